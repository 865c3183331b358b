"""Keys of TrainingArguments that need no thought: why each changes nothing here, or why it cannot be had."""

from ..rules import ANY, FLAG, NUMBER, TEXT, WHOLE, Rule, ignored, refused

LINES = "lines, metrics.jsonl and the run folder are always written"
LOADER = "batches are made by this trainer's own reader, whose order depends on the seed alone"
HUB = "nothing is uploaded; the run folder's export is a Hugging Face folder that can be"
BEST = "no checkpoint is better than another here; the last save_total_limit are kept"
METRICS = "an evaluation is a loss over tokens"
NO_DDP = "it is a detail of torch's DDP, which does not run here"

KEYS: dict[str, Rule] = {
    **{key: ignored(ANY, why) for key, why in (
        ("average_tokens_across_devices", "the loss of a batch is always weighted by its tokens over all ranks"),
        ("do_train", "shardwise train trains"),
        ("do_eval", "evaluations follow from eval_steps"),
        ("do_predict", "predictions are made by other programs"),
        ("overwrite_output_dir", "a run folder that is in use is never overwritten"),
        ("bf16_full_eval", "an evaluation computes as the training does"),
        ("fp16_full_eval", "an evaluation computes as the training does"),
        ("tf32", "torch.set_float32_matmul_precision decides it for all of a program"),
        ("torch_compile_mode", "blocks are compiled in the default mode"),
        ("use_cache", "training keeps no cache of keys and values"),
        ("torch_empty_cache_steps", "memory is planned, and not given back in between"),
        ("liger_kernel_config", "use_liger_kernel says whether there are any"),
        ("use_liger_kernel", "the head's loss is computed in chunks; other kernels are the model's own"),
        ("data_seed", LOADER), ("ignore_data_skip", "a resumed run goes on with the samples that come next"),
        ("restore_callback_states_from_checkpoint", "there are no callbacks"),
        ("full_determinism", "torch.use_deterministic_algorithms decides it for all of a program"),
        ("ddp_find_unused_parameters", NO_DDP), ("ddp_bucket_cap_mb", NO_DDP), ("ddp_broadcast_buffers", NO_DDP),
        ("ddp_static_graph", NO_DDP), ("ddp_backend", "nccl on GPUs, gloo on CPUs"),
        ("local_rank", "launchers say it in the environment"), ("log_on_each_node", LINES), ("log_level", LINES),
        ("log_level_replica", LINES), ("logging_dir", LINES), ("logging_first_step", LINES),
        ("logging_nan_inf_filter", "a loss that is no number stops the run"), ("disable_tqdm", LINES),
        ("include_num_input_tokens_seen", "tokens are counted in metrics.jsonl"), ("include_tokens_per_second", LINES),
        ("run_name", "output_dir names a run"), ("project", "output_dir names a run"),
        ("trackio_space_id", HUB), ("trackio_bucket_id", HUB), ("trackio_static_space_id", HUB),
        ("eval_delay", "evaluations follow from eval_steps"), ("prediction_loss_only", METRICS),
        ("eval_on_start", "evaluations follow from eval_steps"), ("eval_do_concat_batches", METRICS),
        ("eval_use_gather_object", METRICS), ("eval_accumulation_steps", METRICS), ("include_for_metrics", METRICS),
        ("batch_eval_metrics", METRICS), ("label_names", METRICS), ("remove_unused_columns", LOADER),
        ("save_only_model", "a checkpoint is complete; export writes the model alone at the end"),
        ("save_safetensors", "everything is written as safetensors"),
        ("save_on_each_node", "ranks write their own parts"), ("enable_jit_checkpoint", "SIGTERM always saves first"),
        ("hub_token", HUB), ("hub_private_repo", HUB), ("hub_model_id", HUB), ("hub_strategy", HUB),
        ("hub_always_push", HUB), ("hub_revision", HUB), ("greater_is_better", BEST),
        ("metric_for_best_model", BEST), ("dataloader_drop_last", LOADER), ("dataloader_num_workers", LOADER),
        ("dataloader_pin_memory", LOADER), ("dataloader_persistent_workers", LOADER),
        ("dataloader_prefetch_factor", LOADER), ("dataloader_multiprocessing_context", LOADER),
        ("dataloader_in_order", LOADER), ("length_column_name", LOADER),
        ("skip_memory_metrics", "memory is always measured"), ("jit_mode_eval", METRICS),
        ("accelerator_config", "batches and their order are this trainer's own"),
    )},
    "push_to_hub": refused(FLAG, HUB),
    "load_best_model_at_end": refused(FLAG, BEST),
    "label_smoothing_factor": refused(NUMBER, "the loss is the cross-entropy as it is"),
    "neftune_noise_alpha": refused(NUMBER, "no noise is added to embeddings here"),
    "auto_find_batch_size": refused(FLAG, "the batch is the contract; `shardwise plan` says which one fits"),
    "optim_args": refused(TEXT, "optimizers have no further arguments here"),
    "optim_target_modules": refused(ANY, "an optimizer is for all of a model here"),
    "parallelism_config": refused(ANY, "only a program can make one; Accelerate's file has a block for it"),
    "debug": refused(ANY, "there is no such check here"),
    "train_sampling_strategy": refused(TEXT, "samples are shuffled by the seed", ("random", "none", "")),
    "group_by_length": refused(FLAG, "samples are shuffled by the seed; packing leaves no gaps"),
    "half_precision_backend": refused(TEXT, "there is one", ("auto", "none", "", "cuda_amp", "cpu_amp")),
    "use_mps_device": refused(FLAG, "there are no Apple GPUs here, only CUDA GPUs and CPUs"),
    "tpu_num_cores": refused(WHOLE, "there are no TPUs here, only CUDA GPUs and CPUs"),
    "tp_size": refused(WHOLE, "matrices are not split over ranks here; only training state is", ("0", "1")),
}  # fmt: skip
