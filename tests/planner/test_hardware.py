"""GPUs, networks and clusters by name, and what is refused."""

import subprocess
import sys
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.planner.hardware.cluster import NETWORKS, bytes_of, make_cluster
from shardwise.planner.hardware.gpus import GIB, GPUS, gpu_of_device
from shardwise.planner.hardware.links import Link


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xH100-80GB", 8, "H100-80GB"),
        ("8xH100", 8, "H100-80GB"),
        ("8XH100", 8, "H100-80GB"),
        ("h100", 1, "H100-80GB"),
        ("8*h200", 8, "H200-141GB"),
        ("4 x A100-80GB", 4, "A100-80GB"),
        ("8xA100-SXM4-40GB", 8, "A100-40GB"),
        ("8xA100-SXM-80GB", 8, "A100-80GB"),
        ("H100 SXM5", 1, "H100-80GB"),
        ("Tesla T4", 1, "T4"),
        ("NVIDIA GeForce RTX 5080", 1, "RTX-5080"),
        ("2 x RTX Pro 6000 Blackwell", 2, "RTX-PRO-6000"),
        ("8xRTX 6000 Ada", 8, "RTX-6000-Ada"),
        ("72xGB200-NVL72", 72, "GB200"),
        ("8xB300-288GB", 8, "B300"),
        ("2xA100 80GB PCIe", 2, "A100-PCIe-80GB"),
        ("NVIDIA H100 PCIe", 1, "H100-PCIe"),
        ("1xRTX4090", 1, "RTX-4090"),
        ("2x GeForce RTX 3090", 2, "RTX-3090"),
        ("8xMI300X", 8, "MI300X"),
        ("16xV100-32GB", 16, "V100-32GB"),
        ("l4", 1, "L4"),
    ],
)
def test_gpus_from_words(text: str, count: int, name: str) -> None:
    cluster = make_cluster(text, 1)
    assert (cluster.node_size, cluster.gpu) == (count, GPUS[name])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("8xA100", "there are A100-40GB and A100-80GB: say which 'A100' it is"),
        ("V100", "there are V100-16GB and V100-32GB"),
        ("8xH1000", "unknown GPU 'H1000'; did you mean 'H100-80GB',"),
        ("8xA100-60GB", "unknown GPU 'A100-60GB'; did you mean 'A100-40GB', 'A100-80GB'"),
        ("0xH100", "0 GPUs in '0xH100'; give a whole number from 1 to 100000"),
        ("-2xH100", "-2 GPUs in"),
        ("9.5xH100", "9.5 GPUs in"),
        ("", "names no GPU; write 8xH100-80GB"),
        ("8x", "unknown GPU '8x'"),
    ],
)
def test_gpus_that_are_none(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as seen:
        make_cluster(text)
    assert why in str(seen.value)
    assert "\n" not in str(seen.value)


def test_every_gpu_is_found_by_its_own_name_and_makes_a_cluster() -> None:
    for name, gpu in GPUS.items():
        cluster = make_cluster(f"2x{name}", 2)
        assert (cluster.node_size, cluster.gpu) == (2, gpu)
        assert cluster.network in NETWORKS
        assert cluster.inter.gigabytes_per_s > 0
        assert gpu.context_bytes < gpu.memory_bytes


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GB10", None),
        ("cpu", None),
    ],
)
def test_gpus_by_what_drivers_call_them(device: str, name: str | None) -> None:
    assert gpu_of_device(device) == (None if name is None else GPUS[name])


def test_a_cluster_of_what_is_usual() -> None:
    cluster = make_cluster("8xH100-80GB", 4)
    assert (cluster.node_size, cluster.num_nodes, cluster.world_size) == (8, 4, 32)
    assert cluster.fabric.world_size == 32
    assert cluster.fabric.intra == cluster.intra == Link(361.0, 20.0)
    assert cluster.inter == Link(47.5, 15)
    assert cluster.switch == Link(480.0, 20.0)
    assert cluster.gpu.memory_bytes == round(79.1 * GIB)
    assert cluster.host_bytes == 8 * 256 * 10**9
    assert str(cluster) == "4 x 8 x H100-80GB"


