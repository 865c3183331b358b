"""Two steps, a save, a load and two steps are four steps: from every preset into every preset, from every world into
every other, from the device to host and disk and back.

The model has everything that checkpoints are known to lose: frozen parameters, buffers, tied weights, groups with
settings of their own, a parameter without elements and one that is a number. What is measured against is one process
without shardwise that cuts its batches as the worlds do. A sum of two has no order, so among worlds of one and two not
a bit may differ; beyond that, sums in another order do, by less than `TOLERANCE`.

In each world a model is built once for each preset, and loads every checkpoint into what the last one left: nothing may
shine through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.index import Stored
from shardwise.checkpoint.opened import open_checkpoint
from shardwise.core.layout import Strategy
from tests.checkpoint.by_hand import read_whole
from tests.harness import Pool
from tests.support.strategies import NAMED, OFFLOADED, STRATEGIES, disk_for
from tests.support.trainee import features
from tests.support.training import weight_error

TOLERANCE = 1e-5
WORLDS = {1: 1, 2: 1, 3: 1, 4: 2}  # ranks, and ranks of a node: what is split over nodes differs from what is not
HALF, END, BATCH = 2, 4, 12
WIDTH = 32
LAYOUTS: dict[str, Strategy] = {
    **{name: STRATEGIES[name] for name in NAMED if name not in OFFLOADED},
    "mapping": {"blocks.0": "ddp", "blocks.1": "hpz", "*": "zero2"},
}
OFFLOADS: dict[str, Strategy] = {
    **{name: STRATEGIES[name] for name in NAMED if name in OFFLOADED},
    "half on host": "ddp+optimizer=host:0.5",
    "a part on host, parameters on disk": "zero3+params=disk+grads=host+optimizer=host:0.6",
    "split further, on disk": "hfsdp+params=disk+optimizer=disk",
    "mapping with host and disk": {"blocks.0": "zero3_nvme", "blocks.1": "ddp", "*": "zero2_offload"},
}
OTHER_WAYS = ["in whole tensors", "in the background"]
# Saved in other ways, too.
SEVERAL_WAYS = ["hfsdp", "zero3_offload"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 50)
        self.down = nn.Linear(50, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(torch.ones_like(self.mean), 0.3)
        return x + self.scale * self.down(self.up(x).tanh()) + self.mean


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.leave.weight = self.enter.weight
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("not_saved", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.enter(x) * self.not_saved[0] + self.num_calls * 0.01
        for block in self.blocks:
            x = block(x)
        return self.leave(x + self.frozen(x))


def adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [param for param in params if param.ndim > 1]
    rest = [param for param in params if param.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": rest, "lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.0},
        ],
        lr=5e-3,
        eps=1e-4,
    )


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Each rate is made from the last one, which is the optimizer's: both have to come back."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * END)


def loss_of(model: nn.Module, step: int, index: int, num_slices: int) -> Tensor:
    """One of equal slices of a step's batch: sample i is the same in every world."""
    batch = features(step, 0, BATCH, WIDTH).chunk(num_slices)[index]
    return model(batch).square().mean()


def fresh(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Everything()


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]


