"""Gradients can be read and changed under every layout, and are those of one process."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.harness import Pool
from tests.support.strategies import disk_for, slow_but
from tests.support.trainee import LAYOUTS, Block, Trainee, check, check_refused, features

OFFLOADED = ["zero2_offload", "zero3_offload", "zero3+optimizer=host", "ddp+optimizer=host"]
MAPPING = {"layers.0": "ddp", "layers.1": "zero3_offload", "layers.*": "zero3", "*": "zero2"}
HERE = [*LAYOUTS, *OFFLOADED, MAPPING]
QUICK = ["zero1", "zero3", "zero2_offload", MAPPING]
EACH = slow_but([QUICK], [QUICK, LAYOUTS, OFFLOADED])
ON_NODES = ["hsdp", "hfsdp", "hpz", {"layers.0": "hsdp", "layers.*": "zero3", "*": "hsdp+optimizer=host"}]


class Net(nn.Module):
    """Tied ends, a frozen part, one that nobody uses and one that only the first rank does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.spare = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)
        self.head.weight = self.stem.weight
        self.layers[2].up.requires_grad_(False)

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.sometimes(x) if is_first else x)


def loss_on(trainee: Trainee, step: int) -> Tensor:
    return trainee.share(lambda rank: trainee.model(features(step, rank), rank == 0).float().square().mean())


def backward(trainee: Trainee, step: int) -> float:
    """Two micro-batches."""
    first = loss_on(trainee, step)
    with trainee.accumulate():
        first.backward()
    second = loss_on(trainee, 100 + step)
    second.backward()
    return trainee.mean(first) + trainee.mean(second)


@contextmanager
def whole(trainee: Trainee, write: bool = False, part: str = "") -> Iterator[list[tuple[str, nn.Parameter]]]:
    module = trainee.model.get_submodule(part)
    with sw.whole(module, grads=True, write=write) if trainee.is_sharded else nullcontext(), torch.no_grad():
        yield list(module.named_parameters())


def params_of(trainee: Trainee) -> list[nn.Parameter]:
    return list(trainee.model.parameters())


def clip(trainee: Trainee, max_norm: float, norm_type: float) -> float:
    if trainee.is_sharded:
        return float(trainee.optimizer.clip_grad_norm(max_norm, norm_type, error_if_nonfinite=True))
    return float(nn.utils.clip_grad_norm_(params_of(trainee), max_norm, norm_type, error_if_nonfinite=True))


def clip_value(trainee: Trainee, value: float) -> None:
    if trainee.is_sharded:
        trainee.optimizer.clip_grad_value(value)
    else:
        nn.utils.clip_grad_value_(params_of(trainee), value)


def scale(trainee: Trainee, factor: float) -> None:
    if trainee.is_sharded:
        trainee.optimizer.scale_grads(factor)
    else:
        for param in params_of(trainee):
            if param.grad is not None:
                param.grad.mul_(factor)


def norms(trainee: Trainee, norm_type: float) -> list[float]:
    """By name, and by name alone."""
    named = dict(trainee.model.named_parameters())
    found = (
        sw.grad_norms(trainee.model, norm_type)
        if trainee.is_sharded
        else {
            name: float(torch.linalg.vector_norm(param.grad, norm_type))
            for name, param in named.items()
            if param.grad is not None
        }
    )
    assert {"spare.weight", "layers.2.up.weight", "head.weight"}.isdisjoint(found)
    return [found[name] for name in named if name in found]


def values(trainee: Trainee) -> list[float]:
    """A number for each gradient that changes with each of its elements; -1 for one that is not there."""
    found = []
    with whole(trainee) as named:
        for _, param in named:
            if param.grad is None:
                found.append(-1.0)
            else:
                assert param.grad.shape == param.shape
                row = param.grad.double().flatten()
                # Nothing cancels out, so that roundings stay as small as they are.
                found.append(float((torch.where(row > 0, row, -3 * row) * torch.linspace(1, 2, row.numel())).sum()))
    return found


