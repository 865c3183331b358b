"""What cannot be right is refused: clearly, on every rank alike, before anything ran.

A refusal names the thing, both values that disagree, and the fix. Ranks that do not mean the same thing all hear of
it, and a rank that is gone stops the others within the timeout instead of leaving them waiting.
"""

import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.harness import Pool
from tests.support.models import IN_TREE, MODELS, tokens
from tests.support.strategies import disk_for
from tests.support.training import adamw

HIDDEN = 32


class Net(nn.Module):
    def __init__(self, hidden: int = HIDDEN, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def net(seed: int = 0, **options: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net(**options)


def shard(model: nn.Module | None = None, strategy: Any = "zero3", lr: float = 1e-3, **options: Any) -> Any:
    """`sw.shard` of a small model with AdamW, in fp32 unless told otherwise."""
    sw.init()
    model = model or net()
    return sw.shard(model, torch.optim.AdamW(model.parameters(), lr=lr), strategy, **{"precision": "fp32", **options})


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(2, HIDDEN)).square().mean()


# ---------------------------------------------------------------------------------------------------------
# the same mistake on all ranks


def complex_numbers() -> None:
    model = net()
    model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    shard(model)


def foreign_optimizer() -> None:
    sw.init()
    sw.shard(net(), torch.optim.AdamW(net().parameters()), "zero3")


def optimizer_of_older_weights() -> None:
    """The model was cast after the optimizer was built, in a way that made new parameters."""
    sw.init()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model.blocks[1] = nn.Linear(HIDDEN, HIDDEN)
    sw.shard(model, optimizer, "zero3")


def sharded_twice() -> None:
    model, _ = shard()
    shard(model)


def part_of_a_sharded_model() -> None:
    model, _ = shard()
    shard(model.blocks[0])


def around_a_sharded_model() -> None:
    model, _ = shard()
    shard(nn.Sequential(model, nn.Linear(HIDDEN, HIDDEN)))


def fully_sharded_block() -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model.blocks[1])
    shard(model)


def no_parameters() -> None:
    sw.init()
    sw.shard(nn.Sequential(nn.ReLU()), None, "zero3")


def meta_without_seed() -> None:
    with torch.device("meta"):
        model = net()
    shard(model)


def not_sharded() -> None:
    sw.init()
    with sw.accumulate(net()):
        pass


def other_backend() -> None:
    sw.init(backend="nccl")


def given(*args: Any) -> None:
    sw.init()
    sw.shard(*args)


def use_the_old_one(verb: str, *args: Any) -> None:
    sw.init()
    model = net()
    old = torch.optim.AdamW(model.parameters())
    sw.shard(model, old, "zero3", precision="fp32")
    loss_of(model).backward()
    getattr(old, verb)(*args)


