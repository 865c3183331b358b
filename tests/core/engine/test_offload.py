"""What rests on the host or on disk trains as what rests on the device does: bit for bit, whatever a user does.

A story is told on two ranks under a layout with everything on the device, and again with parts of it elsewhere. What it
returns and the weights in the end may not differ in a bit. Beside stories there is what is refused, and what happens
when an update on the host fails.
"""

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.layout import layout_of
from shardwise.core.optim import host_updates
from shardwise.core.optim.groups import shard_groups
from shardwise.core.schedule import state_bytes
from tests.core.optim.test_optimizers import OPTIMIZERS
from tests.harness import Pool, num_open_files
from tests.support.strategies import disk_for
from tests.support.trainee import Block, features
from tests.support.training import adamw, weight_error

# On the device, and with parts elsewhere.
ZERO2 = ["zero2_offload", "zero2+optimizer=host", "zero2+optimizer=disk"]
ZERO3 = ["zero3_offload", "zero3+optimizer=host", "zero3+params=disk+optimizer=host:0.5", "zero3_nvme"]
DDP = ["ddp+optimizer=host:0.5", "ddp+grads=host+optimizer=host"]
MOVED = ["ddp+optimizer=host:0.5", "zero2_offload", "zero3+optimizer=host", "zero3_nvme"]
ON_HOST = ["ddp+optimizer=host:0.5", "zero2+optimizer=host", "zero3_offload"]

Story = Callable[[nn.Module, Any], Sequence[Any] | None]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Stack(nn.Module):
    """Four blocks, and the root's own: two layers at the ends, whose weights may be one."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 16)
        if tied:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LowRank(nn.Module):
    """A frozen layer with a small one beside it that is trained."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, frozen.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.a.t() @ self.b.t()


def lora() -> nn.Module:
    model = Stack()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = LowRank(layer.up), LowRank(layer.down)
    return model


class Branches(nn.Module):
    """In every block, between two layers that are always used, one that is left out where `uses` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3)) for _ in range(3))
        self.uses = [True, True, True]

    def forward(self, x: Tensor) -> Tensor:
        for layers, uses in zip(self.layers, self.uses, strict=True):
            x = layers[0](x).tanh()
            x = layers[1](x).tanh() if uses else x
            x = layers[2](x).tanh()
        return x


class Whole(nn.Module):
    """As `Branches`, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# ---------------------------------------------------------------------------------------------------------
# telling stories


def told(
    story: Story, strategy: str, build: Callable[[], nn.Module], make: Make, options: dict[str, Any]
) -> tuple[list[Any], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build()
    given = make([param for param in model.parameters() if param.requires_grad])
    options = {"precision": "fp32", **disk_for(strategy), **options}
    model, optimizer = sw.shard(model, given, strategy, **options)
    values = list(story(model, optimizer) or [])
    optimizer.zero_grad()
    return values, sw.full_state_dict(model)


def differences(
    story: Story, strategies: Sequence[str], build: Callable[[], nn.Module], make: Make, options: dict[str, Any]
) -> list[str]:
    """Runs on every rank: what each strategy tells otherwise than with everything on the device."""
    sw.init()
    found, on_device = [], dict[str, Any]()
    for strategy in strategies:
        base = layout_of(strategy).on_device.name
        if base not in on_device:
            on_device[base] = told(story, base, build, make, options)
        values, weights = on_device[base]
        seen, seen_weights = told(story, strategy, build, make, options)
        assert len(values) == len(seen)
        found += [f"{strategy}: {a}, not {b}" for a, b in zip(seen, values, strict=True) if not is_same(a, b)]
        found += [f"{strategy}: {name}" for name in weights if not is_same(seen_weights[name], weights[name])]
    return found


def is_same(one: Any, other: Any) -> bool:
    """In every bit; a NaN is itself."""
    a, b = (torch.as_tensor(value) for value in (one, other))
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def assert_same(
    pool: Pool,
    story: Story,
    strategies: Sequence[str],
    build: Callable[[], nn.Module] = Stack,
    make: Make = adamw,
    world: int = 2,
    **options: Any,
) -> None:
    for found in pool(world, differences, story, strategies, build, make, options):
        assert found == []


def loss_of(model: nn.Module, step: int, micro: int = 0) -> Tensor:
    return model(features(step, 10 * micro + dist.get_rank())).float().square().mean()


def steps(model: nn.Module, optimizer: Any, num: int = 3, first: int = 0, clip: float | None = None) -> list[float]:
    losses = []
    for step in range(first, first + num):
        loss = loss_of(model, step)
        losses.append(loss.detach())
        loss.backward()
        if clip is not None:
            losses.append(optimizer.clip_grad_norm(clip))
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ---------------------------------------------------------------------------------------------------------
# accumulation and clipping


def accumulated(model: nn.Module, optimizer: Any, which: str = "all but the last") -> list[Any]:
    values = []
    for step in range(3):
        for micro in range(3):
            waits = which == "all" or (which == "all but the last" and micro < 2)
            with sw.accumulate(model) if waits else nullcontext():
                (loss_of(model, step, micro) / 3).backward()
        values.append(optimizer.clip_grad_norm(0.2))
        optimizer.step()
        optimizer.zero_grad()
    return values


@pytest.mark.quick("all but the last")
@pytest.mark.parametrize("which", ["all but the last", "all", "none"])
def test_accumulation(run_ranks: Pool, which: str) -> None:
    strategies = [*DDP, "zero1+grads=host+optimizer=host", *ZERO2, *ZERO3]
    assert_same(run_ranks, partial(accumulated, which=which), strategies)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["all but the last", "all", "none"])