# ---------------------------------------------------------------------------------------------------------
# norms and clipping


def clipped_by(orders: tuple[float, ...], trainee: Trainee) -> list[float]:
    found = []
    for step, order in enumerate(orders):
        found.append(backward(trainee, step))
        found += norms(trainee, order)
        found.append(clip(trainee, 0.9 * found[-1], order))
        found.append(clip(trainee, math.inf, order))
        trainee.step()
    return found


@pytest.mark.parametrize("strategies", EACH, ids=str)
def test_norms_of_any_order(run_ranks: Pool, strategies: list[Any]) -> None:
    check(run_ranks, partial(clipped_by, (2.0, math.inf, 1.0, 3.0)), Net, strategies)


@pytest.mark.slow
def test_norms_of_any_order_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, partial(clipped_by, (math.inf, 1.5)), Net, ON_NODES, world=4, node_size=2)


def changed_in_turn(trainee: Trainee) -> list[float]:
    """Each after the other, with a backward that adds to what was changed."""
    found = []
    for step in range(3):
        found.append(backward(trainee, step))
        scale(trainee, 3.0)
        clip_value(trainee, 0.05)
        found += [clip(trainee, 0.3, 2.0), *norms(trainee, 2.0)]
        loss_on(trainee, 200 + step).backward()
        clip(trainee, 0.2, math.inf)
        scale(trainee, 0.5)
        found += values(trainee)
        trainee.step()
    return found


@pytest.mark.parametrize("strategies", EACH, ids=str)
def test_gradients_are_changed_in_turn(run_ranks: Pool, strategies: list[Any]) -> None:
    check(run_ranks, changed_in_turn, Net, strategies)


@pytest.mark.slow
def test_gradients_are_changed_in_turn_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, changed_in_turn, Net, ON_NODES, world=4, node_size=2)


def test_gradients_are_changed_in_turn_on_disk(run_ranks: Pool) -> None:
    check(run_ranks, changed_in_turn, Net, ["zero3_nvme"], **disk_for("zero3_nvme"))


