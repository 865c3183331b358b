"""The file that doctor writes: every value is looked at, and a cluster comes out."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.planner.hardware.cluster import (
    Measured,
    cluster_in,
    efficiency_in,
    gpu_in,
    read_measured,
    write_measured,
)
from shardwise.planner.hardware.gpus import GPUS
from shardwise.planner.hardware.links import Link

COMMON: dict[str, Any] = {
    "host_memory_bytes": 2 * 10**12, "host_adam_elems_per_s": 4e9, "disk_bytes": 10**13, "disk_read_bytes_per_s": 2e10,
    "disk_write_bytes_per_s": 1e10,
}  # fmt: skip
NODE = Measured(
    device="NVIDIA H200", kind="cuda", num_devices=8, memory_bytes=150 * 10**9, context_bytes=600 * 10**6, flops=720e12,
    fp32_flops=50e12, memory_bytes_per_s=4.1e12, to_host_bytes_per_s=55e9, from_host_bytes_per_s=52e9,
    gather_bytes_per_s=350e9, all_reduce_bytes_per_s=470e9, collective_latency_us=25.0, **COMMON,
)  # fmt: skip
PROCESSOR = Measured(
    device="cpu (EPYC)", kind="cpu", num_devices=1, memory_bytes=10**11, context_bytes=0, flops=2e12, fp32_flops=1e12,
    memory_bytes_per_s=1e11, **COMMON,
)  # fmt: skip


@pytest.mark.parametrize("measured", [NODE, PROCESSOR], ids=["node", "processor"])
def test_what_is_written_is_read(tmp_path: Path, measured: Measured) -> None:
    write_measured(measured, tmp_path / "hardware.json")
    assert read_measured(tmp_path / "hardware.json") == measured


def test_a_known_gpu_keeps_its_peak_and_gets_the_share_that_was_seen() -> None:
    cluster = cluster_in(NODE, nodes=2)
    assert cluster.world_size == 16
    assert cluster.gpu.flops == GPUS["H200-141GB"].flops
    # A little more than was seen: a large product, too, begins and ends.
    assert 1.0 < efficiency_in(NODE).products / (720e12 / 989.5e12) < 1.05
    assert cluster.gpu.memory_bytes == 150 * 10**9
    assert cluster.intra == Link(350.0, 25.0)
    assert cluster.switch == Link(470.0, 25.0)
    assert cluster.pcie.gigabytes_per_s == 52.0
    assert cluster.network == "ib-ndr"
    assert cluster_in(NODE, 4, network="ethernet-100").inter.gigabytes_per_s == 2.5


def test_ranks_share_a_processor() -> None:
    two, four = cluster_in(PROCESSOR), cluster_in(PROCESSOR, 4)
    assert (two.node_size, four.node_size) == (2, 4)
    assert (two.gpu.flops, four.gpu.flops) == (1e12, 5e11)
    assert (two.gpu.memory_bytes, four.gpu.memory_bytes) == (5 * 10**10, 25 * 10**9)
    assert efficiency_in(PROCESSOR).products == 1.0
    assert gpu_in(PROCESSOR).name == "cpu (EPYC)"


def test_more_gpus_than_were_measured() -> None:
    with pytest.raises(ConfigurationError, match="GPUs: 9, but 8 were measured"):
        cluster_in(NODE, 9)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"flops": 0}, "flops is 0, but must be a number above 0"),
        ({"flops": 1e-320}, "flops is 1e-320"),  # a step would take for ever
        ({"flops": "fast"}, "flops is 'fast'"),
        ({"flops": float("nan")}, "flops is nan"),
        ({"memory_bytes": 1.5}, "memory_bytes is 1.5, but must be a whole number above 0"),
        ({"num_devices": -1}, "num_devices is -1"),
        ({"gather_bytes_per_s": -1.0}, "gather_bytes_per_s is -1.0"),
        ({"device": 5}, "device is 5, but must be a word"),
        ({"kind": "tpu"}, "kind 'tpu'; did you mean"),
        ({"version": 2}, "version 2, but 1 is needed: measure again"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"disk_bytes": None}, "disk_bytes is None"),
    ],
)
def test_values_that_cannot_be(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    file = tmp_path / "hardware.json"
    write_measured(NODE, file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigurationError) as seen:
        read_measured(file)
    assert why in str(seen.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    with pytest.raises(ConfigurationError, match="make it with shardwise doctor --measure"):
        read_measured(file)
    for text, why in (
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list"),
        ("{}", "has no version, no device, no kind"),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=why):
            read_measured(file)
