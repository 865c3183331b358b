"""Inputs and outputs of layers: by keyword, in dicts and tuples, changed in place, views, the input itself."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Block, Net, start
from tests.loops.training import train_model


class KeywordNet(Net):
    def forward(self, *, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        hidden = self.features(batch["x"] * scale)
        return {"out": self.head(hidden), "aux": [hidden, None, 3], "name": "net"}


@scenario(equal=ALL)
def keywords_and_dicts(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, KeywordNet())
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(batch={"x": x}, scale=0.5)["out"], y))
    return model


class TupleBlock(Block):
    """Takes and returns a tuple with a tensor, a cache that is None, and a dict."""

    def forward(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        x, _, info = state
        return super().forward(x), None, {"depth": info["depth"] + 1, "kept": x}


class TupleNet(Net):
    def __init__(self) -> None:
        super().__init__(block=TupleBlock)

    def forward(self, x: Tensor) -> Tensor:
        state = (self.embed(x), None, {"depth": 0})
        for layer in self.layers:
            state = layer(state)
        return self.head(state[0] + state[2]["kept"])


@scenario(equal=ALL)
def layers_that_pass_tuples(loop: Loop) -> nn.Module:
    return train_model(loop, TupleNet())


class InPlaceBlock(Block):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.down(torch.tanh(self.up(self.norm(x.clone()))))
        return x


@scenario()
def layers_that_change_their_input(loop: Loop) -> nn.Module:
    return train_model(loop, Net(block=InPlaceBlock))


class InPlaceNet(Net):
    """Changes the outputs of its layers in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            x.mul_(0.5).relu_()
        return self.head(x)


@scenario()
def outputs_of_layers_changed_in_place(loop: Loop) -> nn.Module:
    return train_model(loop, InPlaceNet())


@scenario()
def the_output_of_the_model_changed_in_place(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x).mul_(2).add_(0.1), y))
    return model


class ViewBlock(Block):
    """Returns views: a transpose, a slice, and a chunk."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.t().contiguous().t()[:, :8].chunk(1)[0].view(-1, 8)


@scenario(equal=ALL)
def layers_that_return_views(loop: Loop) -> nn.Module:
    return train_model(loop, Net(block=ViewBlock))


class SometimesIdentity(Block):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return x if self.step % 2 else super().forward(x)


@scenario(equal=ALL)
def layers_that_return_their_input(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=SometimesIdentity))
    loop.train(model, optimizer, range(4))
    return model


class DetachedBlock(Block):
    """Returns something that needs a gradient, and something that does not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = super().forward(x)
        return out, out.detach(), out.argmax(-1)


class DetachedNet(Net):
    def __init__(self) -> None:
        super().__init__(block=DetachedBlock)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            out, kept, index = layer(x)
            x = out + 0.1 * kept + 0.01 * index.unsqueeze(-1)
        return self.head(x)


@scenario(equal=ALL)
def layers_that_return_indices_and_detached_tensors(loop: Loop) -> nn.Module:
    return train_model(loop, DetachedNet())


class StopNet(Net):
    """No gradient goes below the third layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, layer in enumerate(self.layers):
            x = layer(x.detach() if index == 2 else x)
        return self.head(x)


@scenario(equal=ALL)
def a_gradient_that_stops_in_the_middle(loop: Loop) -> nn.Module:
    return train_model(loop, StopNet())


class NothingBlock(Block):
    """Keeps its result in a list of the caller's and returns nothing."""

    def forward(self, results: list[Tensor]) -> None:
        results.append(super().forward(results[-1]))


class NothingNet(Net):
    def __init__(self) -> None:
        super().__init__(block=NothingBlock)

    def forward(self, x: Tensor) -> Tensor:
        results = [self.embed(x)]
        for layer in self.layers:
            layer(results)
        return self.head(results[-1])


@scenario()
def layers_that_return_nothing(loop: Loop) -> nn.Module:
    return train_model(loop, NothingNet())


class GeneratorBlock(Block):
    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


class GeneratorNet(Net):
    def __init__(self) -> None:
        super().__init__(block=GeneratorBlock)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            (x,) = layer(x)
        return self.head(x)


@scenario()
def layers_that_are_generators(loop: Loop) -> nn.Module:
    """Their bodies run after the call has returned."""
    return train_model(loop, GeneratorNet())


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 8)

    def forward(self, x: Tensor, skip: Tensor, *, gates: list[Tensor]) -> Tensor:
        return torch.tanh(self.mix(torch.cat([x, skip], -1))) * gates[0].sigmoid()


class UNet(nn.Module):
    """Outputs of early layers go into late ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(ManyInputs() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        for up in self.up:
            x = up(x, kept.pop(), gates=[x, x])
        return self.head(x)


@scenario(equal=ALL)
def skip_connections(loop: Loop) -> nn.Module:
    return train_model(loop, UNet())


class Branches(nn.Module):
    """Layers side by side, whose backwards torch may run in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(layer(x) * (index + 1) for index, layer in enumerate(self.layers)))


@scenario(equal=ALL)
def layers_side_by_side(loop: Loop) -> nn.Module:
    return train_model(loop, Branches())


@scenario(equal=ALL)
def sizes_that_nothing_divides(loop: Loop) -> nn.Module:
    """Three, five and seven elements over two and four ranks."""
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 7), nn.Linear(7, 4))
    return train_model(loop, model)


@scenario(equal=ALL)
def dropout_in_evaluation(loop: Loop) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).eval()
    return train_model(loop, model)


@scenario(equal=ALL)
def dropout_with_random_numbers_of_ones_own(loop: Loop) -> nn.Module:
    """Masks come from the sample, so that ranks and one process draw the same."""

    class Masked(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.features(x)
            return self.head(hidden * (x.abs() * 1000).long().remainder(2))

    return train_model(loop, Masked())


@scenario(equal=ALL)
def random_numbers_of_the_script(loop: Loop) -> nn.Module:
    """Sharding and training draw nothing from torch's generator."""
    model, optimizer = start(loop)
    torch.manual_seed(9)
    loop.train(model, optimizer)
    loop.check(torch.rand(3))
    return model


@scenario(equal=ALL)
def sparse_inputs(loop: Loop) -> nn.Module:
    """A bag of words goes into a linear layer as a sparse tensor."""
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=lambda model, x, y: F.mse_loss(model(x.to_sparse()), y))
    return model