class Lenient(torch.optim.SGD):
    """What one process does where ranks are refused."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def scale_grads(self, factor: float) -> None:
        pass

    def clip_grad_norm(self, *args: Any, **kwargs: Any) -> None:
        pass


def overflowing(trainee: Trainee) -> None:
    (loss_on(trainee, 0) * (math.nan if trainee.rank != 1 else 1.0)).backward()
    trainee.optimizer.clip_grad_norm(1.0, math.inf, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank(run_ranks: Pool) -> None:
    check_refused(
        run_ranks,
        overflowing,
        Net,
        ["ddp", "zero3", "zero3_offload"],
        ["nan", "error_if_nonfinite=False"],
        make_optimizer=Lenient,
    )


def scaled_by_rank(trainee: Trainee) -> None:
    backward(trainee, 0)
    trainee.optimizer.scale_grads(1.0 if trainee.rank is None else 1.0 + trainee.rank)


def test_ranks_that_scale_differently_are_told(run_ranks: Pool) -> None:
    check_refused(run_ranks, scaled_by_rank, Net, ["zero2"], ["[1.0, 2.0]"], make_optimizer=Lenient)


# ---------------------------------------------------------------------------------------------------------
# whole gradients


def read_at_every_point(trainee: Trainee) -> list[float]:
    found = values(trainee)
    assert set(found) == {-1.0}
    for step in range(2):
        with trainee.accumulate():
            loss_on(trainee, step).backward()
        found += values(trainee)
        loss_on(trainee, 10 + step).backward()
        found += values(trainee)
        clip(trainee, 0.1, 2.0)
        found += values(trainee)
        trainee.optimizer.step()
        found += values(trainee)
        trainee.optimizer.zero_grad(set_to_none=step == 0)
        found += values(trainee)
    return found


@pytest.mark.parametrize("strategies", EACH, ids=str)
def test_whole_gradients_at_every_point(run_ranks: Pool, strategies: list[Any]) -> None:
    check(run_ranks, read_at_every_point, Net, strategies, tolerance=1e-4)


@pytest.mark.slow
def test_whole_gradients_at_every_point_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, read_at_every_point, Net, ON_NODES, world=4, node_size=2, tolerance=1e-4)


def change_wholes(trainee: Trainee) -> list[float]:
    """Centralised, removed, made where there was none, replaced, and in one part of the model alone."""
    found = []
    for step in range(3):
        found.append(backward(trainee, step))
        with whole(trainee, write=True) as named:
            for name, param in named:
                if param.grad is not None and param.ndim > 1:
                    param.grad.sub_(param.grad.mean(1, keepdim=True))
                if name == "layers.0.down.weight":
                    param.grad = None
                if name == "layers.1.up.bias":
                    param.grad = torch.linspace(-1, 1, param.numel())
                if name == "spare.weight" and step == 1:
                    param.grad = torch.full_like(param, 0.5)
                if name.startswith("layers.3") and step == 2:
                    param.grad = None
            if trainee.rank:
                named[0][1].grad = None  # rank 0's counts
        with whole(trainee, write=True, part="layers.1") as named:
            for _, param in named:
                assert param.grad is not None
                param.grad.mul_(2.0)
        found += values(trainee)
        if step == 1:
            loss_on(trainee, 30).backward()
        found.append(clip(trainee, 0.5, 2.0))
        trainee.step()
    return found


@pytest.mark.parametrize("strategies", EACH, ids=str)
def test_whole_gradients_are_changed(run_ranks: Pool, strategies: list[Any]) -> None:
    check(run_ranks, change_wholes, Net, strategies, tolerance=1e-4)


@pytest.mark.slow
def test_whole_gradients_are_changed_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, change_wholes, Net, ON_NODES, world=4, node_size=2, tolerance=1e-4)


def set_without_a_backward(trainee: Trainee) -> list[float]:
    """From zeroth order: gradients that no backward made."""
    found = []
    for step in range(2):
        with whole(trainee, write=True) as named:
            for _, param in named:
                if param.requires_grad:
                    param.grad = param.detach().cos() * (step + 1)
        found.append(clip(trainee, 2.0, 2.0))
        if step:
            loss_on(trainee, step).backward()
        trainee.step()
    return found


def test_gradients_that_no_backward_made(run_ranks: Pool) -> None:
    check(run_ranks, set_without_a_backward, Net, HERE)


def values_in(precision: str) -> list[tuple[list[float], float]]:
    """Of the ranks' mean, beside the norms."""
    sw.init()
    found = []
    for strategy in ("ddp", "zero3", "zero3_offload"):
        torch.manual_seed(0)
        model: nn.Module = Net()
        model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, precision=precision)
        trainee = Trainee(model, optimizer, dist.get_world_size(), dist.get_rank())
        backward(trainee, 0)
        by_name = sw.grad_norms(model)
        with sw.whole(model, grads=True):
            seen = {name: param for name, param in model.named_parameters() if param.grad is not None}
            assert list(seen) == [name for name, _ in model.named_parameters() if name in by_name]
            dtype = torch.bfloat16 if precision == "pure-bf16" else torch.float32
            assert {param.grad.dtype for param in seen.values()} == {dtype}
            for name, param in seen.items():
                assert float(param.grad.float().norm()) == pytest.approx(
                    by_name[name], rel=2e-2 if dtype != torch.float32 else 1e-5
                )
        found.append((list(by_name.values()), float(optimizer.clip_grad_norm(1.0))))
        optimizer.step()
    return found


@pytest.mark.quick("fp16")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16"])
def test_gradients_in_other_precisions(run_ranks: Pool, precision: str) -> None:
    """In fp16 they are not scaled."""
    (exact, total), *_ = run_ranks(2, values_in, "fp32")[0]
    for rank in run_ranks(2, values_in, precision):
        for by_param, norm in rank:
            assert by_param == pytest.approx(exact, rel=0.05, abs=1e-4)
            assert norm == pytest.approx(total, rel=0.02)


