"""Normalisation, embeddings, parametrizations and lazy modules."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import shardwise as sw
from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Block, Net, TokenNet, adam, sgd, start
from tests.loops.training import train_model, train_tokens


class NormBlock(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


def train_norm(loop: Loop, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss = loop.mean_of(lambda rank, step=step: model(loop.samples(step, rank)).pow(2).mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)


@scenario()
def batch_norm(loop: Loop) -> nn.Module:
    """Statistics of the batch are each rank's own, as under DDP; only the trained weights are compared."""
    model, optimizer = start(loop, Net(block=NormBlock))
    train_norm(loop, model, optimizer, range(3))
    with loop.whole(model):
        loop.check(*(param.detach() for param in model.parameters()))
    return []


@scenario(equal=ALL)
def batch_norm_with_the_same_batch_everywhere(loop: Loop) -> nn.Module:
    """With equal batches running statistics are equal too, and those of one process."""
    model, optimizer = start(loop, Net(block=NormBlock))
    for step in range(3):
        loss = model(loop.samples(step, 0)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def batch_norm_with_synchronised_buffers(loop: Loop) -> None:
    model, optimizer = start(loop, Net(block=NormBlock))
    train_norm(loop, model, optimizer, range(3))
    if loop.is_sharded:
        sw.sync_buffers(model)
    loop.check_shared(*model.buffers())


@scenario()
def batch_norm_in_evaluation_after_training(loop: Loop) -> None:
    """The same input gives the same output on every rank only if the statistics were synchronised."""
    model, optimizer = start(loop, Net(block=NormBlock))
    train_norm(loop, model, optimizer, range(3))
    if loop.is_sharded:
        sw.sync_buffers(model)
    model.eval()
    with torch.no_grad():
        loop.check_shared(model(loop.samples(9, 0)))


class Counting(Block):
    """A buffer that every forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("not_saved", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.not_saved.add_(1)
        return super().forward(x) + 0.01 * self.calls + 0.01 * self.not_saved


@scenario(equal=ALL)
def buffers_changed_in_forward(loop: Loop) -> nn.Module:
    return train_model(loop, Net(block=Counting))


@scenario()
def sparse_embedding(loop: Loop) -> nn.Module:
    return train_tokens(loop, TokenNet(sparse=True))


@scenario()
def sparse_embedding_with_sparse_adam(loop: Loop) -> nn.Module:
    model = TokenNet(sparse=True)
    a = torch.optim.SparseAdam([*model.embed.parameters()], lr=0.01)
    b = torch.optim.SGD([*model.layers.parameters(), *model.head.parameters()], lr=0.05)
    model, optimizers = loop.shard(model, [a, b])
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            tokens = loop.tokens(step, rank)
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

        loss = loop.mean_of(loss_of)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def embedding_that_renormalises_itself(loop: Loop) -> nn.Module:
    """`max_norm` writes to the weight in the forward: the rows that this rank's tokens use."""
    model = TokenNet()
    model.embed = nn.Embedding(16, 8, max_norm=0.5)
    return train_tokens(loop, model)


@scenario(equal=ALL)
def embedding_with_padding(loop: Loop) -> nn.Module:
    model = TokenNet()
    model.embed = nn.Embedding(16, 8, padding_idx=0)
    return train_tokens(loop, model, make=adam)


@scenario()
def embedding_resized_after_sharding(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, TokenNet())
    old = model.embed.weight.detach().clone()
    model.embed = nn.Embedding(16, 8)
    with torch.no_grad():
        model.embed.weight.copy_(old)
    for step in range(2):
        loss = loop.mean_of(lambda rank, step=step: model(loop.tokens(step, rank)).pow(2).mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


class WeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(self.up)


@scenario(equal=ALL)
def weight_norm(loop: Loop) -> nn.Module:
    return train_model(loop, Net(block=WeightNormed))


class OldWeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(self.up)


@scenario()
def weight_norm_of_old(loop: Loop) -> nn.Module:
    """The hook-based one, which writes the weight as an attribute before every forward."""
    return train_model(loop, Net(block=OldWeightNormed))


class SpectralNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.spectral_norm(self.up)


@scenario(equal=ALL)
def spectral_norm(loop: Loop) -> nn.Module:
    return train_model(loop, Net(block=SpectralNormed))


class OldSpectralNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.spectral_norm(self.up)


@scenario()
def spectral_norm_of_old(loop: Loop) -> nn.Module:
    return train_model(loop, Net(block=OldSpectralNormed))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


@scenario(equal=ALL)
def a_parametrization_of_ones_own(loop: Loop) -> nn.Module:
    model = Net()
    parametrize.register_parametrization(model.embed, "weight", Symmetric())
    return train_model(loop, model)


@scenario()
def a_parametrization_after_sharding(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    parametrize.register_parametrization(model.embed, "weight", Symmetric())
    loop.train(model, optimizer)
    return model


@scenario()
def pruning_after_sharding(loop: Loop) -> nn.Module:
    from torch.nn.utils import prune

    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    prune.l1_unstructured(model.layers[1].up, "weight", amount=0.5)
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def lazy_modules(loop: Loop) -> nn.Module:
    """Parameters that have no shape before the first forward."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4))
    model, optimizer = loop.shard(model, None) if loop.is_sharded else (model, None)
    model(loop.samples(0, 0))
    optimizer = optimizer or sgd(model)
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def lazy_modules_after_a_first_forward(loop: Loop) -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4))
    model(loop.samples(0, 0))
    return train_model(loop, model)
