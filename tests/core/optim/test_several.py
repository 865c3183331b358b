"""Several optimizers on one model, each with parameters of its own; and parameters that join later, or never."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.harness import Pool
from tests.support.strategies import slow_but
from tests.support.trainee import LAYOUTS, TOLERANCE, Block, Trainee, check, check_refused, features
from tests.support.training import weight_error

ELSEWHERE = ["zero2_offload", "zero3_offload", "zero3+optimizer=host:0.5", {"*.0": "ddp", "*.1": "zero3", "*": "zero2"}]
ON_NODES = ["hsdp", "hfsdp", "hpz"]
QUICK = ["ddp", "zero3", "zero2_offload", ELSEWHERE[-1]]
EACH = slow_but([QUICK], [QUICK, LAYOUTS, ELSEWHERE])


class Pair(nn.Module):
    """Two networks in one module: one makes what the other judges."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(Block(), Block(), Block())
        self.judge = nn.Sequential(Block(), Block(), Block(), nn.Linear(16, 1))

    def forward(self, x: Tensor, how: str = "both") -> Tensor:
        if how != "judge":
            x = self.maker(x)
        return x if how == "make" else self.judge(x)


def matrices_and_rest(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD([param for param in params if param.ndim > 1], lr=0.05, momentum=0.9),
        torch.optim.AdamW([param for param in params if param.ndim < 2], lr=1e-2, eps=1e-4),
    ]


NUM_OF_MAKER = len(list(Pair().maker.parameters()))


def maker_and_judge(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(params[:NUM_OF_MAKER], lr=1e-2, eps=1e-4),
        torch.optim.AdamW(params[NUM_OF_MAKER:], lr=2e-2, eps=1e-4),
    ]


def clip(trainee: Trainee, number: int, max_norm: float) -> float:
    optimizer = trainee.optimizer[number]
    if trainee.is_sharded:
        return float(optimizer.clip_grad_norm(max_norm))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return float(nn.utils.clip_grad_norm_(params, max_norm))


def loss_on(trainee: Trainee, step: int) -> Tensor:
    return trainee.share(lambda rank: trainee.model(features(step, rank)).square().mean())


def both_at_once(trainee: Trainee) -> list[float]:
    """One clips, the other does not; one steps every time, the other every second time."""
    found = []
    for step in range(6):
        with trainee.accumulate():
            loss_on(trainee, 100 + step).backward()
        loss = loss_on(trainee, step)
        loss.backward()
        found += [trainee.mean(loss), clip(trainee, 0, 0.1)]
        trainee.optimizer[0].step()
        trainee.optimizer[0].zero_grad()
        if step % 2:
            found.append(clip(trainee, 1, math.inf))
            trainee.optimizer[1].step()
            trainee.model.zero_grad()
    return found


@pytest.mark.parametrize("strategies", EACH, ids=str)
@pytest.mark.parametrize("make", [matrices_and_rest, maker_and_judge])
def test_two_optimizers(run_ranks: Pool, strategies: list[Any], make: Any) -> None:
    check(run_ranks, both_at_once, Pair, strategies, make_optimizer=make)


@pytest.mark.slow
def test_two_optimizers_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, both_at_once, Pair, ON_NODES, make_optimizer=matrices_and_rest, world=4, node_size=2)


def adversarial(trainee: Trainee) -> list[float]:
    """The maker's graph is used after the judge's step."""
    makers, judges = trainee.optimizer
    found = []
    for step in range(4):
        made = {}

        def judged(rank: int, made: dict[int, Tensor] = made, step: int = step) -> Tensor:
            made[rank] = trainee.model(features(step, rank), "make")
            real = trainee.model(features(50 + step, rank), "judge")
            return (real - 1).square().mean() + trainee.model(made[rank].detach(), "judge").square().mean()

        loss = trainee.share(judged)
        loss.backward()
        judges.step()
        judges.zero_grad()
        fooled = trainee.share(lambda rank, made=made: (trainee.model(made[rank], "judge") - 1).square().mean())  # type: ignore[misc]
        fooled.backward()
        makers.step()
        makers.zero_grad()
        judges.zero_grad()
        found += [trainee.mean(loss), trainee.mean(fooled)]
    return found


