"""Kinds of modules, and weights that other modules read."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Block, Net, TokenNet, adam, start
from tests.loops.training import train_model, train_tokens


@scenario(equal=ALL)
def a_single_linear_layer(loop: Loop) -> nn.Module:
    return train_model(loop, nn.Linear(8, 4))


@scenario(equal=ALL)
def a_sequential(loop: Loop) -> nn.Module:
    return train_model(loop, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Block(), Block(), nn.Linear(8, 4)))


class Shared(Net):
    """One layer is called three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.embed(x))
        x = self.layers[1](x)
        x = self.layers[0](x)
        return self.head(self.layers[0](self.layers[2](x)))


@scenario(equal=ALL)
def a_layer_called_three_times(loop: Loop) -> nn.Module:
    return train_model(loop, Shared())


@scenario(equal=ALL)
def a_module_in_two_places(loop: Loop) -> nn.Module:
    model = Net()
    model.layers[3] = model.layers[0]
    return train_model(loop, model)


@scenario(equal=ALL)
def a_parameter_in_two_layers(loop: Loop) -> nn.Module:
    model = Net()
    model.layers[3].up.weight = model.layers[0].up.weight
    return train_model(loop, model)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.weights = nn.ParameterList(torch.randn(8, 8) * 0.3 for _ in range(2))
        self.named = nn.ParameterDict({"out": torch.randn(4, 8) * 0.3, "shift": torch.zeros(4)})

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.weights, strict=True):
            x = layer(x) @ weight
        return F.linear(x, self.named["out"], self.named["shift"])


@scenario(equal=ALL)
def lists_and_dicts_of_parameters(loop: Loop) -> nn.Module:
    return train_model(loop, Lists())


@scenario(equal=ALL)
def a_layer_that_is_never_run(loop: Loop) -> nn.Module:
    model = Net()
    model.unused = Block()
    return train_model(loop, model, make=adam)


@scenario(equal=ALL)
def recurrent_layers(loop: Loop) -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)])
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.layers[0](x.unsqueeze(1).expand(-1, 3, -1))
            x, _ = self.layers[1](x)
            return self.head(x[:, -1])

    return train_model(loop, Recurrent())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.unsqueeze(1).expand(-1, 3, -1)).mean(1))


@scenario(equal=ALL)
def transformer_encoder(loop: Loop) -> nn.Module:
    """torch's fast path reads the weights of all parts from outside, in evaluation under `no_grad`."""
    model, optimizer = start(loop, Encoder())
    loop.train(model, optimizer)
    model.eval()
    with torch.no_grad():
        loop.log(model(loop.inputs(9)).pow(2).mean())
    model.train()
    loop.train(model, optimizer, range(3, 5))
    return model


class Attending(nn.Module):
    """`nn.MultiheadAttention` reads the weight of its own `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.unsqueeze(1) * torch.tensor([1.0, 0.5, -1.0]).view(1, 3, 1)
        return x + self.mix(self.attention(seq, seq, seq, need_weights=False)[0].mean(1))


@scenario(equal=ALL)
def multihead_attention(loop: Loop) -> nn.Module:
    return train_model(loop, Net(block=Attending))


# --- weights that are read by others


class FusedHead(TokenNet):
    """The model's forward reads the weight of its head, as fused cross-entropy kernels do."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x @ self.head.weight.t()


@scenario(equal=ALL)
def a_parent_that_reads_the_weight_of_its_head(loop: Loop) -> nn.Module:
    return train_tokens(loop, FusedHead())


class BigHead(nn.Module):
    """A head that is a unit of its own, and is never called: only its weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*(Block() for _ in range(3)), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        return self.head(F.linear(x, self.layers[3].weight))


@scenario(equal=ALL)
def a_parent_that_reads_the_weight_of_a_layer(loop: Loop) -> nn.Module:
    return train_model(loop, BigHead())


@scenario(equal=ALL)
def a_parent_that_reads_a_weight_of_a_unit(loop: Loop) -> nn.Module:
    return train_model(loop, BigHead(), units=["Block", "Linear"])


class LayerReads(Net):
    """The third layer's output is mixed with a weight that the first layer owns."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x @ self.layers[0].down.weight @ self.layers[0].up.weight)


@scenario()
def a_parent_that_reads_a_weight_inside_a_layer(loop: Loop) -> nn.Module:
    return train_model(loop, LayerReads())


@scenario()
def a_parent_that_reads_a_weight_from_the_second_step_on(loop: Loop) -> nn.Module:
    class Later(Net):
        mixing = False

        def forward(self, x: Tensor) -> Tensor:
            out = self.features(x)
            return self.head(out @ self.layers[0].down.weight @ self.layers[0].up.weight if self.mixing else out)

    model, optimizer = start(loop, Later())
    loop.train(model, optimizer, range(2))
    model.mixing = True
    loop.train(model, optimizer, range(2, 4))
    return model


class Casting(Net):
    """Calls `.to()` on its own parts, as Switch Transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.to(torch.float32)
        self.layers[1].to(x.dtype)
        return super().forward(x)


@scenario(equal=ALL)
def a_model_that_casts_its_own_parts(loop: Loop) -> nn.Module:
    return train_model(loop, Casting())
