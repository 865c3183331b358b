"""Weights for models built on the meta device, and weights loaded from elsewhere."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.core.layout import Strategy
from shardwise.trainer.model import Transformer
from shardwise.trainer.shapes import TransformerShape
from tests.harness import Pool
from tests.support.models import HUGGING_FACE, MODELS, tokens
from tests.support.trainee import features
from tests.support.training import adamw

SHAPE = TransformerShape(vocab=61, hidden=24, layers=5, heads=2, kv_heads=1, ffn=41, max_seq=9)
TIED = TransformerShape(vocab=61, hidden=24, layers=2, heads=2, kv_heads=1, ffn=41, max_seq=9, tied=True)

Weights = dict[str, Tensor]


def assert_equal(seen: Weights, expected: Weights) -> None:
    assert list(seen) == list(expected)
    for name, value in expected.items():
        assert seen[name].dtype == value.dtype, name
        assert torch.equal(seen[name], value), name


# ---------------------------------------------------------------------------------------------------------
# drawing weights


def in_tree() -> nn.Module:
    return Transformer(SHAPE)


def tied() -> nn.Module:
    return Transformer(TIED)


class TiedHead(nn.Module):
    """A head with a bias of its own whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attending(nn.Module):
    """torch's own modules, with resets of several names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(16)
        self.convolve = nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.convolve(self.norm(x.transpose(1, 2)).transpose(1, 2))


def drawn(build: Callable[[], nn.Module], strategy: Strategy, seed: int, **options: Any) -> Weights:
    sw.init()
    with torch.device("meta"):
        model = build()
    model, _ = sw.shard(model, None, strategy, seed=seed, **{"precision": "fp32", **options})
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return sw.full_state_dict(model)


Case = tuple[str, dict[str, Any]]


def drawn_alike(build: Callable[[], nn.Module], cases: list[Case], seed: int, expected: Weights) -> bool:
    for strategy, options in cases:
        assert_equal(drawn(build, strategy, seed, **options), expected)
    return True


@pytest.mark.quick("TiedHead")
@pytest.mark.parametrize("build", [in_tree, tied, TiedHead, Attending])
def test_weights_do_not_depend_on_world_or_layout(run_ranks: Pool, build: Callable[[], nn.Module]) -> None:
    expected = run_ranks(1, drawn, build, "ddp", 5)[0]
    assert list(expected) == list(build().state_dict())
    for name, value in expected.items():
        assert torch.isfinite(value).all(), name
    cases: dict[int, list[Case]] = {
        1: [("zero3", {})],
        2: [("ddp", {}), ("zero1", {}), ("zero3", {}), ("shard_grad_op", {"precision": "bf16"})],
        4: [("zero3", {}), ("hsdp", {"node_size": 2}), ("hfsdp", {"node_size": 2})],
    }
    if build in (in_tree, tied):  # whose modules have one parameter each
        cases[2] += [("zero3", {"units": 1}), ("zero3", {"units": 600}), ("zero2", {"units": 10**9})]
    for world, each in cases.items():
        assert all(run_ranks(world, drawn_alike, build, each, 5, expected))


def test_another_seed_gives_other_weights(run_ranks: Pool) -> None:
    first, second = (run_ranks(1, drawn, in_tree, "zero3", seed)[0] for seed in (5, 6))
    matrices = [name for name, value in first.items() if value.ndim > 1]
    assert not any(torch.equal(first[name], second[name]) for name in matrices)
    # No two modules of one shape are drawn alike.
    assert not torch.equal(first["blocks.0.ffn.up.weight"], first["blocks.1.ffn.up.weight"])
    assert not torch.equal(first["blocks.0.ffn.up.weight"], first["blocks.0.ffn.gate.weight"])


def test_weights_are_drawn_as_the_modules_draw_them(run_ranks: Pool) -> None:
    """Norms are ones, matrices have the spread that the model's own construction gives."""
    weights = run_ranks(2, drawn, in_tree, "zero3", 5)[0]
    given = in_tree().state_dict()
    for name, value in given.items():
        if "norm" in name:
            assert torch.equal(weights[name], value), name
        else:
            assert float(weights[name].std()) == pytest.approx(float(value.std()), rel=0.3), name