@cache
def alone(first: int, last: int) -> Outcome:
    """Without shardwise: half of the steps in slices as `first` ranks have them, half as `last` ranks do."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks
    model = fresh(0)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = adamw(list(model.parameters()))
    scheduler = scheduler_of(optimizer)
    losses = []
    for step in range(END):
        num_slices = first if step < HALF else last
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        total, sums = torch.zeros(()), [torch.zeros_like(param) for param in params]
        for index in range(num_slices):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            loss = loss_of(model, step, index, num_slices)
            total += loss.detach()
            grads = torch.autograd.grad(loss, params, materialize_grads=True)
            sums = list(grads) if index == 0 else [a + b for a, b in zip(sums, grads, strict=True)]
        losses.append(float(total / num_slices))
        for param, grad in zip(params, sums, strict=True):
            param.grad = grad.mul(1.0 / num_slices)
        optimizer.step()
        scheduler.step()
    torch.set_num_threads(num_threads)
    return Outcome(losses, {name: value.detach() for name, value in model.state_dict().items()})


# ---------------------------------------------------------------------------------------------------------
# on every rank


def build(strategy: str, seed: int) -> tuple[nn.Module, Any]:
    model = fresh(seed)
    chosen, world = (LAYOUTS | OFFLOADS)[strategy], dist.get_world_size()
    options = {"precision": "fp32", "node_size": WORLDS[world], **disk_for(chosen)}
    return sw.shard(model, adamw(list(model.parameters())), chosen, **options)


def train(model: nn.Module, optimizer: Any, scheduler: Any, first: int, last: int) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(first, last):
        loss = loss_of(model, step, rank, world)
        total = loss.detach().clone()
        loss.backward()
        dist.all_reduce(total)
        losses.append(float(total / world))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def save_each(root: Path, strategies: Sequence[str]) -> None:
    """Half of the steps under each strategy, and a save; under one of them in other ways, too."""
    sw.init()
    for strategy in strategies:
        model, optimizer = build(strategy, 0)
        scheduler = scheduler_of(optimizer)
        losses = train(model, optimizer, scheduler, 0, HALF)
        extra = {"step": HALF, "losses": losses, "scheduler": scheduler.state_dict()}
        sw.save(root / strategy, model, optimizer, extra=extra)
        if strategy in SEVERAL_WAYS:
            whole, beside = (root / f"{strategy} {way}" for way in OTHER_WAYS)
            sw.save(whole, model, optimizer, extra=extra, whole=True)
            saving = sw.start_save(beside, model, optimizer, extra=extra)
            train(model, optimizer, scheduler, HALF, END)
            saving.finish()


def load_each(jobs: Sequence[tuple[str, int, Path]], expected: dict[int, Outcome]) -> None:
    """Each job: a strategy, and a checkpoint with the size of its world; loaded, and the other half of the steps."""
    sw.init()
    world, built = dist.get_world_size(), dict[str, tuple[nn.Module, Any]]()
    for strategy, saved, path in jobs:
        if strategy not in built:
            built[strategy] = build(strategy, 1)
        model, optimizer = built[strategy]
        scheduler = scheduler_of(optimizer)
        extra = sw.load(path, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        losses = extra["losses"] + train(model, optimizer, scheduler, extra["step"], END)
        try:
            compare(Outcome(losses, sw.full_state_dict(model)), expected[saved], max(saved, world) <= 2)
        except AssertionError as error:
            error.add_note(f"saved by {saved} ({path.name}), loaded by {world} ({strategy})")
            raise


def compare(seen: Outcome, expected: Outcome, exactly: bool) -> None:
    tolerance = 0.0 if exactly else TOLERANCE
    for name in ("num_calls", *(name for name in expected.weights if "mean" in name or "frozen" in name)):
        assert torch.equal(seen.weights[name], expected.weights[name]), name
    assert seen.weights["leave.weight"].data_ptr() == seen.weights["enter.weight"].data_ptr()
    error = weight_error(seen.weights, expected.weights)
    assert error <= tolerance, f"weights differ by {error}"
    for a, b in zip(seen.losses, expected.losses, strict=True):
        assert abs(a - b) <= tolerance * abs(b), f"losses {seen.losses}, expected {expected.losses}"


# ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_by_two(run_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every strategy in a world of two."""
    root = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_each, root / "2", [*LAYOUTS, *OFFLOADS])
    return root


@pytest.fixture(scope="module")
def saved(run_ranks: Pool, saved_by_two: Path) -> Path:
    """Checkpoints of every strategy in every world."""
    for world in WORLDS:
        if world != 2:
            run_ranks(world, save_each, saved_by_two / f"{world}", [*LAYOUTS, *OFFLOADS])
    return saved_by_two


