"""Whatever Accelerate and transformers can be told is known here: no field of theirs is an unknown key."""

import copy
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import shardwise.migrate.api as api
from shardwise.core.layout import layout_of
from tests.migrate.test_fsdp import MEANS
from tests.migrate.told import assert_all_told

pytestmark = pytest.mark.peers

UNKNOWN = "unknown key"
# Of the plugin, and never of a file.
NOT_IN_FILES = {"hf_ds_config", "is_train_batch_min", "transformer_moe_cls_names", "enable_msamp", "msamp_opt_level"}


def fields_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def unknown(tree: dict[str, Any], kind: Any) -> list[str]:
    migrated = api.read(tree, kind)
    assert_all_told(tree, migrated)
    return [entry.key for entry in migrated.refused if entry.text.startswith(UNKNOWN)]


def test_the_top_of_accelerates_file() -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    keys = fields_of(ClusterConfig) | fields_of(SageMakerConfig)
    assert not unknown(dict.fromkeys(keys, "x") | {"distributed_type": "FSDP"}, "accelerate")


def test_kinds_and_precisions() -> None:
    from accelerate.utils import DistributedType, PrecisionType

    for kind in DistributedType:
        assert not unknown({"distributed_type": kind.value}, "accelerate")
    for word in PrecisionType:
        assert not unknown({"distributed_type": "FSDP", "mixed_precision": word.value}, "accelerate")


def test_fsdp() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY

    from shardwise.migrate.fsdp import POLICIES, strategies
    from shardwise.migrate.tables import table

    assert list(strategies()) == FSDP_SHARDING_STRATEGY
    assert list(POLICIES) == FSDP_AUTO_WRAP_POLICY
    from accelerate.utils.constants import FSDP_STATE_DICT_TYPE

    assert set(table("accelerate")["state_dicts"]) == set(FSDP_STATE_DICT_TYPE)
    keys = fields_of(FullyShardedDataParallelPlugin) - {"fsdp_version"}
    for prefix in ("", "fsdp_"):
        block = {prefix + key: "x" for key in keys} | {"fsdp_version": 2}
        assert not unknown({"distributed_type": "FSDP", "fsdp_config": block}, "accelerate")


def test_flags_of_the_launcher() -> None:
    """Every --fsdp_*, --fp8_*, --dynamo_*, --parallelism_config_* may stand in a block of the file."""
    from accelerate.commands.launch import launch_command_parser

    flags = [action.dest for action in launch_command_parser()._actions]
    blocks = {
        "fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_",
        "parallelism_config": "parallelism_config_", "mpirun_config": "mpirun_",
    }  # fmt: skip
    for block, prefix in blocks.items():
        keys = [flag for flag in flags if flag.startswith(prefix)]
        assert keys, prefix
        assert not unknown({"distributed_type": "FSDP", block: dict.fromkeys(keys, "1")}, "accelerate")


def test_groups() -> None:
    from accelerate import ParallelismConfig

    tree = {"distributed_type": "FSDP", "parallelism_config": dict.fromkeys(fields_of(ParallelismConfig), "1")}
    assert not unknown(tree, "accelerate")


def test_deepspeed() -> None:
    from accelerate.commands.config import cluster
    from accelerate.utils import DeepSpeedPlugin

    asked = set(re.findall(r'deepspeed_config\["(\w+)"\]', inspect.getsource(cluster)))
    keys = (fields_of(DeepSpeedPlugin) | asked) - NOT_IN_FILES - {"deepspeed_config_file"}
    block = dict.fromkeys(keys, "none") | {"zero_stage": 3}
    assert not unknown({"distributed_type": "DEEPSPEED", "deepspeed_config": block}, "accelerate")


@pytest.mark.slow
def test_training_arguments() -> None:
    from transformers import TrainingArguments
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    from shardwise.migrate.tables import table

    assert not unknown(dict.fromkeys(fields_of(TrainingArguments), "x"), "hugging-face")
    assert {kind.value for kind in SchedulerType} <= set(table("hugging_face")["schedules"])
    for name in OptimizerNames:
        migrated = api.read({"optim": name.value}, "hugging-face")
        assert bool(migrated.refused) == ("optimizer" not in migrated.settings), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "keys",
    [
        {"fsdp": True},
        {"fsdp": "full_shard auto_wrap"},
        {"fsdp": "shard_grad_op"},
        {"fsdp": ["full_shard", "offload"]},
        {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True}},
        {"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": "true", "activation_checkpointing": True}},
        {"fsdp": "hybrid_shard", "fsdp_config": {"version": 1}},
        {"fsdp": "hybrid_shard_zero2 offload", "fsdp_config": {"version": 1, "transformer_layer_cls_to_wrap": "A"}},
        {"fsdp": "no_shard", "fsdp_config": {"version": 1}},
    ],
)
def test_a_trainer_understands_fsdp_as_we_do(keys: dict[str, Any], tmp_path: Path) -> None:
    from transformers import TrainingArguments

    ours = api.read(keys, "hugging-face")
    theirs = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **copy.deepcopy(keys)).fsdp_plugin_args
    reshard = theirs["reshard_after_forward"]
    name = {1: "FULL_SHARD", 0: "SHARD_GRAD_OP"}.get(reshard) or str(reshard).upper()
    layout = layout_of(ours.strategy)
    assert not ours.refused
    assert layout.on_device == layout_of(MEANS[name])
    assert (layout.params_on == "host") == theirs.get("cpu_offload", False)
    assert ("gradient_checkpointing" in ours.settings) == bool(theirs.get("activation_checkpointing"))
    assert ours.words.get("units", ()) == tuple(
        filter(None, theirs.get("transformer_cls_names_to_wrap", "").split(","))
    )


def test_what_a_trainer_does_unsaid() -> None:
    from transformers import TrainingArguments

    from shardwise.migrate.hugging_face import DEFAULTS, EPOCHS

    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    assert defaults["num_train_epochs"] == EPOCHS
    for name, value in DEFAULTS.items():
        assert name in ("min_lr_ratio", "eval_fraction", "packing") or defaults[name] == value, name


@pytest.mark.parametrize("word", ["no", "fp16", "bf16"])
@pytest.mark.parametrize(
    "keys", [{}, {"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}]
)
@pytest.mark.filterwarnings("ignore")
def test_deepspeeds_keys_are_completed_as_accelerate_does(word: str, keys: dict[str, Any]) -> None:
    from accelerate.utils import DeepSpeedPlugin

    from shardwise.migrate.accelerate import completed

    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, **copy.deepcopy(keys)})
    plugin.set_mixed_precision(word)
    ours = completed(keys, word)
    for kind in ("bf16", "fp16"):
        assert str(ours.get(kind, {}).get("enabled", "false")) == str(plugin.deepspeed_config[kind]["enabled"]).lower()
