"""Activations on the host: the same gradients to the last bit, and what a block saved is off the device meanwhile."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.runtime import Engine
from shardwise.core.offload.arena import HostBuffers
from shardwise.trainer.checkpointing import checkpoint_blocks
from shardwise.trainer.model import Transformer
from shardwise.trainer.shapes import TransformerShape
from tests.harness import Pool
from tests.support.models import MODELS, tokens
from tests.support.trainee import ONE_OF_EACH

WIDTH, NUM_BLOCKS, NUM_ROWS = 128, 5, 256
ROW_BYTES = WIDTH * 4
INPUT_BYTES = NUM_ROWS * ROW_BYTES  # 128 KiB
HIDDEN_BYTES = 2 * INPUT_BYTES
NUM_STEPS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


# A block saves its input, the normed input, and what the activation made of it.
BLOCK_BYTES = 2 * INPUT_BYTES + HIDDEN_BYTES


class Stack(nn.Module):
    """Notes the memory of its blocks' inputs."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(make_block() for _ in range(NUM_BLOCKS))
        self.inputs: list[StorageWeakRef] = []

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.clear()
        x = x * self.scale
        for layer in self.layers:
            self.inputs.append(StorageWeakRef(x.untyped_storage()))
            x = self.run(layer, x)
        return x * self.scale


class CheckpointedOutside(Stack):
    """Around the call of a block, as Hugging Face does it."""

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)


class Reentrant(Stack):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=True)


def full() -> Stack:
    model = Stack()
    checkpoint_blocks(model, "full")
    return model


def selective() -> Stack:
    model = Stack()
    checkpoint_blocks(model, "selective")
    return model


def frozen() -> Stack:
    """Weights that get no gradient are saved all the same."""
    model = Stack()
    for layer in model.layers:
        for param in layer.parameters():
            param.requires_grad_(False)
    return model


def compiled() -> Stack:
    model = Stack()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


