"""Work (memory and arithmetic) of every unit of a model in one micro-batch, computed from the model's sizes alone.

All blocks are equal, so only one block and the end of the model are run, on a simulated autograd tape (blocks.py,
tape.py). Work outside of blocks: the beginning (token ids, the rotary table, an embedding that is no unit) belongs to
`ROOT`, and the end (the last norm, the head, the loss) to the head, or to `LOSS` if the head is no unit.

Not modelled: attention masks (several documents in one sequence), and fragmentation inside blocks of torch's allocator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from ...core.schedule.model import ROOT, UnitSpec
from ..shapes.shape import ModelShape, targets_of, units_of
from ..training import Loss, LossChunk, Training, tokens_per_chunk
from . import blocks
from .tape import Block, Gradients, Habits, Kernel, Tape, Tensor, Weight, measure
from .work import Product, Work, chain, embedding_scratch_bytes, rounded

LOSS = "loss"
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Head:
    """Output projection and loss. `is_plain`: a plain linear layer, whose gradient can be written directly.

    chunked (trainer/loss.py): the forward computes gradients for a chunk of tokens at a time, and holds them in fp32
    plain: logits in the compute dtype and in fp32, their log-softmax, and in the backward two gradients of that size
    compiled: plain, as one kernel that saves the logits, and one that makes their gradient
    fused (Liger's): like chunked, but gradients have the compute dtype, and chunks are no larger than the hidden states
    """

    hidden: int
    vocab: int
    loss: Loss
    is_plain: bool = True
    chunk: LossChunk = "small"
    is_capped: bool = False

    def __call__(self, t: Tape, states: Tensor) -> Tensor:
        return self._plain(t, states) if self.loss in ("plain", "compiled") else self._chunked(t, states)

    def _plain(self, t: Tape, states: Tensor) -> Tensor:
        logits = blocks.linear(t, states, (self.hidden, self.vocab), "lm_head", plain=self.is_plain)
        del states
        if self.loss == "compiled":
            return t.op([logits], 1, saves=[logits])
        if self.is_capped:  # Gemma 2
            logits = blocks.scale(t, logits)
            logits = t.op([logits], kernel=Kernel(saves_result=True))
            logits = blocks.scale(t, logits)
        scores = t.op([blocks.cast(t, logits, 4)], kernel=Kernel(saves_result=True))
        return t.op([scores], 1, saves=[scores])

    def _chunked(self, t: Tape, states: Tensor) -> Tensor:
        weight = t.habits.weight(self.hidden * self.vocab)
        num_tokens, num_states = states.num_elems // self.hidden, states.num_elems
        grad_itemsize = 4 if self.loss == "chunked" else t.itemsize
        node = t.node((states,))
        node.saved.append(t.new(num_states, grad_itemsize))
        if weight.trainable:
            node.saved.append(t.new(weight.num_elems, grad_itemsize))
        logit_grads: Tensor | None = None
        chunk_tokens = self.tokens_per_chunk(num_tokens)
        num_full, rest = divmod(num_tokens, chunk_tokens)
        # All chunks after the second are like it, except the last.
        for rows, count in ((chunk_tokens, min(num_full, 1)), (chunk_tokens, num_full - 1), (rest, 1)):
            if rows == 0 or count < 1:
                continue
            if self.loss == "chunked":
                logits = t.new(rows * self.vocab, 4)
                scores = t.new(rows * self.vocab, 4)
                del logits
                # The variable holds the gradients of the previous chunk until the new ones exist.
                logit_grads = scores if t.itemsize == 4 else t.new(rows * self.vocab)
                del scores
                temporaries = [t.new(rows * self.hidden, 4), t.new(rows * self.hidden)]
                del temporaries
            else:
                logit_grads = t.new(rows * self.vocab)
            # The two products of the backward also run here, in the forward.
            t.products.append(Product(rows, self.vocab, self.hidden, count, trainable=weight.trainable))
            t.num_kernels += 12 * count
            t.moved_bytes += count * rows * self.vocab * (4 * 4 + 2 * 4 + 4 + t.itemsize)
            t.moved_bytes += count * rows * self.hidden * (2 * 4 + 4 * t.itemsize)
        del logit_grads

        def backward(grads: Gradients) -> list[Tensor | None]:
            grads.clear()
            state_grads = t.new(num_states)
            if weight.trainable:
                t.grads.append(t.new(weight.num_elems))
            if self.loss == "chunked":  # scaled and rounded once
                t.moved_bytes += (num_states + weight.num_elems * weight.trainable) * (grad_itemsize + t.itemsize)
            return [state_grads]

        node.backward = backward
        loss = t.new(1, 4)
        loss.node = node
        return loss

    def tokens_per_chunk(self, num_tokens: int) -> int:
        if self.loss == "chunked":
            return tokens_per_chunk(self.vocab, self.chunk)
        num_chunks = -(-self.vocab // self.hidden)
        return 1 << (-(-num_tokens // num_chunks) - 1).bit_length()


def end(shape: ModelShape, training: Training, t: Tape, x: Tensor) -> Tensor:
    """Run the end of the model on the tape: from the last block's output to the loss."""
    states = blocks.norm(shape, t, x, shape.hidden)
    del x
    # A tied weight is reduced last, with the embedding: the buffer for its gradient does not exist yet.
    is_plain = shape.code != "in-tree" and not shape.tied
    head = Head(shape.hidden, shape.vocab, training.loss, is_plain, training.loss_chunk, shape.logits_capped)
    return head(t, states)


def works_of(shape: ModelShape, training: Training) -> dict[str, Work]:
    """Return work by unit name, in the order of execution, with `LOSS` last if the head is no unit."""
    return dict(_works(shape, replace(training, num_micro_batches=1, optimizer="adamw", reduce=None)))


def block_works(shape: ModelShape, training: Training) -> tuple[Work, Work]:
    """Return the work of the first block, whose input has no gradient if there are adapters, and of each other one."""
    run = partial(
        measure, block_of(shape), training.num_tokens * shape.hidden,
        training.formats.compute.itemsize, checkpointing=training.checkpointing,
    )  # fmt: skip
    habits = _habits(shape, training)
    other = _run_block(run, habits)
    return _run_block(run, habits, needs_input_grad=False) if training.lora else other, other


def _habits(shape: ModelShape, training: Training) -> Habits:
    return Habits(
        writes_directly=not training.is_fsdp,
        is_fused=training.compile,
        keeps_every_second=shape.code == "titan",
        rank=training.lora.r if training.lora else 0,
        targets=targets_of(shape, training.lora) if training.lora else (),
        drops_inputs=training.lora is not None and training.lora.dropout > 0,
        upcasts=training.lora is not None and training.lora.upcast,
        batch=training.micro_batch,
        seq=training.seq,
    )


@cache
def _works(shape: ModelShape, training: Training) -> tuple[tuple[str, Work], ...]:
    itemsize = training.formats.compute.itemsize
    units = units_of(shape, training.lora)
    # Units outside of blocks, by the last part of their path. A copy does the work of the module that it replaces.
    paths = {unit.name: unit.path.removesuffix(".modules_to_save.default") for unit in units}
    leaves = {path.rpartition(".")[2]: name for name, path in reversed(paths.items())}
    embed = leaves.get("embed") or leaves.get("embed_tokens") or leaves.get("wte")
    positions, head = leaves.get("wpe"), leaves.get("head") or leaves.get("lm_head")
    block_names = [unit.name for unit in units if unit.path.rpartition(".")[2].isdigit()]
    num_elems = training.num_tokens * shape.hidden
    made = {id(kind): block_works(kind, training) for kind in {id(kind): kind for kind in shape.kinds}.values()}
    block_work = [made[id(kind)][index > 0] for index, kind in enumerate(shape.kinds)]
    num_rows = shape.vocab + (shape.num_positions if positions is None else 0)
    embedding_work = _embedding(shape, training, num_rows)
    works = {ROOT: _beginning(shape, training, None if embed else embedding_work)}
    if embed is not None:
        works[embed] = embedding_work
    if positions is not None:
        # Positions are the same for all sequences.
        works[positions] = _embedding(shape, replace(training, micro_batch=1), shape.num_positions)
    for name in block_names:
        works |= assign_to_units(block_work[int(name.rpartition(".")[2])], name, units)
    if not block_names:
        works[ROOT] = chain([works[ROOT], *block_work])
    # Blocks may be compiled; the model around them is not.
    run_end = partial(end, shape, training)
    habits = _habits(shape, replace(training, compile=False))
    works[head or LOSS] = measure(run_end, num_elems, itemsize, habits, kind="loss")
    works |= {name: Work(0, 0, 0, 0) for name, path in paths.items() if path.endswith(".original_module")}
    names = {unit.name for unit in units}
    return tuple((name, work) for name, work in works.items() if name in names or name == LOSS)


def _run_block(run: Callable[..., Work], habits: Habits, needs_input_grad: bool = True) -> Work:
    """Return the work of a block, also with gradients of weights that are computed at the end of its backward."""
    now, late = (run(each, needs_input_grad=needs_input_grad) for each in (habits, replace(habits, is_late=True)))
    return replace(now, late_peak_bytes=late.backward_peak_bytes, late_bytes=late.grad_bytes - now.grad_bytes)


def _beginning(shape: ModelShape, training: Training, embedding_work: Work | None) -> Work:
    """Return the work of the beginning: tokens, targets and the rotary table (cosine and sine of every position, in
    fp32 or, in transformers, twice as wide in the compute dtype). `embedding_work`: None if the embedding is a unit."""
    table = 0 if shape.num_positions else 4 * training.seq * shape.head_dim
    held = 2 * rounded(_INDEX_BYTES * training.num_tokens) + rounded(table)
    if embedding_work is None:
        return Work(held, held, 0, 0)
    return replace(
        embedding_work,
        saved_bytes=embedding_work.saved_bytes + held,
        forward_peak_bytes=embedding_work.forward_peak_bytes + held,
        # A tied weight already has a gradient, from the head; the embedding's is added to it.
        grad_bytes=0 if shape.tied else embedding_work.grad_bytes,
    )


def _embedding(shape: ModelShape, training: Training, num_rows: int) -> Work:
    """Return the work of an embedding: a lookup of rows, whose gradient is as large as the weight."""
    num_elems = training.num_tokens * shape.hidden

    def look_up(t: Tape, x: Tensor) -> Tensor:
        scratch = embedding_scratch_bytes(training.num_tokens, num_rows, shape.hidden)
        weight = Weight(num_rows * shape.hidden, training.lora is None)
        return t.op([x], num_elems, weights=[weight], kernel=Kernel(scratch_bytes=scratch))

    work = measure(look_up, 0, training.formats.compute.itemsize, needs_input_grad=False)
    return replace(work, moved_bytes=float(2 * work.output_bytes))


def assign_to_units(work: Work, block: str, units: Sequence[UnitSpec]) -> dict[str, Work]:
    """Assign a block's work to its units. If a block has several units, the largest one gets all work, and the others
    only pass tensors on. Checkpointing, too, is for the block as a whole."""
    num_elems = {unit.name: sum(param.num_elems for param in unit.params)
             for unit in units if unit.path == block or unit.path.startswith(f"{block}.")}  # fmt: skip
    largest = max(num_elems, key=lambda name: num_elems[name])
    return {name: work if name == largest else Work(0, 0, 0, work.output_bytes) for name in num_elems}


def block_of(shape: ModelShape) -> Block:
    """Select the code of a block."""
    kinds = {"in-tree": blocks.in_tree_block, "titan": blocks.titan_block, "mpt": blocks.mpt_block}
    kind = kinds.get(shape.code, blocks.gpt_block if shape.num_positions else blocks.llama_block)
    return partial(kind, shape)
