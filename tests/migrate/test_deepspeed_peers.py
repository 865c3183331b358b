"""DeepSpeed itself is asked: which keys it reads, and which learning rate a step has."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from shardwise.migrate.api import read
from shardwise.trainer.optimizers import learning_rate
from shardwise.trainer.settings import Settings
from tests.migrate.support import rows
from tests.support.deepspeed import DeepSpeed

pytestmark = pytest.mark.peers

# ---------------------------------------------------------------------------------------------------------
# keys


class Recorded(dict[str, Any]):
    """Remembers what it is asked for; a copy of it tells the same."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return _Asking(self)


class _Asking:
    def __init__(self, block: Recorded) -> None:
        self._block = block

    def __contains__(self, key: object) -> bool:
        return key in self._block

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._block)


def keys_of_deepspeed() -> dict[str, list[str]]:
    """Path of a block -> the keys that DeepSpeed asks it for; of its models all fields, by name and by alias."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import (
        _REMOVED_TOP_LEVEL_CONFIG_KEYS,
        _REMOVED_ZERO_CONFIG_KEYS,
        DeepSpeedConfig,
    )
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    blocks = {
        name: Recorded()
        for name in ("activation_checkpointing", "aio", "flops_profiler", "data_types", "torch_autocast")
    }
    blocks |= {"checkpoint.writer": Recorded(), "checkpoint.parallel_write": Recorded()}
    blocks["checkpoint"] = Recorded(**{name: blocks[f"checkpoint.{name}"] for name in ("writer", "parallel_write")})
    blocks |= {"optimizer": Recorded(type="Adam"), "scheduler": Recorded(type="WarmupLR")}
    top = Recorded(train_batch_size=1, **{path: block for path, block in blocks.items() if "." not in path})
    with suppress(AssertionError):  # about the batch, once all is read
        DeepSpeedConfig(top)
    found = {path: [*block.asked] for path, block in blocks.items()}
    found[""] = [*top.asked, *_REMOVED_TOP_LEVEL_CONFIG_KEYS]
    for path, model in {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }.items():
        fields = model.model_fields
        found[path] = [*fields, *(field.alias for field in fields.values() if field.alias)]
    found["zero_optimization"] += _REMOVED_ZERO_CONFIG_KEYS
    return found


@pytest.fixture(scope="module")
def keys(on_deepspeed: DeepSpeed) -> dict[str, list[str]]:
    found: dict[str, list[str]] = on_deepspeed(keys_of_deepspeed)
    return found


@pytest.mark.slow
def test_every_key_that_deepspeed_reads_is_known(keys: dict[str, list[str]]) -> None:
    unknown = []
    for path, names in keys.items():
        for name in names:
            written: Any = {name: "1"}
            for block in reversed(path.split(".") if path else []):
                written = {block: written}
            key = f"{path}.{name}" if path else name
            told = rows(read(written, "deepspeed"))
            if told[key].text.startswith("unknown key"):
                unknown.append(key)
    assert not unknown


def test_they_were_found(keys: dict[str, list[str]]) -> None:
    """Else the test above says nothing."""
    assert {path: len(set(names)) for path, names in keys.items() if len(set(names)) < 2} == {
        "checkpoint.parallel_write": 1
    }
    assert len(keys[""]) > 50
    assert len(keys["zero_optimization"]) > 50


# ---------------------------------------------------------------------------------------------------------
# learning rates

NUM_STEPS = 40
RATE = 3e-3
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_max_lr": 0.02}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_min_lr": 0.001, "warmup_max_lr": 0.002}),
    ("WarmupLR", {"warmup_num_steps": 100, "warmup_min_lr": 0.001, "warmup_max_lr": 0.002}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 7}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_num_steps": 8, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_num_steps": 5, "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3}),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 9}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 7}),
    ("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 7, "warmup_type": "linear", "cos_min_ratio": 0.2}),
    ("WarmupCosineLR", {"total_num_steps": 60, "warmup_num_steps": 2, "warmup_min_ratio": 0.3, "cos_min_ratio": 0.0}),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 20}),
]


def rates_of_deepspeed() -> list[list[float]]:
    """The learning rate of every update, as the engine has it: a schedule steps after the optimizer."""
    import torch
    from deepspeed.runtime import lr_schedules

    found = []
    for kind, params in SCHEDULES:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        scheduler = getattr(lr_schedules, kind)(optimizer, **params)
        rates = []
        for _ in range(NUM_STEPS):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
        found.append(rates)
    return found


def test_every_step_has_the_learning_rate_of_deepspeed(on_deepspeed: DeepSpeed) -> None:
    for (kind, params), theirs in zip(SCHEDULES, on_deepspeed(rates_of_deepspeed), strict=True):
        written = {
            "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
            "scheduler": {"type": kind, "params": params},
        }
        migrated = read(written, "deepspeed")
        migrated.require_accepted()
        settings = Settings(**migrated.settings)
        ours = [learning_rate(settings, step, NUM_STEPS) for step in range(NUM_STEPS)]
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18), (kind, params)
