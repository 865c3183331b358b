"""The Parameter objects of before `sw.shard` stay the user's: what is done with them is right, or refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.harness import Pool
from tests.support.trainee import LAYOUTS, NODES, Trainee, check, check_refused, features
from tests.support.training import adamw

SPLIT = ["zero1", "zero2", "shard_grad_op", "zero3"]
EVERYWHERE = [*LAYOUTS, "zero3_offload", "zero2_offload"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 37)
        self.down = nn.Linear(37, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


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


# ---------------------------------------------------------------------------------------------------------
# the same objects


def same_objects(strategy: str) -> bool:
    sw.init()
    model = Stack()
    before = dict(model.named_parameters())
    given = {name: (tuple(p.shape), p.numel(), p.ndim, p.device) for name, p in before.items()}
    optimizer = adamw(list(model.parameters()))
    groups = [list(group["params"]) for group in optimizer.param_groups]
    before["head.weight"].note = "mine"
    model, sharded = sw.shard(model, optimizer, strategy, precision="bf16")
    for step in range(2):
        model(features(step, 0)).float().square().mean().backward()
        sharded.step()
        sharded.zero_grad()
        now = dict(model.named_parameters())
        assert all(now[name] is before[name] for name in before)
        assert {name: (tuple(p.shape), p.numel(), p.ndim, p.device) for name, p in now.items()} == given
        assert {p.dtype for p in now.values()} == {torch.bfloat16}
        for mine, group in zip(groups, sharded.param_groups, strict=True):
            assert all(a is b for a, b in zip(mine, group["params"], strict=True))
        assert now["head.weight"].note == "mine"
        assert "head.weight" in repr(now["head.weight"])
        assert {now["head.weight"]: 1}[before["head.weight"]] == 1
        assert set(sharded.state) <= set(before.values())
    return True


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "zero3_offload"])
def test_parameters_are_the_objects_of_before(run_ranks: Pool, strategy: str) -> None:
    assert all(run_ranks(2, same_objects, strategy))


# ---------------------------------------------------------------------------------------------------------
# elementwise changes between steps


def decayed_by_hand(trainee: Trainee) -> list[float]:
    losses = []
    params = list(trainee.model.parameters())
    for step in range(4):
        losses.extend(train(trainee, 1, first=step))
        with torch.no_grad():
            for param in params:
                param.mul_(0.9)
                param.add_(torch.ones_like(param), alpha=0.01)
                param.copy_(param * 1.1)
        for param in params:
            param.data.clamp_(-0.2, 0.2)
            param.data = param.data * 0.99
            param.detach().add_(0.001)
        torch._foreach_mul_([param.detach() for param in params], 1.01)
    return losses


@pytest.mark.slow
def test_elementwise_changes_are_changes_of_the_weights(run_ranks: Pool) -> None:
    check(run_ranks, decayed_by_hand, Stack, EVERYWHERE)
    check(run_ranks, decayed_by_hand, Stack, NODES, world=4, node_size=2)


def set_from_vector(trainee: Trainee) -> list[float]:
    losses = train(trainee, 1)
    params = list(trainee.model.parameters())
    size = sum(param.numel() for param in params)
    vector = torch.linspace(-0.1, 0.1, size)
    nn.utils.vector_to_parameters(vector, params)
    return losses + train(trainee, 2, first=1)


def test_a_vector_becomes_the_parameters(run_ranks: Pool) -> None:
    check(run_ranks, set_from_vector, Stack, EVERYWHERE)


def moving_average(trainee: Trainee) -> list[float]:
    """A momentum copy that is sharded like the model, and used after it."""
    torch.manual_seed(3)
    other = Stack()
    other.requires_grad_(False)
    if trainee.is_sharded:
        other, _ = sw.shard(other.requires_grad_(True), None, MOVING["strategy"], precision="fp32")
        other.requires_grad_(False)
    values = []
    for step in range(3):
        values += train(trainee, 1, first=step)
        with torch.no_grad():
            for mine, theirs in zip(other.parameters(), trainee.model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
                mine.lerp_(theirs, 0.05)
            values.append(trainee.mean(trainee.share(lambda rank: other(features(9, rank)).square().mean())))
    return values


MOVING: dict[str, Any] = {}


def moving_average_under(trainee: Trainee) -> list[float]:
    MOVING["strategy"] = "zero3" if trainee.is_sharded else ""
    return moving_average(trainee)


def moving_average_whole(trainee: Trainee) -> list[float]:
    MOVING["strategy"] = "ddp"
    return moving_average(trainee)


def test_a_moving_average_between_two_sharded_models(run_ranks: Pool) -> None:
    check(run_ranks, moving_average_under, Stack, ["zero3", "shard_grad_op", "zero1"])
    check(run_ranks, moving_average_whole, Stack, ["ddp"])


def reads_a_part(strategy: str) -> list[str]:
    sw.init()
    model = Stack()
    model, _ = sw.shard(model, adamw(list(model.parameters())), strategy, precision="fp32")
    weight = model.head.weight
    wrong = []
    tries = {
        "norm": lambda: weight.norm(2),
        "sum under no_grad": lambda: weight.detach().sum(),
        "matmul": lambda: weight @ torch.ones(16),
        "item": lambda: weight[0, 0] + 1,
        "numpy": lambda: weight.detach().numpy(),
        "tolist": lambda: [weight.data.tolist()],
        "equal": lambda: torch.equal(weight, torch.ones(16, 16)),
        "view": lambda: weight.detach().view(-1),
        "index": lambda: weight.data[0],
        "vector": lambda: nn.utils.parameters_to_vector(model.parameters()),
        "loss": lambda: weight.square().sum().backward(),
        "normal": lambda: nn.init.normal_(weight),
        "kaiming": lambda: nn.init.kaiming_uniform_(weight),
        "deepcopy": lambda: copy.deepcopy(weight),
        "into a plain tensor": lambda: torch.zeros(16, 16).add_(weight.detach()),
        "broadcast": lambda: weight.data.mul_(torch.ones(16)),
        "set_": lambda: torch.no_grad()(weight.set_)(torch.zeros(16, 16)),
        "share_memory": weight.share_memory_,
        "grad": lambda: torch.autograd.grad(model(features(0, 0)).sum(), [weight]),
        "data of another shape": lambda: setattr(weight, "data", torch.zeros(3)),
        "a new parameter": lambda: setattr(model.head, "weight", nn.Parameter(torch.zeros(16, 16))),
        "another parameter": lambda: model.head.register_parameter("more", nn.Parameter(torch.zeros(2))),
        "a new module": lambda: setattr(model, "head", nn.Linear(16, 16)),
        "another module": lambda: model.layers.append(Block()),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(model.head),
    }
    whole_is_fine = ("norm", "sum", "matmul", "item", "numpy", "tolist", "equal", "view", "index", "vector", "loss",
                     "normal", "kaiming", "into", "broadcast", "grad", "weight norm")  # fmt: skip
    for name, act in tries.items():
        if strategy == "ddp" and name.startswith(whole_is_fine):
            continue
        if strategy in ("zero1", "zero2") and name == "grad":
            continue
        try:
            act()
            wrong.append(f"{name}: nothing was raised")
        except sw.StateError:
            pass
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_what_needs_all_of_a_weight_is_refused_where_it_is_split(run_ranks: Pool, strategy: str) -> None:
    for wrong in run_ranks(2, reads_a_part, strategy):
        assert not wrong


# ---------------------------------------------------------------------------------------------------------
# freezing


def frozen_for_a_while(trainee: Trainee) -> list[float]:
    model = trainee.model
    losses = train(trainee, 2)
    model.layers[1].requires_grad_(False)
    model.head.weight.requires_grad = False
    losses += train(trainee, 2, first=2)
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    losses += train(trainee, 2, first=4)
    model.requires_grad_(True)
    return losses + train(trainee, 2, first=6)


@pytest.mark.slow
def test_parameters_are_frozen_and_thawed_after_sharding(run_ranks: Pool) -> None:
    check(run_ranks, frozen_for_a_while, Stack, EVERYWHERE)
    check(run_ranks, frozen_for_a_while, Stack, NODES, world=4, node_size=2)


def thawed_only_later(trainee: Trainee) -> None:
    trainee.model.layers[0].requires_grad_(True)


def half_frozen() -> nn.Module:
    model = Stack()
    model.layers[0].requires_grad_(False)
    return model


def test_what_was_frozen_at_first_stays_so(run_ranks: Pool) -> None:
    check_refused(run_ranks, thawed_only_later, half_frozen, LAYOUTS, ["layers.0", "sw.shard"])


# ---------------------------------------------------------------------------------------------------------
# hooks


def hooks_later(trainee: Trainee) -> list[float]:
    """They see, and may change, the local gradient."""
    seen: list[float] = []
    handle = trainee.model.layers[1].up.weight.register_hook(lambda grad: grad * 0.5)
    trainee.model.head.weight.register_post_accumulate_grad_hook(lambda param: (param.grad.mul_(2.0), None)[1])
    for param in trainee.model.parameters():
        param.register_hook(lambda grad: seen.append(float(grad.abs().sum())))
    losses = train(trainee, 2)
    handle.remove()
    losses += train(trainee, 1, first=2)
    assert len(seen) == 3 * len(list(trainee.model.parameters()))
    return losses


def hooked() -> nn.Module:
    model = Stack()
    model.head.bias.register_hook(lambda grad: grad + 0.1)
    return model


def test_gradient_hooks_run_whenever_they_were_registered(run_ranks: Pool) -> None:
    check(run_ranks, hooks_later, Stack, EVERYWHERE)
    check(run_ranks, train, hooked, EVERYWHERE)


# ---------------------------------------------------------------------------------------------------------
# weights outside their unit


class ReadsTheHead(nn.Module):
    """As fused losses do: the head is never called, its weight is read by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) + self.layers[2][0].bias
        return torch.nn.functional.linear(x, self.head.weight)


