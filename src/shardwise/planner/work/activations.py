"""Work of every unit of a model in a micro-batch, from the sizes alone.

Blocks are alike, so one of them is run on a tape (blocks.py, tape.py), and the end of the model once. Work
outside of blocks: the beginning (token ids, the rotary table, an embedding that is no unit) belongs to `root`, and the
end (the last norm, the head, the loss) to the head, or to `LOSS` if the head is no unit.

Not modelled: masks (several documents in a row); remainders that torch's allocator cannot split off a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from ...core.schedule.model import ROOT, UnitSpec
from ..shapes.shape import ModelShape, targets_of, units_of
from ..training import Loss, Training
from .blocks import (
    cast,
    gpt_block,
    in_tree_block,
    layer_norm,
    linear,
    llama_block,
    llama_norm,
    mpt_block,
    rms_norm,
    titan_block,
)
from .tape import Block, Buffers, Gradients, Habits, Tape, Tensor, Weight, measure
from .work import Product, Work, chain, embedding_scratch_bytes, rounded

# Same values as in trainer/loss.py, which imports torch.
CHUNK_LOGITS_BYTES = 256 * 2**20
CHUNK_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Head:
    """Output projection and loss. `is_plain`: a plain linear layer, whose gradient can be written directly.

    chunked: trainer/loss.py: gradients are computed in the forward, a chunk of tokens at a time, and held in fp32
    plain: logits in the compute dtype, in fp32, their log-softmax, and in the backward two gradients of that size
    fused: Liger's: as chunked, with gradients in the compute dtype and chunks no larger than the hidden states
    """

    hidden: int
    vocab: int
    loss: Loss
    is_plain: bool = True

    def __call__(self, t: Tape, states: Tensor) -> Tensor:
        return self._plain(t, states) if self.loss == "plain" else self._chunked(t, states)

    def _plain(self, t: Tape, states: Tensor) -> Tensor:
        logits = linear(t, states, (self.hidden, self.vocab), "lm_head", plain=self.is_plain)
        del states
        scores = t.op([cast(t, logits, 4)], logits.num_elems, itemsize=4, buffers=Buffers(saves_result=True))
        return t.op([scores], 1, itemsize=4, saves=[scores])

    def _chunked(self, t: Tape, states: Tensor) -> Tensor:
        weight = t.habits.weight(self.hidden * self.vocab)
        num_tokens, num_states = states.num_elems // self.hidden, states.num_elems
        grad_itemsize = 4 if self.loss == "chunked" else t.itemsize
        node = t.node((states,))
        node.saved.append(t.new(num_states, grad_itemsize))
        if weight.trainable:
            node.saved.append(t.new(weight.num_elems, grad_itemsize))
        slopes: Tensor | None = None
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
                # A variable holds the slopes of the previous chunk until these replace them.
                slopes = scores if t.itemsize == 4 else t.new(rows * self.vocab)
                del scores
                beside = [t.new(rows * self.hidden, 4), t.new(rows * self.hidden)]
                del beside
            else:
                slopes = t.new(rows * self.vocab)
            # Two more products of this size follow here, and not in the backward.
            t.products.append(Product(rows, self.vocab, self.hidden, count, trainable=weight.trainable))
            t.num_kernels += 12 * count
            t.moved_bytes += count * rows * self.vocab * (4 * 4 + 2 * 4 + 4 + t.itemsize)
            t.moved_bytes += count * rows * self.hidden * (2 * 4 + 4 * t.itemsize)
        del slopes

        def backward(grads: Gradients) -> list[Tensor | None]:
            grads.clear()
            found = t.new(num_states)
            if weight.trainable:
                t.grads.append(t.new(weight.num_elems))
            return [found]

        node.backward = backward
        loss = t.new(1, 4)
        loss.node = node
        return loss

    def tokens_per_chunk(self, num_tokens: int) -> int:
        if self.loss == "chunked":
            return max(CHUNK_LOGITS_BYTES // (4 * self.vocab) // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE
        num_chunks = -(-self.vocab // self.hidden)
        return 1 << (-(-num_tokens // num_chunks) - 1).bit_length()


def end(shape: ModelShape, loss: Loss, is_ours: bool, t: Tape, x: Tensor) -> Tensor:
    """Run the end of the model: from the last block's output to the loss."""
    is_in_tree = is_ours and shape.code == "in-tree"
    if shape.norm == "layer":
        states = layer_norm(t, x, shape.hidden, bias=shape.norm_bias)
    else:
        states = (rms_norm if is_in_tree else llama_norm)(t, x, shape.hidden)
    del x
    # A tied weight is reduced last, with the embedding: there is no memory yet to write its gradient directly.
    head = Head(shape.hidden, shape.vocab, loss, shape.code == "hf" and not shape.tied)
    return head(t, states)


LOSS = "loss"

_EMBEDDINGS = ("embed", "embed_tokens", "wte")
_POSITIONS = ("wpe",)
_HEADS = ("head", "lm_head")
_INDEX_BYTES = 8


