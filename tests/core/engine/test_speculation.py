"""Updates that run ahead of the clipping factor change no bit, whatever a user does between backward and step.

A story is told twice under one strategy: without spare memory, and with it. In its fourth step something special
happens after the backward, when the host has computed the updates that it expects. Losses, norms, masters and moments
are compared in every bit, and so is what became of the updates.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.schedule import state_bytes
from shardwise.core.unit.state import FlatState
from tests.core.engine.test_offload import Make, Stack, Whole, is_same, loss_of
from tests.core.optim.test_optimizers import OPTIMIZERS
from tests.harness import Pool
from tests.support.strategies import disk_for
from tests.support.training import adamw

NO_LIMIT = 1e9
ENOUGH = 10_000_000
SPECIAL_STEP = 3
NUM_STEPS = 6
ONE_UNIT = {"units": ["Branches"]}
ON_HOST = ["zero2_offload", "zero3_offload", "ddp+optimizer=host:0.5", "zero3+optimizer=host"]
ON_DISK = ["zero2+optimizer=disk", "zero3+params=host+optimizer=disk", "zero3+optimizer=disk+grads=host"]
CASES_ON_DISK = [
    "nothing special", "clipped", "clipped twice", "another norm", "another rate", "weights are read",
    "weights are written", "gradients are written", "saved and loaded", "an older checkpoint is loaded",
    "an evaluation", "forgotten", "no step", "a second backward", "a backward that fails", "micro-batches are added",
    "infinite", "infinite and skipped", "fp16 that overflows", "bf16", "bf16, clipped", "pure bf16",
    "unused by one rank",
]  # fmt: skip

Act = Callable[[nn.Module, Any], Any]


class Case(NamedTuple):
    """`act` replaces clipping and step after a backward. `drops`: the updates that ran ahead are not used then; None
    if that depends on how far a backward came."""

    act: Act
    drops: bool | None = True
    options: dict[str, Any] = {}  # noqa: RUF012  never changed
    build: Callable[[], nn.Module] = Stack


def finish(model: nn.Module, optimizer: Any, clip: float = NO_LIMIT, norm_type: float = 2.0) -> Tensor:
    norm = optimizer.clip_grad_norm(clip, norm_type)
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


def saving(model: nn.Module, optimizer: Any) -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    sw.save(f"{folder[0]}/saved", model, optimizer)
    sw.load(f"{folder[0]}/saved", model, optimizer)
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


def freezing(model: nn.Module, optimizer: Any) -> None:
    next(iter(model.layers[1].parameters())).requires_grad_(False)


def backward(model: nn.Module, optimizer: Any) -> None:
    loss_of(model, 60).backward()
    await_host(model)


def changing_in_place(model: nn.Module, optimizer: Any) -> Any:
    finish(model, optimizer)
    group = optimizer.param_groups[0]
    group["betas"] = list(group["betas"])
    backward(model, optimizer)
    group["betas"][0] = 0.5
    return finish(model, optimizer)


def without_amsgrad(model: nn.Module, optimizer: Any) -> Any:
    """The largest second moments stay what they are, for the time when amsgrad is on again."""
    finish(model, optimizer)
    optimizer.param_groups[0]["amsgrad"] = False
    backward(model, optimizer)
    return finish(model, optimizer)


def scheduling(model: nn.Module, optimizer: Any) -> None:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 / (step + 1)).step()


def forgetting_clipped(model: nn.Module, optimizer: Any) -> Tensor:
    norm = optimizer.clip_grad_norm(NO_LIMIT)
    optimizer.zero_grad()
    optimizer.step()
    return norm


def loading_older(model: nn.Module, optimizer: Any) -> Any:
    """Weights, moments, step and rate are those of the checkpoint, and the gradients those of a later step."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    finish(model, optimizer)
    sw.save(f"{folder[0]}/saved", model, optimizer)
    backward(model, optimizer)
    finish(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    backward(model, optimizer)
    sw.load(f"{folder[0]}/saved", model, optimizer)
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return finish(model, optimizer)


def saving_behind(model: nn.Module, optimizer: Any) -> Any:
    """Steps go on while a background save reads the state."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    finish(model, optimizer)
    saving = sw.start_save(f"{folder[0]}/saved", model, optimizer)
    for _ in range(2):
        backward(model, optimizer)
        finish(model, optimizer)
    saving.finish()
    ahead = list(sw.full_state_dict(model).values())
    sw.load(f"{folder[0]}/saved", model, optimizer)
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return ahead, list(sw.full_state_dict(model).values())


def failing(model: nn.Module, optimizer: Any) -> Any:
    """An error ends a backward in which some units were updated ahead."""

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    finish(model, optimizer)
    handle = model.layers[0].up.register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model, 63).backward()
    handle.remove()
    await_host(model)
    optimizer.zero_grad()
    loss_of(model, 64).backward()
    await_host(model)
    return finish(model, optimizer)


def accumulating_more(model: nn.Module, optimizer: Any) -> Tensor:
    """Gradients that were final become sums again, and the step reduces them."""
    with sw.accumulate(model):
        loss_of(model, 65).backward()
    await_host(model)
    return finish(model, optimizer)


def freezing_for_a_step(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Unfrozen between a backward and its step."""
    param = next(iter(model.layers[1].parameters()))
    param.requires_grad_(False)
    norms = [finish(model, optimizer)]
    backward(model, optimizer)
    param.requires_grad_(True)
    return [*norms, finish(model, optimizer)]


def forgetting(model: nn.Module, optimizer: Any, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none)


def nothing(model: nn.Module, optimizer: Any) -> None:
    pass


def leaving_out(model: nn.Module, optimizer: Any, ranks: tuple[int, ...] = ()) -> Any:
    """A parameter that some ranks do not use; one rank alone may not use it at all."""
    finish(model, optimizer)
    model.inner.uses = [True, dist.get_rank() not in ranks, True]
    loss_of(model, 61).backward()
    await_host(model)
    norm = finish(model, optimizer)
    model.inner.uses = [True, True, True]
    return norm


def infinite(model: nn.Module, optimizer: Any) -> Any:
    finish(model, optimizer)
    (loss_of(model, 62) * float("inf")).backward()
    await_host(model)
    return finish(model, optimizer), optimizer.num_skipped_steps


CASES = {
    "nothing special": Case(finish, drops=False),
    "a norm without limit": Case(partial(finish, clip=float("inf")), drops=False),
    "clipped": Case(partial(finish, clip=1e-3)),
    "step without clipping": Case(step_alone, drops=False),
    "another norm": Case(
        lambda model, optimizer: (optimizer.clip_grad_norm(NO_LIMIT, 1.0), step_alone(model, optimizer))
    ),
    "the largest element": Case(
        lambda model, optimizer: (optimizer.clip_grad_norm(NO_LIMIT, float("inf")), step_alone(model, optimizer))
    ),
    "clipped by value": Case(after(lambda model, optimizer: optimizer.clip_grad_value(1e-4))),
    "clipped twice": Case(after(lambda model, optimizer: optimizer.clip_grad_norm(1e-3))),
    "asked for the norm twice": Case(after(lambda model, optimizer: optimizer.clip_grad_norm(NO_LIMIT))),
    "scaled": Case(after(lambda model, optimizer: optimizer.scale_grads(0.5))),
    "norms by parameter": Case(after(lambda model, optimizer: sorted(sw.grad_norms(model).values()))),
    "another rate": Case(with_group(lr=0.123)),
    "another decay": Case(with_group(weight_decay=0.5)),
    "other betas": Case(with_group(betas=(0.8, 0.9))),
    "a list that changes in place": Case(changing_in_place),
    "without amsgrad": Case(without_amsgrad, drops=None),
    "a scheduler": Case(after(scheduling)),
    "a closure": Case(closing),
    "a hook": Case(hooked),
    "state is read": Case(after(reading_state)),
    "state is written": Case(after(writing_state)),
    "state is replaced": Case(after(replacing_state)),
    "weights are read": Case(after(reading_weights)),
    "weights are written": Case(after(writing_weights)),
    "gradients are written": Case(after(writing_grads)),
    "saved and loaded": Case(after(saving)),
    "an evaluation": Case(after(evaluating), drops=False),
    "a parameter is frozen": Case(after(freezing), drops=False),  # its gradient is there already
    "forgotten": Case(forgetting),
    "zeros": Case(after(partial(forgetting, set_to_none=False))),
    "no step": Case(nothing),
    "forgotten after clipping": Case(forgetting_clipped),
    "an older checkpoint is loaded": Case(loading_older),
    "saved in the background": Case(saving_behind, drops=False),
    "a backward that fails": Case(failing, drops=None),
    "micro-batches are added": Case(accumulating_more),
    "frozen for a step": Case(freezing_for_a_step, drops=False),
    "a second backward": Case(after(backward)),
    "infinite": Case(infinite),
    "infinite and skipped": Case(infinite, options={"skip_nonfinite": True}),
    "fp16": Case(finish, drops=False, options={"precision": "fp16"}),
    "fp16 that overflows": Case(infinite, options={"precision": "fp16"}),
    "bf16": Case(finish, drops=False, options={"precision": "bf16"}),
    "bf16, clipped": Case(partial(finish, clip=1e-3), options={"precision": "bf16"}),
    "pure bf16": Case(finish, drops=False, options={"precision": "pure-bf16"}),
    "bf16 gradients": Case(finish, drops=False, options={"precision": "bf16", "reduce_dtype": "bf16"}),
    "unused by one rank": Case(partial(leaving_out, ranks=(1,)), drops=False, build=Whole, options=ONE_UNIT),
    "unused": Case(partial(leaving_out, ranks=(0, 1)), drops=False, build=Whole, options=ONE_UNIT),
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
            plain, none = told(case, strategy, make, 0)
            seen, ahead = told(case, strategy, make, ENOUGH)
            a, b = list(flatten(plain)), list(flatten(seen))
            is_equal = len(a) == len(b) and all(is_same(one, other) for one, other in zip(a, b, strict=True))
            expected = ahead.get("accepted", 0) > 0 and case.drops in (None, ahead.get("dropped", 0) > 0)
            if any(none.values()) or not is_equal or not expected:
                found.append(f"{name}, {strategy}: {is_equal=}, {none}, {ahead}")
    return found


@pytest.mark.quick("zero2_offload-1")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ON_HOST)
def test_no_bit_changes(run_ranks: Pool, strategy: str, world: int) -> None:
    for found in run_ranks(world, complaints, list(CASES), [strategy], adamw):
        assert "\n".join(found) == ""


@pytest.mark.quick("zero2+optimizer=disk")
@pytest.mark.parametrize("strategy", ON_DISK)
def test_no_bit_changes_on_disk(run_ranks: Pool, strategy: str) -> None:
    """With chunks that are shorter than a flat."""
    for found in run_ranks(2, in_chunks, CASES_ON_DISK, [strategy], adamw):
        assert "\n".join(found) == ""


def in_chunks(*args: Any) -> list[str]:
    before = state_bytes.CHUNK_ELEMS
    state_bytes.CHUNK_ELEMS = 300
    try:
        return complaints(*args)
    finally:
        state_bytes.CHUNK_ELEMS = before


@pytest.mark.quick("AdamW", "SGD*")
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "AdamW maximize", "Adam", "SGD momentum", "Adagrad", "NAdam"])
def test_any_optimizer(run_ranks: Pool, name: str) -> None:
    cases = ["nothing special", "clipped", "state is read", "another rate", "infinite"]
    for found in run_ranks(2, complaints, cases, ["zero2_offload", "zero3_offload"], OPTIMIZERS[name]):
        assert "\n".join(found) == ""
    for found in run_ranks(2, in_chunks, ["nothing special", "clipped"], ["zero2+optimizer=disk"], OPTIMIZERS[name]):
        assert "\n".join(found) == ""


