"""Any optimizer that works element by element gives on shards what it gives on whole parameters."""

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

import shardwise as sw
from shardwise.core.optim.groups import shard_groups
from tests.harness import Pool
from tests.support.trainee import LAYOUTS, NODES, ONE_OF_EACH, Trainee, check, features

NUM_STEPS = 6


class Model(nn.Module):
    """Blocks of matrices and vectors whose sizes no shard boundary respects."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 19)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(19), nn.Linear(19, 19)) for _ in range(4))
        self.head = nn.Linear(19, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def loss_on(trainee: Trainee, step: int) -> Tensor:
    return trainee.share(lambda rank: trainee.model(features(step, rank)).square().mean())


def train(trainee: Trainee, num_steps: int = NUM_STEPS) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = loss_on(trainee, step)
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return losses


class Lion(torch.optim.Optimizer):
    """A user's optimizer: sign of an interpolated momentum, decoupled decay."""

    def __init__(self, params: Any, lr: float = 1e-3, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            fast, slow = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                # Not quite a sign: rounding noise around zero must not decide about a whole step.
                update = (state["momentum"].lerp(param.grad, 1 - fast) * 1e3).tanh()
                param.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])
                state["momentum"].lerp_(param.grad, 1 - slow)
        return loss


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=True),
    "AdamW one by one": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=False),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "AdamW amsgrad": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, amsgrad=True),
    "AdamW maximize": partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, maximize=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-4, weight_decay=0.01),
    "Adam fused": partial(torch.optim.Adam, lr=1e-2, eps=1e-4, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adagrad foreach": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1, foreach=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-4, momentum=0.9, centered=True),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2, eps=1e-4),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2, eps=1e-4),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2, eps=1e-4),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0, eps=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
    "Lion": partial(Lion, lr=1e-2),
}


@pytest.mark.quick("AdamW foreach", "AdamW fused", "Adam", "SGD momentum", "Adagrad", "RMSprop", "Lion")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_one_process(run_ranks: Pool, name: str) -> None:
    check(run_ranks, train, Model, ["ddp", "zero1", "zero3"], make_optimizer=OPTIMIZERS[name])


@pytest.mark.quick("AdamW fused")
@pytest.mark.parametrize("name", ["AdamW fused", "Adagrad", "Lion"])
def test_equal_to_one_process_on_nodes(run_ranks: Pool, name: str) -> None:
    check(run_ranks, train, Model, NODES, make_optimizer=OPTIMIZERS[name], world=4, node_size=2)


@pytest.mark.quick("Adagrad")
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adagrad"])
def test_equal_to_one_process_on_three_ranks(run_ranks: Pool, name: str) -> None:
    check(run_ranks, train, Model, "zero3", make_optimizer=OPTIMIZERS[name], world=3)


# ---------------------------------------------------------------------------------------------------------
# groups


def grouped_by_name(model: nn.Module) -> torch.optim.Optimizer:
    """Four groups: chosen by name, by `ndim`, one frozen in all but name, one of a single parameter."""
    named = dict(model.named_parameters())
    head = [named.pop("head.weight")]
    late = [named.pop(name) for name in list(named) if name.startswith("layers.3")]
    decayed = [param for param in named.values() if param.ndim > 1]
    plain = [param for param in named.values() if param.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.3, "name": "decayed"},
            {"params": plain, "weight_decay": 0.0, "name": "plain", "betas": (0.5, 0.9)},
            {"params": late, "lr": 0.0, "name": "late"},
            {"params": head, "lr": 5e-2, "name": "head"},
        ],
        lr=1e-2,
        eps=1e-4,
    )