# name -> (what is done on every rank, the error's type, what its message says)
MISTAKES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "unknown preset": (
        lambda: shard(strategy="zero33"),
        "ConfigurationError",
        r"unknown strategy 'zero33'; did you mean 'zero3'\?",
    ),
    "unknown preset in a mapping": (
        lambda: shard(strategy={"blocks.0": "dpp", "*": "zero3"}),
        "ConfigurationError",
        r"unknown strategy 'dpp'; did you mean 'ddp'\?",
    ),
    "pattern without a unit": (
        lambda: shard(strategy={"block.*": "ddp", "*": "zero3"}),
        "ConfigurationError",
        r"'block\.\*' matches no unit; did you mean 'blocks\.\d'\?",
    ),
    "unit without a pattern": (
        lambda: shard(strategy={"blocks.0": "ddp"}),
        "ConfigurationError",
        r"no pattern matches unit 'blocks\.1'",
    ),
    "no strategy at all": (lambda: shard(strategy=None), "ConfigurationError", r"strategy .*not NoneType"),
    "layout that contradicts itself": (
        lambda: shard(strategy=sw.Layout("world", "whole", "whole", "forward")),
        "ConfigurationError",
        r"params='world' with optimizer='whole'",
    ),
    "unknown precision": (
        lambda: shard(precision="bf61"),
        "ConfigurationError",
        r"unknown precision 'bf61'; did you mean 'bf16'\?",
    ),
    "a dtype for a precision": (
        lambda: shard(precision=torch.bfloat16),
        "ConfigurationError",
        r"precision.*torch\.bfloat16.*bf16",
    ),
    "unknown reduce_dtype": (
        lambda: shard(reduce_dtype="fp23"),
        "ConfigurationError",
        r"unknown reduce_dtype 'fp23'; did you mean 'fp32'\?",
    ),
    "reduce_dtype that is no number": (
        lambda: shard(reduce_dtype=torch.int32),
        "ConfigurationError",
        r"reduce_dtype torch\.int32",
    ),
    "unknown way of units": (
        lambda: shard(units="atuo"),
        "ConfigurationError",
        r"units='atuo'.*did you mean 'auto'\?",
    ),
    "class that the model has not": (
        lambda: shard(units=["Liner"]),
        "ConfigurationError",
        r"no module of class 'Liner'; did you mean 'Linear'\?",
    ),
    "units of no size": (lambda: shard(units=0), "ConfigurationError", r"units=0"),
    "unknown option": (lambda: shard(stratgey="zero3"), "TypeError", "stratgey"),
    "node size that does not divide": (
        lambda: shard(node_size=3),
        "ConfigurationError",
        r"a world of 2 ranks does not divide into nodes of 3: 2 = 0 x 3 \+ 2",
    ),
    "node size of zero": (lambda: shard(node_size=0), "ConfigurationError", r"a world of 2 .* nodes of 0"),
    "budget below one unit": (
        lambda: shard(memory_budget=100),
        "ConfigurationError",
        r"memory_budget=100 bytes.*'blocks\.\d' takes \d+ bytes",
    ),
    "complex numbers": (complex_numbers, "ConfigurationError", r"'phase' is trained and is torch\.complex64"),
    "foreign optimizer": (
        foreign_optimizer,
        "ConfigurationError",
        r"parameter 0 of the optimizer's group 0 \(shape \(32, 32\)\) is not a parameter of the model",
    ),
    "optimizer of older weights": (
        optimizer_of_older_weights,
        "ConfigurationError",
        r"parameter 2 of the optimizer's group 0 .*is not a parameter of the model",
    ),
    "sharded twice": (sharded_twice, "StateError", r"this Net, or a part of it, is sharded already"),
    "part of a sharded model": (
        part_of_a_sharded_model,
        "StateError",
        r"this Linear, or a part of it, is sharded already",
    ),
    "around a sharded model": (around_a_sharded_model, "StateError", r"sharded already"),
    "wrapped already": (
        lambda: shard(nn.parallel.DistributedDataParallel(net())),
        "ConfigurationError",
        r"\(it is a DistributedDataParallel\): give it the plain model",
    ),
    "sharded by torch": (fully_sharded_block, "ConfigurationError", r"\(its module 'blocks\.1' is a FSDPModule\)"),
    "no parameters": (no_parameters, "ConfigurationError", r"this Sequential has no parameters"),
    "meta without seed": (meta_without_seed, "ConfigurationError", r"meta device.*seed="),
    "not sharded": (not_sharded, "StateError", r"this Net is not sharded: call sw\.shard"),
    "the strategy in the optimizer's place": (
        lambda: given(net(), "zero3"),
        "ConfigurationError",
        r"write sw\.shard\(model, optimizer, 'zero3'\)",
    ),
    "the model in another place": (lambda: given("zero3", net()), "ConfigurationError", r"the model is a str"),
    "parameters for an optimizer": (
        lambda: given(net(), list(net().parameters()), "zero3"),
        "ConfigurationError",
        r"the optimizer is a list of Parameter",
    ),
    "an optimizer's class": (
        lambda: given(net(), torch.optim.AdamW, "zero3"),
        "ConfigurationError",
        r"the optimizer is a class AdamW",
    ),
    "a size in words": (lambda: shard(memory_budget="2GB"), "ConfigurationError", r"memory_budget='2GB': .*not a str"),
    "a class for units": (lambda: shard(units=nn.Linear), "ConfigurationError", r"units=.*a list of class names"),
    "the model in the path's place": (
        lambda: sw.save(net(), "somewhere"),  # type: ignore[arg-type]
        "ConfigurationError",
        r"not the str 'somewhere': sw\.save and sw\.load take the path first",
    ),
    "the old optimizer steps": (
        lambda: use_the_old_one("step"),
        "StateError",
        r"step the optimizer that sw\.shard returned",
    ),
    "the old optimizer clears": (
        lambda: use_the_old_one("zero_grad"),
        "StateError",
        r"zero_grad\(\) of the optimizer that sw\.shard re",
    ),
    **{
        f"{name} of the old optimizer": (
            partial(use_the_old_one, name, *args),
            "StateError",
            rf"{name}\(\) of the optimizer that was given to sw\.shard: use the one that sw\.shard returned",
        )
        for name, args in {"state_dict": (), "load_state_dict": ({},), "add_param_group": ({},)}.items()
    },
    "other backend": (other_backend, "ConfigurationError", r"backend='nccl'.*'gloo' exists already"),
}


