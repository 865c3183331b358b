"""Updates that run ahead of the clipping factor change no bit, whatever a user does between backward and step.

A story is told twice under one strategy: without spare memory, and with it. In its fourth step something special
happens after the backward, when the host has computed the updates that it expects. Losses, norms, masters and moments
are compared in every bit, and so is what became of the updates.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.updates import NUM_RECENT
from tests.core.engine.test_offload import Branches, Make, Stack, is_same, loss_of
from tests.core.optim.test_optimizers import OPTIMIZERS
from tests.harness import Pool
from tests.support.strategies import disk_for
from tests.support.training import adamw

NO_LIMIT = 1e9
ENOUGH = 10_000_000
SPECIAL_STEP = 3
NUM_STEPS = 6
ON_HOST = ["zero2_offload", "zero3_offload", "ddp+optimizer=host:0.5", "zero3+optimizer=host"]
ON_DISK = ["zero3_nvme", "zero3+params=disk+optimizer=host"]

Act = Callable[[nn.Module, Any], Any]


class Case(NamedTuple):
    """`act` replaces clipping and step after a backward. `drops`: the updates that ran ahead are not used then."""

    act: Act
    drops: bool = True
    options: dict[str, Any] = {}  # noqa: RUF012  never changed
    build: Callable[[], nn.Module] = Stack
    may_use_disk: bool = True


def finish(model: nn.Module, optimizer: Any, clip: float = NO_LIMIT) -> Tensor:
    norm = optimizer.clip_grad_norm(clip)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def await_host(model: nn.Module) -> None:
    """Wait until the host has nothing left that it can do."""
    jobs = engine_of(model).host_jobs
    while jobs._has_thread:
        time.sleep(0.001)


def after(change: Callable[[nn.Module, Any], Any]) -> Act:
    """Change something, then clip and step."""

    def act(model: nn.Module, optimizer: Any) -> Any:
        values = change(model, optimizer)
        return finish(model, optimizer), values

    return act


def with_group(**changes: Any) -> Act:
    return after(lambda model, optimizer: optimizer.param_groups[0].update(changes))


def step_alone(model: nn.Module, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def closing(model: nn.Module, optimizer: Any) -> Any:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, 77)
        loss.backward()
        await_host(model)
        optimizer.clip_grad_norm(NO_LIMIT)
        return loss.detach()

    loss = optimizer.step(closure)
    optimizer.zero_grad()
    return loss


def hooked(model: nn.Module, optimizer: Any) -> Any:
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    norm = finish(model, optimizer)
    handle.remove()
    return norm


def reading_state(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [
        value.clone()
        for param in model.parameters()
        if param in optimizer.state
        for value in optimizer.state[param].values()
        if type(value) is Tensor
    ]


def writing_state(model: nn.Module, optimizer: Any) -> None:
    """Through tensors from before, not through `optimizer.state`."""
    for stored in list(optimizer.inner.state.values()):
        for value in stored.values():
            if type(value) is Tensor and value.numel() > 1:
                value.mul_(0.5)


def replacing_state(model: nn.Module, optimizer: Any) -> None:
    for param in [param for param in model.parameters() if param in optimizer.state]:
        stored = dict(optimizer.state[param])
        optimizer.state[param] = {key: value * 2 if type(value) is Tensor else value for key, value in stored.items()}


def writing_weights(model: nn.Module, optimizer: Any) -> None:
    with sw.whole(model, write=True):
        for param in model.parameters():
            param.data.mul_(0.9)


def writing_grads(model: nn.Module, optimizer: Any) -> None:
    with sw.whole(model, grads=True, write=True):
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.25)


def reading_weights(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return list(sw.full_state_dict(model).values())


def evaluating(model: nn.Module, optimizer: Any) -> Tensor:
    with torch.no_grad():
        return loss_of(model, 50)


def saving(model: nn.Module, optimizer: Any, folder: str = "") -> None:
    sw.save(folder, model, optimizer)
    sw.load(folder, model, optimizer)


def freezing(model: nn.Module, optimizer: Any) -> None:
    next(iter(model.layers[1].parameters())).requires_grad_(False)


def backward(model: nn.Module, optimizer: Any) -> None:
    loss_of(model, 60).backward()
    await_host(model)


def forgetting(model: nn.Module, optimizer: Any, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none)


def nothing(model: nn.Module, optimizer: Any) -> None:
    pass


def leaving_out(model: nn.Module, optimizer: Any, ranks: tuple[int, ...] = ()) -> Any:
    """A parameter that some ranks do not use; one rank alone may not use it at all."""
    optimizer.zero_grad()
    model.uses = [True, dist.get_rank() not in ranks, True]
    loss_of(model, 61).backward()
    await_host(model)
    norm = finish(model, optimizer)
    model.uses = [True, True, True]
    return norm


def infinite(model: nn.Module, optimizer: Any) -> Any:
    optimizer.zero_grad()
    (loss_of(model, 62) * float("inf")).backward()
    await_host(model)
    return finish(model, optimizer), optimizer.num_skipped_steps


CASES = {
    "nothing special": Case(finish, drops=False),
    "a norm without limit": Case(partial(finish, clip=float("inf")), drops=False),
    "clipped": Case(partial(finish, clip=1e-3)),
    "step without clipping": Case(step_alone, drops=False),
    "another norm": Case(lambda model, optimizer: (optimizer.clip_grad_norm(NO_LIMIT, 1.0), step_alone(model, optimizer))),
    "the largest element": Case(
        lambda model, optimizer: (optimizer.clip_grad_norm(NO_LIMIT, float("inf")), step_alone(model, optimizer))
    ),
    "clipped by value": Case(after(lambda model, optimizer: optimizer.clip_grad_value(1e-4))),
    "clipped twice": Case(after(lambda model, optimizer: optimizer.clip_grad_norm(1e-3))),
    "scaled": Case(after(lambda model, optimizer: optimizer.scale_grads(0.5))),
    "norms by parameter": Case(after(lambda model, optimizer: sorted(sw.grad_norms(model).values()))),
    "another rate": Case(with_group(lr=0.123)),
    "another decay": Case(with_group(weight_decay=0.5)),
    "other betas": Case(with_group(betas=(0.8, 0.9))),
    "a closure": Case(closing, may_use_disk=False),
    "a hook": Case(hooked, may_use_disk=False),
    "state is read": Case(after(reading_state), may_use_disk=False),
    "state is written": Case(after(writing_state), may_use_disk=False),
    "state is replaced": Case(after(replacing_state), may_use_disk=False),
    "weights are read": Case(after(reading_weights)),
    "weights are written": Case(after(writing_weights)),
    "gradients are written": Case(after(writing_grads)),
    "an evaluation": Case(after(evaluating), drops=False),
    "a parameter is frozen": Case(after(freezing), drops=False),  # its gradient is there already
    "forgotten": Case(forgetting),
    "zeros": Case(after(partial(forgetting, set_to_none=False))),
    "no step": Case(nothing),
    "a second backward": Case(after(backward)),
    "infinite": Case(infinite),
    "infinite and skipped": Case(infinite, options={"skip_nonfinite": True}),
    "fp16": Case(finish, drops=False, options={"precision": "fp16"}),
    "fp16 that overflows": Case(infinite, options={"precision": "fp16"}),
    "bf16": Case(finish, drops=False, options={"precision": "bf16"}),
    "bf16, clipped": Case(partial(finish, clip=1e-3), options={"precision": "bf16"}),
    "pure bf16": Case(finish, drops=False, options={"precision": "pure-bf16"}),
    "bf16 gradients": Case(finish, drops=False, options={"precision": "bf16", "reduce_dtype": "bf16"}),
    "unused by one rank": Case(partial(leaving_out, ranks=(1,)), build=Branches),
    "unused": Case(partial(leaving_out, ranks=(0, 1)), build=Branches),
}


def everything(model: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """Masters and the whole state of the optimizer."""
    for unit in engine_of(model).units:
        for state in unit.trainable_states:
            engine_of(model).await_host_of(state)
            yield state.read_master().clone()
            for resting in state.resting_params:
                for key in sorted(optimizer.inner.state.get(resting, {})):
                    value = optimizer.stored_state(resting, key)
                    yield value.clone() if isinstance(value, Tensor) else torch.tensor(float(value or 0))


def told(case: Case, strategy: str, make: Make, speculation: int) -> tuple[list[Any], dict[str, int]]:
    torch.manual_seed(0)
    model = case.build()
    options = {"precision": "fp32", **disk_for(strategy), **case.options, "speculation": speculation}
    model, optimizer = sw.shard(model, make(list(model.parameters())), strategy, **options)
    values: list[Any] = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        loss.backward()
        await_host(model)
        values += [loss.detach(), (case.act if step == SPECIAL_STEP else finish)(model, optimizer)]
    values += everything(model, optimizer)
    return values, dict(engine_of(model).host_jobs.num_ahead)


def flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from flatten(each)
    elif value is not None:
        yield value


def complaints(names: list[str], strategies: list[str], make: Make) -> list[str]:
    """Runs on every rank."""
    sw.init()
    found = []
    for name in names:
        for strategy in strategies:
            case = CASES[name]
            if "disk" in f"{strategy}{disk_for(strategy)}" and not case.may_use_disk:
                continue
            plain, none = told(case, strategy, make, 0)
            seen, ahead = told(case, strategy, make, ENOUGH)
            a, b = list(flatten(plain)), list(flatten(seen))
            is_equal = len(a) == len(b) and all(is_same(one, other) for one, other in zip(a, b, strict=True))
            expected = ahead.get("accepted", 0) > 0 and (ahead.get("dropped", 0) > 0) == case.drops
            if any(none.values()) or not is_equal or not expected:
                found.append(f"{name}, {strategy}: {is_equal=}, {none}, {ahead}")
    return found


@pytest.mark.parametrize("strategy", ON_HOST)
@pytest.mark.parametrize("world", [1, 2])
def test_no_bit_changes(run_ranks: Pool, world: int, strategy: str) -> None:
    for found in run_ranks(world, complaints, list(CASES), [strategy], adamw):
        assert "\n".join(found) == ""