class ByName:
    """`make_optimizer` gets parameters only; the names come from the model, which holds the same objects."""

    def __call__(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        names = [name for name, _ in Model().named_parameters()]
        holder = nn.Module()
        holder.named_parameters = lambda: zip(names, params, strict=True)  # type: ignore[assignment,method-assign]
        return grouped_by_name(holder)


def grouped_story(trainee: Trainee) -> list[float]:
    groups = trainee.optimizer.param_groups
    assert [group["name"] for group in groups] == ["decayed", "plain", "late", "head"]
    assert [group["lr"] for group in groups] == [1e-2, 1e-2, 0.0, 5e-2]
    losses = train(trainee, 3)
    groups[2]["lr"] = 1e-2  # what the user sets later counts
    groups[3]["weight_decay"] = 0.5
    return losses + train(trainee, 3)


def test_groups_stay_right(run_ranks: Pool) -> None:
    check(run_ranks, grouped_story, Model, ONE_OF_EACH, make_optimizer=ByName())


def sums_of_groups(strategy: str) -> list[tuple[int, float]]:
    """How many elements each group holds on this rank, and their sum."""
    sw.init()
    model = Model()
    model, optimizer = sw.shard(model, grouped_by_name(model), strategy, precision="fp32")
    return [
        (sum(p.numel() for p in shards), float(sum(p.detach().double().sum() for p in shards)))
        for shards in shard_groups(optimizer.inner)
    ]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_the_ranks_parts_of_a_group_are_the_group(run_ranks: Pool, strategy: str) -> None:
    torch.manual_seed(0)
    whole = grouped_by_name(Model()).param_groups
    ranks = run_ranks(2, sums_of_groups, strategy)
    for index, group in enumerate(whole):
        assert sum(rank[index][0] for rank in ranks) == sum(param.numel() for param in group["params"])
        total = float(sum(param.detach().double().sum() for param in group["params"]))
        assert sum(rank[index][1] for rank in ranks) == pytest.approx(total, rel=1e-6)


def some_parameters(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params[::2], lr=1e-2, eps=1e-4)


def test_parameters_outside_the_optimizer_are_not_updated(run_ranks: Pool) -> None:
    check(run_ranks, train, Model, ONE_OF_EACH, make_optimizer=some_parameters)


# ---------------------------------------------------------------------------------------------------------
# learning-rate schedulers


def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, step / 3))  # starts at zero


def cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=NUM_STEPS)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Moves beta 1 as well."""
    return OneCycleLR(optimizer, max_lr=2e-2, total_steps=NUM_STEPS)


def plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)


SCHEDULERS = [warm_up, cosine, one_cycle, plateau]


class Scheduled:
    """A story with a scheduler that is made after sw.shard."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
        self.make = make

    def __call__(self, trainee: Trainee) -> list[float]:
        return self.train(trainee, self.make(trainee.optimizer))

    @staticmethod
    def train(trainee: Trainee, scheduler: LRScheduler) -> list[float]:
        values = []
        for step in range(NUM_STEPS):
            loss = loss_on(trainee, step)
            loss.backward()
            values.extend([trainee.mean(loss), trainee.optimizer.param_groups[0]["lr"]])
            trainee.step()
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(trainee.mean(loss))
            else:
                scheduler.step()
        values.append(scheduler.get_last_lr()[0])
        return values


@pytest.mark.quick("one_cycle", "plateau")
@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_made_after_sharding(run_ranks: Pool, make: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
    check(run_ranks, Scheduled(make), Model, ["ddp", "zero3"], make_optimizer=OPTIMIZERS["AdamW"])


class MadeBefore:
    """Makes the optimizer and a scheduler on it at once; the story finds the scheduler on the optimizer."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
        self.make = make

    def __call__(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS["AdamW"](params)
        optimizer.early_scheduler = self.make(optimizer)  # type: ignore[attr-defined]
        return optimizer


def train_with_early_scheduler(trainee: Trainee) -> list[float]:
    return Scheduled.train(trainee, trainee.optimizer.early_scheduler)


@pytest.mark.quick("warm_up", "one_cycle")
@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_made_before_sharding(
    run_ranks: Pool, make: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    check(run_ranks, train_with_early_scheduler, Model, ["ddp", "zero3"], make_optimizer=MadeBefore(make))


# ---------------------------------------------------------------------------------------------------------
# the step


def by_closure(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):

        def closure(step: int = step) -> Tensor:
            trainee.optimizer.zero_grad()
            loss = loss_on(trainee, step)
            loss.backward()
            return loss

        losses.append(trainee.mean(trainee.optimizer.step(closure)))
    return losses


def test_a_closure(run_ranks: Pool) -> None:
    check(run_ranks, by_closure, Model, ["ddp", "zero2", "zero3"])


def by_step_hooks(trainee: Trainee) -> list[float]:
    seen = []
    trainee.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    trainee.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    losses = train(trainee, 2)
    assert seen == ["before", "after"] * 2
    return losses


def test_step_hooks_run_once_each(run_ranks: Pool) -> None:
    check(run_ranks, by_step_hooks, Model, ["ddp", "zero3"])


def model_zero_grad(trainee: Trainee) -> list[float]:
    """`model.zero_grad()` is as common as the optimizer's."""
    losses = []
    for step in range(4):
        loss = loss_on(trainee, step)
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.optimizer.step()
        trainee.model.zero_grad()
    return losses


def test_zero_grad_of_the_model(run_ranks: Pool) -> None:
    check(run_ranks, model_zero_grad, Model, ONE_OF_EACH)


def touch_the_optimizer() -> None:
    sw.init()
    model = Model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = sw.shard(model, inner, "zero3", precision="fp32")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "AdamW" in repr(optimizer)
    assert optimizer.defaults["lr"] == 1e-2
    for _ in range(2):
        for call in (
            optimizer.state_dict,
            lambda: optimizer.load_state_dict({}),
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
            lambda: copy.deepcopy(optimizer),
            lambda: pickle.dumps(optimizer),
        ):
            with pytest.raises((sw.StateError, sw.ConfigurationError)):
                call()
        model(features(0, dist.get_rank())).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_what_cannot_be_done_to_a_sharded_optimizer_is_refused(run_ranks: Pool) -> None:
    run_ranks(2, touch_the_optimizer)


# ---------------------------------------------------------------------------------------------------------
# optimizers that need more than elements


class Trust(torch.optim.Optimizer):
    """Scales each update by norms of the whole parameter, as LARS and LAMB do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "trust": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    ratio = param.norm() / (param.grad.norm() + 1e-6) if group["trust"] else 1.0
                    param.sub_(param.grad * ratio, alpha=group["lr"])


class NoDecayForVectors(torch.optim.SGD):
    """Looks at `ndim` inside the step: a shard of a matrix would be taken for a vector."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim > 1:
                    param.mul_(0.9)
        super().step()


def matrices(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.ndim == 2]


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices(params), lr=1e-2)


