"""Keys of DeepSpeed's JSON that change nothing here: their types, and why. A table for each block, by its path.

What is used stands in the readers beside this file, and what cannot be followed in `switches.py`.
"""

from functools import partial

from ..account import Block
from ..rules import FLAG, FROM_ONE, NOT_NEGATIVE, NUMBER, TEXT, TEXTS, WHOLE, Check, Rule, ignored, settle

UNITS = "what travels together is a unit, a block of the model, whatever its size"
AHEAD = "one unit is gathered ahead of the one that computes; memory_budget= of sw.shard allows more"
ALWAYS = "it is always so here"
DISK = "the disk is read and written by eight threads, in pieces of their own"
PINNED = "the host's memory is pinned wherever the system allows it"
CHECKPOINTS = "checkpoints are the trainer's own: every rank writes its part, and any number of ranks reads them"
LOGGED = "metrics.jsonl in the run folder has time, memory and throughput"
TRACED = "--profile writes a trace of three steps"
NO_COMET = "nothing is sent to Comet"
RECOMPUTED = (
    "it configures deepspeed.checkpointing for models that call it, and switches nothing on; --gradient-checkpointing "
    "computes blocks again here, and activations=host behind a strategy moves what they keep"
)
SCALED = (
    "the loss scale begins at 65536, halves whenever a gradient overflows, doubles after 2000 steps without that, and "
    "is at least 1: which steps are left out can differ, and nothing else"
)

