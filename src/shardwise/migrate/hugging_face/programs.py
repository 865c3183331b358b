"""Keys that only TRL, LLaMA-Factory or Axolotl have, and that are no settings of ours. A hint, not a promise.

What changes what is trained (rows, templates, tokens, the loss) is refused with what to do instead; what changes only
how it is computed, cached or logged is ignored with the reason.
"""

from ..account import Block
from ..rules import ANY, FLAG, NUMBER, OFF, TEXT, WHOLE, Rule, ignored, refused

NOT_PLAIN = "weights are not quantised for training here"
ITS_DATA = "the data is said with --train-file or --dataset: rows with text, with prompt and completion, or messages"
OTHER_TRAINING = "only next tokens are learnt here"
SEQUENCES = "neither matrices nor sequences are split over ranks here; only training state is"
PLAIN_LORA = "adapters are plain LoRA here: new ones, on the modules that are named"
LOSS = "a row's prompt is never trained on, and all of its answers are"
TEMPLATE = (
    "messages are written with the tokenizer's own chat template; put another one into a copy of the tokenizer "
    "(tokenizer=FOLDER), and leave this out"
)
VOCABULARY = "a tokenizer and a model's vocabulary stay as they are; save a changed tokenizer and model, and name those"
NO_OPTIMIZER = "there is no such optimizer here"

# What changes nothing that is trained: the reason, and the keys.
NO_EFFECT: dict[str, str] = {
    ITS_DATA: "datasets pretraining_dataset dataset dataset_dir dataset_mixer dataset_splits tokenized_path "
    "mix_strategy buffer_size",
    "an evaluation is on eval_file, or on eval_fraction of the data": "dataset_test_split test_datasets eval_dataset",
    "predictions are made by other programs": "predict_dataset predict_with_generate max_model_len",
    "an evaluation is a loss over tokens": "compute_accuracy eval_table_size eval_max_new_tokens",
    "evaluation samples are made as those of the training": "eval_packing eval_sample_packing",
    "rows are read from disk as they are needed, and nothing has to be prepared": "dataset_streaming streaming "
    "dataset_num_proc num_proc overwrite_cache preprocessing_num_workers preprocessing_batch_size "
    "dataset_prepared_path dataset_processes dataset_keep_in_memory",
    "padding is never trained on": "pad_token padding_free pad_to_multiple_of pad_to_sequence_len",
    "packed samples are documents end to end, cut at seq_length (what TRL calls wrapped)": "packing_strategy "
    "sample_packing_eff_est excess_length_strategy",
    "samples are shuffled by the seed": "shuffle_dataset",
    "code of a model's own is never run: only architectures of transformers are loaded": "trust_remote_code",
    "config.json and tokenizer_config.json say their classes": "model_type tokenizer_type is_llama_derived_model "
    "tokenizer_use_fast use_fast_tokenizer",
    "HF_HOME and HF_TOKEN say it to the Hub's client": "cache_dir hf_use_auth_token",
    "which kernel computes attention is chosen here; the result is the same": "attn_implementation flash_attn "
    "flash_attention xformers_attention sdp_attention attention flash_attn_cross_entropy flash_attn_rms_norm "
    "flash_attn_fuse_qkv flash_attn_fuse_mlp",
    "the head's loss is computed in chunks; other kernels are the model's own": "enable_liger_kernel use_unsloth "
    "liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy liger_swiglu "
    "lora_mlp_kernel lora_qkv_kernel lora_o_kernel",
    "activations go to the host by +activations=host behind a strategy": "activation_offloading",
    "gradient_checkpointing says whether blocks are computed again; the result is the same": "use_reentrant_gc "
    "gradient_checkpointing_use_reentrant disable_gradient_checkpointing",
    "load_in_4bit and load_in_8bit say whether weights are quantised": "bnb_4bit_quant_type use_bnb_nested_quant "
    "bnb_4bit_quant_storage",
    "quantization_bit says whether weights are quantised": "quantization_method",
    "it is a detail of torch's DDP, which does not run here": "ignore_bias_buffers",
    "weights are loaded shard by shard": "low_cpu_mem_usage experimental_skip_move_to_device",
    "peft finds it out": "lora_fan_in_fan_out lora_task_type",
    "adapters are always new ones": "create_new_adapter",
    "there are no images and videos here": "image_max_pixels video_max_pixels freeze_vision_tower "
    "freeze_multi_modal_projector",
    "ranks are not started by Ray": "ray_run_name ray_storage_path ray_num_workers resources_per_worker "
    "placement_strategy",
    "report_to says where numbers go; wandb reads WANDB_PROJECT, WANDB_ENTITY and WANDB_NAME": "wandb_project "
    "wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id mlflow_experiment_name mlflow_tracking_uri "
    "comet_project_name",
    "lines, metrics.jsonl and the run folder are always written": "plot_loss print_param_status "
    "include_effective_tokens_per_second",
    "saves follow from save_steps": "save_first_step",
    "keys that nobody knows are always refused": "strict",
    "divergence_ratio stops a run that goes nowhere": "loss_watchdog_threshold loss_watchdog_patience",
}


