"""Methods other than `forward`, losses left on modules, and outputs of every kind."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Block, Net, adam, start

# --- methods other than forward


class Methods(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.features(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)

    def direct_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.encode(x)), y)


@scenario(equal=ALL)
def a_method_that_calls_the_model(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Methods())
    loop.train(model, optimizer, loss_of=lambda m, x, y: m.loss(x, y))
    return model


@scenario()
def a_method_that_calls_parts_of_the_model(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Methods())
    loop.train(model, optimizer, loss_of=lambda m, x, y: m.direct_loss(x, y))
    return model


@scenario()
def encode_without_saying_so(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Methods())
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m.encode(x)[:, :4], y))
    return model


@scenario(equal=ALL)
def encode_registered(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Methods())
    if loop.is_sharded:
        sw.register_forward(model, "encode")
        sw.register_forward(model, "direct_loss")
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m.encode(x)[:, :4], y))
    loop.train(model, optimizer, range(3, 5), loss_of=lambda m, x, y: m.direct_loss(x, y))
    loop.train(model, optimizer, range(5, 6))
    return model


@scenario(equal=ALL)
def a_layer_called_from_outside(loop: Loop) -> nn.Module:
    """The loop calls parts of the model itself; each is a unit."""
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m.layers[1](m.layers[0](x))[:, :4], y))
    return model


@scenario()
def root_parts_called_from_outside(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m.head(m.embed(x)), y))
    return model


@scenario()
def forward_called_by_name(loop: Loop) -> nn.Module:
    """`model.forward(x)` goes around all hooks."""
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m.forward(x), y))
    return model


@scenario()
def forward_replaced_after_sharding(loop: Loop) -> nn.Module:
    """A patch of `forward`, as Liger and unsloth do it."""
    model, optimizer = start(loop)
    old = model.layers[1].forward
    model.layers[1].forward = lambda x: old(x) * 2
    loop.train(model, optimizer)
    return model


# --- auxiliary losses and outputs


class AuxBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        self.aux_loss = hidden.pow(2).mean() + 0.01 * self.up.weight.pow(2).sum()
        return x + self.down(hidden)


@scenario()
def auxiliary_losses_left_on_modules(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=AuxBlock))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y) + 0.1 * sum(layer.aux_loss for layer in model.layers)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario()
def auxiliary_losses_alone(loop: Loop) -> nn.Module:
    """The backward begins in the middle of the model."""
    model, optimizer = start(loop, Net(block=AuxBlock))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model(x)
        return model.layers[1].aux_loss + model.layers[2].aux_loss

    loop.train(model, optimizer, loss_of=loss_of)
    return model


class KeepingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


@scenario(equal=ALL)
def activations_left_on_modules(loop: Loop) -> nn.Module:
    """Distillation of hidden states that modules keep."""
    model, optimizer = start(loop, Net(block=KeepingBlock))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y) + sum(layer.kept.pow(2).mean() for layer in model.layers)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@dataclass
class PlainOutput:
    out: Tensor
    hidden: list[Tensor]


class TupleOutput(NamedTuple):
    out: Tensor
    hidden: tuple[Tensor, ...]


class ObjectOutput:
    def __init__(self, out: Tensor, hidden: list[Tensor]) -> None:
        self.out, self.hidden = out, hidden


@dataclass(frozen=True, slots=True)
class FrozenOutput:
    out: Tensor
    hidden: tuple[Tensor, ...]


class Structured(Net):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        hidden = []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        kept = tuple(hidden) if self.kind in (TupleOutput, FrozenOutput) else hidden
        return self.kind(out=self.head(x), hidden=kept)


def structured_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    return F.mse_loss(output.out, y) + sum(hidden.pow(2).mean() for hidden in output.hidden)


@scenario(equal=ALL)
def output_as_a_dataclass(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Structured(PlainOutput))
    loop.train(model, optimizer, loss_of=structured_loss)
    return model


@scenario(equal=ALL)
def output_as_a_named_tuple(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Structured(TupleOutput))
    loop.train(model, optimizer, loss_of=structured_loss)
    return model


@scenario(equal=ALL)
def output_as_a_plain_object(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Structured(ObjectOutput))
    loop.train(model, optimizer, loss_of=structured_loss)
    return model


@scenario(equal=ALL)
def output_as_a_frozen_dataclass(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Structured(FrozenOutput))
    loop.train(model, optimizer, loss_of=structured_loss)
    return model


@scenario(equal=ALL)
def output_of_which_only_a_hidden_state_is_used(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Structured(PlainOutput), adam)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x).hidden[1][:, :4], y))
    return model
