"""What a user touches between steps either works or raises; nothing stale, freed or foreign is ever seen."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.precision import PRECISIONS
from tests.harness import Pool
from tests.support.models import MODELS, tokens
from tests.support.trainee import (
    LAYOUTS,
    NODES,
    ONE_OF_EACH,
    Block,
    Trainee,
    check,
    check_refused,
    features,
    tell_alone,
)
from tests.support.training import adamw

Weights = dict[str, Tensor]


class Stack(nn.Module):
    """Five blocks, a tie between the ends, a frozen block, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(16, 16)
        self.head.weight = self.stem.weight
        self.layers[2].requires_grad_(False)
        self.register_buffer("offset", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.offset.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded(strategy: str, precision: str = "fp32", node_size: int | None = None) -> Trainee:
    sw.init()
    torch.manual_seed(0)
    model = Stack()
    model, optimizer = sw.shard(
        model, adamw(list(model.parameters())), strategy, precision=precision, node_size=node_size
    )
    return Trainee(model, optimizer, dist.get_world_size(), dist.get_rank())


def loss_on(trainee: Trainee, step: int) -> Tensor:
    return trainee.share(lambda rank: trainee.model(features(step, rank)).float().square().mean())


def train(trainee: Trainee, num_steps: int = 2, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + num_steps):
        loss = loss_on(trainee, step)
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return losses


def assert_equal(seen: Weights, expected: Weights) -> None:
    assert list(seen) == list(expected)
    for name, value in expected.items():
        assert (seen[name].dtype, seen[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(seen[name], value), name


# ---------------------------------------------------------------------------------------------------------
# what parameters show


def shown(model: nn.Module) -> Weights:
    """This rank's part of every weight."""
    parts = {}
    for unit in engine_of(model).units:
        for state in unit.states:
            for spec, resting in zip(state.flat.params, state.resting_params, strict=True):
                parts[spec.name] = resting.detach().clone()
    return parts


def resting_after_every_phase(strategy: str, node_size: int | None) -> list[tuple[str, Weights]]:
    """What a rank holds at each point at which a user might look."""
    trainee = sharded(strategy, node_size=node_size)
    model, optimizer = trainee.model, trainee.optimizer
    found = [("sharded", shown(model))]
    for step in range(2):
        loss = loss_on(trainee, step)
        found.append((f"forward {step}", shown(model)))
        with sw.accumulate(model):
            loss.backward()
        found.append((f"accumulated {step}", shown(model)))
        loss_on(trainee, step + 10).backward()
        found.append((f"backward {step}", shown(model)))
        with torch.no_grad():
            model(features(20, 0))
        found.append((f"evaluation {step}", shown(model)))
        optimizer.step()
        found.append((f"step {step}", shown(model)))
        optimizer.zero_grad()
    return found


def alone_after_every_phase(trainee: Trainee) -> None:
    """The true weights at the same points; left on the model."""
    found = [("sharded", trainee.weights())]
    for step in range(2):
        for phase in ("forward", "accumulated", "backward", "evaluation"):
            found.append((f"{phase} {step}", trainee.weights()))
        loss_on(trainee, step).backward()
        loss_on(trainee, step + 10).backward()
        trainee.optimizer.step()
        found.append((f"step {step}", trainee.weights()))
        trainee.optimizer.zero_grad()
    trainee.model.found = found


def true_weights(world: int) -> list[tuple[str, Weights]]:
    models: list[Any] = []

    def build() -> nn.Module:
        models.append(Stack())
        return models[0]

    tell_alone(alone_after_every_phase, build, world)
    return models[0].found


@pytest.mark.quick("ddp-2-None-1", "zero2-2-None-2", "zero3-3-None-3", "hpz-4-2-4")
@pytest.mark.parametrize(
    ("strategy", "world", "node_size", "num_shares"),
    [
        ("ddp", 2, None, 1),
        ("zero1", 2, None, 2),
        ("zero2", 2, None, 2),
        ("shard_grad_op", 2, None, 2),
        ("zero3", 2, None, 2),
        ("zero3", 3, None, 3),
        ("hsdp", 4, 2, 2),
        ("hfsdp", 4, 2, 4),
        ("hpz", 4, 2, 4),
    ],
)
def test_resting_parameters_are_the_ranks_parts_of_the_true_weights(
    run_ranks: Pool, strategy: str, world: int, node_size: int | None, num_shares: int
) -> None:
    """In the order of the shards, the ranks' parts joined are the weight, at every point of a step."""
    ranks = run_ranks(world, resting_after_every_phase, strategy, node_size)
    frozen = {name for name, param in Stack().named_parameters() if not param.requires_grad}
    for point, (label, weights) in enumerate(true_weights(world)):
        for name, _ in Stack().named_parameters():
            expected = weights[name]
            parts = [rank[point][1][name] for rank in ranks]
            assert ranks[0][point][0] == label
            if sum(part.numel() for part in parts) == expected.numel() * world:
                for part in parts:  # not split
                    torch.testing.assert_close(part.view_as(expected), expected, rtol=1e-5, atol=1e-6)
                assert num_shares == 1 or name in frozen, name
                continue
            assert num_shares > 1
            copies = sum(part.numel() for part in parts) // expected.numel()
            assert copies == world // num_shares or (name in frozen and copies == 2)
            for group in _shares(parts, world // copies, strategy, node_size):
                joined = torch.cat([part.flatten() for part in group])
                torch.testing.assert_close(joined, expected.flatten(), rtol=1e-5, atol=1e-6, msg=f"{label} {name}")


def _shares(parts: list[Tensor], num_shares: int, strategy: str, node_size: int | None) -> list[list[Tensor]]:
    """The parts that make up one copy, in the order of the elements: first along the node, then across nodes."""
    world = len(parts)
    if node_size is None or num_shares == world:
        size = node_size or world
        order = [node * size + place for place in range(size) for node in range(world // size)]
        return [[parts[rank] for rank in order]]
    return [parts[first : first + node_size] for first in range(0, world, node_size)]


def same_objects() -> bool:
    """Parameter objects live as long as the model: what a user keeps a hold of stays right."""
    for strategy in LAYOUTS:
        trainee = sharded(strategy)
        kept = dict(trainee.model.named_parameters())
        groups = [param for group in trainee.optimizer.param_groups for param in group["params"]]
        train(trainee)
        now = dict(trainee.model.named_parameters())
        assert list(kept) == list(now)
        assert all(kept[name] is now[name] for name in kept)
        assert all(any(param is other for other in now.values()) for param in groups)
    return True


def test_parameters_are_the_same_objects_over_steps(run_ranks: Pool) -> None:
    assert all(run_ranks(2, same_objects))


def look_around(strategy: str) -> dict[str, Any]:
    trainee = sharded(strategy)
    given = Stack()
    train(trainee)
    model = trainee.model
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in given.named_parameters()]
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [
        name for name, _ in given.named_parameters(remove_duplicate=False)
    ]
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in given.parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in given.named_modules()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in given.named_buffers()]
    assert model.head.weight is model.stem.weight
    return {"repr": repr(model), "describe": sw.describe(model), "traffic": str(sw.traffic(model))}


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_names_modules_and_repr_are_the_models_own(run_ranks: Pool, strategy: str) -> None:
    for seen in run_ranks(2, look_around, strategy):
        assert seen["repr"] == repr(Stack())
        assert strategy in seen["describe"]
        assert seen["traffic"]


# ---------------------------------------------------------------------------------------------------------
# what is refused


def saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a part": lambda model: model.layers[1].state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(Stack().state_dict()),
    "load_state_dict of a part": lambda model: model.layers[1].load_state_dict(Block().state_dict()),
    "to a dtype": lambda model: model.to(torch.bfloat16),
    "to a device": lambda model: model.to("meta"),
    "half": lambda model: model.half(),
    "double of a part": lambda model: model.layers[0].double(),
    "share_memory": lambda model: model.share_memory(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "deepcopy of a part": lambda model: copy.deepcopy(model.layers[3]),
    "deepcopy in a container": lambda model: copy.deepcopy({"model": model}),
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "pickle of a part": lambda model: pickle.dumps(model.layers[3]),
    "torch.save": saved,
    "torch.save in a container": lambda model: saved({"model": model}),
    "sharding again": lambda model: sw.shard(model, None, "ddp"),
    "sharding a part": lambda model: sw.shard(model.layers[0], None, "ddp"),
    "sharding inside another": lambda model: sw.shard(nn.Sequential(model, nn.Linear(2, 2)), None, "ddp"),
    "averaging": torch.optim.swa_utils.AveragedModel,
}


def try_refused(strategy: str) -> list[str]:
    """Those that did not raise a StateError, before training and after it."""
    trainee = sharded(strategy)
    wrong = []
    for moment in ("before", "after"):
        for name in REFUSED:
            before = shown(trainee.model)
            try:
                REFUSED[name](trainee.model)
            except sw.StateError as error:
                if len(str(error)) < 20:
                    wrong.append(f"{moment}: {name}: says only {error}")
            except Exception as error:  # noqa: BLE001
                wrong.append(f"{moment}: {name}: {type(error).__name__}: {error}")
            else:
                wrong.append(f"{moment}: {name}: nothing was raised")
            after = shown(trainee.model)
            if list(after) != list(before) or not all(torch.equal(after[key], before[key]) for key in before):
                wrong.append(f"{moment}: {name}: changed the parameters")
        train(trainee, 1)
    return wrong


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_what_would_take_shards_for_weights_is_refused(run_ranks: Pool, strategy: str) -> None:
    for wrong in run_ranks(2, try_refused, strategy):
        assert not wrong


def looks_for_gradients(trainee: Trainee) -> list[float]:
    """Gradients are not in `param.grad`: torch's own clipping must not find nothing to do there and say nothing."""
    losses = train(trainee, 1)
    loss = loss_on(trainee, 1)
    loss.backward()
    if trainee.is_sharded:
        held = [param for param in trainee.model.parameters() if param.requires_grad and param.numel()]
        with pytest.raises(sw.StateError, match=r"optimizer\.clip_grad_norm"):
            nn.utils.clip_grad_norm_(held, 1.0)
        with pytest.raises(sw.StateError, match=r"optimizer\.clip_grad_norm"):
            nn.utils.clip_grad_value_(held, 1.0)
        with pytest.raises(sw.StateError, match="lie in flat shards"):
            held[0].grad.norm()
    losses.append(trainee.clip(0.5))
    trainee.step()
    return losses + train(trainee, 2, first=2)


def test_gradients_looked_for_in_the_parameters_are_refused(run_ranks: Pool) -> None:
    check(run_ranks, looks_for_gradients, Stack, ONE_OF_EACH)


def gradients_cleared_by_hand(trainee: Trainee) -> list[float]:
    losses = train(trainee, 1)
    loss_on(trainee, 1).backward()
    for param in trainee.model.parameters():
        param.grad = None
    trainee.optimizer.step()
    return losses


def test_gradients_cleared_by_hand_are_refused_at_the_step(run_ranks: Pool) -> None:
    check_refused(run_ranks, gradients_cleared_by_hand, Stack, LAYOUTS, ["zero_grad"])


def touched(trainee: Trainee) -> list[float]:
    """Everything a user may try between steps, none of which may disturb the training."""
    losses = train(trainee)
    if trainee.is_sharded:
        model = trainee.model
        for call in REFUSED.values():
            with pytest.raises(sw.StateError):
                call(model)
        repr(model)
        sum(param.numel() for param in model.parameters())
        repr(list(model.parameters()))
        sw.full_state_dict(model)
        with sw.whole(model):
            {name: value.clone() for name, value in model.state_dict().items()}
        model.train()
        model.apply(lambda module: None)
        sw.describe(model)
    return losses + train(trainee, 3, first=2)


def test_touching_does_not_disturb(run_ranks: Pool) -> None:
    check(run_ranks, touched, Stack, ONE_OF_EACH)


@pytest.mark.slow
def test_touching_does_not_disturb_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, touched, Stack, NODES, world=4, node_size=2)


def clamped(trainee: Trainee) -> list[float]:
    """In-place changes of resting parameters are changes of the weights, for every unit and at once."""
    losses = []
    for step in range(4):
        losses.extend(train(trainee, 1, first=step))
        with torch.no_grad():
            for param in trainee.model.parameters():
                param.clamp_(-0.1, 0.1)
    return losses


def test_parameters_changed_in_place_are_changed(run_ranks: Pool) -> None:
    check(run_ranks, clamped, Stack, ONE_OF_EACH)


# ---------------------------------------------------------------------------------------------------------
# whole weights


def read_whole(strategy: str, precision: str, node_size: int | None) -> dict[str, Weights]:
    """The weights by every way of reading them."""
    trainee = sharded(strategy, precision, node_size)
    model = trainee.model
    train(trainee)
    found = {"full_state_dict": sw.full_state_dict(model)}
    parts = {name: param.shape for name, param in model.named_parameters()}
    with sw.whole(model):
        found["state_dict"] = {name: value.clone() for name, value in model.state_dict().items()}
        found["parameters"] = {name: value.detach().clone() for name, value in model.named_parameters()}
        assert model.head.weight is model.stem.weight
        assert model.layers[0].up.weight.shape == (37, 16)
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in Stack().parameters()]
    with sw.whole(model.layers[1]):
        found["part"] = {name: value.clone() for name, value in model.layers[1].state_dict().items()}
        others = {name: param.shape for name, param in model.named_parameters() if "layers.1." not in name}
        assert all(parts[name] == shape for name, shape in others.items())
    with sw.whole(model.layers[1].up):
        found["smaller part"] = {name: value.clone() for name, value in model.layers[1].up.state_dict().items()}
    with sw.whole(model.head):
        found["tied part"] = {name: value.clone() for name, value in model.head.state_dict().items()}
    assert parts == {name: param.shape for name, param in model.named_parameters()}
    only_first = sw.full_state_dict(model, rank0_only=True)
    assert bool(only_first) == (dist.get_rank() == 0)
    if only_first:
        assert_equal(only_first, found["full_state_dict"])
    train(trainee)
    return found


@pytest.mark.quick("ddp-*", "zero2-*", "zero3-*", "hpz-*")
@pytest.mark.parametrize(
    ("strategy", "world", "node_size"),
    [*((name, 2, None) for name in LAYOUTS), *((name, 4, 2) for name in NODES)],
)
def test_reading_whole_weights(run_ranks: Pool, strategy: str, world: int, node_size: int | None) -> None:
    expected = tell_alone(train, Stack, world).weights
    for found in run_ranks(world, read_whole, strategy, "fp32", node_size):
        seen = found["full_state_dict"]
        assert list(seen) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-6)
        assert_equal(found["state_dict"], seen)
        assert_equal(found["parameters"], {name: seen[name] for name, _ in Stack().named_parameters()})
        for part, prefix in (
            ("part", "layers.1."),
            ("smaller part", "layers.1.up."),
            ("tied part", "head."),
        ):
            inside = {name.removeprefix(prefix): seen[name] for name in seen if name.startswith(prefix)}
            assert_equal(found[part], inside)


@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
def test_whole_weights_are_the_masters_in_their_precision(run_ranks: Pool, precision: str) -> None:
    found = run_ranks(2, read_whole, "zero3", precision, None)[0]
    master = torch.float32 if precision == "bf16" else torch.bfloat16
    for name, param in Stack().named_parameters():
        kept = master if param.requires_grad else torch.float32
        assert found["parameters"][name].dtype == kept
        assert found["full_state_dict"][name].dtype == torch.float32
        assert torch.equal(found["parameters"][name].float(), found["full_state_dict"][name])


def write_whole(strategy: str, node_size: int | None) -> tuple[Weights, Weights, float, float]:
    """Rank 0 alone writes: all of the model, a part, and a tied weight; then a forward with them."""
    trainee = sharded(strategy, node_size=node_size)
    model, rank = trainee.model, trainee.rank
    train(trainee)
    expected = sw.full_state_dict(model)
    with sw.whole(model, write=True):
        for name, param in model.named_parameters():
            if rank == 0:
                nn.init.constant_(param, 0.01 * len(name))
            else:
                nn.init.constant_(param, 99.0)  # what others leave there counts for nothing
    for name, param in Stack().named_parameters():
        expected[name] = torch.full_like(param, 0.01 * len(name))
    with sw.whole(model.layers[3].norm, write=True), torch.no_grad():
        if rank == 0:
            model.layers[3].norm.weight.copy_(torch.arange(16.0))
    expected["layers.3.norm.weight"] = torch.arange(16.0)
    with sw.whole(model.head, write=True), torch.no_grad():
        if rank == 0:
            model.head.weight.fill_(0.125)
    expected["head.weight"] = expected["stem.weight"] = torch.full((16, 16), 0.125)
    return _with_forward(trainee, expected)


def _with_forward(trainee: Trainee, expected: Weights) -> tuple[Weights, Weights, float, float]:
    alone = Stack()
    expected["head.weight"] = expected["stem.weight"]
    alone.load_state_dict(expected)
    with torch.no_grad():
        seen_loss = float(trainee.model(features(3, 0)).square().mean())
        loss = float(alone(features(3, 0)).square().mean())
    found = sw.full_state_dict(trainee.model)
    train(trainee)
    return found, expected, seen_loss, loss


@pytest.mark.quick("ddp-*", "zero2-*", "zero3-*", "hpz-*")
@pytest.mark.parametrize(
    ("strategy", "world", "node_size"),
    [*((name, 2, None) for name in LAYOUTS), *((name, 4, 2) for name in NODES)],
)
def test_writing_whole_weights_on_rank_0(run_ranks: Pool, strategy: str, world: int, node_size: int | None) -> None:
    for seen, expected, seen_loss, loss in run_ranks(world, write_whole, strategy, node_size):
        assert_equal(seen, expected)
        assert seen_loss == pytest.approx(loss, rel=1e-5)


def write_otherwise(how: str) -> bool:
    """Ways of writing that replace parameters or go behind autograd's back: they work, or they raise."""
    trainee = sharded("zero3")
    model = trainee.model
    before = sw.full_state_dict(model)
    try:
        with sw.whole(model, write=True):
            if how == "load_state_dict":
                model.load_state_dict({name: value + 1 for name, value in before.items()})
            elif how == "assigned state dict":
                model.load_state_dict({name: value + 1 for name, value in before.items()}, assign=True)
            elif how == "data":
                for name, value in model.named_parameters():
                    value.data.copy_(before[name] + 1)
                model.offset += 1
            elif how == "assigned data":
                for name, value in model.named_parameters():
                    value.data = before[name] + 1
                model.offset += 1
            elif how == "assigned parameters":
                for path, module in model.named_modules():
                    for name in list(module._parameters):
                        full = f"{path}.{name}" if path else name
                        if module._parameters[name] is not None:
                            setattr(module, name, nn.Parameter(before[full] + 1))
                model.offset += 1
    except sw.StateError:
        assert how.startswith("assigned"), how
        assert_equal(sw.full_state_dict(model), before)
        return True
    after = sw.full_state_dict(model)
    return all(torch.equal(after[name], before[name] + 1) for name in before)


@pytest.mark.parametrize(
    "how", ["load_state_dict", "assigned state dict", "data", "assigned data", "assigned parameters"]
)
def test_other_ways_of_writing_are_right_or_refused(run_ranks: Pool, how: str) -> None:
    assert all(run_ranks(2, write_otherwise, how))


def assign(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(37, 16))


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda module: module.weight.add_(1.0),
    "init": lambda module: nn.init.zeros_(module.weight),
    "data": lambda module: module.weight.data.add_(1.0),
    "assignment": assign,
}