class FusedBlock(nn.Module):
    """Saves three views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.fused(x).chunk(3, dim=-1)
        return x + first * second * third


def fused() -> Stack:
    return Stack(FusedBlock)


def moved(engine: Engine) -> tuple[int, int]:
    """Bytes to the host and to the device, since the last step."""
    ways = engine.host.moves.by_way()
    return ways.get("to_host", 0), ways.get("to_device", 0)


def rows(step: int, num_rows: int = NUM_ROWS) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(step))


class Run:
    """A sharded model, in a world that is there already."""

    def __init__(self, build: Callable[[], nn.Module], strategy: Any = "zero3", hosted: bool = True, **options: Any):
        sw.init()
        torch.manual_seed(0)
        model = build()
        params = [param for param in model.parameters() if param.requires_grad]
        options = {"precision": "fp32", **options}
        strategy = f"{strategy}+activations=host" if hosted else strategy
        self.model, self.optimizer = sw.shard(model, torch.optim.SGD(params, lr=0.1), strategy, **options)
        self.engine = engine_of(self.model)
        self.host = self.engine.activations

    def loss(self, step: int, num_rows: int = NUM_ROWS) -> Tensor:
        return self.model(rows(step, num_rows)).square().mean()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return sw.full_state_dict(self.model)


Story = Callable[[Run], list[float]]


def told(
    story: Story, build: Callable[[], nn.Module], strategies: list[str], options: dict[str, Any], moves: bool = True
) -> None:
    """Runs on every rank: what a story tells is the same to the last bit wherever activations rest."""
    for strategy in strategies:
        runs = [Run(build, strategy, hosted, **options) for hosted in (False, True)]
        values = [story(run) for run in runs]
        assert values[0] == values[1], strategy
        plain, hosted = (run.weights() for run in runs)
        for name, value in plain.items():
            assert torch.equal(value, hosted[name]), f"{name} under {strategy}"
        gc.collect()
        assert lent_bytes(runs[1].host.buffers) == 0
        assert bool(runs[1].host.buffers.held_bytes) == moves
        assert top_hooks() is None


def lent_bytes(buffers: HostBuffers) -> int:
    return buffers.held_bytes - sum(buffer.num_bytes for buffer in (*buffers._free, *buffers._returned))


def top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# ---------------------------------------------------------------------------------------------------------
# the same training


def train(run: Run) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        loss = run.loss(step)
        loss.backward()
        losses += [loss.item(), float(run.optimizer.clip_grad_norm(0.5))]
        run.step()
    return losses


def train_with_micro_batches(run: Run) -> list[float]:
    """Two forwards before one backward, evaluations in between, and a graph that nobody goes through."""
    losses = []
    for step in range(NUM_STEPS):
        for micro in range(2):
            with sw.accumulate(run.model):
                run.loss(10 * step + micro).backward()
        first, second = run.loss(10 * step + 2), run.loss(10 * step + 3)
        with torch.no_grad():
            losses.append(run.loss(50).item())
        unused = run.loss(51)
        with sw.accumulate(run.model):
            second.backward()
        first.backward()
        losses += [unused.item(), first.item(), float(run.optimizer.clip_grad_norm(0.5))]
        run.step()
    return losses


def train_on_a_sum(run: Run) -> list[float]:
    """One backward through two forwards."""
    losses = []
    for step in range(NUM_STEPS):
        loss = run.loss(2 * step) + run.loss(2 * step + 1)
        loss.backward()
        losses.append(loss.item())
        run.step()
    return losses


def train_with_kept_graphs(run: Run) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        loss = run.loss(step)
        with sw.accumulate(run.model):
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.item())
        run.step()
    return losses


def train_compiled(run: Run) -> list[float]:
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            losses = train(run)
            torch._dynamo.config.error_on_recompile = True
            return losses + train(run)
    finally:
        torch._dynamo.config.error_on_recompile = False
        torch._dynamo.reset()


BUILDS = [Stack, full, selective, CheckpointedOutside, fused]


@pytest.mark.quick("full", "CheckpointedOutside")
@pytest.mark.parametrize("build", BUILDS)
def test_training_is_the_same_to_the_last_bit(run_ranks: Pool, build: Any) -> None:
    run_ranks(2, told, train, build, ONE_OF_EACH, {})


@pytest.mark.quick("Stack", "selective")
@pytest.mark.parametrize("build", BUILDS)
def test_micro_batches(run_ranks: Pool, build: Any) -> None:
    run_ranks(2, told, train_with_micro_batches, build, ["shard_grad_op", "zero3"], {})


@pytest.mark.quick("Stack")
@pytest.mark.parametrize("build", [Stack, full])
def test_one_backward_through_two_forwards(run_ranks: Pool, build: Any) -> None:
    run_ranks(2, told, train_on_a_sum, build, ["ddp", "zero3"], {})


@pytest.mark.parametrize("build", [Stack, full, CheckpointedOutside])
def test_a_graph_that_is_kept_serves_again(run_ranks: Pool, build: Any) -> None:
    run_ranks(1, told, train_with_kept_graphs, build, ["ddp", "zero3"], {})


def test_beside_other_things_on_the_host(run_ranks: Pool) -> None:
    run_ranks(2, told, train, full, ["ddp+optimizer=host", "zero3-offload"], {})


def test_frozen_weights(run_ranks: Pool) -> None:
    run_ranks(2, told, train, frozen, ["zero3"], {})


def test_sixteen_bits(run_ranks: Pool) -> None:
    run_ranks(1, told, train, full, ["zero3"], {"precision": "bf16"})


@pytest.mark.slow
def test_compiled_blocks(run_ranks: Pool) -> None:
    run_ranks(1, told, train_compiled, compiled, ["zero3"], {})


def test_reentrant_checkpoints(run_ranks: Pool) -> None:
    """Such a checkpoint around a call saves the inputs of a block when it is over: they stay."""
    run_ranks(1, told, train, Reentrant, ["ddp"], {}, moves=False)


class HuggingFace:
    def __call__(self) -> nn.Module:
        model = MODELS["llama"].fresh()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


def train_hugging_face(run: Run) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        # Rows enough that a hidden state is worth a copy.
        loss = MODELS["llama"].loss(run.model, torch.cat([tokens(step, rank) for rank in range(64)]))
        loss.backward()
        losses.append(loss.item())
        run.step()
    return losses


def test_hugging_face_checkpoints_its_blocks(run_ranks: Pool) -> None:
    run_ranks(1, told, train_hugging_face, HuggingFace(), ["zero3"], {})


# ---------------------------------------------------------------------------------------------------------
# what moves, and what is held


def moves_of_a_step(build: Callable[[], nn.Module], num_micro: int = 1) -> tuple[int, int]:
    run = Run(build)
    for step in range(2):
        for micro in range(num_micro):
            with nullcontext() if micro == num_micro - 1 else sw.accumulate(run.model):
                run.loss(step).backward()
        found = moved(run.engine)
        run.step()
    return found


@pytest.mark.parametrize(
    ("build", "block_bytes"),
    [
        (full, INPUT_BYTES),
        (selective, INPUT_BYTES),
        (Stack, BLOCK_BYTES),
        # No weights, though autograd saves them for the gradient of the input; it does not save what only they read.
        (frozen, BLOCK_BYTES - INPUT_BYTES),
        # The input, what was cut into three, and the product of two parts.
        (fused, 5 * INPUT_BYTES),
    ],
)
def test_what_a_block_saves_moves_once_and_no_weights_do(run_ranks: Pool, build: Any, block_bytes: int) -> None:
    """The last block's stays, and that of the one before it is still there when the backward begins."""
    for num_micro in (1, 3):
        seen = run_ranks(1, moves_of_a_step, build, num_micro)[0]
        assert seen == (num_micro * (NUM_BLOCKS - 1) * block_bytes, num_micro * (NUM_BLOCKS - 2) * block_bytes)


