"""Any file at all: a refusal or a complete account, never a traceback, and a named strategy stays itself."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise.migrate.api as api
from shardwise.errors import ConfigurationError
from shardwise.layout import layout_of
from shardwise.migrate.accelerate_keys import DEEPSPEED, DYNAMO, FP8, PARALLELISM, TOP
from shardwise.migrate.environment import NAMED, PREFIXES, read_environment
from shardwise.migrate.fsdp_keys import KNOWN
from shardwise.migrate.hugging_face_keys import KEYS
from shardwise.migrate.hugging_face_programs import PROGRAMS
from shardwise.migrate.hugging_face_training import NAMES
from shardwise.migrate.migrated import Migrated
from shardwise.train.settings import Settings
from tests.migrate.test_fsdp import MEANS
from tests.migrate.told import assert_all_told

FEW = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))

WORDS = st.sampled_from(
    [
        *MEANS, *map(str.lower, MEANS), "true", "false", "yes", "no", "none", "auto", "bf16", "fp16", "fp8", "cpu",
        "nvme", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "FULL_STATE_DICT", "INDUCTOR", "static", "",
        "0", "1", "2", "3", "4", "5", "1e3", "0.5", "-1", "1e400", "nan", "9" * 40, "cosine", "linear", "constant",
        "warmup_stable_decay", "cosine_with_min_lr", "adamw_torch", "lora", "all", "\x00", "bfloat16", "a/b.json",
    ]
)  # fmt: skip
SCALARS = st.one_of(
    WORDS, st.booleans(), st.none(), st.integers(), st.floats(allow_nan=True), st.text(max_size=8),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b_", "enabled"]), inner),
    max_leaves=3,
)  # fmt: skip
SAYS = ("sharding_strategy", "reshard_after_forward")
FSDP = [*KNOWN, "fsdp_shardign", "x"]
GROUPS = [*PARALLELISM, *(f"parallelism_config_{key}" for key in PARALLELISM), "dp_shard_size", "dp_replicate_size"]
STAGES = [
    *DEEPSPEED, "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping",
    "offload_param_nvme_path", "deepspeed_config_file", "zero3_save_16bit_model", "gradient_accumulation_steps",
]  # fmt: skip


def block(keys: list[str], values: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(keys), values, max_size=6) | values


ACCELERATE = st.fixed_dictionaries(
    {"distributed_type": st.sampled_from(["FSDP", "FSDP", "MULTI_GPU", "NO", "DEEPSPEED", "XLA", "fsdp"]) | VALUES},
    optional={
        "fsdp_config": block(FSDP),
        "parallelism_config": block(GROUPS),
        "deepspeed_config": block(STAGES),
        "dynamo_config": block([*DYNAMO, "dynamo_backend"]),
        "fp8_config": block([*FP8, "enable_fsdp_float8_all_gather"]),
        **dict.fromkeys(
            [
                *TOP, "mixed_precision", "num_processes", "num_machines", "machine_rank", "main_process_ip",
                "main_process_port", "rdzv_backend", "use_cpu", "compute_environment", "fp16", "unknown",
                "mpirun_config",
            ],
            VALUES,
        ),
    },
)  # fmt: skip
SCHEDULING = [
    "lr_scheduler_type", "lr_scheduler", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_steps", "optim",
    "num_train_epochs", "num_epochs", "save_strategy", "save_steps", "eval_strategy", "evaluation_strategy",
    "eval_steps",
    "logging_strategy", "bf16", "fp16", "dtype", "torch_dtype", "pure_bf16", "adapter", "finetuning_type", "use_peft",
    "lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "lora_target_modules", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "torch_compile", "report_to", "resume_from_checkpoint", "packing", "use_cpu",
    "optimizer", "cosine_min_lr_ratio", "fsdp", "deepspeed", "fsdp_version", "dp_shard_size", "dp_replicate_size",
]  # fmt: skip
HUGGING_FACE = st.dictionaries(
    st.sampled_from([*SCHEDULING, *KEYS, *PROGRAMS, *(key for keys in NAMES.values() for key in keys), "unknown"]),
    VALUES,
    max_size=8,
).flatmap(lambda tree: st.fixed_dictionaries({}, optional={"fsdp_config": block(FSDP)}).map(lambda more: tree | more))


def account_of(tree: dict[str, Any], kind: Any) -> Migrated | None:
    try:
        migrated = api.read(tree, kind)
    except ConfigurationError:
        return None
    assert_all_told(api.texts_of(tree), migrated)
    layout_of(migrated.strategy)
    if not migrated.refused:
        Settings(**migrated.settings)
    return migrated


@FEW
@given(ACCELERATE)
def test_accelerate(tree: dict[str, Any]) -> None:
    account_of(tree, "accelerate")


@FEW
@given(HUGGING_FACE)
def test_hugging_face(tree: dict[str, Any]) -> None:
    account_of(tree, "hugging-face")


@FEW
@given(
    st.sampled_from(list(MEANS)),
    block(FSDP),
    block(GROUPS),
    st.sampled_from(SAYS),
)
def test_a_named_strategy_stays_itself_or_is_refused(name: str, more: Any, groups: Any, key: str) -> None:
    others = more if isinstance(more, dict) else {}
    others = {word: value for word, value in others.items() if not word.endswith(SAYS)}
    tree = {"distributed_type": "FSDP", "fsdp_config": {**others, f"fsdp_{key}": name}, "parallelism_config": groups}
    migrated = account_of(tree, "accelerate")
    if migrated is not None and not migrated.refused:
        ours, meant = layout_of(migrated.strategy), layout_of(MEANS[name])
        for what in ("params", "grads", "optimizer", "gathered_until"):
            assert getattr(ours, what) == getattr(meant, what)


@FEW
@given(
    st.dictionaries(
        st.sampled_from(
            [*NAMED, *(prefix + word for prefix, _, _ in PREFIXES for word in ("VERSION", "X", "BACKEND"))]
        ),
        WORDS,
    )
)
def test_the_environment(environ: dict[str, str]) -> None:
    environ = {"ACCELERATE_USE_FSDP": "true", **environ}
    try:
        migrated = read_environment(environ)
    except ConfigurationError:
        return
    assert migrated is not None
    told = {entry.key for entry in migrated.entries}
    assert len(told) == len(migrated.entries)
    assert all(any(name == key or key.startswith(f"{name}.") for key in told) for name in environ)