def test_rows_that_an_update_does_not_know(run_ranks: Pool) -> None:
    for found in run_ranks(2, complaints, ["without amsgrad"], ["zero2_offload"], OPTIMIZERS["AdamW amsgrad"]):
        assert "\n".join(found) == ""


# ---------------------------------------------------------------------------------------------------------
# loops of another kind


def accumulating(speculation: int) -> tuple[list[Any], int]:
    """Only the last micro-batch has final gradients."""
    model, optimizer = shard(Stack(), speculation)
    values = []
    for step in range(4):
        for micro in range(3):
            with sw.accumulate(model) if micro < 2 else nullcontext():
                (loss_of(model, step, micro) / 3).backward()
            await_host(model)
        values.append(finish(model, optimizer))
    return [*values, *everything(model, optimizer)], engine_of(model).host_jobs.num_ahead["accepted"]


def two_optimizers(speculation: int) -> tuple[list[Any], int]:
    """One of them steps every other time, and only the other one clips what must be clipped."""
    model = Stack()
    given = [adamw(list(model.layers.parameters())), adamw([*model.stem.parameters(), *model.head.parameters()])]
    options = {"precision": "fp32", "speculation": speculation}
    model, (often, seldom) = sw.shard(model, given, "zero3_offload", **options)
    values = []
    for step in range(6):
        loss_of(model, step).backward()
        await_host(model)
        values.append(often.clip_grad_norm(1e-3 if step == 4 else NO_LIMIT))
        often.step()
        often.zero_grad()
        if step % 2:
            values.append(seldom.clip_grad_norm(NO_LIMIT))
            seldom.step()
            seldom.zero_grad()
    values += [*everything(model, often), *everything(model, seldom)]
    return values, engine_of(model).host_jobs.num_ahead["accepted"]


