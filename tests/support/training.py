"""One training recipe, twice: sharded over ranks with shardwise, and by hand in one process.

AdamW with two groups chosen by `ndim`, clipped to a global norm. What the one process does is written out step by
step below, without shardwise, because it is what every promise is measured against.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.layout import Strategy
from tests.support.models import MODELS, tokens
from tests.support.strategies import disk_for

NUM_STEPS = 12
CLIP = 1.0
LR = 5e-3


@dataclass(frozen=True)
class Outcome:
    """What came of a run: mean loss and gradient norm of every step, and the final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    num_skipped: int = 0
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Poke:
    """At this step the loss of one slice is multiplied by so much that its fp16 gradient overflows."""

    step: int
    slice: int

    def __call__(self, loss: Tensor, step: int, index: int) -> Tensor:
        return loss * 1e30 if (step, index) == (self.step, self.slice) else loss


def adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Decay for matrices only. The large epsilon keeps gradients that are nothing but rounding noise (a key's
    bias, which softmax does not feel) from becoming steps of full size, different in every order of summation."""
    return torch.optim.AdamW(
        [
            {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=LR,
        eps=1e-4,
    )


# ---------------------------------------------------------------------------------------------------------
# sharded


def train_sharded(
    model_name: str,
    strategy: Strategy,
    *,
    num_micro: int = 1,
    accumulate: Literal["all but the last", "all", "none"] = "all but the last",
    num_steps: int = NUM_STEPS,
    num_steps_alone: int = 0,
    clip: float | None = CLIP,
    poke: Poke | None = None,
    **options: Any,
) -> Outcome:
    """Runs on every rank, each on its slice of the batch. `options` are those of `sw.shard`.

    `accumulate` says which micro-batches run under `sw.accumulate`: as they should, or as a user may have forgotten.
    For `num_steps_alone` steps every rank trains the whole batch by itself; the model is sharded then.
    """
    sw.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    spec = MODELS[model_name]
    model = spec.fresh()
    optimizer = adamw(list(model.parameters()))
    losses, norms = [], []
    for step in range(num_steps_alone):
        loss = spec.loss(model, tokens(step))
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = sw.shard(model, optimizer, strategy, **disk_for(strategy), **options)
    for step in range(num_steps_alone, num_steps):
        total = torch.zeros(())
        for micro in range(num_micro):
            batch = tokens(step, rank * num_micro + micro, world * num_micro)
            waits = accumulate == "all" or (accumulate != "none" and micro < num_micro - 1)
            with sw.accumulate(model) if waits else nullcontext():
                loss = spec.loss(model, batch)
                total += loss.detach() / num_micro
                if poke is not None:
                    loss = poke(loss, step, rank * num_micro + micro)
                (loss / num_micro).backward()
        dist.all_reduce(total)
        losses.append(float(total / world))
        if clip is not None:
            norms.append(float(optimizer.clip_grad_norm(clip)))
        optimizer.step()
        optimizer.zero_grad()
    weights = sw.full_state_dict(model)
    return Outcome(losses, norms, weights, optimizer.num_skipped_steps, optimizer.loss_scale)


# ---------------------------------------------------------------------------------------------------------
# one process


@dataclass(frozen=True)
class Formats:
    """Compute, master and gradient dtypes, spelled out here so that a wrong table in the source is noticed."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    scaled: bool = False


