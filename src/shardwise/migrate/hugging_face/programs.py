"""Keys that only TRL, LLaMA-Factory or Axolotl have, and that are no settings of ours. A hint, not a promise: what they
do with data and templates is theirs, and is said to be."""

from ..rules import ANY, FLAG, NUMBER, TEXT, WHOLE, Rule, ignored, refused

NOT_OURS = "it belongs to TRL, LLaMA-Factory or Axolotl, and is not read here"
NOT_PLAIN = "weights are not quantised for training here"
ITS_DATA = "the data is said with --train-file or --dataset: rows with text, with prompt and completion, or messages"
OTHER_TRAINING = "only next tokens are learnt here"
SEQUENCES = "neither matrices nor sequences are split over ranks here; only training state is"


def _of(keys: str) -> dict[str, Rule]:
    return {key: ignored(ANY, NOT_OURS) for key in keys.split()}


TRL: dict[str, Rule] = {
    **_of("""
        model_revision trust_remote_code lora_task_type
        dataset_config dataset_streaming dataset_test_split dataset_num_proc dataset_kwargs dataset_text_field eos_token
        pad_token packing_strategy padding_free pad_to_multiple_of eval_packing chat_template_path
        activation_offloading max_model_len bnb_4bit_quant_type use_bnb_nested_quant
        bnb_4bit_quant_storage ignore_bias_buffers streaming gradient_checkpointing_use_reentrant attn_implementation
        dataset_mixer dataset_splits num_proc model_init_kwargs shuffle_dataset
    """),
    "load_in_4bit": refused(FLAG, NOT_PLAIN),
    "load_in_8bit": refused(FLAG, NOT_PLAIN),
}  # fmt: skip
LLAMA_FACTORY: dict[str, Rule] = {
    **_of("""
        template max_samples overwrite_cache preprocessing_num_workers preprocessing_batch_size plot_loss
        flash_attn trust_remote_code image_max_pixels video_max_pixels enable_liger_kernel tokenized_path
        cache_dir split_special_tokens upcast_layernorm upcast_lmhead_output use_unsloth use_fast_tokenizer
        include_effective_tokens_per_second ray_run_name ray_storage_path ray_num_workers resources_per_worker
        placement_strategy mix_strategy buffer_size eval_dataset dataset_dir print_param_status
        disable_gradient_checkpointing use_reentrant_gc compute_accuracy predict_with_generate enable_thinking
        freeze_vision_tower freeze_multi_modal_projector neat_packing low_cpu_mem_usage
        create_new_adapter predict_dataset
    """),
    "dataset": ignored(ANY, ITS_DATA),
    "stage": refused(TEXT, OTHER_TRAINING, ("sft", "pt", "")),
    "quantization_bit": refused(ANY, NOT_PLAIN),
    "quantization_method": ignored(ANY, "quantization_bit says whether there is any"),
    "use_galore": refused(FLAG, "there is no such optimizer here"),
    "use_apollo": refused(FLAG, "there is no such optimizer here"),
    "use_badam": refused(FLAG, "there is no such optimizer here"),
    "use_adam_mini": refused(FLAG, "there is no such optimizer here"),
    "use_muon": refused(FLAG, "there is no such optimizer here"),
    "use_llama_pro": refused(FLAG, "no blocks are added here"),
    "loraplus_lr_ratio": refused(NUMBER, "adapters have one learning rate here"),
    "pissa_init": refused(FLAG, "adapters begin with zeros here"),
    "fp8": refused(FLAG, "matrices are not multiplied in fp8 here"),
}  # fmt: skip
AXOLOTL: dict[str, Rule] = {
    **_of("""
        model_type tokenizer_type is_llama_derived_model strict special_tokens tokens added_tokens_overrides
        dataset_prepared_path dataset_processes shuffle_merged_datasets test_datasets chat_template
        pad_to_sequence_len eval_sample_packing sample_packing_eff_est lora_fan_in_fan_out
        lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        wandb_project wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id mlflow_experiment_name
        mlflow_tracking_uri comet_project_name xformers_attention flash_attention sdp_attention
        attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp
        eval_table_size eval_max_new_tokens saves_per_epoch evals_per_epoch local_rank save_first_step
        tokenizer_use_fast tokenizer_legacy trust_remote_code s2_attention
        excess_length_strategy remove_unused_columns logging_first_step use_tensorboard
        liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy liger_swiglu
        auto_resume_from_checkpoints hf_use_auth_token dataset_keep_in_memory
        experimental_skip_move_to_device
    """),
    "datasets": ignored(ANY, ITS_DATA),
    "pretraining_dataset": ignored(ANY, ITS_DATA),
    "plugins": refused(ANY, "plugins of Axolotl run in Axolotl only"),
    "rl": refused(TEXT, OTHER_TRAINING),
    "rl_beta": refused(ANY, OTHER_TRAINING),
    "qat": refused(ANY, NOT_PLAIN),
    "quantization": refused(ANY, NOT_PLAIN),
    "gptq": refused(FLAG, NOT_PLAIN),
    "fp8": refused(FLAG, "matrices are not multiplied in fp8 here"),
    "unfrozen_parameters": refused(ANY, "all weights are trained here, or LoRA adapters"),
    "relora_steps": refused(ANY, "adapters are not merged in between"),
    "jagged_restart_steps": refused(ANY, "adapters are not merged in between"),
    "loss_watchdog_threshold": ignored(ANY, "divergence_ratio stops a run that goes nowhere"),
    "loss_watchdog_patience": ignored(ANY, "divergence_ratio stops a run that goes nowhere"),
    "sequence_parallel_degree": refused(WHOLE, SEQUENCES, ("0", "1")),
    "context_parallel_size": refused(WHOLE, SEQUENCES, ("0", "1")),
    "tensor_parallel_size": refused(WHOLE, SEQUENCES, ("0", "1")),
}  # fmt: skip
PLAIN_LORA = "adapters are plain LoRA here: new ones, on the modules that are named"
LOSS = "a row's prompt is never trained on, and all of its answers are"
# What changes a training, whoever has it.
CHANGES: dict[str, Rule] = {
    **{key: refused(ANY, PLAIN_LORA) for key in (
        "use_rslora", "use_dora", "peft_use_dora", "lora_modules_to_save", "additional_target", "adapter_name_or_path",
        "lora_model_dir",
    )},
    "train_on_inputs": refused(FLAG, LOSS),
    # TRL's, and the other way round.
    "assistant_only_loss": refused(FLAG, LOSS, off=("true",)),
    "train_on_prompt": refused(FLAG, LOSS),
    "mask_history": refused(FLAG, LOSS),
    "completion_only_loss": refused(FLAG, LOSS, ("true",)),
    "loss_type": refused(TEXT, "the loss is the cross-entropy as it is", ("nll", "none", "")),
    "resize_vocab": refused(FLAG, "a model's vocabulary stays as it is"),
    "rope_scaling": refused(ANY, "a model's own configuration says it"),
    "cosine_constant_lr_ratio": refused(NUMBER, "the learning rate falls until the end"),
    "early_stopping_patience": refused(ANY, "a run stops when its steps are done, or when it diverges"),
}  # fmt: skip
PROGRAMS = CHANGES | TRL | LLAMA_FACTORY | AXOLOTL
