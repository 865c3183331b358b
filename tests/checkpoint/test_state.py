"""What else goes on: every kind of optimizer state, settings of groups, buffers, frozen and never used parameters."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.opened import open_checkpoint
from shardwise.core.optim.groups import shard_groups
from tests.harness import Pool
from tests.support.trainee import features


class Odd(nn.Module):
    """A buffer that the forward changes, a frozen matrix in another dtype, a number, and a parameter never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 1024)
        self.frozen = nn.Linear(1024, 64, bias=False).to(torch.bfloat16).requires_grad_(False)
        self.scale = nn.ParameterList([nn.Parameter(torch.tensor(1.5))])
        self.unused = nn.Parameter(torch.ones(700))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.last = nn.Linear(1024, 4)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(1024))
        self.register_buffer("not_saved", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.num_calls += 1
        self.mean.lerp_(torch.full_like(self.mean, float(self.num_calls)), 0.1)
        frozen = self.frozen(hidden.to(self.frozen.weight.dtype)).to(hidden.dtype)
        return self.last(hidden + self.mean) * self.scale[0] + frozen.mean()


def eight_bit(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim import AdamW8bit

        return AdamW8bit(params, lr=1e-3)


def in_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [param for param in params if param.ndim > 1]
    rest = [param for param in params if param.ndim <= 1]
    groups = [{"params": matrices, "lr": 1e-2}, {"params": rest, "weight_decay": 0.3, "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=1e-3, amsgrad=True)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adamw in groups": in_groups,
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
    "learning rate as a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-3)),
}
# Needs whole matrices, so its state is not cut.
WHOLE = {"adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2)}


def build(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], strategy: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = Odd()
    return sw.shard(model, make(list(model.parameters())), strategy, precision="fp32")


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + first + step))
    for step in range(first, last):
        # The same samples on every rank: whatever the world, the same mean.
        model(features(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def kept(optimizer: Any) -> dict[str, Any]:
    """The state of this rank's parameters, in their order."""
    found = [
        list(optimizer.state.get(param, {}).items()) for group in optimizer.param_groups for param in group["params"]
    ]
    return {f"{index}.{key}": value for index, items in enumerate(found) for key, value in items}


def go_on(name: str, saving: str, loading: str, path: Path) -> None:
    """Runs on every rank: six steps in one go, and three and three."""
    sw.init()
    make = (OPTIMIZERS | WHOLE | {"eight bit": eight_bit})[name]
    straight = build(make, loading, 0)
    steps(*straight, 0, 6)
    model, optimizer = build(make, saving, 0)
    steps(model, optimizer, 0, 3)
    sw.save(path, model, optimizer)
    model, optimizer = build(make, loading, 1)
    steps(model, optimizer, 0, 1)  # state of its own, which must not shine through
    assert sw.load(path, model, optimizer) == {}
    steps(model, optimizer, 3, 6)
    expected = sw.full_state_dict(straight[0])
    seen = sw.full_state_dict(model)
    assert list(seen) == list(expected)
    # The scales of 8-bit blocks are rounded once more.
    tolerance = 1e-5 if name == "eight bit" else 0.0
    for key, value in expected.items():
        torch.testing.assert_close(seen[key], value, rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")
    ours, theirs = kept(optimizer), kept(straight[1])
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        if isinstance(value, Tensor):
            # Not the shape: beside a parameter that is a number, a row of one element and a number are the same.
            assert (type(ours[key]), ours[key].numel(), ours[key].dtype) == (type(value), value.numel(), value.dtype)
        else:
            assert ours[key] == value, key
    for ours, theirs in zip(optimizer.param_groups, straight[1].param_groups, strict=True):
        assert {key: value for key, value in ours.items() if key != "params"} == {
            key: value for key, value in theirs.items() if key != "params"
        }


def go_on_each(names: list[str], saving: str, loading: str, path: Path) -> None:
    for name in names:
        go_on(name, saving, loading, path / name)


@pytest.mark.quick("zero3-ddp")
@pytest.mark.parametrize(("saving", "loading"), [("zero3", "ddp"), ("ddp", "zero2")])
def test_every_kind_of_optimizer_goes_on(run_ranks: Pool, tmp_path: Path, saving: str, loading: str) -> None:
    run_ranks(2, go_on_each, list(OPTIMIZERS), saving, loading, tmp_path)


def test_state_that_is_not_cut_goes_on_whole(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, go_on_each, list(WHOLE), "ddp", "ddp", tmp_path)


def go_on_eight_bit(path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):  # compiling its update takes minutes
        go_on("eight bit", "zero3", "ddp", path)


def test_eight_bits_go_on(run_ranks: Pool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(2, go_on_eight_bit, tmp_path / "here")


def requantise(path: Path) -> None:
    """Any codes that a run may come to, put there without one."""
    sw.init()
    model, optimizer = build(eight_bit, "zero3", 0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for param in shard_groups(optimizer.inner)[0]:
        state = optimizer.inner.state[param]
        state["step"] = torch.tensor(3.0)
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[key] = optimizer.inner._new_buffer(param, signed)
            values = torch.randn(param.shape, generator=generator)
            state[key].copy_(values if signed else values.square())
    sw.save(path, model, optimizer)
    again, other = build(eight_bit, "zero3", 1)
    sw.load(path, again, other)
    ours, theirs = kept(other), kept(optimizer)
    assert set(ours) == set(theirs)
    num_quantised = 0
    for key, value in theirs.items():
        assert type(ours[key]) is type(value)
        if type(value) is not Tensor:
            num_quantised += 1
            assert torch.equal(ours[key].codes, value.codes)
            torch.testing.assert_close(ours[key].scale, value.scale, rtol=1e-6, atol=0)
        else:
            assert torch.equal(ours[key], value)
    assert num_quantised
    whole, whole_optimizer = build(eight_bit, "ddp", 1)
    sw.load(path, whole, whole_optimizer)
    sw.save(path / "whole", whole, whole_optimizer)
    sw.load(path / "whole", again, other)
    assert all(torch.equal(kept(other)[key].codes, ours[key].codes) for key in ours if type(ours[key]) is not Tensor)


def test_eight_bits_come_back_as_they_were(run_ranks: Pool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(2, requantise, tmp_path / "here", deadline=120)


def weights_alone(path: Path) -> None:
    sw.init()
    model, optimizer = build(in_groups, "zero3", 0)
    steps(model, optimizer, 0, 2)
    extra = {"step": 2, "seen": [1, 2.5, None, {"a": True}], "rank": dist.get_rank()}
    sw.save(path / "both", model, optimizer, extra=extra)
    sw.save(path / "model", model)
    expected = sw.full_state_dict(model)
    for name in ("both", "model"):
        torch.manual_seed(1)
        other, none = sw.shard(Odd(), None, "ddp", precision="bf16")
        assert none is None
        found = sw.load(str(path / name), other)
        assert found == ({**extra, "rank": 0} if name == "both" else {})
        seen = sw.full_state_dict(other)
        assert all(torch.equal(seen[key], value) for key, value in expected.items())
    other, other_optimizer = build(in_groups, "ddp", 1)
    with pytest.raises(sw.CheckpointError, match="holds no optimizer"):
        sw.load(path / "model", other, other_optimizer)


def test_weights_load_without_an_optimizer_and_in_another_precision(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, weights_alone, tmp_path)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "hsdp"])
def test_every_element_is_written_once_and_by_all_ranks(run_ranks: Pool, tmp_path: Path, strategy: str) -> None:
    run_ranks(4, save_once, strategy, tmp_path / "here")
    index = open_checkpoint(tmp_path / "here").index
    num_elems = [0] * 4
    for _, stored in index.every_stored():
        for piece in stored.pieces:
            num_elems[piece.file] += piece.stop - piece.start
    params = [saved for saved in index.tensors.values() if saved.kind == "parameter"]
    assert sum(saved.num_elems for saved in params) == sum(param.numel() for param in Odd().parameters())
    assert sum(num_elems) == sum(stored.num_elems for _, stored in index.every_stored())
    assert max(num_elems) <= 2 * sum(num_elems) / 4


def save_once(strategy: str, path: Path) -> None:
    sw.init()
    torch.manual_seed(0)
    model = Odd()
    model, optimizer = sw.shard(model, in_groups(list(model.parameters())), strategy, precision="fp32", node_size=2)
    sw.save(path, model, optimizer)
