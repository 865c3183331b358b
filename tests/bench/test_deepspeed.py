"""DeepSpeed as it is asked for: what it is told, that it understands it, and that it computes the same."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.bench.case import Shape, one_process, read_deepspeed
from shardwise.bench.compare import TOLERANCES, losses_of
from shardwise.bench.contenders import config_of, refuse_what_deepspeed_ignores
from shardwise.bench.launch import Outcome, launch
from tests.bench.cases import smoke
from tests.bench.test_contenders import losses
from tests.support.deepspeed import DeepSpeed

CASE = smoke(precision="bf16", reduce="bf16", clip=1.0, disk_path="/nvme")
FABRIC = "2x2,intra=1GB/s,inter=1GB/s"
OFFLOADED = ("2+offload", "3+offload", "3+offload_optimizer:0.5")


def zero(argument: str) -> dict[str, Any]:
    return config_of(CASE, read_deepspeed(argument))["zero_optimization"]


def test_what_stays_on_the_device_keeps_torchs_optimizer() -> None:
    config = config_of(CASE, read_deepspeed("3"))
    assert "optimizer" not in config
    assert not {"offload_optimizer", "offload_param"} & set(config["zero_optimization"])


def test_the_optimizer_on_the_host_is_deepspeeds_own() -> None:
    config = config_of(CASE, read_deepspeed("2+offload"))
    assert config["optimizer"]["type"] == "AdamW"
    assert config["gradient_clipping"] == 1.0
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}
    assert "offload_param" not in config["zero_optimization"]


def test_stage_3_moves_parameters_too_unless_told_otherwise() -> None:
    assert zero("3+offload")["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in zero("3+offload_optimizer:0.6")
    assert zero("3+offload_optimizer:0.6")["offload_optimizer"]["ratio"] == 0.6
    assert zero("3+super_offload")["offload_optimizer"]["super_offload"]


def test_what_rests_on_disk_is_in_the_folder_of_the_case() -> None:
    for what in ("offload_optimizer", "offload_param"):
        assert (zero("3+nvme")[what]["device"], zero("3+nvme")[what]["nvme_path"]) == ("nvme", "/nvme")


def test_the_second_copy_is_split_over_the_ranks_of_a_node() -> None:
    assert zero("3+hpz") == {**zero("3"), "zero_hpz_partition_size": CASE.node_size}
    encoded = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    assert zero("3+zeropp") == {**zero("3+hpz"), **encoded}
    assert zero("3+qwz") | zero("3+qgz") == {**zero("3"), **encoded}


@pytest.mark.parametrize(
    ("part", "world_size", "node_size", "ranks_per_node", "message"),
    [
        ("hpz", 2, 1, 1, "a node has 1 rank"),
        ("qgz", 2, 2, 2, "all 2 ranks are one node"),
        ("qgz", 16, 8, 1, "the 1 devices of this machine for a node of qgz, and a node has 8 ranks"),
    ],
)
def test_what_deepspeed_would_leave_out_is_refused(
    part: str, world_size: int, node_size: int, ranks_per_node: int, message: str
) -> None:
    case = smoke(world_size=world_size, node_size=node_size)
    with pytest.raises(ConfigurationError, match=message):
        refuse_what_deepspeed_ignores(case, [part], ranks_per_node)


def test_what_deepspeed_does_is_not_refused() -> None:
    refuse_what_deepspeed_ignores(smoke(world_size=2, node_size=1), [], 2)
    refuse_what_deepspeed_ignores(smoke(world_size=4, node_size=2), ["hpz", "qwz", "qgz"], 2)


def understood() -> list[dict[str, Any]]:
    """What DeepSpeed makes of it. It refuses unknown keys here, but ignores those of the disk."""
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = config_of(CASE, read_deepspeed("3+nvme"))
    assert set(config["aio"]) <= set(AIO_DEFAULT_DICT)
    arguments = ("2", "2+offload", "3+offload:0.6", "3+super_offload", "3+nvme", "3+zeropp")
    return [DeepSpeedZeroConfig(**zero(argument)).model_dump(mode="json") for argument in arguments]


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # DeepSpeed's
def test_deepspeed_understands_it(on_deepspeed: DeepSpeed) -> None:
    plain, two, three, superfast, disk, plus = on_deepspeed(understood)
    assert plain["offload_optimizer"] is None
    assert (two["offload_optimizer"]["device"], two["offload_param"]) == ("cpu", None)
    assert (three["offload_optimizer"]["ratio"], three["offload_param"]["device"]) == (0.6, "cpu")
    assert superfast["offload_optimizer"]["super_offload"]
    assert disk["offload_optimizer"]["pipeline_read"]
    assert {each["overlap_comm"] for each in (plain, two, three, disk)} == {True}
    assert (plus["zero_hpz_partition_size"], plus["zero_quantized_weights"], plus["zero_quantized_gradients"]) == (
        2,
        True,
        True,
    )


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # DeepSpeed's
@pytest.mark.parametrize("argument", OFFLOADED)
def test_deepspeed_on_the_host_computes_the_same(on_deepspeed: DeepSpeed, argument: str) -> None:
    """Its optimizer is compiled when it is first asked for, which takes a minute."""
    expected = on_deepspeed(losses, "plain", "bf16", "bf16", "blocks-smoke")
    seen = on_deepspeed(losses, f"deepspeed:{argument}", "bf16", "bf16", "blocks-smoke")
    assert seen == pytest.approx(expected, rel=TOLERANCES["bf16"])
    assert expected[-1] < expected[0], "something is learned"


def on_two_nodes(argument: str, fabric: str = "") -> Outcome:
    """Two ranks in each. Matrices are large enough for DeepSpeed to split them, from 100,000 elements; what the first
    micro-batch has gathered, the second copy has for the second."""
    pytest.importorskip("deepspeed")
    wide = Shape("wide", hidden=320, ffn=640, layers=1, heads=4, kv_heads=4, tokens=16, vocab=512)
    case = smoke(f"deepspeed:{argument}", world_size=4, node_size=2, shape=wide, micro_batches=2, fabric=fabric)
    return launch(case, timeout_s=200)


@pytest.mark.slow
@pytest.mark.peers
def test_deepspeeds_second_copy_changes_no_loss() -> None:
    expected, seen = on_two_nodes("3"), on_two_nodes("3+hpz")
    assert losses_of(seen) == losses_of(expected)
    assert losses_of(seen)[-1] < losses_of(seen)[0], "something is learned"


@pytest.mark.slow
@pytest.mark.peers
def test_deepspeeds_second_copy_is_gathered_inside_the_node() -> None:
    without, with_copy = (on_two_nodes(argument, FABRIC).answers[0]["wires"] for argument in ("3", "3+hpz"))
    assert with_copy["inter"]["bytes"] < 0.8 * without["inter"]["bytes"]


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("argument", ["3+qwz", "3+qgz"])
def test_deepspeeds_quantizers_are_not_for_cpus(argument: str) -> None:
    """What the documentation says of them."""
    assert on_two_nodes(argument, FABRIC).error.endswith("This op had not been implemented on CPU backend.")


def test_one_process_has_nothing_on_disk() -> None:
    assert not one_process(CASE).disk_path
