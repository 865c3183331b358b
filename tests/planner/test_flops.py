"""Peaks by the names that devices give themselves, and the FLOP of a token."""

from dataclasses import replace

import pytest

from shardwise.base.dtypes import BF16, FP16, FP32
from shardwise.bench.case import SHAPES
from shardwise.bench.model import flops_of, num_params
from shardwise.planner.hardware.gpus import flops_per_token, peak_flops
from shardwise.planner.shapes.names import shape_of
from shardwise.planner.subject import subject_of
from shardwise.planner.training import Lora, Training


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A1000", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device(name: str, teraflops: float | None) -> None:
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(name, BF16) == peak_flops(name, FP16) == expected


def test_no_peak_is_claimed_for_a_format_that_a_device_does_not_multiply() -> None:
    assert peak_flops("Tesla T4", FP16) == 65e12
    assert peak_flops("Tesla T4", BF16) is None


def test_no_peak_is_claimed_for_32_bits() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", FP32) is None


def test_flops_of_a_token() -> None:
    assert flops_per_token(1000, layers=2, hidden=8, seq=16) == 6 * 1000 + 12 * 2 * 8 * 16
    # An embedding that is looked up does not multiply; a tied one does, as the head.
    smoke, tied = SHAPES["smoke"], SHAPES["llama-3.2-1b"]
    assert flops_of(smoke) == flops_per_token(num_params(smoke) - 256 * 64, 2, 64, 16)
    assert flops_of(tied) == flops_per_token(num_params(tied), tied.layers, tied.hidden, tied.tokens)


def test_a_frozen_weight_has_no_gradient() -> None:
    """4 FLOP instead of 6, as the trainer counts them; adapters of rank 16 at queries and values."""
    shape, training = shape_of("llama-3-8b"), Training(lora=Lora(16))
    full, lora = (subject_of(shape, each).flops_per_token for each in (replace(training, lora=None), training))
    adapters = 32 * 16 * (4096 + 4096 + 4096 + 1024)
    attention = 12 * 32 * 4096 * training.seq
    assert full == 6 * shape.num_matmul_params + attention
    assert lora == pytest.approx(4 * shape.num_matmul_params + 6 * adapters + attention)