_TABLE: dict[str, dict[str, tuple[Check, str]]] = {
    "": {
        "zero_allow_untested_optimizer": (FLAG, "every optimizer that works element by element is sharded, once tried"),
        "zero_force_ds_cpu_optimizer": (FLAG, "the host updates with any optimizer; AdamW has one pass in C"),
        "managed_gradient_accumulation": (FLAG, "a step is where optimizer.step() is called"),
        "dataloader_drop_last": (FLAG, "the trainer takes samples itself: every step has a whole batch"),
        "prescale_gradients": (FLAG, "the mean over ranks is the same, wherever it is divided"),
        "gradient_predivide_factor": (NUMBER, "the mean over ranks is the same, wherever it is divided"),
        "disable_allgather": (FLAG, "DeepSpeed reads it and does nothing with it"),
        "seq_parallel_communication_data_type": (
            partial(Block.word, choices=("fp32", "fp16", "bf16"), default=""),
            "sequences are not split here",
        ),
        "wall_clock_breakdown": (FLAG, LOGGED),
        "memory_breakdown": (FLAG, LOGGED),
        "dump_state": (FLAG, "the banner and config.json in the run folder have it"),
        "disable_python_gc": (FLAG, "Python's garbage collector is left as it is"),
        "vocabulary_size": (FROM_ONE, "DeepSpeed only warns about it"),
        "use_data_before_expert_parallelism": (FLAG, "there are no expert-parallel ranks here"),
        "log_level": (TEXT, "logging is Python's: logging.getLogger('shardwise')"),
        "allgather_size": (FROM_ONE, UNITS),
    },
    "zero_optimization": {
        "contiguous_gradients": (FLAG, f"{ALWAYS}: gradients are written into the buffers that travel"),
        "reduce_scatter": (FLAG, f"{ALWAYS}, where gradients are split; the sums are the same"),
        "use_multi_rank_bucket_allreduce": (FLAG, UNITS),
        "allgather_partitions": (FLAG, f"{ALWAYS}: parameters are gathered in one collective for each unit"),
        "allgather_bucket_size": (NOT_NEGATIVE, UNITS),
        "reduce_bucket_size": (FROM_ONE, UNITS),
        "overlap_comm": (FLAG, f"{ALWAYS}: what travels does so beside the computation"),
        "load_from_fp32_weights": (FLAG, "checkpoints hold the fp32 masters, and a run goes on from those"),
        "elastic_checkpoint": (FLAG, CHECKPOINTS),
        "sub_group_size": (NOT_NEGATIVE, "updates go unit by unit, and on disk in chunks of 8 million parameters"),
        "cpu_offload_use_pin_memory": (FLAG, PINNED),
        "stage3_prefetch_bucket_size": (NOT_NEGATIVE, AHEAD),
        "stage3_param_persistence_threshold": (
            NOT_NEGATIVE,
            "small parameters travel with their unit, at no message of their own, and are split as the others",
        ),
        "stage3_model_persistence_threshold": (NOT_NEGATIVE, "no parameters stay whole for being small"),
        "stage3_max_live_parameters": (NOT_NEGATIVE, AHEAD),
        "stage3_max_reuse_distance": (NOT_NEGATIVE, "units are dropped after their forward, but for the last"),
        "stage3_module_granularity_threshold": (NOT_NEGATIVE, UNITS),
        "stage3_use_all_reduce_for_fetch_params": (FLAG, "gathers are all-gathers in place, which copy nothing"),
        "stage3_allgather_sequential": (FLAG, UNITS),
        "ignore_unused_parameters": (FLAG, "a parameter without a gradient is never an error, and is not updated"),
        "round_robin_gradients": (FLAG, "ranks share a unit's gradients equally"),
        "parameter_alignment": (FLAG, f"{ALWAYS}: every parameter begins at a multiple of 256 elements"),
        "memory_efficient_linear": (FLAG, "linear layers write weight gradients straight into what travels"),
        "pipeline_loading_checkpoint": (FLAG, CHECKPOINTS),
        "override_module_apply": (FLAG, "a model is built on the meta device, and filled rank by rank"),
        "log_trace_cache_warnings": (FLAG, "an order of modules that is not the expected one is planned again, once"),
        "enable_sanity_checks": (FLAG, "ranks compare what they were given when a model is sharded"),
        "save_muon_momentum_buffer_in_memory": (FLAG, "there is no Muon here"),
        "mics_hierarchical_params_gather": (FLAG, "gathers stay inside the group"),
    },
    "zero_optimization.leaf_module": dict.fromkeys(
        ("classes", "names", "name_suffixes"), (TEXTS, "a block is gathered as a whole, experts and all")
    ),
    "zero_optimization.offload_param": {
        "buffer_count": (NOT_NEGATIVE, "two places on the device and three on the host take units in turn"),
        "buffer_size": (NOT_NEGATIVE, "places are as large as the largest unit"),
        "max_in_cpu": (NOT_NEGATIVE, "what rests on disk has three places on the host, and no more"),
        "pin_memory": (FLAG, PINNED),
    },
    "zero_optimization.offload_optimizer": {
        "buffer_count": (NOT_NEGATIVE, "four windows of 8 million parameters take turns between disk and host"),
        "pin_memory": (FLAG, PINNED),
        "pipeline_read": (FLAG, f"{ALWAYS}: the next chunk is read while one is updated"),
        "pipeline_write": (FLAG, f"{ALWAYS}: the last chunk is written while one is updated"),
        "fast_init": (FLAG, "room on disk is reserved before anything runs"),
        "super_offload": (FLAG, "how DeepSpeed hides the host's work; here updates run beside the next forward"),
        "cpuadam_cores_perc": (NUMBER, "ranks of a machine share its cores equally"),
    },
    "fp16": {
        "initial_scale_power": (WHOLE, SCALED),
        "loss_scale_window": (FROM_ONE, SCALED),
        "hysteresis": (WHOLE, SCALED),
        "consecutive_hysteresis": (FLAG, SCALED),
        "min_loss_scale": (FROM_ONE, SCALED),
    },
    "activation_checkpointing": {
        "partition_activations": (FLAG, RECOMPUTED),
        "cpu_checkpointing": (FLAG, RECOMPUTED),
        "contiguous_memory_optimization": (FLAG, RECOMPUTED),
        "number_checkpoints": (NOT_NEGATIVE, RECOMPUTED),
        "synchronize_checkpoint_boundary": (FLAG, RECOMPUTED),
        "profile": (FLAG, RECOMPUTED),
    },
    "aio": {
        "block_size": (FROM_ONE, DISK),
        "queue_depth": (FROM_ONE, DISK),
        "thread_count": (FROM_ONE, DISK),
        "intra_op_parallelism": (FROM_ONE, DISK),
        "single_submit": (FLAG, DISK),
        "overlap_events": (FLAG, DISK),
        "use_gds": (FLAG, DISK),
    },
    "checkpoint": {
        "tag_validation": (partial(Block.word, choices=("Ignore", "Warn", "Fail"), default=""), CHECKPOINTS),
        "load_universal": (FLAG, CHECKPOINTS),
        "use_node_local_storage": (FLAG, CHECKPOINTS),
        "checkpoint_serialization": (FLAG, CHECKPOINTS),
    },
    "checkpoint.parallel_write": {"pipeline_stage": (FLAG, CHECKPOINTS)},
    "checkpoint.writer": {
        "type": (partial(Block.word, choices=("mock", "python", "fast"), default=""), CHECKPOINTS),
        "io_buffer_size": (FROM_ONE, CHECKPOINTS),
        "io_buffer_double": (FLAG, CHECKPOINTS),
        "io_multiplier": (FROM_ONE, CHECKPOINTS),
        "show_statistics": (FLAG, CHECKPOINTS),
        "data_parallel": (partial(Block.word, choices=("replica", "socket", "machine"), default=""), CHECKPOINTS),
        "decoupled": (FLAG, f"{CHECKPOINTS}; --async-save writes them beside the training"),
    },
    "flops_profiler": {
        "enabled": (FLAG, f"{LOGGED}; {TRACED}"),
        "recompute_fwd_factor": (NUMBER, TRACED),
        "profile_step": (NOT_NEGATIVE, TRACED),
        "module_depth": (WHOLE, TRACED),
        "top_modules": (NOT_NEGATIVE, TRACED),
        "detailed": (FLAG, TRACED),
        "output_file": (TEXT, TRACED),
    },
    "comms_logger": {
        "enabled": (FLAG, "traffic.json in the run folder has the bytes of every collective"),
        "prof_all": (FLAG, TRACED),
        "prof_ops": (TEXTS, TRACED),
        "verbose": (FLAG, TRACED),
        "debug": (FLAG, TRACED),
    },
    "timers.throughput": {"enabled": (FLAG, LOGGED), "synchronized": (FLAG, LOGGED)},
    "csv_monitor": {
        "enabled": (FLAG, LOGGED),
        "output_path": (TEXT, "the run folder is --output-dir"),
        "job_name": (TEXT, "the run's name is its folder's"),
    },
    "tensorboard": {
        "output_path": (TEXT, "the run folder is --output-dir, and the charts lie in it"),
        "job_name": (TEXT, "the run's name is its folder's"),
    },
    "wandb": {
        "group": (TEXT, "wandb reads WANDB_RUN_GROUP"),
        "team": (TEXT, "wandb reads WANDB_ENTITY"),
        "project": (TEXT, "wandb reads WANDB_PROJECT"),
    },
    "comet": {
        "enabled": (FLAG, NO_COMET),
        "samples_log_interval": (FROM_ONE, NO_COMET),
        "online": (FLAG, NO_COMET),
        **dict.fromkeys(
            ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"), (TEXT, NO_COMET)
        ),
    },
    "compile": {
        "autoep_non_moe": (FLAG, "there are no expert-parallel ranks here"),
        **{
            key: (check, "belongs to deepcompile, which is off; --compile is torch.compile, block by block")
            for check, keys in {
                FLAG: (
                    "free_activation", "offload_activation", "offload_activation_pin_memory", "offload_opt_states",
                    "double_buffer", "symmetric_memory", "debug_log", "offload_parameters", "sync_before_reduce",
                    "sync_after_reduce", "sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors",
                    "keep_all_input_tensors",
                ),
                NOT_NEGATIVE: ("free_activation_threshold",),
                TEXTS: ("passes",),
            }.items()
            for key in keys
        },
    },
}  # fmt: skip

