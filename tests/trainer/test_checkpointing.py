"""Checkpointed blocks: the same numbers, exactly the bytes that the mode says, and no gather more."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.core.wire.ledger import Row
from shardwise.trainer.checkpointing import checkpoint_blocks
from shardwise.trainer.compilation import why_not_compiled
from shardwise.trainer.model import Block, Transformer, rotary_at
from shardwise.trainer.shapes import TransformerShape
from tests.harness import Pool
from tests.support.models import HUGGING_FACE, MODELS, tokens
from tests.support.trainee import LAYOUTS, NODES, Trainee, check
from tests.support.training import adamw

MODES = ["selective", "full"]


def loss_and_grads(name: str, model: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    loss = MODELS[name].loss(model, tokens(0))
    loss.backward()
    return loss.detach(), [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def assert_identical(seen: tuple[Tensor, list[Any]], expected: tuple[Tensor, list[Any]]) -> None:
    assert torch.equal(seen[0], expected[0])
    assert len(seen[1]) == len(expected[1])
    for a, b in zip(seen[1], expected[1], strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------------------
# in one process


@pytest.mark.parametrize("name", ["in-tree", "in-tree tied", *HUGGING_FACE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_identical_to_no_checkpointing(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name].fresh().to(dtype)
    expected = loss_and_grads(name, model)
    for mode in (*MODES, "none"):
        paths = checkpoint_blocks(model, mode)  # type: ignore[arg-type]
        assert len(paths) >= 3
        assert_identical(loss_and_grads(name, model), expected)
    assert list(model.state_dict()) == list(MODELS[name].fresh().state_dict())


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 48), nn.Dropout(0.3), nn.Linear(48, 16)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("mode", MODES)
def test_a_recompute_draws_the_same_dropout(mode: Any) -> None:
    grads = []
    for wanted in ("none", mode):
        torch.manual_seed(3)
        model = WithDropout()
        checkpoint_blocks(model, wanted)
        model(torch.ones(4, 16)).square().mean().backward()
        grads.append([param.grad for param in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_a_copy_calls_its_own_forward() -> None:
    model = MODELS["in-tree"].fresh()
    checkpoint_blocks(model, "full")
    twin = copy.deepcopy(model)
    MODELS["in-tree"].loss(twin, tokens(0)).backward()
    assert all(param.grad is not None for param in twin.parameters())
    assert all(param.grad is None for param in model.parameters())


def test_blocks_by_class() -> None:
    model = MODELS["in-tree"].fresh()
    assert checkpoint_blocks(model, "full") == [f"blocks.{i}" for i in range(5)]
    assert checkpoint_blocks(model, "full", blocks=["Attention"])[0] == "blocks.0.attention"
    assert checkpoint_blocks(model, "none", blocks=[Block]) == [f"blocks.{i}" for i in range(5)]


def test_what_cannot_be_is_refused() -> None:
    model = MODELS["in-tree"].fresh()
    with pytest.raises(ConfigurationError, match="did you mean 'selective'"):
        checkpoint_blocks(model, "selektive")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no module of class 'Blok'; did you mean 'Block'"):
        checkpoint_blocks(model, "full", blocks=["Blok"])
    with pytest.raises(ConfigurationError, match="no repeated blocks were found in this Linear"):
        checkpoint_blocks(nn.Linear(3, 3), "full")
    assert checkpoint_blocks(nn.Linear(3, 3), "none") == []
    model.blocks[0].forward = torch.compile(model.blocks[0].forward, backend="eager")
    with pytest.raises(ConfigurationError, match=r"the forward of 'blocks.0' is compiled by itself"):
        checkpoint_blocks(model, "selective")


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_is_refused_in_training_and_served_otherwise(mode: Any) -> None:
    model = MODELS["llama"].fresh()
    model.config.use_cache = True
    checkpoint_blocks(model, mode)
    with pytest.raises(ConfigurationError, match=r"DynamicCache a second time: set model.config.use_cache = False"):
        MODELS["llama"].loss(model, tokens(0))
    with torch.no_grad():
        assert model(input_ids=tokens(0)).past_key_values is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_block_is_compiled_and_refuses_a_cache(mode: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = MODELS["llama"].fresh()
    paths = checkpoint_blocks(model, mode)
    for path in paths:
        model.get_submodule(path).compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: about selective checkpointing, and while it traces a cache
        MODELS["llama"].loss(model, tokens(0)).backward()
        assert torch._dynamo.utils.counters["frames"]["ok"]
        assert why_not_compiled() == ""
        model.config.use_cache = True
        with pytest.raises(ConfigurationError, match="DynamicCache a second time"):
            MODELS["llama"].loss(model, tokens(0))
    assert why_not_compiled() != ""


# ---------------------------------------------------------------------------------------------------------
# bytes


class Made(TorchDispatchMode):
    """Storages that operators made, and which of them are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf) and leaf.untyped_storage()._cdata not in known:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def live_bytes(self) -> int:
        return sum(num_bytes for ref, num_bytes in self._made.values() if not ref.expired())