class HuggingFace:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> nn.Module:
        return MODELS[self.name].build()


@pytest.mark.quick("t5")
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(run_ranks: Pool, name: str) -> None:
    build = HuggingFace(name)
    expected = run_ranks(1, drawn, build, "ddp", 5)[0]
    given = build().state_dict()
    assert list(expected) == list(given)
    for key, value in given.items():
        assert torch.isfinite(expected[key]).all(), key
        if value.numel() > 1:
            assert float(expected[key].std()) == pytest.approx(float(value.std()), rel=0.4, abs=1e-6), key
    for world in (2, 4) if name == "llama" else (2,):
        for seen in run_ranks(world, drawn, build, "zero3", 5):
            assert_equal(seen, expected)


def buffers_and_loss(name: str, strategy: str, on_meta: bool) -> tuple[Weights, float]:
    """Buffers that no state dict holds (rotary tables) must be right as well."""
    sw.init()
    with torch.device("meta" if on_meta else "cpu"):
        model = MODELS[name].build()
    model, optimizer = sw.shard(
        model, adamw(list(model.parameters())), strategy, precision="fp32", seed=5 if on_meta else None
    )
    loss = torch.tensor(0.0)
    for step in range(2):
        loss = MODELS[name].loss(model, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.named_buffers()}, float(loss.detach())


@pytest.mark.quick("t5")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "t5"])
def test_hugging_face_models_train_from_meta(run_ranks: Pool, name: str) -> None:
    expected, _ = run_ranks(2, buffers_and_loss, name, "zero3", False)[0]
    seen, loss = run_ranks(2, buffers_and_loss, name, "zero3", True)[0]
    assert_equal(seen, expected)
    assert 0 < loss < 10


def train_from_meta(strategy: str) -> tuple[list[float], list[float]]:
    """Losses of a model drawn on meta, and of the same weights sharded from a real device."""
    sw.init()
    found = []
    weights: Weights = {}
    for on_meta in (True, False):
        with torch.device("meta" if on_meta else "cpu"):
            model: nn.Module = TiedHead()
        if not on_meta:
            model.load_state_dict(weights)
        optimizer = torch.optim.AdamW(
            [
                {"params": [param for param in model.parameters() if param.ndim > 1]},
                {"params": [param for param in model.parameters() if param.ndim == 1], "weight_decay": 0.5},
            ],
            lr=1e-2,
        )
        model, optimizer = sw.shard(model, optimizer, strategy, precision="fp32", seed=5 if on_meta else None)
        weights = sw.full_state_dict(model)
        losses = []
        for step in range(3):
            loss = model(tokens(step, dist.get_rank(), 2) % 50).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_torch_modules_train_from_meta_with_groups(run_ranks: Pool, strategy: str) -> None:
    for from_meta, from_device in run_ranks(2, train_from_meta, strategy):
        assert from_meta == from_device
        assert from_meta[-1] < from_meta[0]


def frozen_on_meta() -> nn.Module:
    model = Transformer(SHAPE)
    model.blocks[1].requires_grad_(False)
    return model.to(torch.bfloat16)


def test_given_dtypes_and_frozen_parts(run_ranks: Pool) -> None:
    expected = run_ranks(1, drawn, frozen_on_meta, "ddp", 5, precision="bf16")[0]
    assert {value.dtype for value in expected.values()} == {torch.bfloat16}
    for seen in run_ranks(2, drawn, frozen_on_meta, "zero3", 5, precision="bf16"):
        assert_equal(seen, expected)


def random_state_is_kept() -> bool:
    sw.init()
    with torch.device("meta"):
        model = in_tree()
    before = torch.random.get_rng_state()
    sw.shard(model, None, "zero3", precision="fp32", seed=5)
    return torch.equal(before, torch.random.get_rng_state())