def test_accumulation_on_nodes(run_ranks: Pool, which: str) -> None:
    moved = "+params=host+grads=host+optimizer=host"
    strategies = [f"{name}{moved}" for name in ("hsdp", "hfsdp", "hpz")] + ["hfsdp+params=disk+optimizer=disk"]
    assert_same(run_ranks, partial(accumulated, which=which), strategies, world=4, node_size=2)


def clipped_in_turns(model: nn.Module, optimizer: Any) -> list[Any]:
    """Once, twice, not at all, as far as infinity, to nearly nothing."""
    values = []
    for step, norms in enumerate([(0.3,), (0.5, 0.1), (), (float("inf"),), (0.2, float("inf")), (1e-9,)]):
        loss_of(model, step).backward()
        values += [optimizer.clip_grad_norm(norm) for norm in norms]
        optimizer.step()
        optimizer.zero_grad()
    return values


def test_clipping(run_ranks: Pool) -> None:
    assert_same(run_ranks, clipped_in_turns, [*MOVED, "zero3+params=disk+optimizer=host:0.5"])


def with_an_infinite_gradient(model: nn.Module, optimizer: Any) -> list[Any]:
    (loss_of(model, 0) * float("inf")).backward()
    norm = optimizer.clip_grad_norm(1.0)
    optimizer.step()
    return [norm]


def test_an_infinite_gradient_is_not_hidden(run_ranks: Pool) -> None:
    assert_same(run_ranks, with_an_infinite_gradient, ["zero2_offload", "zero3+optimizer=host"])


def overflowing(model: nn.Module, optimizer: Any) -> list[Any]:
    values = []
    for step in range(5):
        loss = loss_of(model, step)
        factor = 1e30 if step == 2 and dist.get_rank() == 1 else 1.0
        (loss * factor).backward()
        if step % 2:
            optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
        values += [optimizer.num_skipped_steps, optimizer.loss_scale]
    assert optimizer.num_skipped_steps == 1
    return values


def test_an_overflow_skips_the_step(run_ranks: Pool) -> None:
    assert_same(run_ranks, overflowing, [*MOVED, "zero2+optimizer=disk"], precision="fp16")


@pytest.mark.quick("options1")
@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"precision": "bf16", "reduce_dtype": "bf16"}, {"precision": "pure-bf16"}]
)
def test_sixteen_bits(run_ranks: Pool, options: dict[str, str]) -> None:
    assert_same(run_ranks, clipped_in_turns, [*MOVED, "zero3_offload"], **options)


@pytest.mark.slow
def test_sixteen_bits_of_another_optimizer(run_ranks: Pool) -> None:
    options = {"precision": "bf16", "reduce_dtype": "bf16"}
    assert_same(run_ranks, clipped_in_turns, MOVED, make=OPTIMIZERS["SGD momentum"], **options)


# ---------------------------------------------------------------------------------------------------------
# gradients that are used otherwise


def zeros(model: nn.Module, optimizer: Any) -> list[Any]:
    """Gradients of zero still move by momentum and decay."""
    steps(model, optimizer, 1)
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    norm = optimizer.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, 2).backward()
    optimizer.step()
    return [norm]


def twice(model: nn.Module, optimizer: Any) -> list[Any]:
    """The same gradients once more, clipped in between."""
    values = []
    for step in range(2):
        loss_of(model, step).backward()
        values.append(optimizer.clip_grad_norm(0.4))
        optimizer.step()
        optimizer.step()
        values.append(optimizer.clip_grad_norm(0.2))
        optimizer.step()
        optimizer.zero_grad()
    return values


def added_to(model: nn.Module, optimizer: Any) -> list[Any]:
    """Backwards on top of what was reduced already: before the step, after it, and after clipping."""
    values = []
    for step in range(3):
        loss_of(model, step).backward()
        if step == 1:
            values.append(optimizer.clip_grad_norm(0.3))
        loss_of(model, step, micro=1).backward()
        values.append(optimizer.clip_grad_norm(0.5))
        optimizer.step()
        if step == 2:
            with sw.accumulate(model):
                loss_of(model, step, micro=2).backward()
            optimizer.step()
        if step:
            optimizer.zero_grad()
    return values