BATCH, SEQ, HIDDEN, HEADS, FFN = 2, 16, 64, 4, 224
KV = HIDDEN // HEADS  # one head of keys and values
SHAPE = TransformerShape(vocab=64, hidden=HIDDEN, layers=2, heads=HEADS, kv_heads=1, ffn=FFN, max_seq=SEQ)
LOG_SUM_EXP = HEADS  # a number per token and head, which attention's backward reads

# Elements per token that a block holds after its forward, its output (the input of the next) among them.
KEPT = {
    "full": HIDDEN,
    # output, query, attention, out, gate
    "selective": HIDDEN + HIDDEN + (HIDDEN + LOG_SUM_EXP) + HIDDEN + FFN,
    # output; twice the normed input, its scaled self and one number per token (torch's CPU norm is not fused); rotated
    # query and key, value; attention, and a copy for `out`; the sum after attention; gate, its silu, up, their product
    "none": HIDDEN + 2 * (2 * HIDDEN + 1) + (HIDDEN + 2 * KV) + (2 * HIDDEN + LOG_SUM_EXP) + HIDDEN + 4 * FFN,
}


def bytes_of_a_block(mode: Any, dtype: torch.dtype) -> int:
    model = Transformer(SHAPE).to(dtype)
    checkpoint_blocks(model, mode)
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
    rotary = rotary_at(torch.arange(SEQ, device=x.device), HIDDEN // HEADS)
    with Made() as made:
        output = model.blocks[0](x, rotary)
    found = made.live_bytes()
    output.sum().backward()
    return found


@pytest.mark.parametrize("mode", ["none", *MODES])
def test_a_block_keeps_exactly_what_its_mode_says(mode: str) -> None:
    assert bytes_of_a_block(mode, torch.float32) == 4 * BATCH * SEQ * KEPT[mode]


def test_modes_are_in_order_in_bf16() -> None:
    full, selective, none = (bytes_of_a_block(mode, torch.bfloat16) for mode in ("full", "selective", "none"))
    assert full == 2 * BATCH * SEQ * KEPT["full"]
    # attention keeps its sums in fp32
    assert selective == 2 * BATCH * SEQ * (KEPT["selective"] + LOG_SUM_EXP)
    assert full < selective < none


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_modes_are_in_order_for_hugging_face_models(name: str) -> None:
    held = []
    for mode in ("full", "selective", "none"):
        model = MODELS[name].fresh()
        checkpoint_blocks(model, mode)  # type: ignore[arg-type]
        with Made() as made:
            loss = MODELS[name].loss(model, tokens(0))
        held.append(made.live_bytes())
        loss.backward()
    assert held[0] < held[1] < held[2]


class Products(TorchDispatchMode):
    """Which (tokens, width) x (width, new width) were multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[0].shape[0] == BATCH * SEQ and args[1].shape[0] != BATCH * SEQ:
            self.widths.append((args[0].shape[1], args[1].shape[1]))
        return func(*args, **(kwargs or {}))


def test_what_is_computed_again() -> None:
    """The backward of a block without checkpointing, and what is multiplied beside: never the last product."""
    again = {}
    for mode in ("none", "selective", "full"):
        model = Transformer(SHAPE)
        checkpoint_blocks(model, mode)  # type: ignore[arg-type]
        x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
        output = model.blocks[0](x, rotary_at(torch.arange(SEQ, device=x.device), HIDDEN // HEADS))
        with Products() as products:
            output.sum().backward()
        again[mode] = products.widths
    for mode in MODES:
        for product in again["none"]:
            again[mode].remove(product)
    assert again["selective"] == [(HIDDEN, KV), (HIDDEN, KV), (HIDDEN, FFN)]
    assert sorted(again["full"]) == sorted(
        [(HIDDEN, HIDDEN), (HIDDEN, KV), (HIDDEN, KV), (HIDDEN, HIDDEN), (HIDDEN, FFN), (HIDDEN, FFN)]
    )


# ---------------------------------------------------------------------------------------------------------
# sharded


class Checkpointed:
    """Builds a model whose blocks are checkpointed before `sw.shard`."""

    def __init__(self, name: str, mode: Any) -> None:
        self.name, self.mode = name, mode

    def __call__(self) -> nn.Module:
        model = MODELS[self.name].fresh()
        checkpoint_blocks(model, self.mode)
        return model


class Train:
    def __init__(self, name: str, num_steps: int = 2) -> None:
        self.name, self.num_steps = name, num_steps

    def __call__(self, trainee: Trainee) -> list[float]:
        told = []
        for step in range(self.num_steps):

            def loss_of(rank: int, step: int = step) -> Tensor:
                return MODELS[self.name].loss(trainee.model, tokens(step, rank, trainee.world))

            loss = trainee.share(loss_of)
            loss.backward()
            told.extend([trainee.mean(loss), trainee.clip(0.5)])
            trainee.step()
        return told


@pytest.mark.quick("in-tree-full", "llama-selective")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["in-tree", "llama"])
def test_every_layout_equals_one_process(run_ranks: Pool, name: str, mode: str) -> None:
    check(run_ranks, Train(name), Checkpointed(name, mode), LAYOUTS)


@pytest.mark.quick("selective")
@pytest.mark.parametrize("mode", MODES)
def test_nodes_equal_one_process(run_ranks: Pool, mode: str) -> None:
    check(run_ranks, Train("in-tree"), Checkpointed("in-tree", mode), NODES, world=4, node_size=2)


def train(name: str, mode: Any, strategy: str, precision: str, when: str) -> tuple[list[float], list[tuple[Row, ...]]]:
    """Losses, norms, and what moved in each step."""
    sw.init()
    model = MODELS[name].fresh()
    if when == "before":
        checkpoint_blocks(model, mode)
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, precision=precision)
    if when == "after":
        checkpoint_blocks(model, mode)
    told, rows = [], []
    for step in range(3):
        loss = MODELS[name].loss(model, tokens(step, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        told.extend([float(loss.detach()), float(optimizer.clip_grad_norm(1.0))])
        optimizer.step()
        optimizer.zero_grad()
        rows.append(sw.traffic(model).rows)
    return told, rows


def train_each(name: str, cases: list[tuple[str, str, str, str]]) -> list[Any]:
    return [train(name, *case) for case in cases]


@pytest.mark.quick("in-tree-bf16")
@pytest.mark.parametrize(
    ("name", "precision"), [("in-tree", "fp32"), ("in-tree", "bf16"), ("in-tree tied", "fp32"), ("llama", "bf16")]
)
def test_identical_numbers_and_no_gather_more(run_ranks: Pool, name: str, precision: str) -> None:
    cases = [
        (mode, strategy, precision, when)
        for strategy in ("zero2", "shard_grad_op", "zero3")
        for mode, when in [("none", "before"), *((mode, when) for mode in MODES for when in ("before", "after"))]
    ]
    for told in run_ranks(2, train_each, name, cases):
        plain: Any = None
        for case, seen in zip(cases, told, strict=True):
            plain = seen if case[0] == "none" else plain
            assert seen == plain, case


# ---------------------------------------------------------------------------------------------------------
# compiled


def train_compiled(mode: Any, way: str, backend: str) -> tuple[list[float], int]:
    """Losses under zero3, and how many graphs were compiled."""
    sw.init()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = MODELS["in-tree"].fresh()
    if way == "wrapped, then checkpointed":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
    if way == "compiled, then checkpointed":
        for block in model.blocks:
            block.compile(backend=backend)
    checkpoint_blocks(model, mode)
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), "zero3", precision="fp32")
    if way == "checkpointed, then compiled":
        for block in model.blocks:
            block.compile(backend=backend)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for step in range(3):
            loss = MODELS["in-tree"].loss(model, tokens(step, dist.get_rank(), dist.get_world_size()))
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return losses, num_graphs


WAYS = ["checkpointed, then compiled", "compiled, then checkpointed", "wrapped, then checkpointed"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks(run_ranks: Pool, way: str, mode: str) -> None:
    expected = run_ranks(2, train_compiled, "none", "not compiled", "eager")
    for (seen, num_graphs), (plain, _) in zip(
        run_ranks(2, train_compiled, mode, way, "aot_eager"), expected, strict=True
    ):
        assert seen == pytest.approx(plain, rel=1e-5)
        assert num_graphs >= 1, "nothing was compiled"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_blocks_compiled_with_inductor(run_ranks: Pool, mode: str) -> None:
    expected = run_ranks(2, train_compiled, "none", "not compiled", "eager")
    for (seen, _), (plain, _) in zip(
        run_ranks(2, train_compiled, mode, WAYS[0], "inductor", deadline=300), expected, strict=True
    ):
        assert seen == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
def test_a_compiled_block_keeps_what_its_mode_says() -> None:
    held: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in ("full", "selective", "none"):
            torch._dynamo.reset()
            model = Transformer(SHAPE)
            checkpoint_blocks(model, mode)  # type: ignore[arg-type]
            model.blocks[0].compile(backend="aot_eager")
            x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
            rotary = rotary_at(torch.arange(SEQ, device=x.device), HIDDEN // HEADS)
            given = {tensor.untyped_storage()._cdata for tensor in (x, rotary, *model.parameters())}
            kept: dict[int, int] = {}

            def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = model.blocks[0](x, rotary)
            held[mode] = sum(num_bytes for storage, num_bytes in kept.items() if storage not in given)
            output.sum().backward()
    torch._dynamo.reset()
    # The output is the next block's.
    assert held["selective"] == 4 * BATCH * SEQ * (KEPT["selective"] - HIDDEN)
    assert held["full"] < held["selective"] < held["none"]