FORMATS = {
    "fp32": Formats(torch.float32, torch.float32, torch.float32),
    "bf16": Formats(torch.bfloat16, torch.float32, torch.float32),
    "bf16, reduced in bf16": Formats(torch.bfloat16, torch.float32, torch.bfloat16),
    "fp16": Formats(torch.float16, torch.float32, torch.float32, scaled=True),
    "pure-bf16": Formats(torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


def train_alone(
    model_name: str,
    *,
    formats: Formats = FORMATS["fp32"],
    num_slices: int = 1,
    num_micro: int = 1,
    num_steps: int = NUM_STEPS,
    clip: float | None = CLIP,
    poke: Poke | None = None,
) -> Outcome:
    """The same training in one process without shardwise.

    With one slice the whole batch goes through at once. With more, the batch is cut as `num_slices` ranks would cut
    it and gradients are added in their order: then not even rounding differs from a world of that size.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks
    try:
        return _train_alone(model_name, formats, num_slices, num_micro, num_steps, clip, poke)
    finally:
        torch.set_num_threads(num_threads)


def _train_alone(
    model_name: str,
    formats: Formats,
    num_slices: int,
    num_micro: int,
    num_steps: int,
    clip: float | None,
    poke: Poke | None,
) -> Outcome:
    spec = MODELS[model_name]
    model = spec.fresh()
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().to(formats.master, copy=True)) for param in params]
    optimizer = adamw(masters)
    for param in params:
        param.data = param.data.to(formats.compute)
    scale, num_skipped = (2.0**16 if formats.scaled else 1.0), 0
    losses, norms = [], []
    for step in range(num_steps):
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        sums: list[Tensor] | None = None
        total = torch.zeros(())
        for index in range(num_slices):
            slice_loss = torch.zeros(())
            slice_sums: list[Tensor] | None = None
            for micro in range(num_micro):
                position = index * num_micro + micro
                loss = spec.loss(model, tokens(step, position, num_slices * num_micro))
                slice_loss += loss.detach() / num_micro
                if poke is not None:
                    loss = poke(loss, step, position)
                slice_sums = _add(slice_sums, _grads(loss / num_micro * scale, params, formats.reduce))
            total += slice_loss
            assert slice_sums is not None
            sums = _add(sums, slice_sums)
        losses.append(float(total / num_slices))
        assert sums is not None
        grads = [grad.mul(1.0 / num_slices).mul(1.0 / scale) for grad in sums]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().float()
        if clip is not None:
            norms.append(float(norm))
            factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
            grads = [grad.mul(factor) for grad in grads]
        if torch.isfinite(norm):
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.to(formats.master)
            optimizer.step()
        elif formats.scaled:
            num_skipped += 1
            scale *= 0.5
    # What a state dict holds are the masters, in the dtype the weights were given in.
    for param, master in zip(params, masters, strict=True):
        param.data = master.detach().float()
    return Outcome(losses, norms, dict(model.state_dict()), num_skipped, scale)


def _grads(loss: Tensor, params: list[nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
    """Gradients in the dtype in which they are summed; what got none counts as zero."""
    for param in params:
        param.grad = None
    loss.backward()
    return [torch.zeros_like(param, dtype=dtype) if param.grad is None else param.grad.to(dtype) for param in params]


def _add(sums: list[Tensor] | None, grads: list[Tensor]) -> list[Tensor]:
    return grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]


# ---------------------------------------------------------------------------------------------------------
# comparing


def relative(seen: float, expected: float) -> float:
    return abs(seen - expected) / abs(expected)


def weight_error(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor, as norms: |seen - expected| / |expected|."""
    assert list(seen) == list(expected)
    errors = [0.0]
    for name, value in expected.items():
        assert (seen[name].shape, seen[name].dtype) == (value.shape, value.dtype), name
        scale = float(value.double().norm())
        errors.append(float((seen[name].double() - value.double()).norm()) / (scale or 1.0))
    return max(errors)


def assert_close(seen: Outcome, expected: Outcome, tolerance: float) -> None:
    """Losses, norms and weights, each relative."""
    assert len(seen.losses) == len(expected.losses)
    assert len(seen.norms) == len(expected.norms)
    errors = {
        "losses": max(map(relative, seen.losses, expected.losses)),
        "norms": max(map(relative, seen.norms, expected.norms), default=0.0),
        "weights": weight_error(seen.weights, expected.weights),
    }
    wrong = {what: error for what, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative error beyond {tolerance}: {wrong}; all: {errors}"


def assert_same(seen: Outcome, expected: Outcome) -> None:
    """Bit for bit. A NaN (a norm that overflowed) is itself."""
    torch.testing.assert_close(
        torch.tensor(seen.losses, dtype=torch.float64),
        torch.tensor(expected.losses, dtype=torch.float64),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    torch.testing.assert_close(
        torch.tensor(seen.norms, dtype=torch.float64),
        torch.tensor(expected.norms, dtype=torch.float64),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    assert list(seen.weights) == list(expected.weights)
    different = [name for name, value in expected.weights.items() if not torch.equal(seen.weights[name], value)]
    assert not different, f"weights differ: {different}"
    assert (seen.num_skipped, seen.loss_scale) == (expected.num_skipped, expected.loss_scale)