def make_mistake(name: str) -> None:
    MISTAKES[name][0]()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_on_every_rank_alike(run_ranks: Pool, mistake: str) -> None:
    _, kind, message = MISTAKES[mistake]
    errors = run_ranks.errors(2, make_mistake, mistake, deadline=30)
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert re.match(rf"{kind}: .*{message}", errors[0], re.DOTALL), errors[0]


def test_a_node_size_must_divide_the_world(run_ranks: Pool) -> None:
    errors = run_ranks.errors(4, shard, node_size=3)
    assert all("4 = 1 x 3 + 1" in (error or "") for error in errors)


def test_before_init_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.core.mesh._device", None)
    with pytest.raises(sw.StateError, match=r"call sw\.init\(\) before sw\.shard"):
        sw.shard(net(), None, "zero3")


def refused_then_used() -> bool:
    """A model whose sharding was refused is as it was: same objects, same values, and it can be sharded then."""
    sw.init()
    model = net()
    before = dict(model.named_parameters())
    values = {name: param.detach().clone() for name, param in before.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    for options in (
        {"strategy": "zero33"},
        {"strategy": "zero3", "precision": "fp31"},
        {"strategy": "zero3", "memory_budget": 1},
        {"strategy": "zero3", "node_size": 5},
    ):
        with pytest.raises(sw.ConfigurationError):
            sw.shard(model, optimizer, **options)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], values[name]) for name in values)
    loss_of(model).backward()
    model.zero_grad()
    model, optimizer = sw.shard(model, optimizer, "zero3", precision="fp32")
    loss_of(model).backward()
    optimizer.step()
    return True


def test_a_refused_model_is_as_it_was(run_ranks: Pool) -> None:
    assert run_ranks(2, refused_then_used) == [True, True]


# ---------------------------------------------------------------------------------------------------------
# backwards that cannot be


def second_backward() -> None:
    model, _ = shard()
    loss = loss_of(model)
    loss.backward()
    loss.backward()


def backward_after_step() -> None:
    model, optimizer = shard()
    loss = loss_of(model)
    other = loss_of(model)
    other.backward()
    optimizer.step()
    loss.backward()


def sparse_gradient() -> None:
    sw.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, HIDDEN, sparse=True), nn.Linear(HIDDEN, HIDDEN))
    model, _ = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3", precision="fp32")
    model(torch.arange(4)).sum().backward()


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (second_backward, r"RuntimeError: Trying to backward through the graph a second time"),
        (backward_after_step, r"StateError: .*'blocks\.2' that ran before optimizer\.step\(\)"),
        (sparse_gradient, r"ConfigurationError: parameter '0\.weight' got a sparse gradient"),
    ],
    ids=["through a freed graph", "through older weights", "sparse"],
)
def test_a_backward_that_cannot_be(run_ranks: Pool, job: Callable[[], None], message: str) -> None:
    errors = run_ranks.errors(2, job, deadline=30)
    assert errors[0] == errors[1]
    assert re.match(message, errors[0] or "", re.DOTALL), errors[0]


def train_through_mistakes(strategy: str, with_mistakes: bool) -> dict[str, Tensor]:
    """Steps, between which (or not) things go wrong that the user catches."""
    sw.init()
    spec = MODELS[IN_TREE]
    model = spec.fresh()
    options = {"precision": "fp32", "node_size": 1, **disk_for(strategy)}
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, **options)
    for step in range(4):
        batch = tokens(step, dist.get_rank(), dist.get_world_size())
        old = spec.loss(model, batch) if with_mistakes else None
        spec.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if old is not None:
            with pytest.raises(sw.StateError, match=r"ran before optimizer\.step"):
                old.backward()
            loss = spec.loss(model, batch)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            with pytest.raises(ZeroDivisionError):
                broken_forward(spec.loss, model, batch)
            optimizer.zero_grad()
    return sw.full_state_dict(model)