def test_drawing_leaves_the_users_generator_alone(run_ranks: Pool) -> None:
    assert all(run_ranks(2, random_state_is_kept))


# ---------------------------------------------------------------------------------------------------------
# how much memory that takes


class Watch(TorchDispatchMode):
    """The most bytes of CPU tensors that were alive at once, of those made while watching."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive += size
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def most_bytes_while_drawing(strategy: str) -> tuple[int, int]:
    """The peak during sw.shard of a model on the meta device, and what is left when it is done."""
    sw.init()
    with torch.device("meta"):
        model = Transformer(WIDE)
    gc.collect()
    watch = Watch()
    with watch:
        model, _ = sw.shard(model, None, strategy, precision="fp32", seed=5)
        gc.collect()
        return watch.most, watch.alive


WIDE = TransformerShape(vocab=64, hidden=64, layers=12, heads=2, kv_heads=2, ffn=160, max_seq=9)


def test_no_rank_holds_more_than_its_share_and_one_unit(run_ranks: Pool) -> None:
    with torch.device("meta"):
        model = Transformer(WIDE)
    unit = 4 * sum(param.numel() for param in model.blocks[0].parameters())
    total = 4 * sum(param.numel() for param in model.parameters())
    for world in (2, 4):
        for most, left in run_ranks(world, most_bytes_while_drawing, "zero3"):
            # Its shards and the two gather slots stay; while drawing, one unit is there beside the shards, and a
            # drawn matrix may have a temporary of its size.
            assert left <= total / world + 3 * unit
            assert most <= total / world + 3 * unit
            assert most < total * 0.9


# ---------------------------------------------------------------------------------------------------------
# refusals


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))


class HoldsNoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.odd = NoReset()


class Forgetful(nn.Module):
    """Its reset forgets the bias and the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.bias = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.ones(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def shard_meta(build: Callable[[], nn.Module], seed: int | None) -> None:
    sw.init()
    with torch.device("meta"):
        model = build()
    sw.shard(model, None, "zero3", precision="fp32", seed=seed)


def test_a_module_without_reset_parameters_is_refused_by_name(run_ranks: Pool) -> None:
    for error in run_ranks.errors(2, shard_meta, HoldsNoReset, 3):
        assert error is not None
        assert error.startswith("ConfigurationError")
        assert "'odd'" in error
        assert "NoReset" in error
        assert "reset_parameters" in error


def test_a_model_on_meta_without_a_seed_is_refused(run_ranks: Pool) -> None:
    for error in run_ranks.errors(2, shard_meta, in_tree, None):
        assert error is not None
        assert error.startswith("ConfigurationError")
        assert "seed=" in error


def nans_of_forgotten() -> dict[str, bool] | str:
    sw.init()
    with torch.device("meta"):
        model: nn.Module = Forgetful()
    try:
        model, _ = sw.shard(model, None, "zero3", precision="fp32", seed=3)
    except sw.ConfigurationError as error:
        return str(error)
    return {name: bool(value.isnan().all()) for name, value in sw.full_state_dict(model).items()}


def test_what_a_reset_forgets_is_seen_and_not_old_memory(run_ranks: Pool) -> None:
    """Refused by name, or NaN; never whatever the memory held before."""
    for found in run_ranks(2, nans_of_forgotten):
        if isinstance(found, str):
            assert "Forgetful" in found
        else:
            assert found == {"weight": False, "bias": True, "table": True}


# ---------------------------------------------------------------------------------------------------------
# loading


class WithBuffers(nn.Module):
    """A tie, a buffer that is kept and one that is not, a frozen part, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(4))
        self.head = nn.Linear(16, 16)
        self.head.weight = self.stem.weight
        self.layers[1].requires_grad_(False)
        self.layers[2][0].bfloat16()
        self.register_buffer("phases", torch.linspace(0, 1, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.phases


def other_weights() -> Weights:
    torch.manual_seed(77)
    found = {}
    for name, value in WithBuffers().state_dict().items():
        found[name] = torch.full_like(value, 7) if value.dtype == torch.int64 else torch.rand_like(value)
    found["head.weight"] = found["stem.weight"]
    return found


class Lazy(Mapping[str, Tensor]):
    """Makes a tensor each time it is asked for one, and counts how many of them are alive at once."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.alive = self.most = self.num_read = 0

    def __getitem__(self, name: str) -> Tensor:
        value = self._weights[name].clone()
        self.alive += value.nbytes
        self.num_read += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(value, self._forget, value.nbytes)
        return value

    def _forget(self, num_bytes: int) -> None:
        self.alive -= num_bytes

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def load(strategy: str, precision: str, how: str, node_size: int | None) -> tuple[Weights, bool]:
    """Load into a model that has trained, and compute with it."""
    sw.init()
    rank = dist.get_rank()
    model = WithBuffers()
    model, optimizer = sw.shard(
        model, adamw(list(model.parameters())), strategy, precision=precision, node_size=node_size
    )
    for step in range(2):
        model(features(step, rank)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    given: Mapping[str, Tensor] | None = other_weights()
    if how == "rank 0" and rank:
        given = None
    elif how == "lazy":
        given = Lazy(dict(given or {}))
    sw.load_full_state_dict(model, given)
    found = sw.full_state_dict(model)

    expected = WithBuffers()
    expected.load_state_dict(other_weights())
    expected = expected.float().eval()
    with torch.no_grad():
        out = model.eval()(features(9, rank))
        same = torch.allclose(out.float(), expected(features(9, rank)), rtol=1e-4, atol=1e-4)
    return found, same


@pytest.mark.quick("ddp-rank 0", "zero3-lazy", "hfsdp-all ranks")
@pytest.mark.parametrize("how", ["all ranks", "rank 0", "lazy"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "hfsdp"])
def test_loading_whole_weights(run_ranks: Pool, strategy: str, how: str) -> None:
    for found, same in run_ranks(2, load, strategy, "fp32", how, 1 if strategy == "hfsdp" else None):
        assert_equal(found, other_weights())
        assert same, "the next forward does not compute with the weights that were loaded"


@pytest.mark.quick("hpz")
@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "hpz"])
def test_loading_whole_weights_on_nodes(run_ranks: Pool, strategy: str) -> None:
    for how in ("all ranks", "rank 0"):
        for found, same in run_ranks(4, load, strategy, "fp32", how, 2):
            assert_equal(found, other_weights())
            assert same