def adding_a_group(speculation: int) -> tuple[list[Any], int]:
    model = Stack()
    optimizer = adamw([param for name, param in model.named_parameters() if not name.startswith("layers.2.up")])
    model, optimizer = sw.shard(model, optimizer, "zero2_offload", precision="fp32", speculation=speculation)
    values = []
    for step in range(5):
        loss_of(model, step).backward()
        await_host(model)
        if step == 3:
            optimizer.add_param_group({"params": list(model.layers[2].up.parameters()), "lr": 0.03})
        values.append(finish(model, optimizer))
    return [*values, *everything(model, optimizer)], engine_of(model).host_jobs.num_ahead["accepted"]


def closing_at_once(speculation: int) -> tuple[list[Any], int]:
    """A step with a closure begins while the host is about to use the results of the last one."""
    model, optimizer = shard(Stack(), speculation)
    for step in range(3):
        loss_of(model, step).backward()
        await_host(model)
        finish(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        swap = FlatState.swap
        patch.setattr(FlatState, "swap", lambda state, spare: (swap(state, spare), time.sleep(0.1)))
        loss_of(model, 3).backward()
        await_host(model)
        finish(model, optimizer)
        loss = closing(model, optimizer)
    return [loss, *everything(model, optimizer)], engine_of(model).host_jobs.num_ahead["accepted"]


def shard(model: nn.Module, speculation: int, strategy: str = "zero2_offload", **options: Any) -> tuple[nn.Module, Any]:
    given = adamw(list(model.parameters()))
    return sw.shard(model, given, strategy, **{"precision": "fp32", "speculation": speculation, **options})


def loops_that_differ(loop: Callable[[int], tuple[list[Any], int]]) -> str:
    """Runs on every rank."""
    sw.init()
    told = []
    for speculation in (0, ENOUGH):
        torch.manual_seed(0)
        told.append(loop(speculation))
    (plain, none), (seen, accepted) = told
    a, b = list(flatten(plain)), list(flatten(seen))
    is_equal = len(a) == len(b) and all(is_same(one, other) for one, other in zip(a, b, strict=True))
    return "" if is_equal and not none and accepted else f"{is_equal=}, {none=}, {accepted=}"


@pytest.mark.parametrize("loop", [accumulating, two_optimizers, adding_a_group, closing_at_once])
def test_loops(run_ranks: Pool, loop: Callable[[int], tuple[list[Any], int]]) -> None:
    assert run_ranks(2, loops_that_differ, loop) == ["", ""]


def at_random(speculation: int, seed: int = 0, strategy: str = "") -> tuple[list[Any], int]:
    """Nothing waits for the host here: it has computed ahead what it happens to have, on each rank something else."""
    model, optimizer = shard(Stack(), speculation, strategy, **disk_for(strategy))
    draws, pauses, values = random.Random(seed), random.Random(dist.get_rank()), list[Any]()
    for step in range(100):
        loss = loss_of(model, step)
        loss.backward()
        values.append(loss.detach())
        time.sleep(pauses.choice([0, 0, 0.001, 0.004]))
        what = draws.random()
        if what < 0.06:
            optimizer.zero_grad()
            continue
        if what < 0.12:
            optimizer.param_groups[0]["lr"] *= 0.99
        if what < 0.95:
            values.append(optimizer.clip_grad_norm(1e-2 if draws.random() < 0.15 else NO_LIMIT))
        optimizer.step()
        if draws.random() < 0.05:
            values += everything(model, optimizer)
        optimizer.zero_grad()
    return [*values, *everything(model, optimizer)], engine_of(model).host_jobs.num_ahead["accepted"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("strategy", ["zero2_offload", "zero3_offload", "zero3+params=host+optimizer=disk"])
def test_loops_at_random(run_ranks: Pool, strategy: str, seed: int) -> None:
    assert run_ranks(2, loops_that_differ, partial(at_random, seed=seed, strategy=strategy)) == ["", ""]


# ---------------------------------------------------------------------------------------------------------
# when it runs ahead, and in how much memory


def counts(clips: list[float | None]) -> list[int]:
    """Runs on every rank. The number of flats that ran ahead in each step, whether or not they were used."""
    sw.init()
    torch.manual_seed(0)
    model, optimizer = shard(Stack(), ENOUGH)
    jobs, found = engine_of(model).host_jobs, []
    for step, clip in enumerate(clips):
        before = jobs.num_ahead.total()
        loss_of(model, step).backward()
        await_host(model)
        if clip is not None:
            optimizer.clip_grad_norm(clip)
        optimizer.step()
        optimizer.zero_grad()
        await_host(model)
        found.append(jobs.num_ahead.total() - before)
    return found


def test_it_runs_ahead_only_where_that_pays(run_ranks: Pool) -> None:
    often, never = 1e-3, NO_LIMIT
    clips = [None, None, never, never, *[often] * 4, *[never] * 8, None, never]
    for found in run_ranks(2, counts, clips):
        ahead = [number > 0 for number in found]
        assert ahead[:3] == [False] * 3  # nothing was clipped before
        assert ahead[3:6] == [True] * 3
        assert ahead[7:10] == [False] * 3  # 3, 4, 4 of 5, 6, 7 steps were clipped
        assert ahead[13:16] == [True] * 3  # at most half of the last eight
        assert ahead[16:] == [True, False]  # the step before did not clip


def in_little_memory(num_bytes: int) -> tuple[list[int], int]:
    sw.init()
    torch.manual_seed(0)
    model, optimizer = shard(Stack(), num_bytes)
    host = engine_of(model).host
    seen = sw.memory(model, optimizer)
    assert seen.host <= seen.planned_host == host.size.host
    used = []
    for step in range(4):
        before = engine_of(model).host_jobs.num_ahead["accepted"]
        loss_of(model, step).backward()
        await_host(model)
        finish(model, optimizer)
        await_host(model)
        used.append(engine_of(model).host_jobs.num_ahead["accepted"] - before)
    assert sw.memory(model, optimizer).host == seen.host
    return used, host.spare_bytes


def test_memory_is_bounded(run_ranks: Pool) -> None:
    """Flats share the spare memory: what one leaves, another takes."""
    (_, all_bytes), *_ = run_ranks(1, in_little_memory, ENOUGH)
    ((used, num_bytes),) = run_ranks(1, in_little_memory, all_bytes // 2)
    assert 0 < num_bytes <= all_bytes // 2
    assert used[0] == 0
    assert used[1] == used[2] == used[3] > 0


def held_across_steps() -> None:
    """Tensors from the optimizer's state show new values after steps, and so do parts of weights."""
    sw.init()
    torch.manual_seed(0)
    model, optimizer = shard(Stack(), ENOUGH, "zero3_offload")
    param = model.layers[1].up.weight
    moment: Tensor | None = None
    for step in range(5):
        loss_of(model, step).backward()
        await_host(model)
        finish(model, optimizer)
        await_host(model)
        if step == 1:
            moment = optimizer.state[param]["exp_avg"]
    assert moment is not None
    assert engine_of(model).host_jobs.num_ahead["accepted"]
    assert optimizer.state[param]["exp_avg"] is moment
    view = moment.detach().view(-1)
    part = param.data
    before = part.clone()
    for step in range(5, 8):
        loss_of(model, step).backward()
        await_host(model)
        finish(model, optimizer)
    assert not bool((part - before).as_subclass(Tensor).eq(0).all())
    assert torch.equal(part.as_subclass(Tensor), param.data.as_subclass(Tensor))
    assert torch.equal(view, optimizer.state[param]["exp_avg"].view(-1))


def test_tensors_in_the_users_hands_follow(run_ranks: Pool) -> None:
    run_ranks(1, held_across_steps)


def refusal(strategy: str, options: dict[str, Any]) -> str:
    sw.init()
    model = Stack()
    optimizer = adamw(list(model.parameters()))
    with pytest.raises(sw.ConfigurationError) as raised:
        sw.shard(model, optimizer, strategy, precision="fp32", **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("zero2_offload", {"speculation": 10**15}, ["1,000,000,000,000,000", "give less"]),
        (
            "zero2_offload+optimizer=disk",
            {"speculation": 10**17, "disk_path": "/tmp"},
            ["disk have", "less"],
        ),
        ("zero2_offload", {"speculation": 100}, ["100", "give more"]),
        ("zero2_offload", {"speculation": -1}, ["-1"]),
        ("zero2_offload", {"speculation": "much"}, ["much"]),
        ("zero2_offload", {"speculation": True}, ["True"]),
        ("zero2_offload", {"speculation": "1GB", "early_update": True}, ["1GB", "early_update"]),
        ("zero2", {"speculation": "1GB"}, ["1,000,000,000", "off the device", "set it to 'auto'"]),
        ("zero3_nvme", {"speculation": "1GB", "disk_path": "/tmp"}, ["1,000,000,000", "updated ahead"]),
    ],
)
def test_refused_on_every_rank(run_ranks: Pool, strategy: str, options: dict[str, Any], words: list[str]) -> None:
    for message in run_ranks(2, refusal, strategy, options):
        assert all(word in message for word in words)