def given_up(model: nn.Module, optimizer: Any) -> list[Any]:
    """Gradients that nobody wants: zeroed without a step, and a backward that is broken off."""
    steps(model, optimizer, 1)
    loss_of(model, 1).backward()
    optimizer.zero_grad()
    handle = model.layers[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
    loss = loss_of(model, 2)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    optimizer.zero_grad()
    return steps(model, optimizer, 2, first=3, clip=0.5)


@pytest.mark.quick("twice", "added_to")
@pytest.mark.parametrize("story", [zeros, twice, added_to, given_up])
def test_gradients_used_otherwise(run_ranks: Pool, story: Story) -> None:
    assert_same(run_ranks, story, [*DDP, "zero1+grads=host+optimizer=host", *ZERO2, *ZERO3])


@pytest.mark.quick("zeros")
@pytest.mark.parametrize("story", [twice, zeros])
def test_gradients_used_otherwise_by_another_optimizer(run_ranks: Pool, story: Story) -> None:
    """One that counts its steps in the update itself."""
    assert_same(run_ranks, story, MOVED, make=OPTIMIZERS["RMSprop"])


# ---------------------------------------------------------------------------------------------------------
# models


def test_frozen_parameters(run_ranks: Pool) -> None:
    strategies = [*ZERO3, "ddp+optimizer=host", "zero2_offload", "zero3+params=disk+grads=host+optimizer=host"]
    assert_same(run_ranks, partial(steps, clip=0.5), strategies, build=lora)


@pytest.mark.slow
def test_frozen_parameters_in_bf16(run_ranks: Pool) -> None:
    """Given in fp32, they are kept so, and travel in 16 bits."""
    assert_same(run_ranks, partial(steps, clip=0.5), ["zero3_offload", "zero3_nvme"], build=lora, precision="bf16")


def test_tied_weights(run_ranks: Pool) -> None:
    assert_same(run_ranks, partial(steps, clip=0.5), [*MOVED, "zero3_offload"], build=partial(Stack, tied=True))


def with_unused(model: nn.Module, optimizer: Any) -> list[Any]:
    """A layer that one rank leaves out, then both, then none."""
    branches = model.inner if isinstance(model, Whole) else model
    values = []
    for step, uses in enumerate([(True, dist.get_rank() == 0, False), (False, False, True), (True, True, True)] * 2):
        branches.uses = list(uses)
        values += steps(model, optimizer, 1, first=step, clip=0.5)
    return values


def decaying(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """All in one group, such that neighbours are updated in one go."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.3)


@pytest.mark.quick("blocks")
@pytest.mark.parametrize(("build", "units"), [(Branches, ["ModuleList"]), (Whole, ["Whole"])], ids=["blocks", "one"])
def test_parameters_that_are_left_out(run_ranks: Pool, build: type[nn.Module], units: list[str]) -> None:
    assert_same(run_ranks, with_unused, [*MOVED, "zero3_offload"], build=build, make=decaying, units=units)


def some(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params[::2], lr=1e-2, weight_decay=0.3)


def test_parameters_that_the_optimizer_does_not_have(run_ranks: Pool) -> None:
    assert_same(run_ranks, steps, [*MOVED, "zero3_offload"], make=some)


# ---------------------------------------------------------------------------------------------------------
# optimizers


@pytest.mark.quick("AdamW", "Adam fused", "SGD momentum", "RMSprop", "Lion")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers(run_ranks: Pool, name: str) -> None:
    """With everything that torch's optimizers keep in rows, on disk too; a user's own on the host."""
    strategies = ["ddp+optimizer=host", "zero3+optimizer=host"] if name == "Lion" else MOVED
    assert_same(run_ranks, partial(steps, clip=0.5), strategies, make=OPTIMIZERS[name])


def in_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Groups that keep different things."""
    return torch.optim.SGD(
        [{"params": params[::2], "momentum": 0.9, "dampening": 0.5}, {"params": params[1::2], "momentum": 0.0}], lr=0.05
    )


def in_small_chunks(model: nn.Module, optimizer: Any) -> list[Any]:
    engine = engine_of(model)
    if engine.host.disk is not None:
        assert max(len(state.offloaded.rows.chunks) for unit in engine.units for state in unit.states) > 2
    return steps(model, optimizer, 3)


def differences_in_small_chunks(*arguments: Any) -> list[str]:
    """As if a chunk were 300 elements long."""
    before = state_bytes.CHUNK_ELEMS
    state_bytes.CHUNK_ELEMS = 300
    try:
        return differences(*arguments)
    finally:
        state_bytes.CHUNK_ELEMS = before


@pytest.mark.quick("SGD")
@pytest.mark.parametrize("make", [decaying, in_groups, OPTIMIZERS["RMSprop"]], ids=["AdamW", "SGD", "RMSprop"])
def test_chunk_by_chunk(run_ranks: Pool, make: Make) -> None:
    strategies = ["zero2+optimizer=disk", "zero3_nvme"]
    for found in run_ranks(2, differences_in_small_chunks, in_small_chunks, strategies, Stack, make, {}):
        assert found == []


class NoRate(torch.optim.Optimizer):
    """A user's own, whose settings have names of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"pace": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["pace"])


def test_an_optimizer_without_a_learning_rate(run_ranks: Pool) -> None:
    assert_same(run_ranks, steps, ["ddp+optimizer=host:0.5", "zero3_offload"], make=NoRate)


def with_hooks(model: nn.Module, optimizer: Any) -> list[Any]:
    """They run once a step, and see this rank's parts of all parameters."""
    values = steps(model, optimizer, 1)
    seen = []
    optimizer.register_step_pre_hook(lambda inner, *_: seen.append(sum(len(g["params"]) for g in inner.param_groups)))
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(0))
    values += steps(model, optimizer, 2, first=1, clip=0.5)
    num_params = sum(len(shards) for shards in shard_groups(optimizer.inner))
    assert seen == [num_params, 0] * 2
    handle.remove()
    return values + steps(model, optimizer, 2, first=3, clip=0.5)


def by_closure(model: nn.Module, optimizer: Any) -> list[Any]:
    losses = []
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    return losses + steps(model, optimizer, 1, first=3)


@pytest.mark.quick("by_closure")
@pytest.mark.parametrize("story", [with_hooks, by_closure])
def test_steps_of_other_kinds(run_ranks: Pool, story: Story) -> None:
    assert_same(run_ranks, story, [*ON_HOST, "zero3+params=disk+optimizer=host"])


def scheduled(model: nn.Module, optimizer: Any) -> list[Any]:
    """The rate changes right after `step()`: an update that still waits for its turn has the old one."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    values = []
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
        values.append(float(optimizer.param_groups[0]["lr"]))
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5 * step
        optimizer.zero_grad()
    return values


def rate_in_a_tensor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=torch.tensor(1e-2), momentum=0.9, foreach=False)


@pytest.mark.quick("rate_in_a_tensor")
@pytest.mark.parametrize("make", [adamw, rate_in_a_tensor])
def test_the_learning_rate_is_that_of_the_step(run_ranks: Pool, make: Make) -> None:
    for found in run_ranks(2, differences_while_updates_wait, scheduled, MOVED, Stack, make, {}):
        assert found == []


def differences_while_updates_wait(*arguments: Any) -> list[str]:
    with SlowUpdates(0.01):
        return differences(*arguments)


def test_early_updates(run_ranks: Pool) -> None:
    assert_same(run_ranks, steps, [*MOVED, "zero2+optimizer=disk", "zero3_offload"], early_update=True)


@pytest.mark.slow
def test_early_updates_of_parameters_left_out(run_ranks: Pool) -> None:
    assert_same(
        run_ranks, early_with_unused, ["zero2_offload", "zero3_offload"], build=Branches, make=decaying,
        units=["ModuleList"], early_update=True,
    )  # fmt: skip


def early_with_unused(model: nn.Module, optimizer: Any) -> list[Any]:
    values = []
    for step, uses in enumerate([(True, dist.get_rank() == 0, False), (False, True, True)] * 2):
        model.uses = list(uses)
        values += steps(model, optimizer, 1, first=step)
    return values


class HasStepped:
    """Makes an optimizer that has been used already."""

    def __init__(self, make: Make) -> None:
        self.make = make

    def __call__(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self.make(params)
        for _ in range(2):
            for index, param in enumerate(params):
                param.grad = torch.full_like(param, 0.1 * (index + 1))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer


@pytest.mark.quick("AdamW fused")
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD momentum", "Adagrad"])
def test_an_optimizer_that_has_stepped(run_ranks: Pool, name: str) -> None:
    assert_same(run_ranks, steps, [*MOVED, "zero3_offload"], make=HasStepped(OPTIMIZERS[name]))


def eight_bit(strategy: str, precision: str = "fp32") -> tuple[list[float], dict[str, Tensor], int]:
    from torchao.optim import AdamW8bit

    sw.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(2)))
    # Small ones stay in fp32, as with torchao.
    model, optimizer = sw.shard(
        model, AdamW8bit(model.parameters(), lr=1e-3), strategy, precision=precision, units=["Sequential"]
    )
    losses = []
    for step in range(4):
        loss = model(features(step, dist.get_rank(), width=64)).square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, sw.full_state_dict(model), sw.memory(model, optimizer).host


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_eight_bit_states(run_ranks: Pool) -> None:
    """Close to torchao's own update on the device, whose sums are in another order; and small."""
    on_device, on_host = (run_ranks(2, eight_bit, strategy) for strategy in ("zero2", "zero2_offload"))
    for (losses, weights, _), (seen, seen_weights, num_bytes) in zip(on_device, on_host, strict=True):
        assert seen == pytest.approx(losses, rel=1e-5)
        # A moment between two codes may go the other way.
        assert weight_error(seen_weights, weights) < 1e-4
        num_elems = sum(weight.numel() for weight in weights.values()) // 2
        # Master, gradient and moments of a byte, each with their scales, and what is aligned to pages.
        assert num_bytes < num_elems * (4 + 4 + 4 + 2.2) + 16 * 4096


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_eight_bit_states_beside_sixteen_bit_masters(run_ranks: Pool) -> None:
    for error in run_ranks.errors(2, eight_bit, "zero2_offload", "pure-bf16"):
        assert error is not None
        assert error.startswith("ConfigurationError: optimizer AdamW8bit on the host with master weights in bfloat16")


# ---------------------------------------------------------------------------------------------------------
# between steps


def rewritten(model: nn.Module, optimizer: Any) -> list[Any]:
    """Weights are changed by hand, right after a step whose updates may still run."""
    values = steps(model, optimizer, 2)
    with sw.whole(model, write=True):
        for param in model.parameters():
            param.data.mul_(0.9)
    values += steps(model, optimizer, 1, first=2)
    with sw.whole(model.layers[1], write=True):
        model.layers[1].up.weight.data.add_(0.01)
    values += steps(model, optimizer, 1, first=3)
    weights = sw.full_state_dict(model)
    sw.load_full_state_dict(model, {name: value * 1.1 for name, value in weights.items()})
    values += steps(model, optimizer, 1, first=4)
    weights = {name: value * 0.9 for name, value in weights.items()}
    sw.load_full_state_dict(model, weights if dist.get_rank() == 0 else None)
    return values + steps(model, optimizer, 1, first=5)


def evaluated(model: nn.Module, optimizer: Any) -> list[Any]:
    """At every point at which one may."""
    values = []

    def evaluate() -> None:
        with torch.no_grad():
            values.append(loss_of(model, 100))

    for step in range(3):
        evaluate()
        loss = loss_of(model, step)
        with sw.accumulate(model):
            loss.backward()
        evaluate()
        loss_of(model, step, micro=1).backward()
        evaluate()
        optimizer.step()
        evaluate()
        with torch.inference_mode():
            loss_of(model, 100)
        optimizer.zero_grad()
    with sw.whole(model):
        values += [param.detach().double().sum() for param in model.parameters()]
    return values


@pytest.mark.quick("rewritten")
@pytest.mark.parametrize("story", [rewritten, evaluated])
def test_between_steps(run_ranks: Pool, story: Story) -> None:
    assert_same(run_ranks, story, [*DDP, *ZERO2, *ZERO3])


@pytest.mark.slow
def test_between_steps_with_frozen_parameters(run_ranks: Pool) -> None:
    assert_same(run_ranks, evaluated, ["zero3_offload", "zero3_nvme"], build=lora)


def evaluation_alone(strategy: str) -> float:
    sw.init()
    torch.manual_seed(0)
    model, optimizer = sw.shard(Stack().eval(), None, strategy, precision="fp32", **disk_for(strategy))
    assert optimizer is None
    with torch.no_grad():
        return float(loss_of(model, 0))


def test_without_an_optimizer(run_ranks: Pool) -> None:
    expected = run_ranks(2, evaluation_alone, "zero3")
    for strategy in ("zero3_offload", "zero3_nvme"):
        assert run_ranks(2, evaluation_alone, strategy) == expected


class SlowUpdates:
    """Inside, updates on the host begin late."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._run = host_updates.FlatUpdate.run

    def __enter__(self) -> None:
        seconds, original = self._seconds, self._run

        def run(self: host_updates.FlatUpdate, *given: Any) -> None:
            time.sleep(seconds)
            original(self, *given)

        host_updates.FlatUpdate.run = run

    def __exit__(self, *_: object) -> None:
        host_updates.FlatUpdate.run = self._run


def whatever_comes_next(model: nn.Module, optimizer: Any) -> list[Any]:
    """After a step: whole weights, another step, a part of the model, a checkpoint's worth of everything."""
    values = steps(model, optimizer, 1)
    values += [value.sum() for value in sw.full_state_dict(model).values()]
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        values.append(model.layers[0](features(0, 0)).sum())
    with sw.whole(model.layers[2]):
        values.append(model.layers[2].up.weight.detach().sum())
    values += steps(model, optimizer, 1, first=2)
    with torch.no_grad():
        values.append(model.layers[1](features(0, 0)).sum())
    values += steps(model, optimizer, 1, first=3)
    return values


def differences_between_hosts(*arguments: Any) -> list[str]:
    with SlowUpdates(0.02) if dist.get_rank() else nullcontext():
        return differences(*arguments)


@pytest.mark.slow
def test_hosts_that_are_not_equally_fast(run_ranks: Pool) -> None:
    """Whether an update is through may not decide about a collective."""
    arguments = (whatever_comes_next, [*MOVED, "zero3_offload"], Stack, adamw, {})
    for found in run_ranks(2, differences_between_hosts, *arguments, deadline=60):
        assert found == []


# ---------------------------------------------------------------------------------------------------------
# parts


def kept_elems(strategy: str) -> list[tuple[int, int, set[int]]]:
    """Of every unit: elements that stay on the device, all elements, and the sizes of what stays."""
    sw.init()
    torch.manual_seed(0)
    model = Stack()
    model, _ = sw.shard(model, adamw(list(model.parameters())), strategy, precision="fp32")
    found = []
    for unit in engine_of(model).schedule.units:
        kept = [param.num_elems for flat in unit.flats if not flat.host_updates for param in flat.params]
        total = sum(param.num_elems for flat in unit.flats for param in flat.params)
        found.append((sum(kept), total, set(kept)))
    return found


@pytest.mark.parametrize("part", [1.0, 0.999, 0.6, 0.5, 0.25, 0.001])
def test_a_part_is_whole_parameters_and_not_less(run_ranks: Pool, part: float) -> None:
    """What is said to go goes, in every unit; what stays are whole parameters, as many as may."""
    for found in run_ranks(1, kept_elems, f"zero2+optimizer=host:{part}"):
        for kept, total, _ in found:
            assert kept <= (1 - part) * total
        block = found[0] if len(found[0][2]) else found[-1]
        if part <= 0.5:
            assert block[0] > 0


@pytest.mark.quick("0.5")
@pytest.mark.parametrize("part", [0.999, 0.75, 0.5, 0.25, 0.001])
def test_any_part_trains(run_ranks: Pool, part: float) -> None:
    strategies = [f"ddp+optimizer=host:{part}", f"zero3+params=host+optimizer=disk:{part}"]
    assert_same(run_ranks, partial(accumulated, which="all but the last"), strategies)


@pytest.mark.parametrize("part", ["0", "0.0", "-0.5", "1.01", "nan", "half", ""])
def test_no_such_part(part: str) -> None:
    strategy = f"zero2+optimizer=host:{part}"
    if part == "":
        assert layout_of(strategy).kept == 0.0
        return
    with pytest.raises(sw.ConfigurationError, match="above 0 and at most 1"):
        layout_of(strategy)


# ---------------------------------------------------------------------------------------------------------
# what a user sees, and what is refused


def sharded(strategy: str, **options: Any) -> tuple[nn.Module, Any]:
    sw.init()
    torch.manual_seed(0)
    model = Stack()
    given = {"precision": "fp32", **disk_for(strategy), **options}
    return sw.shard(model, adamw(list(model.parameters())), strategy, **given)


def read_from_disk() -> None:
    model, optimizer = sharded("zero3_nvme")
    steps(model, optimizer, 2)
    param = next(model.parameters())
    kept = optimizer.state[param]["exp_avg"]
    assert sum(param.numel() for param in model.parameters()) > 0
    assert param.dtype == kept.dtype == torch.float32
    assert param.numel() == kept.numel()
    assert "of a sharded model" in repr(param)
    reads: list[Callable[[], Any]] = [
        lambda: param + 1,
        param.norm,
        lambda: float(param.detach().sum()),
        lambda: param.data + 1,
        param.tolist,
        lambda: param[0],
        lambda: torch.stack([param, param]),
        kept.max,
        lambda: kept.cpu().numpy(),
    ]
    for read in reads:
        with pytest.raises(sw.StateError, match=r"(is on|offloaded to) disk"):
            read()
    with torch.no_grad(), pytest.raises(sw.StateError, match="offloaded to disk"):
        param.mul_(0.5)
    steps(model, optimizer, 1, first=2)


def test_what_rests_on_disk_says_so(run_ranks: Pool) -> None:
    run_ranks(1, read_from_disk)


def read_from_host(strategy: str) -> None:
    """Right after a step."""
    model, optimizer = sharded(strategy)
    reads: list[Callable[[Tensor], Tensor]] = [
        lambda param: param.detach().clone(),
        lambda param: param.data.clone(),
        lambda param: torch._foreach_mul([param.detach()], 1.0)[0],
    ]
    with SlowUpdates(0.02):
        for step, read in enumerate(reads):
            loss_of(model, step).backward()
            optimizer.step()
            seen = {name: read(param) for name, param in model.named_parameters()}
            optimizer.zero_grad()
            sw.traffic(model)  # waits for updates
            for name, param in model.named_parameters():
                assert isinstance(param, nn.Parameter)
                now = param.detach().as_subclass(Tensor)
                assert torch.equal(seen[name].as_subclass(Tensor), now), (step, name)


@pytest.mark.parametrize("strategy", ["zero2_offload", "zero3_offload", "ddp+optimizer=host:0.5"])
def test_nobody_reads_weights_that_are_being_updated(run_ranks: Pool, strategy: str) -> None:
    run_ranks(1, read_from_host, strategy)


def changed_in_place(strategy: str) -> None:
    model, optimizer = sharded(strategy)
    steps(model, optimizer, 1)
    before = sw.full_state_dict(model)
    name, param = next(iter(model.named_parameters()))
    with torch.no_grad():
        param.mul_(0.5)
    loss_of(model, 1)
    assert torch.equal(sw.full_state_dict(model)[name], before[name] * 0.5)


@pytest.mark.parametrize("strategy", ["zero2+optimizer=host", "zero3_offload"])
def test_changes_in_place_are_changes_of_the_weights(run_ranks: Pool, strategy: str) -> None:
    run_ranks(2, changed_in_place, strategy)


def by_hand(strategy: str) -> None:
    """As a user's own optimizer would be, where it cannot be."""
    model, optimizer = sharded(strategy)
    loss_of(model, 0).backward()
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.step()


def momentum_on_disk() -> None:
    """It is turned on later, so nothing was reserved for it."""
    sw.init()
    model: Any = Stack()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = sw.shard(model, given, "zero2+optimizer=disk", precision="fp32", **disk_for("zero3_nvme"))
    optimizer.param_groups[0]["momentum"] = 0.9
    loss_of(model, 0).backward()
    optimizer.step()
    loss_of(model, 1)


def shard_with(strategy: str, make: Make = adamw, **options: Any) -> None:
    sw.init()
    model = Stack()
    sw.shard(model, make(list(model.parameters())), strategy, **{"precision": "fp32", **options})


def on_last_rank_alone() -> None:
    """The others know a folder."""
    options = {} if dist.get_rank() == 1 else disk_for("zero3_nvme")
    shard_with("zero3_nvme", **options)


def capture() -> None:
    model, optimizer = sharded("zero2_offload")
    sw.capture(model, optimizer, lambda x: x)


def save_in_the_background() -> None:
    model, optimizer = sharded("zero3_nvme")
    steps(model, optimizer, 1)
    sw.start_save("/tmp/never", model, optimizer)


REFUSALS: dict[str, tuple[Callable[[], None], str]] = {
    "no folder": (
        partial(shard_with, "zero3_nvme"),
        r"ConfigurationError: .*is offloaded to disk and no folder is named for it: give disk_path=",
    ),
    "no folder on one rank": (on_last_rank_alone, r"ConfigurationError: .*no folder is named"),
    "a folder that is not there": (
        partial(shard_with, "zero3_nvme", disk_path="/nowhere/at/all"),
        r"\w+Error: /nowhere/at/all is not a folder, and state is to be offloaded there",
    ),
    "a file": (partial(shard_with, "zero3_nvme", disk_path=__file__), r"\w+Error: \S+test_offload\.py is not a folder"),
    "a folder for nothing": (
        partial(shard_with, "zero3_offload", disk_path="/tmp"),
        r"ConfigurationError: disk_path='/tmp' with strategy='zero3_offload', which puts nothing on disk",
    ),
    "an optimizer of one's own on disk": (
        partial(shard_with, "zero3_nvme", make=NoRate, **disk_for("zero3_nvme")),
        r"ConfigurationError: optimizer NoRate keeps its state in its own way, which cannot be offloaded to disk",
    ),
    "an optimizer of whole matrices in chunks": (
        partial(shard_with, "ddp+optimizer=disk", make=torch.optim.Adafactor, **disk_for("zero3_nvme")),
        r"ConfigurationError: optimizer Adafactor needs whole matrices",
    ),
    "hooks of an optimizer on disk": (
        partial(by_hand, "zero3_nvme"),
        r"StateError: unit '[\w.]+' is offloaded to disk, and",
    ),
    "momentum on disk that is turned on later": (
        momentum_on_disk,
        r"ConfigurationError: optimizer SGD keeps 'momentum_buffer' with its present settings",
    ),
    "parameters that never leave": (
        partial(shard_with, "zero2+params=host+optimizer=host"),
        r"ConfigurationError: layout: params_on='host' with gathered_until='always'",
    ),
    "parameters without the optimizer": (
        partial(shard_with, "zero3+params=host"),
        r"ConfigurationError: layout: params_on='host' with optimizer_on='device'",
    ),
    "gradients without the optimizer": (
        partial(shard_with, "zero3+grads=host"),
        r"ConfigurationError: layout: grads_on='host' with optimizer_on='device'",
    ),
    "gradients on disk": (partial(shard_with, "zero3+grads=disk"), r"ConfigurationError: layout: grads_on='disk'"),
    "a save in the background": (
        save_in_the_background,
        r"StateError: sw\.start_save of unit '[\w.]+', which is offloaded to disk \(zero3_nvme\): .*use sw\.save",
    ),
    "a recording": (capture, r"ConfigurationError: sw\.capture records a CUDA graph"),
}


def refused(name: str) -> None:
    REFUSALS[name][0]()


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_on_all_ranks(run_ranks: Pool, name: str) -> None:
    for error in run_ranks.errors(2, refused, name, deadline=30):
        assert re.match(REFUSALS[name][1], error or "", re.DOTALL), error


def places_differ() -> None:
    shard_with("zero3_offload" if dist.get_rank() else "zero3")


def test_ranks_that_differ_in_places_hear_of_it(run_ranks: Pool) -> None:
    for error in run_ranks.errors(2, places_differ, deadline=30):
        assert re.match(r"WireError: the ranks differ in the layout of unit .*zero3_offload", error or ""), error


# ---------------------------------------------------------------------------------------------------------
# updates that fail


class UpdateError(Exception):
    """What no update says."""


def failing_update(after_step: str) -> list[str]:
    """In the second step the update of the third unit fails. What is told, by whoever asks first and ever after."""
    model, optimizer = sharded("zero2_offload")
    steps(model, optimizer, 1)
    sw.traffic(model)  # waits for updates
    original = host_updates.FlatUpdate.run

    def run(self: host_updates.FlatUpdate, *given: Any) -> None:
        if self.state.unit_name == "layers.2":
            raise UpdateError("out of luck")
        original(self, *given)

    host_updates.FlatUpdate.run = run
    asks: dict[str, Callable[[], Any]] = {
        "forward": lambda: loss_of(model, 2),
        "evaluation": lambda: torch.no_grad()(loss_of)(model, 2),
        "save": lambda: sw.save(Path("/tmp/never"), model, optimizer),
        "weights": lambda: sw.full_state_dict(model),
        "traffic": lambda: sw.traffic(model),
        "step": optimizer.step,
    }
    told = []
    try:
        loss_of(model, 1).backward()
        with suppress(sw.StateError):  # it may be told so soon
            optimizer.step()
        for ask in (asks[after_step], *asks.values()):
            with pytest.raises(sw.StateError, match="an update on the host failed: out of luck") as caught:
                ask()
            told.append(type(caught.value.__cause__).__name__)
    finally:
        host_updates.FlatUpdate.run = original
    return told


@pytest.mark.parametrize("after_step", ["forward", "evaluation", "save", "weights", "step"])
def test_a_failed_update_is_told_and_stays(run_ranks: Pool, after_step: str) -> None:
    """No rank goes on with weights of which nobody knows what they are."""
    assert run_ranks(1, failing_update, after_step) == [["UpdateError"] * 7]
    assert not Path("/tmp/never").exists()


# ---------------------------------------------------------------------------------------------------------
# afterwards


def left_behind(strategy: str) -> tuple[bool, bool]:
    """Whether host memory, threads and the file are gone with the model."""
    num_threads, num_files = threading.active_count(), num_open_files()
    model, optimizer = sharded(strategy)
    steps(model, optimizer)
    engine = engine_of(model)
    num_groups = sum(len(channels) for channels in engine.mesh.channels.values())
    gone = [weakref.ref(part) for part in (engine, engine.host, engine.host.arena)]
    del model, optimizer, engine
    until = time.monotonic() + 5
    while time.monotonic() < until and (gone[-1]() is not None or threading.active_count() > num_threads):
        gc.collect()
        time.sleep(0.02)
    # Sockets of process groups stay.
    is_closed = num_open_files() <= num_files + 4 * num_groups
    return all(part() is None for part in gone) and threading.active_count() <= num_threads, is_closed


@pytest.mark.parametrize("strategy", ["zero2_offload", "zero3_nvme"])
def test_nothing_is_left_behind(run_ranks: Pool, strategy: str) -> None:
    assert run_ranks(1, left_behind, strategy) == [(True, True)]


def update_without_a_thread() -> None:
    sw.init()
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = sw.shard(plain, torch.optim.AdamW(plain.parameters()), "zero2_offload", precision="fp32")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start = threading.Thread.start
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        threading.Thread.start = refuse  # type: ignore[method-assign]
        try:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                optimizer.step()
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]
        sw.full_state_dict(model)  # waits for updates, of which there is none


def test_a_thread_that_cannot_be_started_is_not_waited_for(run_ranks: Pool) -> None:
    run_ranks(1, update_without_a_thread)
