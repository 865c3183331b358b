"""Any file at all: a refusal or a complete account, never a traceback, and a named strategy stays itself."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise.migrate.api as api
from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import layout_of
from shardwise.migrate.accelerate import read_environment
from shardwise.migrate.account import Block
from shardwise.migrate.fsdp import known_keys
from shardwise.migrate.migrated import Migrated, yaml_of
from shardwise.migrate.tables import rules, table
from shardwise.trainer.config import resolve
from tests.migrate.test_fsdp import MEANS
from tests.migrate.told import assert_all_told

TOP, DEEPSPEED, DYNAMO, FP8, PARALLELISM = (
    rules("accelerate", block)
    for block in ("top", "deepspeed_config", "dynamo_config", "fp8_config", "parallelism_config")
)
KEYS, PROGRAMS = rules("hugging_face", "trainer"), rules("hugging_face", "programs")
NAMES, VARIABLES = table("hugging_face")["settings"], table("accelerate")["variables"]
PREFIXES = table("accelerate")["variable_prefixes"]
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
FSDP = [*sorted(known_keys()), "fsdp_shardign", "x"]
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


# One at a time, whatever the key is.
NASTY: list[Any] = [
    "", " ", "auto", "none", "x", "-1", "0", "1", "2", "0.5", "1e300", "nan", "9" * 30, True, False, [], {}, [[]],
    ["1", "2"], {"x": "y"}, {"enabled": "auto"}, "a,b", "\x00", "~nobody/x.json", "/", "." * 5000, None,
]  # fmt: skip


# Keys that are all read in the same way; a few of them are enough.
TABLES = {*KEYS, *PROGRAMS} - {"debug", "label_smoothing_factor", "stage", "tf32", "train_sampling_strategy"}


def known_places(kind: Any, tree: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every key that a reader asks for, in the block that it asks for it in."""
    top = Block(tree, "")
    api.READERS[kind](top, Path())
    return [
        (*filter(None, [path]), key)
        for path, found in top._blocks.items()
        for key in sorted(found._known - TABLES)
        if "." not in path
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("accelerate", {"distributed_type": "FSDP"}),
        ("accelerate", {"distributed_type": "MULTI_GPU", "num_machines": "2"}),
        ("accelerate", {"distributed_type": "DEEPSPEED"}),
        ("hugging-face", {"fsdp": "full_shard"}),
        ("hugging-face", {"output_dir": "x", "finetuning_type": "lora", "max_steps": "10"}),
        ("hugging-face", {"reshard_after_forward": "true"}),
        ("hugging-face", {"lr_scheduler_type": "warmup_stable_decay"}),
        ("hugging-face", {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": "1e-4"}),
    ],
)
def test_every_key_with_every_nasty_value(kind: Any, tree: dict[str, Any]) -> None:
    places = known_places(kind, tree)
    assert len(places) > 10
    for place in places:
        for value in NASTY:
            asked = dict(tree)
            if len(place) == 1:
                asked[place[0]] = value
            else:
                asked[place[0]] = {place[1]: value}
            try:
                account_of(asked, kind)
            except AssertionError as error:
                raise AssertionError(f"{place} {value!r}") from error


def account_of(tree: dict[str, Any], kind: Any) -> Migrated | None:
    try:
        migrated = api.read(tree, kind)
    except ConfigurationError:
        return None
    assert_all_told(api.as_strings(tree), migrated)
    layout_of(migrated.strategy)
    if not migrated.refused and "lora_from" not in migrated.settings:  # there is no adapter to read
        used = resolve([], {}, {}, others={"file": migrated.settings})
        assert resolve([], {}, {}, ("written", yaml_of(migrated))).settings == used.settings
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
        st.sampled_from([*VARIABLES, *(prefix + word for prefix in PREFIXES for word in ("VERSION", "X", "BACKEND"))]),
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


FILES = [
    path
    for path in sorted(Path(__file__).parent.glob("fixtures/*/*"))
    if path.parent.name in ("accelerate", "hugging_face")
]


@FEW
@given(
    st.sampled_from(FILES),
    st.integers(0, 60),
    st.integers(0, 60),
    st.sampled_from(["twice", "away", "cut", "text"]),
    st.text(max_size=5),
)
def test_files_that_somebody_spoilt(path: Path, first: int, second: int, how: str, text: str) -> None:
    lines = path.read_text().splitlines()
    at = first % len(lines)
    spoilt = {
        "twice": [*lines[:at], lines[at], *lines[at:]],
        "away": lines[:at] + lines[at + 1 :],
        "cut": [*lines[:at], lines[at][: second % (len(lines[at]) + 1)]],
        "text": [*lines[:at], lines[at] + text, *lines[at + 1 :]],
    }[how]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path.name)
        file.write_text("\n".join(spoilt), encoding="utf-8", errors="ignore")
        with suppress(ConfigurationError):
            api.read(file)