def load_lazily(only_rank_0: bool) -> tuple[int, int, int]:
    """The most bytes of given tensors alive at once, how many were read, and the bytes of the largest unit."""
    sw.init()
    torch.manual_seed(3)
    full = Transformer(WIDE)
    lazy = Lazy({name: value.clone() for name, value in full.state_dict().items()})
    unit = sum(param.nbytes for param in full.blocks[0].parameters())
    with torch.device("meta"):
        model = Transformer(WIDE)
    model, _ = sw.shard(model, None, "zero3", precision="fp32", seed=5)
    sw.load_full_state_dict(model, lazy if not only_rank_0 or dist.get_rank() == 0 else None)
    assert_equal(sw.full_state_dict(model), full.state_dict())
    return lazy.most, lazy.num_read, unit


@pytest.mark.parametrize("only_rank_0", [False, True])
def test_a_lazy_mapping_is_read_a_unit_at_a_time(run_ranks: Pool, only_rank_0: bool) -> None:
    num_tensors = len(Transformer(WIDE).state_dict())
    for rank, (most, num_read, unit) in enumerate(run_ranks(2, load_lazily, only_rank_0)):
        if only_rank_0 and rank:
            assert num_read == 0
        else:
            assert 0 < most <= unit
            assert num_read <= 2 * num_tensors