def write_while_reading(strategy: str, how: str) -> bool:
    def read() -> None:
        with sw.whole(model), torch.no_grad():
            WRITES[how](model.layers[1].up)

    trainee = sharded(strategy)
    model = trainee.model
    before = sw.full_state_dict(model)
    with pytest.raises(sw.StateError, match="write=True"):
        read()
    assert_equal(sw.full_state_dict(model), before)
    train(trainee)
    return True


@pytest.mark.parametrize("how", WRITES)
def test_writing_without_saying_so_is_refused_and_changes_nothing(run_ranks: Pool, how: str) -> None:
    for strategy in ("ddp", "zero3"):
        assert all(run_ranks(2, write_while_reading, strategy, how))


def whole_inside_whole(strategy: str) -> bool:
    """What is done inside the context works or is refused, and the context goes on."""
    trainee = sharded(strategy)
    model = trainee.model
    train(trainee)
    weights = sw.full_state_dict(model)
    shapes = {name: value.shape for name, value in Stack().named_parameters()}

    def are_whole() -> bool:
        return all(param.shape == shapes[name] for name, param in model.named_parameters())

    with sw.whole(model):
        with contextlib.suppress(sw.StateError), sw.whole(model.layers[1]):
            assert are_whole()
        assert are_whole(), "an inner whole() ended the outer one"
        with contextlib.suppress(sw.StateError), torch.no_grad():
            model(features(0, 0))
        assert are_whole(), "a forward ended whole()"
        with contextlib.suppress(sw.StateError):
            assert_equal(sw.full_state_dict(model), weights)
        assert are_whole(), "full_state_dict ended whole()"
    assert_equal(sw.full_state_dict(model), weights)
    train(trainee)
    return True


