"""What models take and return: containers of any kind, plain objects, nested tensors; and parts that models move."""

import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import shardwise as sw
from shardwise.core.engine.nested_tensors import map_tensors, tensors_in
from tests.core.engine.test_models import Stack, train
from tests.harness import Pool
from tests.support.trainee import ONE_OF_EACH, Trainee, check, features
from tests.support.training import adamw

Pair = namedtuple("Pair", "first second")


class Checked(NamedTuple):
    first: Tensor
    second: int = 0


@dataclass(frozen=True)
class Frozen:
    first: Tensor
    second: Tensor = field(init=False, default=torch.ones(2))


@dataclass(frozen=True, slots=True)
class Slotted:
    first: Tensor


@dataclass
class Strict:
    first: Tensor

    def __post_init__(self) -> None:
        if self.first.dtype != torch.float32:
            raise TypeError("fp32 only")


class Bag(dict):  # type: ignore[type-arg]
    def __init__(self, *, only: Tensor) -> None:
        super().__init__(only=only)


class Row(list):  # type: ignore[type-arg]
    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__([first, second])


class Sealed(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("sealed")

    def __copy__(self) -> "Sealed":
        raise TypeError("one of a kind")


def values() -> list[Any]:
    one = torch.ones(2)
    return [
        Pair(one, one),
        Checked(one, 3),
        Frozen(one),
        Slotted(one),
        Strict(one),
        Bag(only=one),
        Row(one, one),
        OrderedDict(a=one),
        defaultdict(list, a=one),
        UserDict(a=one),
        MappingProxyType({"a": one}),
        torch.max(torch.ones(2, 2), 0),
        pack_sequence([one, one]),
        {"a": [(one, {"b": one})]},
    ]


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
def test_tensors_are_changed_inside(value: Any) -> None:
    before = [tensor.dtype for tensor in tensors_in(value)]
    made = map_tensors(value, lambda tensor: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
    assert type(made) is type(value)
    assert torch.bfloat16 in [tensor.dtype for tensor in tensors_in(made)]
    assert torch.float32 not in [tensor.dtype for tensor in tensors_in(made)]
    assert [tensor.dtype for tensor in tensors_in(value)] == before
    assert map_tensors(made, lambda tensor: tensor) is made


def test_what_cannot_be_made_anew_stays() -> None:
    sealed = Sealed(a=torch.ones(2))
    assert map_tensors(sealed, lambda tensor: tensor.double()) is sealed


class Slots:
    __slots__ = ("held", "never")

    def __init__(self, held: Any) -> None:
        self.held = held


class Thing:
    def __init__(self, held: Any) -> None:
        self.held = held
        self.me = self


def test_tensors_are_found_in_objects() -> None:
    one = torch.ones(2)
    assert {id(tensor) for tensor in tensors_in(Thing([Slots({"a": one})]))} == {id(one)}
    assert not list(tensors_in(Thing(nn.Linear(2, 2))))
    assert not list(tensors_in([None, "a", 1, len, Tensor]))


# ---------------------------------------------------------------------------------------------------------
# outputs that are objects


class Returning(nn.Module):
    """Blocks that hand objects from one to the other."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        x = x.held if isinstance(x, self.kind) else x
        return self.kind(x + self.up(self.norm(x)).tanh())


class Chain(nn.Module):
    kind: Any = Thing

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returning(self.kind) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class ChainOfSlots(Chain):
    kind = Slots


def train_on_objects(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(3):
        loss = trainee.share(lambda rank, step=step: trainee.model(features(step, rank)).held.square().mean())
        loss.backward()
        losses.append(trainee.mean(loss))
        trainee.step()
    return losses


@pytest.mark.parametrize("build", [Chain, ChainOfSlots])
def test_outputs_may_be_plain_objects(run_ranks: Pool, build: Any) -> None:
    check(run_ranks, train_on_objects, build, [*ONE_OF_EACH, "zero3_offload"])


# ---------------------------------------------------------------------------------------------------------
# torch's own transformer, whose fast path reads weights by itself


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 2, 16)
        padding = torch.zeros(2, 2, dtype=torch.bool)
        padding[1, 1] = True
        return self.encoder(x, src_key_padding_mask=padding)


def encode(trainee: Trainee) -> list[float]:
    values = train(trainee)
    trainee.model.eval()
    for step in range(2):
        with torch.no_grad():
            out = trainee.share(lambda rank, step=step: trainee.model(features(step, rank)).square().mean())
        values.append(trainee.mean(out))
    with torch.inference_mode():
        values.append(trainee.mean(trainee.share(lambda rank: trainee.model(features(7, rank)).square().mean())))
    trainee.model.train()
    return values + train(trainee)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fast_path_of_transformer_encoder(run_ranks: Pool) -> None:
    check(run_ranks, encode, Encoder, [*ONE_OF_EACH, "zero3_offload"], tolerance=1e-4)


# ---------------------------------------------------------------------------------------------------------
# .to()


class Moving(Stack):
    """Moves and casts its own parts in the forward, to where they are."""

    def forward(self, x: Tensor) -> Tensor:
        self.head = self.head.to(torch.float32)
        self.layers[0].to(x.device)
        return super().forward(x)


def test_a_model_may_move_its_parts_to_where_they_are(run_ranks: Pool) -> None:
    check(run_ranks, train, Moving, [*ONE_OF_EACH, "zero3_offload"])


def moved(strategy: str) -> list[bool]:
    sw.init()
    model, _ = sw.shard(Stack(), None, strategy, precision="fp32")
    same = [model.to("cpu") is model, model.float() is model, model.cpu() is model, model.layers[0].to(torch.float32)]
    refused = []
    for change in (
        model.half,
        lambda: model.to(torch.bfloat16),
        lambda: model.layers[0].to("meta"),
        lambda: model.to_empty(device="cpu"),
        model.share_memory,
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model._apply(lambda tensor: tensor.zero_()),
        lambda: copy.deepcopy(model),
    ):
        with pytest.raises(sw.StateError):
            change()
        refused.append(True)
    return [*map(bool, same), *refused]


def test_only_what_changes_something_is_refused(run_ranks: Pool) -> None:
    for seen in run_ranks(2, moved, "zero3"):
        assert all(seen)


ACTIVATION = nn.GELU()


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.act = ACTIVATION

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))


def two_models() -> float:
    sw.init()
    total = 0.0
    for strategy in ("ddp", "zero3"):
        torch.manual_seed(0)
        model = Sharing()
        model, _ = sw.shard(model, adamw(list(model.parameters())), strategy, precision="fp32")
        loss = model(features(0, dist.get_rank())).sum()
        loss.backward()
        total += float(loss.detach())
    copy.deepcopy(ACTIVATION).to(torch.bfloat16)
    return total


def test_models_may_share_what_has_no_weights(run_ranks: Pool) -> None:
    assert len(run_ranks(2, two_models)) == 2