@pytest.mark.parametrize("world", [2, 4])
def test_every_strategy_saves_and_loads(run_ranks: Pool, saved_by_two: Path, world: int) -> None:
    """Each loads another one's checkpoint, and each one's checkpoint is loaded: on as many ranks, and on more."""
    loading = [*LAYOUTS, *OFFLOADS]
    saving = [*loading[5:], *loading[:5]] if world == 2 else [*loading[9:], *loading[:9]]
    if world == 4:
        ways = [f"{strategy} {way}" for strategy in SEVERAL_WAYS for way in OTHER_WAYS]
        loading, saving = [*loading[::3], *loading[: len(ways)]], [*saving[::3], *ways]
    jobs = [(name, 2, saved_by_two / "2" / other) for name, other in zip(loading, saving, strict=True)]
    run_ranks(world, load_each, jobs, {2: alone(2, world)})


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_every_preset_goes_on_under_every_preset(run_ranks: Pool, saved: Path, world: int) -> None:
    """Worlds of one and two load all that they saved, where not a bit may differ, and one rank loads everybody's. The
    others take turns in whose save of a preset they load: every preset under every preset, and every world's."""
    jobs = [
        (loading, first, saved / f"{first}" / saving)
        for i, loading in enumerate(LAYOUTS)
        for j, saving in enumerate([*LAYOUTS, *(f"hfsdp {way}" for way in OTHER_WAYS)])
        for k, first in enumerate(WORLDS)
        if world == 1 or max(world, first) <= 2 or (i + j + k) % len(WORLDS) == 0
    ]
    run_ranks(world, load_each, jobs, {first: alone(first, world) for first in WORLDS})


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_from_the_device_to_host_and_disk_and_back(run_ranks: Pool, saved: Path, world: int) -> None:
    """Each that rests elsewhere loads from another such one and from the device, and the device from it; worlds of one
    and two each other's, where not a bit may differ, the others everybody's in turns."""
    offloads, layouts = list(OFFLOADS), list(LAYOUTS)
    ways = [f"{strategy} {way}" for strategy in SEVERAL_WAYS[1:] for way in OTHER_WAYS]
    pairs = [
        pair
        for i, name in enumerate(offloads)
        for pair in (
            (name, layouts[i % len(layouts)]),
            (layouts[(i + world) % len(layouts)], name),
            (name, offloads[(i + world) % len(offloads)]),
        )
    ]
    pairs += [(offloads[(i + world) % len(offloads)], way) for i, way in enumerate(ways)]
    jobs = []
    for i, (loading, saving) in enumerate(pairs):
        first = 1 + (i + world) % 2 if world <= 2 and i % 3 else list(WORLDS)[(i + world) % len(WORLDS)]
        jobs.append((loading, first, saved / f"{first}" / saving))
    run_ranks(world, load_each, jobs, {first: alone(first, world) for first in WORLDS})


# ---------------------------------------------------------------------------------------------------------


def pass_on(load_from: Path, save_to: Path) -> Path:
    """Through every layout, one after the other; the last one's checkpoint is for the next world."""
    sw.init()
    path = load_from
    for number, strategy in enumerate([*LAYOUTS, *OFFLOADS]):
        model, optimizer = build(strategy, 1)
        extra = sw.load(path, model, optimizer)
        path = save_to / strategy
        sw.save(path, model, optimizer, extra=extra, whole=number % 2 == 0)
    return path


def values(path: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, by name."""
    opened = open_checkpoint(path)
    index, found = opened.index, dict[str, Any]()
    with opened.reader() as reader:
        found |= {name: read_whole(reader, stored) for name, stored in index.every_stored()}
    for name, saved in index.tensors.items():
        plain = {key: value for key, value in saved.state.items() if not isinstance(value, Stored)}
        found[f"about {name}"] = (saved.kind, saved.is_trained, saved.tied, saved.group, list(saved.state), plain)
    return found | {"optimizer": index.optimizer, "extra": index.extra}


@pytest.mark.slow
def test_not_a_bit_changes_on_the_way(run_ranks: Pool, saved: Path, tmp_path: Path) -> None:
    """Through every layout in every world: weights, buffers, moments, settings, all of it."""
    first = path = saved / "3" / "zero3"
    for world in (4, 1, 3, 2):
        (path, *_) = run_ranks(world, pass_on, path, tmp_path / f"{world}")
    seen, expected = values(path), values(first)
    assert set(seen) == set(expected)
    for name, value in expected.items():
        same = torch.equal(seen[name], value) if isinstance(value, Tensor) else seen[name] == value
        assert same, f"{name}: {seen[name]}, was {value}"