def test_what_is_done_inside_whole_does_not_end_it(run_ranks: Pool) -> None:
    for strategy in ("ddp", "zero2", "zero3"):
        assert all(run_ranks(2, whole_inside_whole, strategy))


def whole_at_odd_moments(strategy: str) -> bool:
    """Left by an error; between forward and backward."""
    trainee = sharded(strategy)
    model = trainee.model
    train(trainee)
    weights = sw.full_state_dict(model)

    def fail() -> None:
        with sw.whole(model, write=True), torch.no_grad():
            model.layers[0].up.weight.zero_()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert_equal(sw.full_state_dict(model), weights)

    loss = loss_on(trainee, 7)
    with sw.whole(model):
        pass
    loss.backward()  # reading does not make the forward old
    trainee.step()
    loss = loss_on(trainee, 8)
    with sw.whole(model, write=True), torch.no_grad():
        model.stem.weight.mul_(2)
    with pytest.raises(sw.StateError):
        loss.backward()
    trainee.optimizer.zero_grad()
    train(trainee)
    return True


def test_whole_weights_at_odd_moments(run_ranks: Pool) -> None:
    for strategy in ("ddp", "zero2", "zero3"):
        assert all(run_ranks(2, whole_at_odd_moments, strategy))


def whole_of_something_else() -> list[str]:
    sw.init()
    found = []
    for call in (
        lambda: sw.whole(Stack()).__enter__(),
        lambda: sw.full_state_dict(Stack()),
        lambda: sw.load_full_state_dict(Stack(), {}),
        lambda: sw.traffic(Stack()),
        lambda: sw.describe(Stack()),
        lambda: sw.accumulate(Stack()).__enter__(),
    ):
        with pytest.raises(sw.StateError, match=r"sw\.shard") as caught:
            call()
        found.append(str(caught.value))
    return found


