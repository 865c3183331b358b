"""Models whose parts are replaced, added or removed after sharding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Block, Net, TokenNet, start


@scenario()
def a_parameter_replaced(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    model.head.weight = nn.Parameter(torch.ones(4, 8) * 0.1)
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def a_parameter_replaced_and_optimised(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    model.layers[1].up.weight = nn.Parameter(torch.ones(16, 8) * 0.1)
    optimizer.add_param_group({"params": [model.layers[1].up.weight]})
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def a_parameter_added(loop: Loop) -> nn.Module:
    """A soft prompt that is registered after sharding and trained by an optimizer of its own."""
    model, optimizer = start(loop, Shifted())
    model.shift = nn.Parameter(torch.zeros(8))
    own = torch.optim.SGD([model.shift], lr=0.1)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
        loop.log(loss)
    return model


class Shifted(Net):
    def forward(self, x: Tensor) -> Tensor:
        shift = self._parameters.get("shift")
        return super().forward(x if shift is None else x + shift)


@scenario()
def a_head_replaced(loop: Loop) -> nn.Module:
    """A new head for the second task, with an optimizer of its own."""
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    torch.manual_seed(4)
    model.head = nn.Linear(8, 4)
    own = torch.optim.SGD(model.head.parameters(), lr=0.05)
    for step in range(2, 4):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
        loop.log(loss)
    return model


@scenario()
def a_layer_appended(loop: Loop) -> nn.Module:
    """Growing: a new layer on top, which is trained with the rest."""
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    torch.manual_seed(4)
    model.layers.append(Block())
    optimizer.add_param_group({"params": list(model.layers[4].parameters())})
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def a_layer_wrapped(loop: Loop) -> nn.Module:
    """LoRA is put around a layer after sharding; the rest stays as it is."""
    model, optimizer = start(loop)
    torch.manual_seed(4)
    model.layers[1].up = WithLora(model.layers[1].up)
    own = torch.optim.SGD(model.layers[1].up.lora.parameters(), lr=0.05)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        own.step()
        own.zero_grad()
        optimizer.zero_grad()
        loop.log(loss)
    return model


class WithLora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.lora = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora(x)


@scenario()
def a_layer_removed(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    del model.layers[3]
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def layers_swapped(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    model.layers[0], model.layers[3] = model.layers[3], model.layers[0]
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def a_layer_replaced_by_identity(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    model.layers[2] = nn.Identity()
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def weights_tied_after_sharding(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, TokenNet())
    model.head.weight = model.embed.weight
    for step in range(3):
        loss = loop.mean_of(lambda rank, step=step: model(loop.tokens(step, rank)).pow(2).mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def the_model_inside_another_module(loop: Loop) -> nn.Module:
    """A wrapper around the sharded model, as loss modules and trainers have it."""
    model, optimizer = start(loop)

    class WithLoss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.inner(x), y)

    wrapper = WithLoss(model)
    wrapper.train()
    loop.train(model, optimizer, loss_of=lambda _m, x, y: wrapper(x, y))
    return model


@scenario(equal=ALL)
def a_part_of_a_model_sharded(loop: Loop) -> nn.Module:
    """Only the trunk is sharded; the head is frozen and stays outside."""
    trunk = Net()
    head = nn.Linear(4, 4).requires_grad_(False)
    trunk, optimizer = start(loop, trunk)
    loop.train(trunk, optimizer, loss_of=lambda m, x, y: F.mse_loss(head(m(x)), y))
    return trunk