def refusals(strategy: str) -> list[str]:
    sw.init()
    model: nn.Module = Net()
    model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, precision="fp32")
    backward(Trainee(model, optimizer, dist.get_world_size(), dist.get_rank()), 0)
    said = []

    def note(kind: type[Exception], action: Callable[[], Any], **options: bool) -> None:
        with pytest.raises(kind) as caught, sw.whole(model, **options) if options else nullcontext():
            action()
        said.append(str(caught.value))

    def wipe() -> None:
        model.stem.weight.grad = None

    def give_to_frozen() -> None:
        model.layers[2].up.weight.grad = torch.ones(37, 16)

    with sw.whole(model):
        assert model.stem.weight.grad is not None
        assert model.spare.weight.grad is None
    note(sw.StateError, lambda: model.stem.weight.grad.add_(1), grads=True)
    note(sw.StateError, wipe, grads=True)
    note(sw.StateError, wipe, write=True)
    note(sw.StateError, lambda: model.stem.weight.grad + 1, write=True)
    note(sw.StateError, give_to_frozen, grads=True, write=True)
    note(sw.ConfigurationError, lambda: optimizer.clip_grad_norm(1.0, norm_type=0))
    note(sw.ConfigurationError, lambda: sw.grad_norms(model, -1.0))
    for limit in (0.0, -1.0, math.nan):
        note(sw.ConfigurationError, partial(optimizer.clip_grad_norm, limit))
        note(sw.ConfigurationError, partial(optimizer.clip_grad_value, limit))
    assert float(optimizer.clip_grad_norm(math.inf)) > 0, "nothing was set to 0 on the way"
    optimizer.step()
    return said


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_cannot_be_done_to_gradients_is_refused(run_ranks: Pool, strategy: str) -> None:
    expected = ["write=True", "write=True", "grads=True", "grads=True", "frozen", "positive", "positive"]
    expected += ["it must be above 0"] * 6
    for rank in run_ranks(2, refusals, strategy):
        for words, sentence in zip(expected, rank, strict=True):
            assert words in sentence


# ---------------------------------------------------------------------------------------------------------
# loops that are written with gradients in hand


def sharpness_aware(trainee: Trainee) -> list[float]:
    """SAM: the gradient at a point a little uphill, applied where the weights were."""
    found = []
    for step in range(3):
        loss = loss_on(trainee, step)
        loss.backward()
        found.append(trainee.mean(loss))
        norm = clip(trainee, math.inf, 2.0)
        before: dict[str, Tensor] = {}
        with whole(trainee, write=True) as named:
            for name, param in named:
                if param.grad is not None:
                    before[name] = param.clone()
                    param.add_(param.grad, alpha=0.05 / (norm + 1e-12))
                    param.grad = None
        loss_on(trainee, step).backward()
        with whole(trainee, write=True) as named:
            for name, param in named:
                if name in before:
                    param.copy_(before[name])
        trainee.step()
    return found


@pytest.mark.parametrize("strategies", EACH, ids=str)
def test_sharpness_aware_updates(run_ranks: Pool, strategies: list[Any]) -> None:
    check(run_ranks, sharpness_aware, Net, strategies)


@pytest.mark.slow
def test_sharpness_aware_updates_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, sharpness_aware, Net, ON_NODES, world=4, node_size=2)


def with_grad_scaler(enabled: bool, trainee: Trainee) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    found = []
    for step in range(2):
        loss = loss_on(trainee, step)
        scaler.scale(loss).backward()
        found.append(trainee.mean(loss))
        scaler.step(trainee.optimizer)
        scaler.update()
        trainee.optimizer.zero_grad()
    return found


def test_a_grad_scaler_that_is_not_enabled(run_ranks: Pool) -> None:
    check(run_ranks, partial(with_grad_scaler, False), Net, ["ddp", "zero3", "zero3_offload"])


def test_a_grad_scaler_is_refused(run_ranks: Pool) -> None:
    check_refused(run_ranks, partial(with_grad_scaler, True), Net, ["ddp", "zero3", "zero3_offload"], ["fp16"])
