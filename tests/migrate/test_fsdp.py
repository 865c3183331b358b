"""`fsdp_config`: a named strategy stays the one that was named, in every spelling and in both versions."""

from typing import Any

import pytest

import shardwise.migrate.api as api
from shardwise.core.layout import layout_of
from shardwise.migrate.migrated import Migrated
from tests.migrate.told import assert_all_told

MEANS = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}
RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}


def read(**keys: Any) -> Migrated:
    tree = {"distributed_type": "FSDP", "fsdp_config": keys}
    migrated = api.read(tree, "accelerate")
    assert_all_told(tree, migrated)
    return migrated


@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("name", MEANS)
def test_a_named_strategy_is_that_strategy(name: str, version: int | None) -> None:
    number = list(MEANS).index(name) + 1
    versions = {} if version is None else {"fsdp_version": version}
    for key in ("fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward"):
        for value in (name, name.lower(), number, str(number)):
            migrated = read(**{key: value}, **versions)
            assert not migrated.refused, (key, value)
            assert migrated.strategy == MEANS[name], (key, value)


def test_nothing_named_is_a_full_shard() -> None:
    assert read().strategy == "zero3"
    assert read(fsdp_reshard_after_forward=True).strategy == "zero3"
    assert read(fsdp_reshard_after_forward="false").strategy == "shard_grad_op"


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("reshard", [True, False, *MEANS])
def test_two_words_agree_or_are_refused(name: str, reshard: bool | str) -> None:
    migrated = read(fsdp_sharding_strategy=name, fsdp_reshard_after_forward=reshard)
    agree = RESHARDS.get(name) == reshard if isinstance(reshard, bool) else name == reshard
    assert migrated.strategy == MEANS[name]
    assert [entry.key for entry in migrated.refused] == ([] if agree else ["fsdp_config.fsdp_reshard_after_forward"])


@pytest.mark.parametrize("key", ["fsdp_offload_params", "offload_params", "cpu_offload", "fsdp_cpu_offload"])
def test_offload_moves_all_three(key: str) -> None:
    layout = layout_of(read(**{key: True}).strategy)
    assert {layout.params_on, layout.grads_on, layout.optimizer_on} == {"host"}
    assert read(**{key: False}).strategy == "zero3"


def test_what_a_layout_refuses_is_refused_with_its_sentence() -> None:
    migrated = read(sharding_strategy="NO_SHARD", offload_params=True)
    assert migrated.strategy == "ddp"
    assert [entry.key for entry in migrated.refused] == ["fsdp_config.offload_params"]
    assert migrated.refused[0].text.startswith("params_on='host' with gathered_until='always'")


@pytest.mark.parametrize(
    ("keys", "units"),
    [
        ({}, "auto"),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "auto"),
        ({"auto_wrap_policy": "transformer_based_wrap", "transformer_layer_cls_to_wrap": "A, B,A"}, ("A", "B")),
        ({"fsdp_transformer_layer_cls_to_wrap": ["A", "B"]}, ("A", "B")),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, 100_000_000),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "1e6"}, 1_000_000),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0}, "auto"),
        ({"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "A"}, "auto"),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": 7}, "auto"),
    ],
)  # fmt: skip
def test_units(keys: dict[str, Any], units: Any) -> None:
    migrated = read(**keys)
    assert not migrated.refused
    assert migrated.words.get("units", "auto") == units


def test_checkpointing_and_where_activations_rest() -> None:
    assert read(activation_checkpointing=True).settings["gradient_checkpointing"] == "full"
    both = read(activation_checkpointing=True, activation_checkpointing_offload=True)
    assert both.strategy == "zero3+activations=host"
    assert not both.refused
    alone = read(fsdp_activation_checkpointing_offload=True)
    assert [entry.key for entry in alone.refused] == ["fsdp_config.fsdp_activation_checkpointing_offload"]


@pytest.mark.parametrize(("kind", "exports"), [("FULL", True), ("SHARDED", False), ("LOCAL", False)])
def test_state_dicts(kind: str, exports: bool) -> None:
    assert read(state_dict_type=f"{kind}_STATE_DICT").settings["export"] is exports


@pytest.mark.parametrize(
    "keys",
    [
        {"fsdp_version": 3},
        {"fsdp_sharding_strategy": "FULL_SHRAD"},
        {"fsdp_sharding_strategy": 6},
        {"fsdp_sharding_strategy": ["FULL_SHARD"]},
        {"fsdp_reshard_after_forward": "maybe"},
        {"fsdp_offload_params": "sometimes"},
        {"fsdp_min_num_params": -1},
        {"fsdp_min_num_params": 1e30},
        {"fsdp_auto_wrap_policy": "SOME_WRAP"},
        {"fsdp_transformer_layer_cls_to_wrap": {"A": "B"}},
        {"fsdp_transformer_layer_cls_to_wrap": "1,2"},
        {"fsdp_ignored_modules": "model.head"},
        {"fsdp_use_orig_params": "perhaps"},
        {"xla": True},
        {"fsdp_shading_strategy": "FULL_SHARD"},
        {"fsdp_mixed_precision_policy": "bf16"},
    ],
)
def test_refused(keys: dict[str, Any]) -> None:
    (key,) = keys
    migrated = read(**keys)
    assert [entry.key for entry in migrated.refused] == [f"fsdp_config.{key}"]


def test_two_spellings_of_one_key() -> None:
    assert not read(fsdp_offload_params=True, offload_params="true").refused
    migrated = read(fsdp_offload_params=True, cpu_offload=False)
    assert [entry.key for entry in migrated.refused] == ["fsdp_config.cpu_offload"]
    assert "fsdp_offload_params is true" in migrated.refused[0].text


def test_what_is_ignored_says_why() -> None:
    keys = {
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": False,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True,
        "limit_all_gathers": True,
    }
    migrated = read(**keys)
    fates = {entry.key.removeprefix("fsdp_config."): entry.fate for entry in migrated.entries}
    assert all(fates[key] == "ignored" for key in keys)