def lbfgs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1)


def second_group_needs_wholes(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Element by element in the first group only."""
    return Trust([{"params": params[:3], "trust": False}, {"params": params[3:], "trust": True}])


NEEDS_WHOLE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": muon,
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "LBFGS": lbfgs,
    "Trust": Trust,
    "NoDecayForVectors": partial(NoDecayForVectors, lr=0.1),
}


def try_to_shard(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], strategy: str) -> None:
    sw.init()
    model = Model()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = make(list(model.parameters()))
    random_state = torch.random.get_rng_state()
    try:
        sw.shard(model, optimizer, strategy, precision="fp32")
    finally:
        # The trial leaves no trace.
        assert torch.equal(random_state, torch.random.get_rng_state())
        assert not optimizer.state or type(optimizer).__name__ == "Adagrad"
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, value)


@pytest.mark.parametrize("name", NEEDS_WHOLE)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_optimizer_that_needs_whole_matrices_is_refused_by_name(run_ranks: Pool, name: str, strategy: str) -> None:
    for error in run_ranks.errors(2, try_to_shard, NEEDS_WHOLE[name], strategy, deadline=30):
        assert error is not None
        assert error.startswith("ConfigurationError")
        assert name in error


def test_every_group_is_tried(run_ranks: Pool) -> None:
    for error in run_ranks.errors(2, try_to_shard, second_group_needs_wholes, "zero3", deadline=30):
        assert error is not None
        assert "Trust" in error


@pytest.mark.parametrize("name", [name for name in NEEDS_WHOLE if name != "LBFGS"])
def test_an_optimizer_that_needs_whole_matrices_works_where_they_are_whole(run_ranks: Pool, name: str) -> None:
    check(run_ranks, train, Model, "ddp", make_optimizer=NEEDS_WHOLE[name], tolerance=1e-4)


def lbfgs_story(trainee: Trainee) -> list[float]:
    """Calls its closure several times a step."""

    def closure() -> Tensor:
        trainee.optimizer.zero_grad()
        loss = loss_on(trainee, 0)
        loss.backward()
        return loss

    return [trainee.mean(trainee.optimizer.step(closure)) for _ in range(2)]


def test_lbfgs_under_ddp(run_ranks: Pool) -> None:
    # A line of secants: differences of gradients are divided by, so roundings grow.
    check(run_ranks, lbfgs_story, Model, "ddp", make_optimizer=lbfgs, tolerance=1e-3)


def test_every_elementwise_optimizer_passes_the_trial_whatever_its_learning_rate(run_ranks: Pool) -> None:
    assert run_ranks(1, shard_all_with_zero_rates) == [len(OPTIMIZERS)]


def shard_all_with_zero_rates() -> int:
    sw.init()
    for make in OPTIMIZERS.values():
        model = Model()
        optimizer = make(list(model.parameters()))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        sw.shard(model, optimizer, "zero3", precision="fp32")
        assert optimizer.param_groups[0]["lr"] == 0.0
    return len(OPTIMIZERS)


# ---------------------------------------------------------------------------------------------------------
# gradient accumulation


class Exact(nn.Module):
    """Gradients are sums of small integers, so that no order of summation rounds anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 40, bias=False) for _ in range(4))
        for layer in self.layers:
            nn.init.constant_(layer.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def integers(num_samples: int, first: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randint(-4, 5, (64, width), generator=generator)[first : first + num_samples].float()


# Samples of each micro-batch, for each of two ranks; both sides have 12.
SPLITS = [
    ([12], [12]),
    ([6, 6], [6, 6]),
    ([1, 11], [4, 8]),
    ([3, 3, 3, 3], [1, 2, 4, 5]),
    ([1] * 12, [1] * 12),
]


def accumulate_exactly(strategy: str, sizes: list[int], last_is_open: bool) -> Tensor:
    rank = dist.get_rank()
    model: nn.Module = Exact()
    inner = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    model, optimizer = sw.shard(model, inner, strategy, precision="fp32", node_size=1)
    for _ in range(2):
        first = 12 * rank
        for index, size in enumerate(sizes):
            loss = (model(integers(size, first, 8)) * integers(size, first, 160)).sum() / 16
            if index < len(sizes) - 1 or last_is_open:
                with sw.accumulate(model):
                    loss.backward()
            else:
                loss.backward()
            first += size
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.flatten() for value in sw.full_state_dict(model).values()])