def test_a_parent_reads_the_weight_of_its_child(run_ranks: Pool) -> None:
    check(run_ranks, train, ReadsTheHead, EVERYWHERE)
    check(run_ranks, train, ReadsTheHead, NODES, world=4, node_size=2)
    check(run_ranks, train, ReadsTheHead, ["zero3", "zero2"], units=["Sequential", "Linear"])


class Scaled(nn.Module):
    """A small parameter of the model itself, used by the loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.inner = Stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def scale_in_the_loss(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(3):
        loss = trainee.share(
            lambda rank, step=step: (trainee.model(features(step, rank)) * trainee.model.scale.exp()).square().mean()
        )
        loss = loss + 0.01 * trainee.model.scale.square()
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return [*losses, float(trainee.model.scale.detach())]


@pytest.mark.slow
def test_a_small_parameter_of_the_model_is_used_by_the_loss(run_ranks: Pool) -> None:
    check(run_ranks, scale_in_the_loss, Scaled, EVERYWHERE)
    check(run_ranks, scale_in_the_loss, Scaled, NODES, world=4, node_size=2)


def penalty(trainee: Trainee) -> list[float]:
    losses = []
    params = list(trainee.model.parameters())
    for step in range(3):
        loss = loss_on(trainee, step) + 0.01 * sum(param.square().sum() for param in params)
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    before = sum(param.square().sum() for param in params)
    loss = loss_on(trainee, 5) + 0.01 * before
    loss.backward()
    trainee.step()
    (0.1 * params[0].square().sum()).backward()
    trainee.step()
    return losses


def test_a_penalty_over_parameters_is_right_or_refused(run_ranks: Pool) -> None:
    check(run_ranks, penalty, Stack, ["ddp"])
    check_refused(run_ranks, penalty, Stack, SPLIT, ["split over the ranks"])


def functional(trainee: Trainee) -> list[float]:
    """Given tensors are used; given parameters are the model's own."""
    losses = train(trainee, 1)
    own = dict(trainee.model.named_parameters())
    loss = trainee.share(
        lambda rank: torch.func.functional_call(trainee.model, own, (features(1, rank),)).square().mean()
    )
    loss.backward()
    losses.append(trainee.mean(loss))
    trainee.step()
    zeros = {name: torch.full(param.shape, 0.01) for name, param in own.items()}
    out = trainee.share(
        lambda rank: torch.func.functional_call(trainee.model, zeros, (features(2, rank),)).square().mean()
    )
    losses.append(trainee.mean(out))
    return losses + train(trainee, 1, first=3)