def test_inputs_of_blocks_that_are_checkpointed_from_outside(run_ranks: Pool) -> None:
    """With them goes what the model saved before the first block: the batch."""
    assert run_ranks(1, moves_of_a_step, CheckpointedOutside)[0] == (
        (1 + NUM_BLOCKS - 1) * INPUT_BYTES,
        (1 + NUM_BLOCKS - 2) * INPUT_BYTES,
    )


def moves_of_some_blocks() -> tuple[int, int]:
    run = Run(full, {"layers.[012]": "zero3+activations=host", "*": "zero3"}, hosted=False)
    run.loss(0).backward()
    return moved(run.engine)


def test_a_unit_may_differ_from_others(run_ranks: Pool) -> None:
    assert run_ranks(1, moves_of_some_blocks)[0] == (2 * INPUT_BYTES, INPUT_BYTES)


def what_is_held(build: Callable[[], Stack]) -> list[list[bool]]:
    """Which inputs of blocks have memory: after the forward, and when the gradient of each block's output arrives."""
    run = Run(build)
    model: Any = run.model
    held: list[list[bool]] = []

    def look(grad: Tensor | None = None) -> None:
        held.append([not ref.expired() for ref in model.inputs])

    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: output.register_hook(look) and None)
    loss = run.loss(0)
    look()
    loss.backward()
    return held


@pytest.mark.parametrize("build", [full, CheckpointedOutside, Stack])
def test_inputs_are_not_held_between_forward_and_backward(run_ranks: Pool, build: Any) -> None:
    held = run_ranks(1, what_is_held, build)[0]
    assert held[0] == [False, False, False, True, True]
    # The originals never come back: what the backward reads is copies.
    assert held[-1] == [False] * NUM_BLOCKS


def bytes_while_it_goes_back() -> list[int]:
    """Device memory of what came back and of what is coming, whenever a block's backward begins."""
    run = Run(full)
    found: list[int] = []

    def look(grad: Tensor) -> None:
        memories = {memory for stretch in run.host._stretches.values() for memory in stretch.memories}
        found.append(sum(memory.num_bytes for memory in memories if memory.here is not None))

    for layer in run.model.layers:
        layer.register_forward_hook(lambda module, args, output: output.register_hook(look) and None)
    loss = run.loss(0)
    loss.backward(retain_graph=True)
    loss.backward()
    return found