@pytest.mark.parametrize("strategies", EACH, ids=str)
def test_a_generator_goes_on_after_the_discriminators_step(run_ranks: Pool, strategies: list[Any]) -> None:
    check(run_ranks, adversarial, Pair, strategies, make_optimizer=maker_and_judge)


@pytest.mark.slow
def test_a_generator_goes_on_after_the_discriminators_step_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, adversarial, Pair, ON_NODES, make_optimizer=maker_and_judge, world=4, node_size=2)


def too_late(trainee: Trainee) -> None:
    """The judge's own graph is not."""
    loss = loss_on(trainee, 0)
    loss.backward(retain_graph=True)
    trainee.optimizer[1].step()
    if trainee.is_sharded:
        loss.backward()


def test_a_graph_through_changed_weights_is_refused(run_ranks: Pool) -> None:
    check_refused(run_ranks, too_late, Pair, ["zero1", "zero3"], ["judge"], make_optimizer=maker_and_judge)


def save_and_load(folder: Path, others: str) -> None:
    sw.init()
    told: dict[str, Any] = {}
    for name in ("straight", "broken", "loaded"):
        torch.manual_seed(0)
        model: nn.Module = Pair()
        strategy = others if name == "loaded" else "zero3"
        model, optimizers = sw.shard(model, matrices_and_rest(list(model.parameters())), strategy, precision="fp32")
        trainee = Trainee(model, optimizers, dist.get_world_size(), dist.get_rank())
        if name == "loaded":
            with pytest.raises(sw.CheckpointError, match=r"SGD\+AdamW"):
                sw.load(folder, model, optimizers[1])
            sw.load(folder, model, optimizers)
        first = 3 if name == "loaded" else 0
        for step in range(first, 3 if name == "broken" else 6):
            loss_on(trainee, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        if name == "broken":
            sw.save(folder, model, optimizers)
        told[name] = sw.full_state_dict(model)
    assert weight_error(told["loaded"], told["straight"]) <= TOLERANCE


@pytest.mark.quick("zero2_offload")
@pytest.mark.parametrize("others", ["zero3", "ddp", "zero2_offload"])
def test_a_checkpoint_holds_both(run_ranks: Pool, tmp_path: Path, others: str) -> None:
    run_ranks(2, save_and_load, tmp_path / "both", others)


def losses_in(precision: str) -> list[float]:
    """They share one scale; a step that overflows is left out, and the other one is not."""
    sw.init()
    torch.manual_seed(0)
    model: nn.Module = Pair()
    model, optimizers = sw.shard(model, maker_and_judge(list(model.parameters())), "zero3", precision=precision)
    makers, judges = optimizers
    trainee = Trainee(model, optimizers, dist.get_world_size(), dist.get_rank())
    if precision == "fp16":
        makers.scaler.scale.fill_(1024.0)
    with sw.accumulate(model):
        loss_on(trainee, 7).backward()
    if precision == "fp16":
        assert makers.scaler is judges.scaler
        (model(features(0, 0), "judge") * math.inf).sum().backward()
        judges.step()
        assert makers.loss_scale == 512.0
    judges.zero_grad()
    losses = []
    for step in range(3):
        loss = loss_on(trainee, step)
        loss.backward()
        losses.append(trainee.mean(loss))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_two_optimizers_in_fp16(run_ranks: Pool) -> None:
    """What the maker had of a micro-batch before the scale changed counts as much as what came after."""
    exact, half = (run_ranks(2, losses_in, precision)[0] for precision in ("fp32", "fp16"))
    assert half == pytest.approx(exact, rel=0.02)


# ---------------------------------------------------------------------------------------------------------
# refusals


def in_two(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(params, lr=0.1), torch.optim.SGD(params[3:5], lr=0.1)]


def shard_in_two(**options: Any) -> None:
    sw.init()
    model = Pair()
    sw.shard(
        model,
        in_two(list(model.parameters())) if not options else maker_and_judge(list(model.parameters())),
        "zero2",
        **options,
    )


def test_a_parameter_in_two_optimizers_is_refused_by_name(run_ranks: Pool) -> None:
    for error in run_ranks.errors(2, shard_in_two):
        assert error is not None
        assert "'maker.0.up.bias' is in two optimizers" in error


def test_early_updates_are_of_one_optimizer(run_ranks: Pool) -> None:
    for error in run_ranks.errors(2, shard_in_two, early_update=True):
        assert error is not None
        assert "several optimizers" in error


def warned() -> list[str]:
    sw.init()
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("shardwise").addHandler(handler)
    model = Pair()
    model.judge[3].weight.requires_grad_(False)
    sw.shard(model, torch.optim.SGD(list(model.parameters())[3:], lr=0.1), "zero2")
    logging.getLogger("shardwise").removeHandler(handler)
    return said


def test_parameters_that_no_optimizer_has_are_named(run_ranks: Pool) -> None:
    first, second = run_ranks(2, warned)
    assert len(first) == 1
    assert first[0].endswith("maker.0.norm.weight, maker.0.norm.bias, maker.0.up.weight")
    assert second == []


def built_after() -> None:
    sw.init()
    for strategy in ("ddp", "zero3"):
        model: nn.Module = Pair()
        model, _ = sw.shard(model, None, strategy, precision="fp32")
        late = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(features(0, 0)).sum().backward()
        with pytest.raises(sw.StateError, match=r"that sw\.shard returned"):
            late.step()


def test_an_optimizer_that_was_built_afterwards(run_ranks: Pool) -> None:
    run_ranks(2, built_after)


# ---------------------------------------------------------------------------------------------------------
# groups that join


def few(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params[2:], lr=1e-2, eps=1e-4)


def join(trainee: Trainee) -> list[float]:
    found = []
    for step in range(4):
        loss = loss_on(trainee, step)
        loss.backward()
        found.append(trainee.mean(loss))
        if step == 1:
            trainee.optimizer.add_param_group({"params": list(trainee.model.parameters())[:2], "lr": 0.05})
        trainee.optimizer.step()
        trainee.model.zero_grad()
    assert [group["lr"] for group in trainee.optimizer.param_groups] == [1e-2, 0.05]
    return found


@pytest.mark.parametrize("strategies", EACH, ids=str)
def test_parameters_join_an_optimizer(run_ranks: Pool, strategies: list[Any]) -> None:
    check(run_ranks, join, Pair, strategies, make_optimizer=few)


def wrong_ones() -> list[str]:
    sw.init()
    model: nn.Module = Pair()
    model.judge[3].requires_grad_(False)
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(params[:3], lr=0.1), torch.optim.SGD(params[4:6], lr=0.1)]
    model, (first, second) = sw.shard(model, optimizers, "zero2", precision="fp32")
    said = []
    now = list(model.parameters())
    for optimizer, given in ((first, nn.Parameter(torch.ones(3))), (first, now[0]), (first, now[-1]), (second, now[3])):
        with pytest.raises(sw.ConfigurationError) as caught:
            optimizer.add_param_group({"params": [given]})
        said.append(str(caught.value))
        assert len(optimizer.param_groups) == 1
    return said


def test_parameters_that_cannot_join(run_ranks: Pool) -> None:
    for foreign, known, frozen, others in run_ranks(2, wrong_ones):
        assert "not a parameter of the sharded model" in foreign
        assert "'maker.0.norm.weight' is in a group already" in known
        assert "frozen" in frozen
        assert "optimizer 0 of the list" in others