def test_a_nodes_network_is_shared_by_its_gpus() -> None:
    assert make_cluster("8xA100-40GB", 2, network="efa-p4d").inter.gigabytes_per_s == 400 * 0.8 / 8 / 8
    assert make_cluster("1xA100-40GB", 2, network="ethernet-10").inter.gigabytes_per_s == 1.0
    assert make_cluster("8xA100-40GB", 2, network="ib-hdr").inter == make_cluster("1xA100-40GB", 2, network="HDR").inter


def test_what_is_said_replaces_what_is_usual() -> None:
    cluster = make_cluster(
        "8xH100", 2, network="25GB/s", intra="pcie4", pcie="pcie3", memory="70GiB", host_memory="512GB", disk="2 TB"
    )
    assert cluster.inter.gigabytes_per_s == 25.0
    assert cluster.intra.gigabytes_per_s == 20.0
    assert cluster.pcie.gigabytes_per_s == 12.0
    assert cluster.switch is None
    assert cluster.gpu.memory_bytes == 70 * GIB
    assert (cluster.host_bytes, cluster.disk_bytes) == (512 * 10**9, 2 * 10**12)
    assert make_cluster("4xGB200", 18, network="nvlink").inter == GPUS["GB200"].intra
    assert make_cluster("8xH100", intra="nvlink") == make_cluster("8xH100")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"nodes": 0}, "num_nodes is 0, but"),
        ({"nodes": -1}, "num_nodes is -1, but"),
        ({"nodes": 2.5}, "num_nodes is 2.5, but"),
        ({"nodes": 100_001}, "num_nodes is 100001, but must be a whole number from 1 to 100,000"),
        ({"network": 5}, "--network: 5 is no name and no rate"),
        ({"network": "1e999GB/s"}, "--network: '1e999GB/s' is no quantity above 0"),
        ({"memory": "1e400GB"}, "--gpu-memory: '1e400GB' is no quantity above 0"),
        ({"host_memory": "1e999GB"}, "--host-memory: '1e999GB' is no quantity"),
        ({"network": "efa"}, "--network: 'efa' comes at several rates: efa-p4d, efa-p5"),
        ({"network": "ib-nrd"}, "did you mean 'ib-ndr'?"),
        ({"network": "50 apples"}, "--network: '50 apples' is no quantity above 0 and up to 1e18; write 50GB/s"),
        ({"network": "0GB/s"}, "--network: '0GB/s' is no quantity above 0"),
        ({"intra": "pcie9"}, "--intra: 'pcie9' is no name and no rate"),
        ({"pcie": "pci4"}, "did you mean 'pcie4'?"),
        ({"memory": "-70GB"}, "--gpu-memory: '-70GB' is no quantity"),
        ({"memory": 0}, "--gpu-memory: '0' is no quantity above 0"),
        ({"memory": "1MB"}, "context_bytes is 900000000, but must be a whole number from 0 to 999,999"),
        ({"host_memory": "lots"}, "--host-memory: 'lots' is no quantity above 0 and up to 1e18; write 512GB"),
        ({"disk": "0TB"}, "--disk: '0TB' is no quantity"),
        ({"gpus": "2xL40S", "intra": "nvlink"}, "a L40S has no NVLink"),
    ],
)
def test_clusters_that_are_none(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as seen:
        make_cluster(**{"gpus": "8xH100", **asked})
    assert why in str(seen.value)


def test_quantities() -> None:
    assert bytes_of("1.5TB", "x") == 1_500_000_000_000
    assert bytes_of("2 gib", "x") == 2 * GIB
    assert bytes_of(12_000_000, "x") == 12_000_000
    with pytest.raises(ConfigurationError, match="12 is 12 bytes; write 12GB"):
        bytes_of(12, "x")


def test_shapes_and_hardware_do_without_torch() -> None:
    code = (
        "import sys\n"
        "from shardwise.planner.hardware import cluster, gpus\n"
        "from shardwise.planner.shapes import hf_config, names\n"
        "from shardwise.planner.shapes.shape import units_of\n"
        "units_of(names.shape_of('llama-3-70b')), cluster.make_cluster('8xH100', 128)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_host_of_the_table_updates_at_a_published_rate_and_is_not_measured() -> None:
    # ZeRO-Offload, table 4: 10B parameters in 2.57 s on one host.
    server = make_cluster("8xA100-80GB")
    assert server.host_adam_elems_per_s == pytest.approx(10e9 / 2.57, rel=0.05)
    assert not server.host_is_measured
