"""Keys at the top of Accelerate's YAML that need no thought, and those in the blocks that are refused altogether."""

from ..rules import ANY, FLAG, OFF, TEXT, TEXTS, WHOLE, Rule, ignored, refused

NO_TPU = "there are no TPUs here, only CUDA GPUs and CPUs"
IN_THE_CLOUD = "nothing is started on SageMaker here; give a configuration of LOCAL_MACHINE"
DEVICES = "CUDA_VISIBLE_DEVICES says which devices there are; ranks take them in order"
NO_FP8 = (
    "matrices are not multiplied in fp8 here; bf16 computes, and enable_fsdp_float8_all_gather lets parameters travel "
    "in fp8"
)

TOP: dict[str, Rule] = {
    "debug": ignored(FLAG, "that ranks agree is checked with it or without"),
    "main_training_function": ignored(TEXT, "a script is started as it is"),
    "same_network": ignored(FLAG, "machines meet at rdzv_endpoint either way"),
    "enable_cpu_affinity": ignored(FLAG, "ranks are not bound to cores"),
    "downcast_bf16": ignored(ANY, "only TPUs read it"),
    "tpu_name": refused(TEXT, NO_TPU),
    "tpu_zone": refused(TEXT, NO_TPU),
    "tpu_use_cluster": refused(FLAG, NO_TPU),
    "tpu_use_sudo": refused(FLAG, NO_TPU),
    "tpu_vm": refused(ANY, NO_TPU),
    "tpu_env": refused(ANY, NO_TPU),
    "command_file": refused(TEXT, f"it is run on a pod of TPUs; {NO_TPU}"),
    "commands": refused(ANY, f"they are run on a pod of TPUs; {NO_TPU}"),
    "megatron_lm_config": refused(ANY, "Megatron-LM splits layers and sequences, and only state is split here"),
    **{
        key: refused(ANY, IN_THE_CLOUD)
        for key in (
            "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version",
            "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args",
        )
    },
}  # fmt: skip

MPIRUN: dict[str, Rule] = {
    "mpirun_hostfile": refused(TEXT, "ranks are not started by MPI; every machine starts its own with --nnodes"),
    "mpirun_ccl": refused(TEXT, "ranks are not started by MPI", OFF),
}

DYNAMO: dict[str, Rule] = {
    "mode": ignored(TEXT, "blocks are compiled in the default mode"),
    "use_fullgraph": ignored(FLAG, "blocks are compiled as they are, with breaks where they must be"),
    "use_dynamic": ignored(FLAG, "torch decides whether shapes are dynamic"),
    "use_regional_compilation": ignored(FLAG, "blocks are always compiled one by one"),
}

FP8: dict[str, Rule] = {
    key: ignored(ANY, "only products in fp8 read it")
    for key in (
        "backend", "use_autocast_during_eval", "margin", "interval", "format", "amax_history_len", "amax_compute_algo",
        "amax_history_length", "amax_compute_algorithm",
        "override_linear_precision", "opt_level", "optimization_level", "pad_inner_dim", "use_mxfp8_block_scaling",
    )
}  # fmt: skip

SEQUENCES = "sequences are not split over ranks here; only training state is"
PARALLELISM: dict[str, Rule] = {
    "tp_size": refused(WHOLE, "matrices are not split over ranks here; only training state is", ("1", "0")),
    "cp_size": refused(WHOLE, SEQUENCES, ("1", "0")),
    "sp_size": refused(WHOLE, SEQUENCES, ("1", "0")),
    "cp_backend": ignored(TEXT, SEQUENCES),
    "cp_comm_strategy": ignored(TEXT, SEQUENCES),
    "cp_handler": refused(ANY, SEQUENCES),
    "cp_seq_length": ignored(ANY, SEQUENCES),
    "cp_seq_length_is_variable": ignored(ANY, SEQUENCES),
    "cp_attn_implementation": ignored(ANY, SEQUENCES),
    "sp_backend": ignored(TEXT, SEQUENCES),
    "sp_seq_length": ignored(ANY, SEQUENCES),
    "sp_seq_length_is_variable": ignored(ANY, SEQUENCES),
    "sp_attn_implementation": ignored(ANY, SEQUENCES),
    "sp_handler": refused(ANY, SEQUENCES),
    "tp_handler": refused(ANY, "matrices are not split over ranks here; only training state is"),
}

DEEPSPEED: dict[str, Rule] = {
    "zero3_init_flag": ignored(FLAG, "it changes how a model is made, not how it is trained"),
    "seq_parallel_communication_data_type": ignored(TEXT, SEQUENCES),
    "deepspeed_hostfile": ignored(TEXT, "every machine starts its own ranks; --nnodes and --rdzv-endpoint join them"),
    "deepspeed_multinode_launcher": ignored(TEXT, "every machine starts its own ranks; --rdzv-endpoint joins them"),
    "deepspeed_inclusion_filter": refused(TEXT, DEVICES),
    "deepspeed_exclusion_filter": refused(TEXT, DEVICES),
    "deepspeed_moe_layer_cls_names": ignored(TEXTS, "units are whole blocks: nothing inside one is gathered alone"),
}


def prefixed(rules: dict[str, Rule], prefix: str) -> dict[str, Rule]:
    """Keys with the prefix, which may be left out."""
    return rules | {f"{prefix}{key}": rule for key, rule in rules.items()}