def broken_forward(loss: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, batch: Tensor) -> None:
    """A forward that stops in the middle of the model."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.blocks[2].ffn.register_forward_pre_hook(fail)
    try:
        loss(model, batch)
    finally:
        handle.remove()


@pytest.mark.quick("zero2", "zero3", "zero3_nvme")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "shard_grad_op", "zero3", "hpz", "zero2_offload", "zero3_nvme"])
def test_training_goes_on_after_a_mistake(run_ranks: Pool, strategy: str) -> None:
    with_mistakes, without = (
        run_ranks(2, train_through_mistakes, strategy, wrong, deadline=60)[0] for wrong in (True, False)
    )
    assert all(torch.equal(with_mistakes[name], without[name]) for name in without)


# ---------------------------------------------------------------------------------------------------------
# agreement


def on_rank(rank: int, one: Any, other: Any) -> Any:
    return one if dist.get_rank() == rank else other


def swapped_rows(model: nn.Module) -> nn.Module:
    """The same numbers in another order."""
    with torch.no_grad():
        weight = model.blocks[1].weight
        weight.copy_(weight.flip(0))
    return model


def wider(model: nn.Module) -> nn.Module:
    model.blocks[1] = nn.Linear(HIDDEN, HIDDEN, bias=False)
    return model


def frozen(model: nn.Module) -> nn.Module:
    model.blocks[1].weight.requires_grad_(False)
    return model


def in_half(model: nn.Module) -> nn.Module:
    model.blocks[1].half()
    return model


def meta(seed: int) -> None:
    sw.init()
    with torch.device("meta"):
        model = Net()
    sw.shard(model, None, "zero3", seed=seed)


# What the last rank does differently; everyone hears the first thing that differs, and both values.
DISAGREEMENTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "seed": (
        lambda last: shard(net(seed=on_rank(last, 1, 0))),
        r"the weights of unit 'blocks\.0'.*rank 0 has .+, rank {last} has .+",
    ),
    "one weight": (
        lambda last: shard(on_rank(last, swapped_rows, lambda model: model)(net())),
        r"the weights of unit 'blocks\.1'.*rank 0 has .+, rank {last} has .+",
    ),
    "layout": (
        lambda last: shard(strategy=on_rank(last, "zero2", "zero3")),
        r"the layout of unit 'blocks\.0': rank 0 has zero3 .*, rank {last} has zero2 .*",
    ),
    "layout of one unit": (
        lambda last: shard(strategy={"blocks.2": on_rank(last, "ddp", "zero3"), "*": "zero3"}),
        r"the layout of unit 'blocks\.2': rank 0 has zero3 .*, rank {last} has ddp .*",
    ),
    "shape": (
        lambda last: shard(net(hidden=on_rank(last, 2 * HIDDEN, HIDDEN))),
        r"unit 'blocks\.0', parameter 'blocks\.0\.weight'.*\(32, 32\).*rank {last} has .*\(64, 64\)",
    ),
    "parameters of a unit": (
        lambda last: shard(on_rank(last, wider, lambda model: model)(net())),
        r"unit 'blocks\.1'",
    ),
    "number of units": (
        lambda last: shard(net(num_blocks=on_rank(last, 4, 3))),
        r"the units.*rank 0 has .*blocks\.2, rank {last} has .*blocks\.3",
    ),
    "trainability": (
        lambda last: shard(on_rank(last, frozen, lambda model: model)(net())),
        r"parameter 'blocks\.1\.weight'.*trained.*rank {last} has .*frozen",
    ),
    "dtype": (
        lambda last: shard(on_rank(last, in_half, lambda model: model)(net())),
        r"parameter 'blocks\.1\.weight'.*float32.*rank {last} has .*float16",
    ),
    "precision": (
        lambda last: shard(precision=on_rank(last, "bf16", "fp32")),
        r"the precision: rank 0 has .*float32.*, rank {last} has .*bfloat16",
    ),
    "reduce_dtype": (
        lambda last: shard(precision="bf16", reduce_dtype=on_rank(last, "bf16", "fp32")),
        r"the precision: rank 0 has .*, rank {last} has .*bfloat16",
    ),
    "ranks per node": (
        lambda last: shard(node_size=on_rank(last, dist.get_world_size() // 2, dist.get_world_size())),
        r"node_size.*rank 0 has \d, rank {last} has \d",
    ),
    "memory budget": (
        lambda last: shard(memory_budget=on_rank(last, 20_000, 10_000)),
        r"memory_budget.*rank 0 has 10000, rank {last} has 20000",
    ),
    "seed of a meta model": (
        lambda last: meta(seed=on_rank(last, 1, 0)),
        r"seed.*rank 0 has 0, rank {last} has 1",
    ),
    "units": (lambda last: shard(units=on_rank(last, 1, ["Net"])), r"the units"),
    "learning rate": (
        lambda last: shard(lr=on_rank(last, 1e-2, 1e-3)),
        r"optimizer.*rank 0 has .*0\.001.*, rank {last} has .*0\.01",
    ),
}


def disagree(name: str) -> None:
    DISAGREEMENTS[name][0](dist.get_world_size() - 1)


@pytest.mark.parametrize(
    ("world", "disagreement"),
    [*((2, name) for name in DISAGREEMENTS), *((4, name) for name in ("seed", "layout", "ranks per node"))],
)
def test_a_disagreement_is_an_error_on_every_rank(run_ranks: Pool, world: int, disagreement: str) -> None:
    errors = run_ranks.errors(world, disagree, disagreement, deadline=20)
    expected = DISAGREEMENTS[disagreement][1].replace("{last}", str(world - 1))
    assert errors == [errors[0]] * world
    assert re.match(rf"WireError: the ranks differ in .*{expected}", errors[0] or "", re.DOTALL), errors[0]


def mistake_on_last(name: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        make_mistake(name)
    else:
        shard()


@pytest.mark.parametrize(
    "mistake",
    ["unknown preset", "unknown precision", "complex numbers", "foreign optimizer", "budget below one unit"],
)
def test_one_ranks_mistake_is_every_ranks_error(run_ranks: Pool, mistake: str) -> None:
    """The others do not wait for a rank that has refused already: they hear which one it was, and why."""
    errors = run_ranks.errors(2, mistake_on_last, mistake, deadline=20)
    _, kind, message = MISTAKES[mistake]
    assert re.match(rf"{kind}: .*{message}", errors[1] or "", re.DOTALL), errors[1]
    assert re.match(rf"\w+Error: .*rank 1.*{message}", errors[0] or "", re.DOTALL), errors[0]


# ---------------------------------------------------------------------------------------------------------
# ranks that are gone

TIMEOUT_S = 3.0


def train_until(leave: str, strategy: str) -> float:
    """Three steps; in the second one, in the middle of a forward, the last rank leaves. Returns how long it waited."""
    sw.init(timeout_s=TIMEOUT_S)
    model = net()
    model, optimizer = sw.shard(model, torch.optim.AdamW(model.parameters()), strategy)
    began = time.monotonic()
    for step in range(3):
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            if leave == "dies":
                os._exit(3)
            time.sleep(2 * TIMEOUT_S)  # lives, but does not take part
            return 0.0
        began = time.monotonic()
        try:
            loss_of(model).backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        except sw.WireError:
            return time.monotonic() - began
    raise AssertionError("nobody noticed")


@pytest.mark.slow
@pytest.mark.parametrize(("leave", "strategy"), [("dies", "ddp"), ("dies", "zero3"), ("sleeps", "zero3")])
def test_a_rank_that_is_gone_stops_the_others(run_ranks: Pool, leave: str, strategy: str) -> None:
    *others, last = run_ranks.throwaway(2, train_until, leave, strategy, join_group=False, deadline=60)
    assert last.kind == ("died" if leave == "dies" else "returned")
    for other in others:
        assert other.kind == "returned", other.detail
        assert other.value < TIMEOUT_S + 2.0


def die_before_sharding() -> None:
    sw.init(timeout_s=TIMEOUT_S)
    if dist.get_rank() == 1:
        os._exit(3)
    sw.shard(net(), None, "zero3")


@pytest.mark.slow
def test_a_rank_that_never_came_stops_the_others(run_ranks: Pool) -> None:
    survivor, _ = run_ranks.throwaway(2, die_before_sharding, join_group=False, deadline=60)
    assert survivor.kind == "raised"
    assert survivor.error.startswith("WireError"), survivor.error
    assert survivor.seconds < 30
