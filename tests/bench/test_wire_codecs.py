"""What codecs lose, of values and of a sharded model's gradients."""

import math

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.bench.wire_codecs import lost_by, matrices
from shardwise.core.engine.guards import engine_of
from shardwise.core.mesh import leave


def test_error_cosine_and_size_are_those_of_the_definition() -> None:
    values = [torch.randn(1024), torch.randn(512) * 10]
    lost = lost_by("bf16", values)
    both = torch.cat(values)
    back = both.bfloat16().float()
    assert lost["relative_rms"] == pytest.approx(float((both - back).norm() / both.norm()), rel=1e-4)
    assert lost["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert lost["bytes_per_elem"] == 2.0
    assert lost["encode_s"] > 0
    assert lost["decode_s"] > 0


def test_fewer_bits_lose_more() -> None:
    values = [torch.randn(4096)]
    errors = [lost_by(name, values)["relative_rms"] for name in ("fp16", "bf16", "int8", "e4m3", "int4")]
    assert None not in errors
    assert errors == sorted(errors, key=lambda error: error or 0.0)
    # int4 in blocks of 256: a payload of half a byte, and 4 bytes of scale for each block.
    assert lost_by("int4", values)["bytes_per_elem"] == 0.5 + 4 / 256


def test_the_worst_unit_is_told_from_all() -> None:
    mild, wild = torch.ones(256), torch.zeros(256)
    wild[0], wild[1:] = 1.0, 0.01
    lost = lost_by("int4", [mild, wild])
    assert lost["worst_relative_rms"] == pytest.approx(math.sqrt(255 * 0.01**2 / (1 + 255 * 0.01**2)))
    assert lost["relative_rms"] is not None
    assert lost["relative_rms"] < lost["worst_relative_rms"]


def test_what_is_not_finite_any_more_is_told() -> None:
    lost = lost_by("fp16", [torch.tensor([1e6, 1.0])])
    assert (lost["relative_rms"], lost["worst_relative_rms"], lost["cosine"]) == (None, None, None)


def test_zeros_lose_nothing() -> None:
    lost = lost_by("int8", [torch.zeros(256)])
    assert (lost["relative_rms"], lost["worst_relative_rms"], lost["cosine"]) == (0.0, 0.0, 1.0)


def test_matrices_of_a_model_are_its_gradients_and_weights() -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False))

    plain, model, tokens = built(), built(), torch.arange(8)
    sw.init(device="cpu")
    try:
        sw.shard(model, None, "zero3", precision="fp32")
        model(tokens).square().sum().backward()
        engine_of(model).finish_gradients()
        sent = torch.cat(list(matrices(model, True, lambda state: state.gradient.final_for_optimizer)))
        weights = torch.cat(list(matrices(model, False, lambda state: state.read_master().detach())))
    finally:
        leave()
    plain(tokens).square().sum().backward()
    expected = [param for name, param in plain.named_parameters() if name in ("1.weight", "3.weight")]
    assert torch.equal(weights, torch.cat([param.detach().view(-1) for param in expected]))
    gradients = [param.grad.view(-1) for param in expected if param.grad is not None]
    torch.testing.assert_close(sent, torch.cat(gradients))
