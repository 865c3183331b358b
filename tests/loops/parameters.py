"""Parameters in the loss, and parameters of unusual kinds."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, TokenNet, adam, sgd, start


@scenario(equal=ALL)
def plain(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def plain_adamw(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=adam)
    loop.train(model, optimizer, range(4))
    return model


@scenario()
def l2_penalty(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y) + 0.1 * sum(param.pow(2).sum() for param in model.parameters())

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario()
def l2_penalty_before_the_forward(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        penalty = 0.1 * sum(param.pow(2).sum() for param in model.parameters())
        return penalty + F.mse_loss(model(x), y)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario()
def l2_penalty_of_old_objects(loop: Loop) -> nn.Module:
    model = Net()
    params = list(model.parameters())
    model, optimizer = loop.shard(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y) + 0.1 * sum(param.pow(2).sum() for param in params)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario()
def l1_penalty_of_one_layer(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y) + 0.1 * model.layers[1].up.weight.abs().sum()

    loop.train(model, optimizer, loss_of=loss_of)
    return model


class Clip(nn.Module):
    """Two towers and a learnable temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Net(2), Net(2)])
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[0](x), self.layers[1](x.flip(1))


@scenario(equal=ALL)
def logit_scale_in_the_loss(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Clip())

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = model(x)
        return ((a * b).sum(1) * model.logit_scale.exp() - y.sum(1)).pow(2).mean()

    loop.train(model, optimizer, loss_of=loss_of)
    loop.check(model.logit_scale.item())
    return model


@scenario()
def logit_scale_clamped(loop: Loop) -> nn.Module:
    """CLIP's training clamps the temperature after every step."""
    model, optimizer = start(loop, Clip())

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = model(x)
        return ((a * b).sum(1) * model.logit_scale.exp() - y.sum(1)).pow(2).mean()

    def clamp(_step: int) -> None:
        with torch.no_grad():
            model.logit_scale.clamp_(0.2, 0.45)

    loop.train(model, optimizer, loss_of=loss_of, each=clamp)
    return model


@scenario()
def head_weight_used_by_the_loop(loop: Loop) -> nn.Module:
    """The loop computes logits itself, from features and the weight of the head."""
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = model(x)
        return F.mse_loss(hidden @ model.head.weight @ model.head.weight.t(), y)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario(equal=ALL)
def tied_weights(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, TokenNet(tied=True))
    for step in range(3):
        loss = loop.mean_of(lambda rank: cross_entropy(model, loop.tokens(step, rank)))  # noqa: B023
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    loop.check(model.head.weight is model.embed.weight)
    return model


def cross_entropy(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


class Quantised(nn.Module):
    """A frozen weight stored as int8, with a scale, beside a trainable one: as bitsandbytes does."""

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        base = torch.arange(64).reshape(8, 8) % 7 - 3
        self.stored = nn.Parameter(base.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        self.lora = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        stored = self.stored.real if self.stored.is_complex() else self.stored
        return x + F.linear(x, stored.float() * self.scale) * 0.1 + self.lora(x)


@scenario(equal=ALL)
def frozen_integer_parameters(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=Quantised), sgd_of_trainable)
    loop.train(model, optimizer)
    return model


class QuantisedComplex(Quantised):
    def __init__(self) -> None:
        super().__init__(torch.complex64)


@scenario(equal=ALL)
def frozen_complex_parameters(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=QuantisedComplex), sgd_of_trainable)
    loop.train(model, optimizer)
    return model


def sgd_of_trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.05)


class Int8Tensor(Tensor):
    """A tensor of floats that is stored as int8 with a scale, as torchao's are: operations see it dequantised."""

    @staticmethod
    def __new__(cls, stored: Tensor, scale: Tensor) -> "Int8Tensor":
        return Tensor._make_wrapper_subclass(cls, stored.shape, dtype=scale.dtype)

    def __init__(self, stored: Tensor, scale: Tensor) -> None:
        self.stored, self.scale = stored, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return cls(args[0].stored, args[0].scale)

        def whole(value: Any) -> Any:
            return value.stored.to(value.scale.dtype) * value.scale if isinstance(value, cls) else value

        return func(*map(whole, args), **{name: whole(value) for name, value in (kwargs or {}).items()})


class Int8Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        base = (torch.arange(64).reshape(8, 8) % 7 - 3).to(torch.int8)
        self.stored = nn.Parameter(Int8Tensor(base, torch.tensor(0.05)), requires_grad=False)
        self.lora = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.stored) + self.lora(x)


@scenario()
def frozen_parameters_of_a_tensor_subclass(loop: Loop) -> list[nn.Module]:
    model, optimizer = start(loop, Net(2, block=Int8Block), sgd_of_trainable)
    loop.train(model, optimizer)
    with loop.whole(model):
        loop.check(*(param.detach() for param in model.parameters() if param.requires_grad))
    return []


class ComplexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)


@scenario()
def trainable_complex_parameters(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=ComplexBlock))
    loop.train(model, optimizer)
    return model


class ViewBlock(nn.Module):
    """A buffer that is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("first_row", self.linear.weight.detach()[0])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.first_row


@scenario()
def buffer_that_is_a_view_of_a_parameter(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=ViewBlock))
    loop.train(model, optimizer)
    return model


class ScalarBlock(nn.Module):
    """Scalars, an empty parameter, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.nothing = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x * self.gain + self.shift) + self.nothing.sum()


@scenario(equal=ALL)
def scalars_and_empty_parameters(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=ScalarBlock))
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def non_contiguous_parameters(loop: Loop) -> nn.Module:
    model = Net()
    for layer in model.layers:
        layer.up.weight = nn.Parameter(torch.randn(8, 16).t() * 0.3)
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer)
    loop.check([layer.up.weight.shape[0] for layer in model.layers])
    return model


@scenario()
def weights_shared_by_two_sharded_models(loop: Loop) -> list[nn.Module]:
    first, second = Net(), Net()
    second.layers[0] = first.layers[0]
    first, a = loop.shard(first, sgd(first))
    second, b = loop.shard(second, torch.optim.SGD(list(second.layers[1:].parameters()), lr=0.05))
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(first(x), y) + F.mse_loss(second(x), y)
        loss.backward()
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
        loop.log(loss)
    return [first, second]


@scenario()
def one_model_sharded_twice(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    model, optimizer = loop.shard(model, optimizer)
    loop.train(model, optimizer)
    return model


@scenario()
def parameter_as_a_dtensor(loop: Loop) -> nn.Module:
    """A parameter that tensor parallelism has made a DTensor before sharding."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = Net()
    if loop.is_sharded:
        mesh = init_device_mesh("cpu", (loop.world,))
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh))
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer)
    return model