def accumulate_every_split(strategy: str) -> list[Tensor]:
    sw.init()
    return [
        accumulate_exactly(strategy, splits[dist.get_rank()], last_is_open)
        for splits in SPLITS
        for last_is_open in (False, True)
    ]


@pytest.mark.quick("ddp", "zero1", "zero3", "hpz")
@pytest.mark.parametrize("strategy", [*LAYOUTS, *NODES])
def test_accumulation_is_exact_for_any_split(run_ranks: Pool, strategy: str) -> None:
    model = Exact()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    for _ in range(2):
        ((model(integers(24, 0, 8)) * integers(24, 0, 160)).sum() / 32).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([param.detach().flatten() for param in model.parameters()])
    for rank in run_ranks(2, accumulate_every_split, strategy):
        assert all(torch.equal(seen, expected) for seen in rank)


# ---------------------------------------------------------------------------------------------------------
# torchao


class Wide(nn.Module):
    """Large enough that torchao keeps 8-bit state for the matrices, also of half a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 1024, bias=False)
        self.second = nn.Linear(1024, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def eight_bit(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim import AdamW8bit

        return AdamW8bit(params, lr=1e-3)


def train_eight_bit(trainee: Trainee) -> list[float]:
    losses = train(trainee, 4)
    if trainee.is_sharded:
        states = [state["exp_avg"] for state in trainee.optimizer.state.values()]
        assert any(type(value).__name__ == "OptimState8bit" for value in states)
    return losses


@pytest.mark.slow
def test_torchao_eight_bit(run_ranks: Pool) -> None:
    # Blocks of 256 elements lie alike in shards and in wholes, so the quantised state is the same but for roundings
    # of the gradient that reach a border between two of the 256 levels.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(
            run_ranks,
            train_eight_bit,
            Wide,
            ["zero3"],
            make_optimizer=eight_bit,
            tolerance=1e-3,
            deadline=300,
        )


class Choosy(torch.optim.SGD):
    """Refuses every group but the first on rank 1, with an error that torch's own optimizers do not raise."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups and dist.get_rank() == 1:
            raise KeyError("momentum of the new group")
        super().add_param_group(param_group)


def add_what_one_rank_refuses() -> int:
    sw.init()
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _, optimizer = sw.shard(plain, Choosy(plain[0].parameters(), lr=0.1), "zero2", precision="fp32")
    with pytest.raises(sw.ConfigurationError, match="momentum of the new group"):
        optimizer.add_param_group({"params": list(plain[1].parameters())})
    return len(optimizer.param_groups)


@pytest.mark.filterwarnings("ignore:.*no optimizer.*")
def test_a_group_that_one_rank_refuses_is_an_error_on_all(run_ranks: Pool) -> None:
    assert run_ranks(2, add_what_one_rank_refuses) == [1, 1]