def test_functional_call_uses_what_it_is_given(run_ranks: Pool) -> None:
    check(run_ranks, functional, Stack, EVERYWHERE)


# ---------------------------------------------------------------------------------------------------------
# refused by sw.shard


def refusals() -> list[str]:
    sw.init()
    wrong = []

    def viewing() -> nn.Module:
        model = Stack()
        model.register_buffer("view", model.head.weight.detach()[:2])
        return model

    def overlapping() -> nn.Module:
        model = Stack()
        model.layers[0].up.weight = nn.Parameter(model.layers[1].up.weight.data)
        return model

    def complex_and_trained() -> nn.Module:
        model = Stack()
        model.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        return model

    def with_gradients() -> nn.Module:
        model = Stack()
        model(features(0, 0)).sum().backward()
        return model

    shared = Stack()
    sw.shard(shared, None, "zero3")

    def sharing() -> nn.Module:
        model = Stack()
        model.head.weight = shared.head.weight
        return model

    for build in (viewing, overlapping, complex_and_trained, with_gradients, sharing, lambda: nn.LazyLinear(4)):
        try:
            sw.shard(build(), None, "zero3")
            wrong.append(f"{build.__name__}: nothing was raised")
        except sw.ShardwiseError:
            pass
    return wrong


def test_what_cannot_be_sharded_is_refused(run_ranks: Pool) -> None:
    for wrong in run_ranks(2, refusals):
        assert not wrong