def _special_tokens(block: Block, key: str) -> object:
    """What is left of them without the token that fills up samples, which is never trained on."""
    tokens = block.values[key]
    if not isinstance(tokens, dict):
        block.refused(key, "it is no mapping of names to tokens")
        return {}
    return {name: token for name, token in tokens.items() if name != "pad_token" and token is not None}


# What changes a training, whoever has it.
CHANGES: dict[str, Rule] = {
    **{key: refused(ANY, PLAIN_LORA) for key in (
        "use_rslora", "use_dora", "peft_use_dora", "lora_modules_to_save", "additional_target", "adapter_name_or_path",
        "lora_model_dir",
    )},
    **{key: refused(FLAG, NO_OPTIMIZER) for key in (
        "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon",
    )},
    # The rows
    "dataset_config": refused(
        TEXT,
        "a dataset's default configuration is read here; write the one you want with save_to_disk, and give its folder "
        "as dataset",
        (*OFF, "default"),
    ),
    "dataset_text_field": refused(TEXT, "texts are in the column text here; rename yours", (*OFF, "text")),
    "dataset_kwargs": refused(ANY, "rows become tokens in one way here"),
    "max_samples": refused(ANY, "all rows are read; cut the file (head -n N rows.jsonl), and leave this out", ()),
    "shuffle_merged_datasets": refused(FLAG, "samples are always shuffled by the seed", ("true",)),
    # The tokens
    "chat_template": refused(TEXT, TEMPLATE, (*OFF, "tokenizer_default")),
    "chat_template_path": refused(TEXT, TEMPLATE),
    "template": refused(TEXT, TEMPLATE),
    "enable_thinking": refused(FLAG, TEMPLATE, ("true",)),
    "eos_token": refused(TEXT, "the tokenizer's own token ends a document; change it in a copy of the tokenizer"),
    "special_tokens": Rule(_special_tokens, VOCABULARY, OFF),
    "tokens": refused(ANY, VOCABULARY),
    "added_tokens_overrides": refused(ANY, VOCABULARY),
    "resize_vocab": refused(FLAG, VOCABULARY),
    "split_special_tokens": refused(FLAG, "a special token is one token here"),
    "tokenizer_legacy": refused(ANY, "a tokenizer is loaded as its folder says", ()),
    # The loss
    "train_on_inputs": refused(FLAG, LOSS),
    # TRL's, and the other way round.
    "assistant_only_loss": refused(FLAG, LOSS, off=("true",)),
    "train_on_prompt": refused(FLAG, LOSS),
    "mask_history": refused(FLAG, LOSS),
    "completion_only_loss": refused(FLAG, LOSS, ("true",)),
    "loss_type": refused(TEXT, "the loss is the cross-entropy as it is", ("nll", "none", "")),
    "stage": refused(TEXT, OTHER_TRAINING, ("sft", "pt", "")),
    "rl": refused(TEXT, OTHER_TRAINING),
    "rl_beta": refused(ANY, OTHER_TRAINING),
    # The model
    "model_revision": refused(
        TEXT,
        "the Hub's main revision is loaded here; fetch another one (hf download ID --revision R --local-dir FOLDER), "
        "and give the folder as model",
        (*OFF, "main"),
    ),
    "model_init_kwargs": refused(ANY, "a model is loaded in one way here; dtype is a key of its own"),
    "rope_scaling": refused(ANY, "a model's own configuration says it"),
    "s2_attention": refused(FLAG, "attention is the model's own"),
    "upcast_layernorm": refused(FLAG, "all of a block computes in one format in the trainer"),
    "upcast_lmhead_output": refused(FLAG, "all of a block computes in one format in the trainer"),
    "use_llama_pro": refused(FLAG, "no blocks are added here"),
    "unfrozen_parameters": refused(ANY, "all weights are trained here, or LoRA adapters"),
    "load_in_4bit": refused(FLAG, NOT_PLAIN),
    "load_in_8bit": refused(FLAG, NOT_PLAIN),
    "quantization_bit": refused(ANY, NOT_PLAIN),
    "qat": refused(ANY, NOT_PLAIN),
    "quantization": refused(ANY, NOT_PLAIN),
    "gptq": refused(FLAG, NOT_PLAIN),
    "fp8": refused(FLAG, "matrices are not multiplied in fp8 here"),
    "plugins": refused(ANY, "plugins of Axolotl run in Axolotl only"),
    "sequence_parallel_degree": refused(WHOLE, SEQUENCES, ("0", "1")),
    "context_parallel_size": refused(WHOLE, SEQUENCES, ("0", "1")),
    "tensor_parallel_size": refused(WHOLE, SEQUENCES, ("0", "1")),
    # The steps
    "loraplus_lr_ratio": refused(NUMBER, "adapters have one learning rate here"),
    "pissa_init": refused(FLAG, "adapters begin with zeros here"),
    "relora_steps": refused(ANY, "adapters are not merged in between"),
    "jagged_restart_steps": refused(ANY, "adapters are not merged in between"),
    "cosine_constant_lr_ratio": refused(NUMBER, "the learning rate falls until the end"),
    "early_stopping_patience": refused(ANY, "a run stops when its steps are done, or when it diverges"),
}  # fmt: skip
PROGRAMS = {key: ignored(ANY, why) for why, keys in NO_EFFECT.items() for key in keys.split()} | CHANGES
