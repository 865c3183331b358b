"""Contenders by name: what may be asked for, and what a mistake is told."""

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.bench.case import (
    DeepSpeed,
    case_from_json,
    label,
    needs_disk,
    peers_in,
    read_deepspeed,
    read_strategy,
    strategies_in,
)
from shardwise.core.layout import PRESETS, Layout
from tests.bench.cases import smoke

MIX = '{"blocks.[0-9]": "shard_grad_op", "*": "zero3"}'


def test_strategies_are_presets_and_mixes() -> None:
    names = strategies_in(f"zero3, {MIX},full-shard,auto")
    assert names == [
        "shardwise:zero3",
        'shardwise:{"blocks.[0-9]":"shard_grad_op","*":"zero3"}',
        "shardwise:full-shard",
        "shardwise:auto",
    ]
    assert label(names[1]) == "shardwise:blocks.[0-9]=shard_grad_op *=zero3"
    assert read_strategy(MIX)[0] == {"blocks.[0-9]": PRESETS["shard_grad_op"], "*": PRESETS["zero3"]}


def test_a_mix_may_write_a_row_of_the_table_out() -> None:
    text = '{"*": {"params": "node", "grads": "world", "optimizer": "world", "gathered_until": "backward"}}'
    assert read_strategy(text)[0] == {"*": Layout("node", "world", "world", "backward")}
    assert label(strategies_in(text)[0]) == "shardwise:*=(custom)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero4", "unknown strategy 'zero4'; did you mean 'zero"),
        ("auto+optimizer=hots", "'hots' is no place; did you mean 'host'?"),
        ('{"*": "zero3"', "is no JSON"),
        ('{"*": 3}', "a strategy is a preset's name, a Layout or a mapping of units to them, not int 3"),
        ('{"*": {"param": "node"}}', "a layout has no 'param'; did you mean 'params'?"),
    ],
)
def test_wrong_strategies(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategies_in(text)


def test_peers() -> None:
    assert peers_in("fsdp2, deepspeed:3,") == ["fsdp2", "deepspeed:3"]
    assert peers_in("") == []
    offloaded = ["fsdp2+offload", "deepspeed:2+offload", "deepspeed:3+offload:0.6", "deepspeed:3+nvme"]
    assert peers_in(",".join(offloaded)) == offloaded
    assert peers_in("hsdp,deepspeed:3+hpz") == ["hsdp", "deepspeed:3+hpz"]


def test_what_leaves_the_device_of_deepspeed() -> None:
    assert read_deepspeed("2") == DeepSpeed(2)
    assert read_deepspeed("2+offload") == DeepSpeed(2, "offload", 1.0)
    assert read_deepspeed("3+offload_optimizer:0.6") == DeepSpeed(3, "offload_optimizer", 0.6)


def test_parts_of_deepspeeds_zero_plus_plus() -> None:
    assert read_deepspeed("3+hpz") == DeepSpeed(3, parts=("hpz",))
    assert read_deepspeed("3+zeropp") == DeepSpeed(3, parts=("hpz", "qwz", "qgz"))


@pytest.mark.parametrize("name", ["zero2_offload", "zero3-offload", "zero3+optimizer=host:0.6", "auto+optimizer=host"])
def test_strategies_may_rest_elsewhere(name: str) -> None:
    (contender,) = strategies_in(name)
    assert contender == label(contender) == f"shardwise:{name}"
    assert read_strategy(name) == (name, set())
    assert read_strategy(f"{name}@early") == (name, {"early"})
    assert not needs_disk(contender)


def test_who_needs_a_folder() -> None:
    mixed = '{"blocks.0":"zero3+optimizer=disk","*":"zero3"}'
    names = [
        *strategies_in(f"zero3_nvme,zero3+params=disk+optimizer=host,auto+optimizer=disk,{mixed}"),
        "deepspeed:3+nvme",
    ]
    assert all(map(needs_disk, names))
    assert not any(map(needs_disk, [*strategies_in("auto,zero3"), "fsdp2+offload", "deepspeed:3", "plain"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp3", "unknown peer 'fsdp3'; did you mean 'fsdp"),
        ("deepspeed", "say which ZeRO stage"),
        ("deepspeed:4", "say which ZeRO stage"),
        ("deepspeed:2+nvme", "DeepSpeed has 'nvme' at stage 3 only"),
        ("deepspeed:0+offload", "DeepSpeed has 'offload' at stage 1 or 2 or 3 only"),
        ("deepspeed:3+ofload", "unknown option 'ofload'; did you mean 'offload'?"),
        ("deepspeed:2+offload:0.5", "a part of the optimizer to the host only, at stage 3"),
        ("deepspeed:2+hpz", "DeepSpeed has 'hpz' at stage 3 only"),
        ("deepspeed:3+qwzz", "unknown option 'qwzz'; did you mean 'qwz'?"),
        ("deepspeed:3+hpz:0.5", "a part of the optimizer to the host only, at stage 3"),
        ("hsdp:2", "hsdp takes no '2'"),
        ("deepspeed:3+offload:60", "'60' is not a part of the optimizer"),
        ("deepspeed:3+offload:half", "'half' is not a part of the optimizer"),
        ("fsdp2+ofload", r"did you mean 'fsdp2\+offload'"),
        ("fsdp2:1", "fsdp2 takes no '1'"),
    ],
)
def test_wrong_peers(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        peers_in(text)


def test_a_case_travels_as_json() -> None:
    case = smoke(f"shardwise:{MIX}", clip=0.5)
    assert case_from_json(case.to_json()) == case


def test_ways_stand_behind_a_strategy() -> None:
    assert strategies_in(f"zero3@early,{MIX}@early@capture, ddp") == [
        "shardwise:zero3@early",
        'shardwise:{"blocks.[0-9]":"shard_grad_op","*":"zero3"}@early@capture',
        "shardwise:ddp",
    ]
    assert read_strategy("zero3@early@capture") == ("zero3", {"early", "capture"})
    assert read_strategy(f"{MIX}@early")[1] == {"early"}
    assert label(f"shardwise:{MIX}@early").endswith("*=zero3@early")
    with pytest.raises(ConfigurationError, match="did you mean 'early'"):
        strategies_in("zero3@erly")
