"""Linear layers write their weight gradient where the reduction reads it, and nobody can tell but by the clock."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.unit.gradient import Gradient
from tests.harness import Pool

HIDDEN = 24


class Block(nn.Module):
    """Weights used once, twice, by hand, with and without bias, on rows and on batches of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.wide = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.narrow = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.twice = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(self.wide(self.norm(x)).relu())
        x = self.twice(self.twice(x))
        return x + F.linear(x, self.twice.weight) + self.twice(x.mean(1)).unsqueeze(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> Tensor:
    return torch.randn(4, 5, HIDDEN, generator=torch.Generator().manual_seed(step))


def counted(function: Callable[[], object]) -> int:
    """How many gradients were written directly."""
    calls = []
    original = Gradient.put

    def put(self: Gradient, *args: Any) -> None:
        calls.append(args[0])
        original(self, *args)

    Gradient.put = put  # type: ignore[method-assign]
    try:
        function()
    finally:
        Gradient.put = original  # type: ignore[method-assign]
    return len(calls)


def train(strategy: str, num_micro: int, compiled: bool = False) -> tuple[dict[str, Tensor], int]:
    sw.init()
    rank = torch.distributed.get_rank()
    model = build()
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.05), strategy, precision="fp32")

    def steps() -> None:
        for step in range(3):
            for index, part in enumerate(batch(step).chunk(2)[rank].chunk(num_micro)):
                if index < num_micro - 1:
                    with sw.accumulate(model):
                        (model(part).square().mean() / num_micro).backward()
                else:
                    (model(part).square().mean() / num_micro).backward()
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings():
        # The compiler itself asks whether a block's input, which is no leaf, has a gradient.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        num_direct = counted(steps)
    return sw.full_state_dict(model), num_direct


def train_alone() -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.quick("ddp-1", "zero2-2", "zero3-2")
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_direct_gradients_are_the_gradients(run_ranks: Pool, strategy: str, num_micro: int) -> None:
    alone = train_alone()
    weights, num_direct = run_ranks(2, train, strategy, num_micro)[0]
    # In each of three blocks: wide, narrow, and twice three times; its use by hand goes the ordinary way.
    assert num_direct == 3 * num_micro * 3 * 5
    for name, weight in alone.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def test_compiled_blocks_take_the_ordinary_way(run_ranks: Pool) -> None:
    alone = train_alone()
    weights, num_direct = run_ranks(2, train, "zero3", 1, compiled=True)[0]
    assert num_direct == 0
    for name, weight in alone.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def other_backwards() -> dict[str, Any]:
    """Backwards that do not train leave the gradients alone; a backward of a backward gets what it needs."""
    sw.init()
    alone, model = build(), build()
    plain = torch.optim.SGD(alone.parameters(), lr=0.05)
    model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.05), "ddp", precision="fp32")
    x = batch(0).requires_grad_()
    found: dict[str, Any] = {}

    def input_gradient(model: nn.Module, **options: bool) -> Tensor:
        return torch.autograd.grad(model(x).square().mean(), x, **options)[0]

    found["direct for inputs"] = counted(lambda: found.update(input=input_gradient(model)))
    found["expected input"] = input_gradient(alone)
    for trained, stepper in ((model, optimizer), (alone, plain)):
        input_gradient(trained, create_graph=True).square().sum().backward()
        stepper.step()
        stepper.zero_grad()
    found["penalised"], found["expected penalised"] = sw.full_state_dict(model), dict(alone.state_dict())

    def autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x).square().mean().backward()

    found["direct under autocast"] = counted(autocast)
    return found


def test_other_backwards(run_ranks: Pool) -> None:
    found = run_ranks(1, other_backwards)[0]
    torch.testing.assert_close(found["input"], found["expected input"])
    for name, weight in found["expected penalised"].items():
        torch.testing.assert_close(found["penalised"][name], weight, rtol=1e-5, atol=1e-6)
    assert found["direct for inputs"] == 0
    assert found["direct under autocast"] == 0


class Odd(nn.Module):
    """Uses of linear layers that a custom function could spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(HIDDEN, HIDDEN)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))
        self.pruned = nn.Linear(HIDDEN, HIDDEN)
        nn.utils.prune.l1_unstructured(self.pruned, "bias", amount=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(input=x).relu_()  # changed in place
        x = self.pruned(self.normed(x))
        return x + self.plain(x[0, 0])


def train_odd(is_sharded: bool) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = Odd()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if is_sharded:
        sw.init()
        model, optimizer = sw.shard(model, optimizer, "zero3", precision="fp32", units=["Odd"])
    losses = []
    for step in range(3):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_odd_uses_of_linear_layers(run_ranks: Pool) -> None:
    assert run_ranks(1, train_odd, True)[0] == pytest.approx(train_odd(False), rel=1e-6)


def gradient_of_the_weight_itself() -> bool:
    """Asked for inside the forward, where the whole weight is at hand."""
    sw.init()
    model, _ = sw.shard(build(), None, "ddp", precision="fp32")
    found = {}
    block = model.blocks[2]

    def ask(module: nn.Module, args: Any, output: Tensor) -> None:
        found["weight"] = torch.autograd.grad(output.square().mean(), module.narrow.weight, retain_graph=True)[0]

    handle = block.register_forward_hook(ask, prepend=True)
    model(batch(0))
    handle.remove()
    alone = build()
    hidden = alone.blocks[1](alone.blocks[0](batch(0)))
    expected = torch.autograd.grad(alone.blocks[2](hidden).square().mean(), alone.blocks[2].narrow.weight)[0]
    return torch.allclose(found["weight"], expected, rtol=1e-5)


def test_the_gradient_itself_can_be_asked_for(run_ranks: Pool) -> None:
    assert run_ranks(1, gradient_of_the_weight_itself) == [True]


def hook_on_a_weight() -> tuple[bool, int]:
    """A hook that a forward puts on its own weight sees the gradient."""
    sw.init()
    model, _ = sw.shard(build(), None, "ddp", precision="fp32")
    seen: list[Tensor | None] = []

    def watch(module: nn.Module, args: Any) -> None:
        module.weight.register_hook(lambda grad: seen.append(None if grad is None else grad.clone()))

    handle = model.blocks[1].narrow.register_forward_pre_hook(watch)
    model(batch(0)).square().mean().backward()
    handle.remove()
    alone = build()
    alone(batch(0)).square().mean().backward()
    expected = alone.blocks[1].narrow.weight.grad
    return seen[0] is not None and expected is not None and torch.allclose(seen[0], expected, rtol=1e-4), len(seen)


def test_a_hook_on_a_weight_sees_its_gradient(run_ranks: Pool) -> None:
    assert run_ranks(1, hook_on_a_weight) == [(True, 1)]