class WithIntegers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(16, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.codes.to(x.dtype))


def test_frozen_integers_stay_as_they_are(run_ranks: Pool) -> None:
    check(run_ranks, train, WithIntegers, EVERYWHERE)


# ---------------------------------------------------------------------------------------------------------
# what leaves a unit by another way than its output


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up = nn.Linear(16, 16)
        self.aux: Any = None
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.aux = (weights.mean(0) ** 2).sum()
        self.history = [weights.max()]
        return x + self.up(x).tanh() * weights[:, :1]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def auxiliary(trainee: Trainee) -> list[float]:
    """Losses that modules keep as attributes."""

    def loss_of(rank: int, step: int) -> Tensor:
        out = trainee.model(features(step, rank)).square().mean()
        return out + sum(layer.aux + 0.1 * layer.history[0] for layer in trainee.model.layers)

    losses = []
    for step in range(3):
        loss = trainee.share(lambda rank, step=step: loss_of(rank, step))
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return losses


def captured(trainee: Trainee) -> list[float]:
    """Features that a hook takes out of the middle of a unit, registered after sharding."""
    features_seen: list[Tensor] = []
    for layer in trainee.model.layers:
        layer.gate.register_forward_hook(lambda module, args, output: features_seen.append(output))

    def loss_of(rank: int, step: int) -> Tensor:
        features_seen.clear()
        out = trainee.model(features(step, rank)).square().mean()
        return out + 0.1 * sum(seen.square().mean() for seen in features_seen)

    losses = []
    for step in range(3):
        loss = trainee.share(lambda rank, step=step: loss_of(rank, step))
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return losses


def test_losses_left_on_modules_and_taken_by_hooks(run_ranks: Pool) -> None:
    check(run_ranks, auxiliary, Routed, EVERYWHERE)
    check(run_ranks, captured, Routed, EVERYWHERE)
    check(run_ranks, auxiliary, Routed, NODES, world=4, node_size=2)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(300, 16))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 16)

    def encode(self, x: Tensor) -> Tensor:
        x = x + self.position[: len(x)]
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def through_a_method(trainee: Trainee) -> list[float]:
    if trainee.is_sharded:
        sw.register_forward(trainee.model, "encode")
    losses = []
    for step in range(3):
        loss = trainee.share(lambda rank, step=step: trainee.model.encode(features(step, rank)).square().mean())
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return losses + train(trainee, 1, first=3)


def through_no_forward(trainee: Trainee) -> None:
    trainee.model.encode(features(0, 0)).square().mean().backward()
    trainee.step()


@pytest.mark.slow
def test_another_method_is_made_a_forward(run_ranks: Pool) -> None:
    check(run_ranks, through_a_method, Encoder, EVERYWHERE)
    check_refused(run_ranks, through_no_forward, Encoder, SPLIT, ["position", "register_forward"])


class Several(list[Tensor]):
    """A list of a user's own."""


def norms_of_several() -> bool:
    sw.init()
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, _ = sw.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1), "ddp", precision="fp32")
    with torch.no_grad():
        norms = torch._foreach_norm(Several(model.parameters()))
        return torch.equal(torch.stack(norms), torch.stack([param.norm() for param in model.parameters()]))


def test_lists_of_a_users_own_class_hold_parameters(run_ranks: Pool) -> None:
    assert run_ranks(2, norms_of_several) == [True, True]