# What Hugging Face computes from the model where a file says "auto".
AUTO_SIZES = {
    "reduce_bucket_size": "the hidden size, squared",
    "stage3_prefetch_bucket_size": "0.9 times the hidden size, squared",
    "stage3_param_persistence_threshold": "10 times the hidden size",
}


def _or_auto(key: str, check: Check, why: str) -> Rule:
    """One of these, as a number or left to Hugging Face."""

    def checked(block: Block, name: str) -> object:
        return block.auto(name, "") or check(block, name)

    return ignored(checked, f'{why} (of "auto" Hugging Face makes {AUTO_SIZES[key]})')


IGNORED: dict[str, dict[str, Rule]] = {
    path: {key: (_or_auto(key, *row) if key in AUTO_SIZES else ignored(*row)) for key, row in rows.items()}
    for path, rows in _TABLE.items()
}
# Fields that have an alias are read by their own name, too.
SHORT_NAMES = {key.removeprefix("stage3_"): key for key in IGNORED["zero_optimization"] if key.startswith("stage3_")}
IGNORED["zero_optimization"] |= {short: IGNORED["zero_optimization"][key] for short, key in SHORT_NAMES.items()}


def ignore_blocks(top: Block) -> None:
    """Those that no reader asks for anything."""
    for path in ("activation_checkpointing", "aio", "flops_profiler", "comms_logger", "csv_monitor"):
        settle(top.inner(path), IGNORED[path])
    settle(top.inner("timers").inner("throughput"), IGNORED["timers.throughput"])
    checkpoint = top.inner("checkpoint")
    settle(checkpoint, IGNORED["checkpoint"])
    for name in ("parallel_write", "writer"):
        settle(checkpoint.inner(name), IGNORED[f"checkpoint.{name}"])