def works_of(shape: ModelShape, training: Training) -> dict[str, Work]:
    """Return work by unit name, in the order of execution, with `LOSS` last if the head is no unit."""
    return dict(_works(shape, replace(training, num_micro_batches=1, optimizer="adamw", reduce=None)))


@cache
def _works(shape: ModelShape, training: Training) -> tuple[tuple[str, Work], ...]:
    habits, itemsize = habits_of(shape, training), training.formats.compute.itemsize
    units = units_of(shape, training.lora)
    embed, positions, head = (_named(units, names) for names in (_EMBEDDINGS, _POSITIONS, _HEADS))
    blocks = [unit.name for unit in units if unit.path.rpartition(".")[2].isdigit()]
    num_elems = training.num_tokens * shape.hidden
    block = block_of(shape, training.engine == "shardwise")
    run = partial(measure, block, num_elems, itemsize, habits, checkpointing=training.checkpointing)
    other = run()
    # With adapters, the input of the first block has no gradient.
    first = run(needs_input_grad=False) if training.lora else other
    num_rows = shape.vocab + (shape.num_positions if positions is None else 0)
    words = _embedding(shape, training, num_rows)
    found = {ROOT: _begin(shape, training, None if embed else words)}
    if embed is not None:
        found[embed] = words
    if positions is not None:
        # Positions are the same for all sequences.
        found[positions] = _embedding(shape, replace(training, micro_batch=1), shape.num_positions)
    for index, name in enumerate(blocks):
        found |= shared_out(other if index else first, name, units)
    if not blocks:
        found[ROOT] = chain([found[ROOT], first, *[other] * (shape.layers - 1)])
    # Blocks may be compiled; the model around them is not.
    last = partial(end, shape, training.loss, training.engine == "shardwise")
    found[head or LOSS] = measure(last, num_elems, itemsize, replace(habits, is_fused=False), kind="loss")
    names = {unit.name for unit in units}
    return tuple((name, work) for name, work in found.items() if name in names or name == LOSS)


def habits_of(shape: ModelShape, training: Training) -> Habits:
    return Habits(
        writes_directly=training.engine == "shardwise",
        is_fused=training.compile,
        keeps_every_second=training.engine == "fsdp2",
        rank=training.lora.r if training.lora else 0,
        targets=targets_of(shape, training.lora) if training.lora else (),
        batch=training.micro_batch,
        seq=training.seq,
    )


def _begin(shape: ModelShape, training: Training, words: Work | None) -> Work:
    """Work of tokens, targets and the rotary table: cosine and sine for every position, in fp32 or (transformers')
    twice as wide in the compute dtype. `words`: the work of the embedding, if that is no unit."""
    table = 0 if shape.num_positions else 4 * training.seq * shape.head_dim
    held = 2 * rounded(_INDEX_BYTES * training.num_tokens) + rounded(table)
    if words is None:
        return Work(held, held, 0, 0)
    return replace(
        words,
        saved_bytes=words.saved_bytes + held,
        forward_peak_bytes=words.forward_peak_bytes + held,
        # A tied weight already has the gradient of the head: this one is added to it.
        grad_bytes=0 if shape.tied else words.grad_bytes,
    )


def _embedding(shape: ModelShape, training: Training, num_rows: int) -> Work:
    """Work of an embedding: rows are looked up, and the gradient is as large as the weight."""
    num_elems = training.num_tokens * shape.hidden

    def look_up(t: Tape, x: Tensor) -> Tensor:
        scratch = embedding_scratch_bytes(training.num_tokens, num_rows, shape.hidden)
        weight = Weight(num_rows * shape.hidden, training.lora is None)
        return t.op([x], num_elems, weights=[weight], buffers=Buffers(scratch_bytes=scratch))

    work = measure(look_up, 0, training.formats.compute.itemsize, needs_input_grad=False)
    return replace(work, moved_bytes=float(2 * work.output_bytes))


def shared_out(work: Work, block: str, units: Sequence[UnitSpec]) -> dict[str, Work]:
    """Assign a block's work to its units. If a block is cut into parts, the largest one gets all work, and the others
    only pass tensors on: checkpointing, too, wraps the whole block."""
    names = {unit.name: sum(param.num_elems for param in unit.params)
             for unit in units if unit.path == block or unit.path.startswith(f"{block}.")}  # fmt: skip
    largest = max(names, key=lambda name: names[name])
    return {name: work if name == largest else Work(0, 0, 0, work.output_bytes) for name in names}


def _named(units: list[UnitSpec], leaves: tuple[str, ...]) -> str | None:
    return next((unit.name for unit in units if unit.path.rpartition(".")[2] in leaves), None)


def block_of(shape: ModelShape, is_ours: bool) -> Block:
    """Select the code of a block. `is_ours`: run by our engine; else as in published measurements."""
    kind: Callable[[ModelShape, Tape, Tensor], Tensor]
    if not is_ours:
        kind = titan_block if shape.gated else mpt_block
    elif shape.code == "in-tree":
        kind = in_tree_block
    else:
        kind = gpt_block if shape.num_positions else llama_block
    return partial(kind, shape)