def test_a_backward_has_two_blocks_on_the_device(run_ranks: Pool) -> None:
    """Where the graph is kept, and nothing goes by itself, also the last one's, which is nowhere else."""
    found = run_ranks(1, bytes_while_it_goes_back)[0]
    first, second = found[:NUM_BLOCKS], found[NUM_BLOCKS:]
    assert [num // INPUT_BYTES for num in first] == [2, 2, 3, 3, 3]
    # In the last one a block's goes with its backward, and the next one's has come.
    assert [num // INPUT_BYTES for num in second] == [2, 1, 1, 1, 1]


def shared_by_all_blocks() -> tuple[int, int, int, int]:
    """A table that the model hands to every block."""
    shape = TransformerShape(vocab=64, hidden=64, layers=4, heads=2, kv_heads=2, ffn=128, max_seq=512)

    def build() -> nn.Module:
        model = Transformer(shape)
        checkpoint_blocks(model, "full")
        return model

    run = Run(build)
    batch = torch.randint(0, 64, (1, 513), generator=torch.Generator().manual_seed(0))
    run.model(batch[:, :-1], batch[:, 1:]).backward()
    return *moved(run.engine), 512 * 64 * 4, 2 * 512 * 16 * 4


def test_what_all_blocks_save_moves_once(run_ranks: Pool) -> None:
    to_host, to_device, of_block, of_all = run_ranks(1, shared_by_all_blocks)[0]
    assert to_host == 3 * of_block + of_all
    assert to_device == 2 * of_block, "it is still there with the last block, and serves the others"


def loss_in_a_unit() -> tuple[list[str], int, int]:
    """The head is a unit of its own, and computes the loss and gradients of its weight in the forward."""
    shape = TransformerShape(vocab=16384, hidden=64, layers=4, heads=2, kv_heads=2, ffn=128, max_seq=512)

    def build() -> nn.Module:
        model = Transformer(shape)
        checkpoint_blocks(model, "full")
        return model

    run = Run(build)
    batch = torch.randint(0, shape.vocab, (8, 513), generator=torch.Generator().manual_seed(0))
    run.model(batch[:, :-1], batch[:, 1:]).backward()
    return [unit.name for unit in run.engine.units], moved(run.engine)[0], 8 * 512 * 64 * 4


def test_the_loss_stays(run_ranks: Pool) -> None:
    names, to_host, of_block = run_ranks(1, loss_in_a_unit)[0]
    assert names[-1] == "head"
    # With the blocks' inputs, the table of positions goes.
    assert 4 * of_block < to_host < 4.5 * of_block


def buffers_of(lengths: list[int], build: Callable[[], nn.Module]) -> list[tuple[int, int, int]]:
    """Bytes held on the host, and lent before and after the backward of each step."""
    run = Run(build)
    buffers, found = run.host.buffers, []
    for step, num_rows in enumerate(lengths):
        loss = run.loss(step, num_rows)
        lent = lent_bytes(buffers)
        loss.backward()
        run.step()
        found.append((buffers.held_bytes, lent, lent_bytes(buffers)))
    return found


@pytest.mark.parametrize(("build", "block_bytes"), [(full, INPUT_BYTES), (Stack, BLOCK_BYTES)])
def test_host_memory_is_the_same_from_the_first_step_on(run_ranks: Pool, build: Any, block_bytes: int) -> None:
    found = run_ranks(1, buffers_of, [NUM_ROWS] * 3, build)[0]
    assert found == [((NUM_BLOCKS - 1) * block_bytes, (NUM_BLOCKS - 1) * block_bytes, 0)] * 3


def test_sequences_of_other_lengths_share_host_memory(run_ranks: Pool) -> None:
    lengths = [NUM_ROWS, NUM_ROWS // 2, 2 * NUM_ROWS, NUM_ROWS]
    held = [held for held, _, _ in run_ranks(1, buffers_of, lengths, full)[0]]
    assert held == [(NUM_BLOCKS - 1) * most * ROW_BYTES for most in (NUM_ROWS, NUM_ROWS, 2 * NUM_ROWS, 2 * NUM_ROWS)]


def unused_graphs() -> list[int]:
    run = Run(full)
    found = []
    for step in range(3):
        loss = run.loss(step)
        found.append(lent_bytes(run.host.buffers))
        del loss
        found.append(lent_bytes(run.host.buffers))
    return [*found, run.host.buffers.held_bytes]


def test_a_backward_that_never_runs_gives_its_memory_back(run_ranks: Pool) -> None:
    lent = (NUM_BLOCKS - 1) * INPUT_BYTES
    assert run_ranks(1, unused_graphs)[0] == [lent, 0] * 3 + [lent]


def evaluations() -> tuple[tuple[int, int], int]:
    run = Run(full)
    with torch.no_grad():
        run.loss(0)
    with torch.inference_mode():
        run.loss(0)
    return moved(run.engine), run.host.buffers.held_bytes


def test_nothing_moves_without_gradients(run_ranks: Pool) -> None:
    assert run_ranks(1, evaluations)[0] == ((0, 0), 0)


def small_activations() -> tuple[int, int]:
    run = Run(full)
    run.loss(0, num_rows=8).backward()
    return moved(run.engine)


def test_what_is_small_stays(run_ranks: Pool) -> None:
    assert run_ranks(1, small_activations)[0] == (0, 0)


def part_of_a_data_set() -> tuple[int, int]:
    """A batch that is a view of much more: it stays, and is no reason to move all of it."""
    run = Run(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    data = torch.randn(100 * NUM_ROWS, WIDTH)
    run.model(data[:NUM_ROWS]).square().mean().backward()
    return moved(run.engine)


def test_a_part_of_something_larger_stays(run_ranks: Pool) -> None:
    """Of a model that is one unit, only what it computed moves."""
    assert run_ranks(1, part_of_a_data_set)[0][0] <= 2 * INPUT_BYTES


# ---------------------------------------------------------------------------------------------------------
# what goes wrong


class Failing(Stack):
    """Fails in one of its blocks."""

    fails: type[BaseException] | None = None

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        def fail(module: nn.Module, args: Any) -> None:
            assert self.fails is not None
            raise self.fails("on purpose")

        if self.fails is None or layer is not self.layers[3]:
            return layer(x)
        handle = layer.down.register_forward_pre_hook(fail)
        try:
            return layer(x)
        finally:
            handle.remove()


@contextmanager
def failing(run: Run, error: type[BaseException]) -> Iterator[None]:
    model: Any = run.model
    model.fails = error
    with pytest.raises(error, match="on purpose"):
        yield
    model.fails = None


def train_after_failures(run: Run) -> list[float]:
    losses = train(run)
    kept = run.loss(70)
    with failing(run, ValueError):
        run.loss(71)
    assert top_hooks() is None
    kept.backward()
    run.step()
    # What is no Exception does not reach the hooks of modules.
    with failing(run, KeyboardInterrupt):
        run.loss(72)
    return losses + train(run)


def test_a_forward_that_fails_leaves_nothing_behind(run_ranks: Pool) -> None:
    run_ranks(1, told, train_after_failures, Failing, ["ddp", "zero3"], {})


def second_derivatives() -> None:
    run = Run(Stack, "ddp")
    x = rows(0).requires_grad_()
    with pytest.raises(sw.StateError, match=r"create_graph=True.*activations_on='device'"):
        torch.autograd.grad(run.model(x).square().mean(), [x], create_graph=True)


def test_a_graph_of_a_backward_is_refused(run_ranks: Pool) -> None:
    run_ranks(1, second_derivatives)


class Overwriting(nn.Module):
    """Changes what autograd has saved."""

    def __init__(self, num_kept_rows: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.num_kept_rows = num_kept_rows

    def forward(self, x: Tensor) -> Tensor:
        x = x[: self.num_kept_rows] + 1
        out = x * self.scale
        x.add_(1)
        return out


def overwritten(num_rows: int) -> None:
    run = Run(lambda: Overwriting(num_rows), "ddp")
    loss = run.loss(0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*unit 'root'"):
        loss.backward()


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 8], ids=["on the host", "too small to go there"])
def test_what_was_overwritten_is_refused_as_autograd_does(run_ranks: Pool, num_rows: int) -> None:
    run_ranks(1, overwritten, num_rows)


def stale_weights() -> None:
    run = Run(Stack, "zero3")
    loss = run.loss(0)
    run.loss(1).backward()
    run.step()
    with pytest.raises(sw.StateError):
        loss.backward()


def test_weights_that_have_changed_since_are_refused(run_ranks: Pool) -> None:
    run_ranks(1, stale_weights)


def inside_a_checkpoint_of_all() -> tuple[tuple[int, int], bool]:
    """Hooks of somebody else around the model: theirs decide."""
    run = Run(Stack, "ddp")
    loss = checkpoint(run.loss, 0, use_reentrant=False)
    loss.backward()
    return moved(run.engine), top_hooks() is None


def test_a_checkpoint_around_the_model_comes_first(run_ranks: Pool) -> None:
    assert run_ranks(1, inside_a_checkpoint_of_all)[0] == ((0, 0), True)


# ---------------------------------------------------------------------------------------------------------
# host memory


def test_the_smallest_buffer_that_is_large_enough_is_lent() -> None:
    buffers = HostBuffers(pin=False, settle=lambda: None)
    small, large = buffers.lend(4096), buffers.lend(3 * 4096)
    for buffer in (large, small):
        buffers.take_back(buffer)
    assert buffers.lend(2 * 4096) is large
    assert buffers.lend(100) is small
    assert (buffers.held_bytes, lent_bytes(buffers)) == (4 * 4096, 4 * 4096)


def test_a_buffer_that_is_too_small_makes_way_when_nothing_uses_it_any_more() -> None:
    settled: list[int] = []
    buffers = HostBuffers(pin=False, settle=lambda: settled.append(buffers.held_bytes))
    buffers.take_back(buffers.lend(4096))
    assert not settled
    assert buffers.lend(4097).row.numel() == 2 * 4096
    assert settled == [4096]
    assert buffers.held_bytes == 2 * 4096
