"""Autocast and bf16 on models that are not language models."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Block, Net, sgd, start

# A bf16 number has 8 bits; losses of order one over three steps of a small rate agree to about one part in a hundred.
ROUGH = 0.05
AUTOCAST = 0.02


def autocast_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    return F.mse_loss(out.float(), y)


@scenario(equal=ALL, tolerance=AUTOCAST)
def autocast_around_the_model(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=autocast_loss)
    return model


@scenario(equal=ALL, tolerance=AUTOCAST)
def autocast_around_forward_and_loss(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL, tolerance=AUTOCAST)
def autocast_around_two_forwards(loop: Loop) -> nn.Module:
    """Autocast keeps its casts until its context ends."""
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            a, b = model(x), model(x.flip(1))
        return F.mse_loss(a.float(), y) + F.mse_loss(b.float(), y)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario(equal=ALL, tolerance=AUTOCAST)
def autocast_without_its_cache(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out = model(x)
        return F.mse_loss(out.float(), y)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario(tolerance=AUTOCAST)
def autocast_around_the_whole_loop(loop: Loop) -> nn.Module:
    """Forward, backward and step are all inside; with autocast's cache, torch would compute with old weights."""
    model, optimizer = start(loop)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loop.train(model, optimizer)
    return model


@scenario(equal=ALL, tolerance=AUTOCAST)
def autocast_in_evaluation_only(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def evaluate(step: int) -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            loop.log(model(loop.inputs(50 + step)).float().pow(2).mean())

    loop.train(model, optimizer, each=evaluate)
    return model


class AutocastBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@scenario(equal=ALL, tolerance=AUTOCAST)
def autocast_inside_layers(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=AutocastBlock))
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL, tolerance=AUTOCAST)
def autocast_with_a_gradient_scaler_that_is_off(loop: Loop) -> nn.Module:
    """The usual script, in which the scaler is on for fp16 only."""
    model, optimizer = start(loop)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        x, y = loop.batch(step)
        loss = autocast_loss(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        loop.clip(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loop.log(loss)
    return model


# --- precision="bf16" and "bf16-autocast" on what is not a language model; one process computes in fp32


class Images(nn.Module):
    """Convolutions and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.view(-1, 1, 2, 4))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


class OwnTensors(Block):
    """Makes tensors in fp32 by itself."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1.5, 8)
        mask = torch.zeros(8)
        mask[2] = -0.5
        return x + self.down(torch.tanh(self.up(x * scale + mask)))


class ReadsDtype(Net):
    """Casts its input to the dtype that a weight has, read outside the unit that owns it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        for layer in self.layers:
            x = layer(x.to(dtype=layer.up.weight.dtype))
        return self.head(x)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(self.linear(x).float()), n=8).to(x.dtype)


class PlainSpectrum(nn.Module):
    """An FFT of whatever comes: torch has none for bf16 on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(self.linear(x)), n=8)


@dataclass(frozen=True, slots=True)
class Sample:
    features: Tensor
    scale: Tensor
    index: Tensor


class TakesDataclasses(Net):
    def forward(self, sample: Sample) -> Tensor:
        sample = replace(sample, features=self.embed(sample.features * sample.scale))
        x = sample.features + sample.index.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(self.up)


def train_in(loop: Loop, precision: str, model: nn.Module) -> nn.Module:
    model, optimizer = loop.shard(model, sgd(model), precision=precision)
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = loop.samples(step, rank)
            return F.mse_loss(model(x).float(), torch.sin(3 * x[:, :4]))

        loss = loop.mean_of(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    with loop.whole(model):
        loop.check(*(param.detach().float() for param in model.parameters()))
    return []


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_plain(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16", Net())


@scenario(tolerance=ROUGH)
def bf16_convolutions_and_batch_norm(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16", Images())


@scenario(tolerance=ROUGH)
def bf16_tensors_of_the_models_own(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16", Net(block=OwnTensors))


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_dtype_of_a_weight(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16", ReadsDtype())


@scenario(tolerance=ROUGH)
def bf16_fft(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16", Net(block=Spectrum))


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_autocast_fft_of_anything(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16-autocast", Net(block=PlainSpectrum))


@scenario(tolerance=ROUGH)
def bf16_weight_norm(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16", Net(block=WeightNormed))


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_autocast_plain(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16-autocast", Net())


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_autocast_convolutions_and_batch_norm(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16-autocast", Images())


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_autocast_tensors_of_the_models_own(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16-autocast", Net(block=OwnTensors))


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_autocast_dtype_of_a_weight(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16-autocast", ReadsDtype())


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_autocast_fft(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16-autocast", Net(block=Spectrum))


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_autocast_weight_norm(loop: Loop) -> nn.Module:
    return train_in(loop, "bf16-autocast", Net(block=WeightNormed))


def train_on_dataclasses(loop: Loop, precision: str) -> nn.Module:
    model = TakesDataclasses()
    model, optimizer = loop.shard(model, sgd(model), precision=precision)
    for step in range(3):
        x, y = loop.batch(step)
        sample = Sample(x, torch.tensor(0.5), torch.arange(len(x)) % 2)
        loss = F.mse_loss(model(sample).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def inputs_in_frozen_dataclasses(loop: Loop) -> nn.Module:
    return train_on_dataclasses(loop, "fp32")


@scenario(tolerance=ROUGH)
def bf16_inputs_in_frozen_dataclasses(loop: Loop) -> nn.Module:
    return train_on_dataclasses(loop, "bf16")


@scenario(tolerance=ROUGH)
def bf16_transformer_encoder_in_evaluation(loop: Loop) -> nn.Module:
    """torch's fast path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model, optimizer = loop.shard(model, sgd(model), precision="bf16")
    for step in range(2):
        x = loop.inputs(step).unsqueeze(1).expand(-1, 3, -1)
        loss = (model(x).float() - 0.5).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loop.log(model(x).float().abs().mean())
        model.train()
    return model


@scenario(equal=ALL, tolerance=ROUGH)
def bf16_losses_of_weights_inside_the_forward(loop: Loop) -> nn.Module:
    class Penalised(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01 * self.head.weight.pow(2).sum()

    return train_in(loop, "bf16", Penalised())