def test_a_model_that_is_not_sharded_is_refused(run_ranks: Pool) -> None:
    assert len(run_ranks(2, whole_of_something_else)[0]) == 6


def test_whole_memory_is_the_users(run_ranks: Pool) -> None:
    """A state dict taken is a copy: training on does not change it, and changing it does not change the model."""
    assert all(run_ranks(2, keep_state_dict, name) for name in ("ddp", "zero3"))


def keep_state_dict(strategy: str) -> bool:
    trainee = sharded(strategy)
    train(trainee)
    first = sw.full_state_dict(trainee.model)
    kept = {name: value.clone() for name, value in first.items()}
    train(trainee, 1, first=5)
    assert_equal(first, kept)
    second = sw.full_state_dict(trainee.model)
    for value in first.values():
        value.zero_()
    assert_equal(sw.full_state_dict(trainee.model), second)
    # One tensor kept does not keep a whole unit alive.
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in second.values())
    return True


# ---------------------------------------------------------------------------------------------------------
# the state dict of every model


def keys_shapes_dtypes(name: str, precision: str) -> dict[tuple[str, torch.dtype], list[Any]]:
    sw.init()
    found = {}
    for strategy in ("ddp", "zero3"):
        for dtype in (torch.float32, torch.bfloat16):
            model = MODELS[name].fresh().to(dtype)
            model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, precision=precision)
            MODELS[name].loss(model, tokens(0, dist.get_rank(), 2)).backward()
            optimizer.step()
            found[strategy, dtype] = described(sw.full_state_dict(model))
    return found


def described(state: Weights) -> list[Any]:
    return [(key, value.shape, value.dtype, value.device.type, value.requires_grad) for key, value in state.items()]


@pytest.mark.quick("fp16-*", "pure-bf16-in-tree tied", "fp32-in-tree")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_the_state_dict_has_the_models_own_keys_shapes_and_dtypes(run_ranks: Pool, name: str, precision: str) -> None:
    for (_, dtype), seen in run_ranks(2, keys_shapes_dtypes, name, precision)[0].items():
        assert seen == described(MODELS[name].fresh().to(dtype).state_dict())
