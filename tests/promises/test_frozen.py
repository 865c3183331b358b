"""Frozen weights in few bits: every strategy trains adapters as one process does on the same rounded base, moves and
holds what the plan says, and goes on from a checkpoint under another strategy and in another world."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.base.dtypes import BF16, FP32, DType, dtype_of
from shardwise.base.errors import CheckpointError, ConfigurationError, StateError
from shardwise.core.engine.guards import engine_of
from shardwise.core.layout import Layout, Strategy, layout_of, quantized
from shardwise.core.schedule.flat import is_quantizable
from shardwise.core.schedule.model import Param, Site
from shardwise.core.schedule.state_bytes import StateBytes
from shardwise.core.wire.codec import encoded_bytes, parse
from shardwise.core.wire.ledger import Call
from shardwise.core.wire.reference_codecs import decoder, encoded
from shardwise.planner.events import step_events
from tests.harness import Pool
from tests.support.strategies import ENCODED, STRATEGIES, disk_for, slow_but

HIDDEN, WIDE, ROWS, STEPS = 48, 100, 12, 4
CODECS = ("nf4", "int8", "int4", "e4m3")
# The patterns of the others name units of another model.
NAMED_ENCODED = [name for name, strategy in ENCODED.items() if isinstance(strategy, str)]
MAPPING: Strategy = {"blocks.0": "ddp", "blocks.1": "hpz", "blocks.*": "zero3", "*": "zero2"}


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank next to it."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.base = nn.Linear(inward, outward).requires_grad_(False)
        self.down, self.up = nn.Linear(inward, 4, bias=False), nn.Linear(4, outward, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN).requires_grad_(False)
        self.inward, self.outward = Adapted(HIDDEN, WIDE), Adapted(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outward(torch.relu(self.inward(self.norm(x))))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, HIDDEN).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(HIDDEN, 31).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def is_base(name: str) -> bool:
    return name.endswith("base.weight")


def fresh(codec: str | None = None) -> Frozen:
    """The model; with a codec its base is rounded to what that codec decodes."""
    torch.manual_seed(0)
    model = Frozen()
    for name, param in model.named_parameters():
        if codec is not None and is_base(name):
            decoder(parse(codec), encoded(parse(codec), param.detach())[None], param.data.view(-1))()
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def batch(step: int, index: int, num_slices: int) -> Tensor:
    tokens = torch.randint(31, (ROWS, 7), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(num_slices)[index]


@cache
def alone(codec: str) -> list[float]:
    """Losses of one process on the rounded base, which cuts the batch as two ranks do."""
    model = fresh(codec)
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    losses = []
    for step in range(STEPS):
        parts = [model(batch(step, index, 2)) for index in range(2)]
        grads = [torch.autograd.grad(part, trained(model)) for part in parts]
        for param, one, other in zip(trained(model), *grads, strict=True):
            param.grad = (one + other) / 2
        optimizer.step()
        losses.append(float(sum(parts).detach() / 2))
    return losses


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    is_as_planned: bool  # collectives, and moves between memories
    memory: tuple[StateBytes, StateBytes, int, int, int, int]  # held and planned: state, buffers, host


def train(
    strategy: Strategy, codec: str, precision: str = "fp32", node_size: int = 1, save: str = "", load: str = ""
) -> Outcome:
    """Runs on every rank: half of the steps, a checkpoint, and the other half."""
    sw.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fresh()
    asked = quantized(strategy, codec)
    given = torch.optim.AdamW(trained(model), lr=0.01)
    model, optimizer = sw.shard(model, given, asked, precision=precision, node_size=node_size, **disk_for(asked))
    losses, is_as_planned = [], True
    if load:
        sw.load(load, model, optimizer)
    for step in range(STEPS // 2 if load else 0, STEPS):
        events = step_events(engine_of(model).schedule, 1, first_step=step == 0 or bool(load and step == STEPS // 2))
        loss = model(batch(step, rank, world))
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total / world))
        optimizer.step()
        optimizer.zero_grad()
        planned = Counter(call for event in events for call in event.calls)
        moved = Counter[str]()
        for move in (move for event in events for move in event.moves):
            moved[move.way] += move.num_bytes
        seen: list[Call] = [*(engine_of(model).mesh.ledger.last_step or ())]
        is_as_planned &= Counter(seen) == planned and sw.traffic(model).moves == dict(moved)
        if save and step == STEPS // 2 - 1:
            sw.save(save, model, optimizer)
    seen_memory = sw.memory(model, optimizer)
    state = seen_memory.seen, seen_memory.planned
    buffers = seen_memory.peak_buffers, seen_memory.planned_buffers
    return Outcome(
        losses,
        sw.full_state_dict(model),
        is_as_planned,
        (*state, *buffers, seen_memory.host, seen_memory.planned_host),
    )


def run(pool: Pool, world: int, strategy: Strategy, codec: str, **options: object) -> Outcome:
    outcomes = pool(world, train, strategy, codec, **options)
    for each in outcomes:
        assert each.losses == outcomes[0].losses
        assert each.is_as_planned
        held, planned, buffers, planned_buffers, host, planned_host = each.memory
        # The moments of small adapters need no padding.
        assert held.params == planned.params
        assert held.optimizer <= planned.optimizer
        assert buffers <= planned_buffers + (4 << 10)
        assert host == planned_host
    return outcomes[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("strategy", "codec"),
    slow_but(
        [("ddp", "nf4"), ("zero2", "nf4"), ("zero3", "nf4"), ("hpz", "int8"), ("zero3_nvme", "nf4")],
        [*((name, "nf4") for name in STRATEGIES if name != "mapping"), *(("hpz", codec) for codec in CODECS[1:])],
    ),
)
def test_losses_equal_one_process_with_the_same_base(run_ranks: Pool, strategy: str, codec: str) -> None:
    outcome = run(run_ranks, 2, STRATEGIES[strategy], codec)
    assert outcome.losses == alone(codec)
    # The base comes back decoded, in its own dtype.
    expected = fresh(codec).state_dict()
    for name, value in outcome.weights.items():
        if is_base(name):
            assert torch.equal(value, expected[name])


@pytest.mark.parametrize("strategy", slow_but(("zero3", "zeropp"), ["zero1", "zero3", "hsdp", "hfsdp", *NAMED_ENCODED]))
def test_two_nodes_of_two_in_bf16(run_ranks: Pool, strategy: str) -> None:
    """Also where gradients, and parameters that are trained, are sent encoded: frozen bytes are sent as they are."""
    outcome = run(run_ranks, 4, ENCODED.get(strategy, strategy), "nf4", precision="bf16", node_size=2)
    assert outcome.losses == pytest.approx(alone("nf4"), rel=0.02)


def test_several_layouts_in_one_model(run_ranks: Pool) -> None:
    assert run(run_ranks, 2, MAPPING, "nf4").losses == alone("nf4")


def test_resume_under_another_strategy_and_world(run_ranks: Pool, tmp_path: Path) -> None:
    place = str(tmp_path / "saved")
    whole = run(run_ranks, 2, "zero3", "nf4", save=place)
    assert whole.losses == alone("nf4")
    for world, strategy in ((2, "ddp"), (1, "zero1")):
        outcome = run(run_ranks, world, strategy, "nf4", load=place)
        assert outcome.losses == pytest.approx(whole.losses[STEPS // 2 :], rel=1e-6)
        for name, value in outcome.weights.items():
            if is_base(name):
                assert torch.equal(value, whole.weights[name])
    with pytest.raises(Exception, match="stored as nf4, and the model's as int8") as caught:
        run_ranks(1, train, "ddp", "int8", load=place)
    assert CheckpointError.__name__ in str(caught.value)


def resting_bytes() -> tuple[int, int, int]:
    """Of a process alone: bytes that stay of the base, its weights, and bytes of the slots."""
    sw.init()
    model, _ = sw.shard(fresh(), None, "ddp+frozen_as=nf4", precision="bf16")
    engine = engine_of(model)
    flats = [state for state in engine.all_states if state.flat.stored_codec is not None]
    num_weights = sum(param.num_elems for state in flats for param in state.flat.params)
    assert not engine.gathers.memory.row_slots[0].numel()
    return sum(state.master.nbytes for state in flats), num_weights, len(engine.gathers.memory.slots)


def test_what_stays_in_memory(run_ranks: Pool) -> None:
    """Also where nothing is split, decoded weights are in two slots only."""
    (num_bytes, num_weights, num_slots), *_ = run_ranks(1, resting_bytes)
    sizes = 4 * sum(-(-encoded_bytes("nf4", HIDDEN * WIDE) // 256) * 256 for _ in range(2))
    assert (num_bytes, num_slots) == (sizes, 2)
    assert num_bytes < 0.56 * num_weights  # matrices of 4,800 weights; 0.516 for large ones


@pytest.mark.parametrize(
    ("path", "shape", "dtype", "expected"),
    [
        ("model.layers.0.mlp.up_proj", (8, 8), BF16, True),
        ("model.layers.0.mlp.up_proj.base_layer", (8, 8), FP32, True),
        ("model.layers.0.mlp.up_proj.lora_A.default", (4, 8), FP32, False),
        ("lm_head", (8, 8), BF16, False),
        ("model.layers.0.input_layernorm", (8,), BF16, False),
        ("model.layers.0.mlp.experts", (2, 8, 8), BF16, False),
        ("model.layers.0.mlp.up_proj", (8, 8), dtype_of("float64"), False),
    ],
)
def test_matrices_that_are_stored_in_few_bits(path: str, shape: tuple[int, ...], dtype: DType, expected: bool) -> None:
    for attribute, is_trained in (("weight", False), ("A_log", False), ("weight", True)):
        param = Param(f"{path}.{attribute}", shape, dtype, is_trained, (Site(path, attribute),))
        assert is_quantizable(param) == (expected and attribute == "weight" and not is_trained)


def test_layouts() -> None:
    assert layout_of("zero3+frozen_as=nf4") == Layout("world", "world", "world", "forward", frozen_as="nf4")
    assert layout_of("zeropp+frozen_as=fp8").name == "zeropp+frozen_as=e4m3"
    assert quantized({"blocks.*": "zero3", "*": Layout()}, "int8") == {
        "blocks.*": "zero3+frozen_as=int8",
        "*": Layout(frozen_as="int8"),
    }
    for bad, why in (
        ("zero3+frozen_as=bf16", "frozen weights are stored as nf4"),
        ("zero3+frozen_as=int8:stochastic", "rounded once"),
        ("zero3+params_as=nf4", "frozen_as"),
        ("zero3+frozen_as=nf5", "did you mean"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            layout_of(bad)


def refusals() -> list[str]:
    sw.init()
    said = []
    with pytest.raises(ConfigurationError) as nothing:
        sw.shard(nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), None, "ddp+frozen_as=nf4")
    said.append(str(nothing.value))
    model, _ = sw.shard(fresh(), None, "ddp+frozen_as=nf4", precision="fp32")
    weight = model.blocks[0].inward.base.weight
    with pytest.raises(StateError) as read:
        weight.sum()
    said.append(str(read.value))
    with pytest.raises(StateError) as write, sw.whole(model, write=True):
        model.blocks[0].inward.base.weight.data.zero_()
    said.append(str(write.value))
    return said


def test_refusals(run_ranks: Pool) -> None:
    (nothing, read, write), *_ = run_ranks(1, refusals)
    assert "no matrix of a repeated block is frozen" in nothing
    assert "is stored as nf4" in read
    assert "changed inside sw.whole" in write


def test_70b_on_one_gpu() -> None:
    made = sw.plan(
        "llama-3-70b",
        "1xH200-141GB",
        strategy="ddp+frozen_as=nf4",
        lora=16,
        seq=2048,
        checkpointing="full",
        search=False,
    )
    assert made.recommended is not None
    assert made.recommended.needed_bytes < 60e9
    flats = [flat for unit in made.recommended.schedule.units for flat in unit.flats if flat.stored_codec]
    num_weights = sum(param.num_elems for flat in flats for param in flat.params)
    assert num_weights > 68e9
    assert sum(flat.num_elems for flat in flats) < 0.517 * num_weights
    with pytest.raises(ConfigurationError, match="no matrix of a repeated block is frozen"):
        sw.plan("llama-3-8b", "8xH100-80GB", strategy="zero3+frozen_as=nf4")


def test_bytes_on_the_wire() -> None:
    made = sw.plan("llama-3-8b", "8xH100-80GB", strategy="zero3+frozen_as=nf4", lora=16, search=False)
    assert made.recommended is not None
    calls = [call for event in made.recommended.events for call in event.calls if call.dtype == "uint8"]
    flats = [flat for unit in made.recommended.schedule.units for flat in unit.flats if flat.stored_codec]
    num_weights = sum(param.num_elems for flat in flats for param in flat.params)
    # Once for the forward and once for the backward, but for the units that are still in their slots.
    gathered = sum(call.num_bytes for call in calls)
    assert 1.9 * 0.516 * num_weights < gathered < 2 * 0.55 * num_weights