def load_changed(change: Callable[[Weights], Mapping[str, Tensor] | None], strict: bool, only_rank_0: bool) -> None:
    sw.init()
    model, _ = sw.shard(WithBuffers(), None, "zero3", precision="fp32")
    before = sw.full_state_dict(model)
    given = change(other_weights()) if dist.get_rank() == 0 or not only_rank_0 else None
    try:
        sw.load_full_state_dict(model, given, strict=strict)
    except sw.ConfigurationError:
        assert_equal(sw.full_state_dict(model), before)  # refused before anything was changed
        raise


def without(weights: Weights) -> Weights:
    del weights["layers.0.0.bias"]
    return weights


def without_a_buffer(weights: Weights) -> Weights:
    del weights["layers.0.1.running_mean"]
    return weights


def with_more(weights: Weights) -> Weights:
    weights["layers.0.0.bais"] = torch.zeros(16)
    return weights


def with_another_shape(weights: Weights) -> Weights:
    weights["layers.3.0.weight"] = torch.zeros(16, 15)
    return weights


def transposed(weights: Weights) -> Weights:
    """As many elements, in another shape."""
    weights["layers.3.0.weight"] = torch.zeros(8, 32)
    return weights


def with_another_shape_of_buffer(weights: Weights) -> Weights:
    """One element would be copied to all sixteen without a word."""
    weights["layers.3.1.running_mean"] = torch.zeros(1)
    return weights


def nothing(weights: Weights) -> None:
    return None


REFUSALS: list[tuple[Callable[[Weights], Any], str]] = [
    (without, "'layers.0.0.bias'"),
    (without_a_buffer, "'layers.0.1.running_mean'"),
    (with_more, "'layers.0.0.bais'"),
    (with_another_shape, "(16, 15)"),
    (transposed, "(8, 32)"),
    (with_another_shape_of_buffer, "'layers.3.1.running_mean'"),
    (nothing, "rank 0"),
]


@pytest.mark.parametrize(("change", "words"), REFUSALS)
@pytest.mark.parametrize("only_rank_0", [False, True])
def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank(
    run_ranks: Pool, change: Callable[[Weights], Any], words: str, only_rank_0: bool
) -> None:
    for error in run_ranks.errors(2, load_changed, change, True, only_rank_0, deadline=30):
        assert error is not None
        assert error.startswith("ConfigurationError")
        assert words in error


def load_partly(only_rank_0: bool) -> tuple[Weights, Weights]:
    """Not strict: what is given is taken, the rest stays; a tied weight may be given under any of its names."""
    sw.init()
    model, _ = sw.shard(WithBuffers(), None, "zero3", precision="fp32")
    before = sw.full_state_dict(model)
    given = {
        name: value
        for name, value in other_weights().items()
        if name in ("layers.0.0.bias", "layers.3.1.running_mean", "head.weight")
    }
    given["unknown"] = torch.zeros(3)
    if only_rank_0 and dist.get_rank():
        sw.load_full_state_dict(model, None, strict=False)
    else:
        sw.load_full_state_dict(model, given, strict=False)
    return before, sw.full_state_dict(model)


@pytest.mark.parametrize("only_rank_0", [False, True])
def test_loading_a_part(run_ranks: Pool, only_rank_0: bool) -> None:
    given = other_weights()
    taken = {"layers.0.0.bias", "layers.3.1.running_mean", "head.weight", "stem.weight"}
    for before, after in run_ranks(2, load_partly, only_rank_0):
        for name, value in after.items():
            assert torch.equal(value, given[name] if name in taken else before[name]), name


def load_from_another_dtype() -> Weights:
    sw.init()
    model, _ = sw.shard(WithBuffers(), None, "zero3", precision="bf16")
    sw.load_full_state_dict(model, {name: value.double() for name, value in other_weights().items()})
    return sw.full_state_dict(model)


def test_masters_are_made_from_the_weights_as_given(run_ranks: Pool) -> None:
    """In bf16 the fp32 masters hold every bit of fp32 weights."""
    assert_equal(run_ranks(2, load_from_another_dtype)[0], other_weights())
