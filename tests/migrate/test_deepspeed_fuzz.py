"""Whatever a DeepSpeed configuration holds: an account of every key that is written, and never a traceback.

Files are made of real keys at right and wrong levels, keys that are nearly right, and values of every kind.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.base.documents import as_strings
from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import layout_of
from shardwise.migrate.api import from_deepspeed, read
from shardwise.migrate.tables import table
from tests.migrate.support import require_all_told, require_sound, rows

# What readers ask for beside the tables.
USED = {
    "": (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer "
        "scheduler fp16 bf16 bfloat16 torch_autocast data_types communication_data_type zero_optimization tensorboard "
        "wandb comet steps_per_print gradient_allreduce_op sequence_parallel_size compile _comment comms_config "
        "activation_checkpointing aio checkpoint flops_profiler comms_logger timers csv_monitor"
    ),
    "zero_optimization": (
        "stage offload_param offload_optimizer cpu_offload cpu_offload_param mics_shard_size zero_hpz_partition_size "
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights zeropp_loco_param zenflow "
        "leaf_module stage3_gather_16bit_weights_on_model_save compute_grad_norm legacy_stage1"
    ),
    "zero_optimization.offload_optimizer": "device nvme_path ratio",
    "zero_optimization.offload_param": "device nvme_path",
    "fp16": "enabled loss_scale auto_cast fp16_master_weights_and_grads",
    "bf16": ("enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"),
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "optimizer": "type params legacy_fusion",
    "optimizer.params": (
        "lr betas eps weight_decay torch_adam adam_w_mode bias_correction amsgrad momentum dampening nesterov "
        "max_grad_norm fp32_optimizer_states"
    ),
    "scheduler": "type params",
    "scheduler.params": (
        "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio "
        "last_batch_iteration cycle_min_lr"
    ),
    "tensorboard": "enabled",
    "wandb": "enabled",
    "compile": "deepcompile disable backend",
}
KEYS = {path: set(keys.split()) for path, keys in USED.items()}
for section, table_rows in table("deepspeed").items():
    if isinstance(table_rows, list) and isinstance(table_rows[0], dict):
        KEYS.setdefault("" if section in ("top", "switches") else section, set()).update(
            key for row in table_rows for key in row["keys"]
        )
ALL_KEYS = sorted({key for keys in KEYS.values() for key in keys})

WORDS = [
    "auto", "AUTO", "cpu", "nvme", "none", "/nvme", "", " ", "true", "false", "Adam", "AdamW", "SGD", "Lamb", "adamw",
    "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "log", "linear", "fp32", "bf16", "fp16", "mean", "sum",
    "1e9", "5e-324", "1e400", "-1", "0", "3", "0.5", "nan", "inf", "1_0", "disk:a=b", "\x00", "a,b", "é",
]  # fmt: skip
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
values = st.one_of(scalars, st.lists(scalars, max_size=3), st.lists(st.lists(scalars, max_size=2), max_size=2))
# Values that make sense more often than not, so that readers get past their first question.
likely = {
    "stage": st.sampled_from([0, 1, 2, 3, "3", "auto"]),
    "enabled": st.booleans(),
    "device": st.sampled_from(["cpu", "nvme", "none"]),
    "nvme_path": st.sampled_from(["/nvme", "/other"]),
    "type": st.sampled_from(["Adam", "AdamW", "SGD", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "Lamb"]),
    "ratio": st.sampled_from([0, 1e-9, 0.3, 1.0]),
}


def block_of(path: str) -> st.SearchStrategy[dict[str, Any]]:
    inner = {
        child.removeprefix(f"{path}.").removeprefix("."): child
        for child in KEYS
        if child and child.rpartition(".")[0] == path
    }

    def value_of(key: str) -> st.SearchStrategy[Any]:
        asked = [values]
        if key in likely:
            asked += [likely[key]] * 3
        if key in inner:
            asked += [block_of(inner[key])] * 4
        return st.one_of(asked)

    wrong = (
        st.sampled_from(ALL_KEYS) | st.text(max_size=4) | st.sampled_from(["zero_optimisation", "zero.stage", "Stage"])
    )
    key = st.one_of(*[st.sampled_from(sorted({*KEYS[path], *inner}))] * 6, wrong)
    pairs = key.flatmap(lambda name: st.tuples(st.just(name), value_of(name)))
    return st.lists(pairs, max_size=6).map(dict)


def some(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=parts)


def either(*choices: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(choices)


sizes, small = st.integers(1, 10**9), st.floats(1e-7, 1e-2)
elsewhere = some(device=either("cpu", "nvme", "none"), nvme_path=st.just("/nvme"), pin_memory=st.booleans())
# Files as people write them: right keys, right types.
sensible = some(
    train_micro_batch_size_per_gpu=either(1, 8, "auto"),
    gradient_accumulation_steps=either(1, 2, "auto"),
    gradient_clipping=either(0, 0.5, 1.0, "auto"),
    steps_per_print=sizes,
    communication_data_type=either("fp32", "bf16"),
    data_types=some(grad_accum_dtype=either("fp32", "bf16")),
    bf16=some(enabled=either(True, False, "auto"), check_grad_overflow=st.booleans()),
    zero_optimization=some(
        stage=st.integers(0, 3),
        overlap_comm=st.booleans(),
        reduce_bucket_size=sizes,
        stage3_param_persistence_threshold=either(0, 10**5, "auto"),
        offload_optimizer=elsewhere,
        offload_param=elsewhere,
        zero_hpz_partition_size=either(1, 2, 8),
        zero_quantized_weights=st.booleans(),
        zero_quantized_gradients=st.booleans(),
    ),
    optimizer=st.fixed_dictionaries(
        {"type": either("Adam", "AdamW")},
        optional={"params": some(lr=small, betas=st.just([0.9, 0.99]), eps=small, weight_decay=either(0, 0.1, "auto"))},
    ),
    scheduler=st.fixed_dictionaries(
        {"type": either("WarmupLR", "WarmupDecayLR")},
        optional={"params": some(warmup_num_steps=sizes, warmup_max_lr=small, warmup_type=either("log", "linear"))},
    ),
)
# What a file that is written right may be refused for.
PLACES = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer", "zero_optimization.zero_quantized")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(sensible)
def test_numbers_and_texts_of_them_are_the_same(written: dict[str, Any]) -> None:
    found, again = read(written, "deepspeed"), read(as_strings(written), "deepspeed")
    assert found == again
    require_all_told(found, as_strings(written))
    require_sound(found)
    _require_stage(found.strategy, as_strings(written), rows(found))
    assert all(entry.key.startswith(PLACES) for entry in found.refused)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(block_of(""))
def test_every_key_is_told_and_nothing_is_raised(written: dict[str, Any]) -> None:
    found = read(written, "deepspeed")
    tree = as_strings(written)
    require_all_told(found, tree)
    require_sound(found)
    _require_stage(found.strategy, tree, rows(found))
    if found.refused:
        with pytest.raises(ConfigurationError):
            from_deepspeed(written)


def _require_stage(strategy: str, tree: dict[str, Any], told: dict[str, Any]) -> None:
    zero = tree.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    entry = told.get("zero_optimization.stage")
    if stage is None or entry is None or entry.fate == "refused":
        return
    asked, given_ = layout_of(table("deepspeed")["stages"][int(float(stage))]), layout_of(strategy)
    # In groups, what is split is split in them; it is the same things that are.
    split = [
        (layout.params != "whole", layout.grads != "whole", layout.optimizer != "whole") for layout in (asked, given_)
    ]
    assert split[0] == split[1]
    assert asked.gathered_until == given_.gathered_until


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=40) | block_of("").map(lambda written: json.dumps(written, default=str)))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file: Path = tmp_path_factory.getbasetemp() / "any.json"
    file.write_text(text, errors="replace")
    try:
        found = read(file, "deepspeed")
    except ConfigurationError:
        return
    require_sound(found)
