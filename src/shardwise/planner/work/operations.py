"""The operations of transformers on a tape: what each saves and allocates in torch, in eager mode.

Attention and rotary positions are written like the torch code they stand for. `Setting` is what a block is made of.
"""

from dataclasses import dataclass

from ..shapes.shape import ModelShape
from .tape import Arithmetic, Buffers, Habits, Tape, Tensor, Weight
from .work import ROUND_BYTES, AttentionShape, Product, rounded


def linear(
    tape: Tape, x: Tensor, fan: tuple[int, int], name: str = "", bias: bool = False, *, plain: bool = True,
    num_weights: int = 1,
) -> Tensor:  # fmt: skip
    """Run a projection, with its adapter if it has one. Not `plain`: autograd makes its gradient (GPT-2's Conv1D).
    If there are several weights of this size, each one processes a part of the rows."""
    habits = tape.habits
    out = _product(tape, x, fan, habits.rank == 0, habits.is_direct and plain, bias, num_weights)
    if not habits.rank or name not in habits.targets:
        return out
    narrow = _product(tape, x, (fan[0], habits.rank), True, habits.is_direct)
    return add(tape, out, scale(tape, _product(tape, narrow, (habits.rank, fan[1]), True, habits.is_direct)))


def _product(
    tape: Tape, x: Tensor, fan: tuple[int, int], trainable: bool, is_direct: bool, bias: bool = False,
    num_weights: int = 1,
) -> Tensor:  # fmt: skip
    width, new_width = fan
    rows = x.num_elems // width
    weights = [Weight(num_weights * width * new_width, trainable, is_direct)]
    product = Product(rows // num_weights, new_width, width, num_weights, trainable)
    return tape.op(
        [x],
        rows * new_width,
        saves=[x] if trainable else (),
        weights=[*weights, Weight(new_width, trainable)] if bias else weights,
        arithmetic=Arithmetic(is_kept=_is_kept(tape, width, new_width), product=product),
    )


def _is_kept(tape: Tape, width: int, new_width: int) -> bool:
    """Return True if selective checkpointing saves the result; our rule is that of trainer/checkpointing.py."""
    if tape.habits.keeps_every_second or new_width > width:
        tape.num_wide += 1
        return tape.num_wide % 2 == 1
    return width < 2 * new_width


def rms_norm(tape: Tape, x: Tensor, width: int) -> Tensor:
    """torch's own RMS norm, one kernel."""
    return _norm(tape, x, width, 4, 1)


def layer_norm(tape: Tape, x: Tensor, width: int, bias: bool = True) -> Tensor:
    return _norm(tape, x, width, 8, 1 + bias)


def _norm(tape: Tape, x: Tensor, width: int, row_bytes: int, num_weights: int) -> Tensor:
    return tape.op(
        [x],
        x.num_elems,
        itemsize=x.itemsize,
        saves=[x],
        weights=[tape.habits.weight(width)] * num_weights,
        buffers=Buffers(extra_bytes=row_bytes * (x.num_elems // width)),
    )


def llama_norm(tape: Tape, x: Tensor, width: int) -> Tensor:
    """transformers' RMS norm: in fp32, one operation after the other."""
    if tape.habits.is_fused:
        return rms_norm(tape, x, width)
    rows, wide = x.num_elems // width, 4 * x.num_elems
    states = cast(tape, x, 4)
    squares = tape.op([states], x.num_elems, itemsize=4, saves=[states], buffers=Buffers(scratch_bytes=2 * wide))
    variance = tape.op([squares], rows, itemsize=4)
    del squares
    root = tape.op([scale(tape, variance)], rows, itemsize=4, buffers=Buffers(saves_result=True))
    states = tape.op([states, root], x.num_elems, itemsize=4, saves=[states, root], buffers=Buffers(scratch_bytes=wide))
    narrow = cast(tape, states, x.itemsize)
    weight = tape.habits.weight(width)
    return tape.op(
        [narrow],
        x.num_elems,
        itemsize=x.itemsize,
        saves=[narrow] if weight.trainable else (),
        weights=[weight],
        buffers=Buffers(scratch_bytes=narrow.num_bytes if weight.trainable else 0),
    )


def cast(tape: Tape, x: Tensor, itemsize: int) -> Tensor:
    return x if x.itemsize == itemsize else tape.op([x], x.num_elems, itemsize=itemsize)


def scale(tape: Tape, x: Tensor) -> Tensor:
    """Multiply by something without a gradient; also a negation, or a sum with a number."""
    return tape.op([x], x.num_elems, itemsize=x.itemsize)


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    return tape.op([a, b], a.num_elems, itemsize=a.itemsize, passes=[True, True])


def subtract(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    return tape.op([a, b], a.num_elems, itemsize=a.itemsize, passes=[True, False])


def multiply(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    saves = [kept for kept, other in ((a, b), (b, a)) if other.node is not None]
    return tape.op([a, b], a.num_elems, itemsize=a.itemsize, saves=saves)


def activation(tape: Tape, x: Tensor) -> Tensor:
    """Apply SiLU or GELU, which save their input."""
    return tape.op([x], x.num_elems, itemsize=x.itemsize, saves=[x])


def gated(tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """Compute activation(gate) * up in one kernel."""
    return tape.op([gate, up], gate.num_elems, saves=[gate, up])


def softmax(tape: Tape, x: Tensor) -> Tensor:
    """Apply softmax. Its backward on a GPU begins with a product of the gradient and the result."""
    return tape.op([x], x.num_elems, itemsize=x.itemsize, buffers=Buffers(saves_result=True, scratch_bytes=x.num_bytes))


def dropout(tape: Tape, x: Tensor) -> Tensor:
    """Apply dropout, which saves a mask of one byte per element. A fused one draws the mask again."""
    return tape.op(
        [x], x.num_elems, itemsize=x.itemsize, buffers=Buffers(extra_bytes=0 if tape.habits.is_fused else x.num_elems)
    )


def gelu_tanh(tape: Tape, x: Tensor) -> Tensor:
    """GPT-2's GELU in transformers, written out: x / 2 * (1 + tanh(c * (x + d * x ** 3)))."""
    if tape.habits.is_fused:
        return activation(tape, x)
    half = scale(tape, x)
    cube = tape.op([x], x.num_elems, saves=[x], buffers=Buffers(scratch_bytes=2 * x.num_bytes))
    # Each intermediate result is freed once the next exists.
    part = scale(tape, cube)
    del cube
    part = add(tape, x, part)
    part = scale(tape, part)
    part = tape.op([part], x.num_elems, buffers=Buffers(saves_result=True))
    part = tape.op([part], x.num_elems, passes=[True])
    return multiply(tape, half, part)


def attention(tape: Tape, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention without a mask."""
    if shape.kernel == "math":
        return _written_out(tape, shape, query, key, value)
    # For the backward: the log-sum-exp of each row in fp32, and the state of a random generator.
    extra_bytes = rounded(4 * shape.batch * shape.heads * shape.seq) + 2 * ROUND_BYTES
    return tape.op(
        [query, key, value],
        query.num_elems,
        saves=[query, key, value],
        buffers=Buffers(True, extra_bytes, shape.scratch_bytes),
        arithmetic=Arithmetic(is_kept=True, attention_flops=shape.flops),
    )


def _written_out(tape: Tape, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with all scores in memory, a mask of numbers, and keys and values repeated for every head."""
    num_scores = shape.batch * shape.heads * shape.seq * shape.seq
    scaled = scale(tape, query)
    mask = tape.new(shape.seq * shape.seq)
    key, value = (tape.op([part], query.num_elems) for part in (key, value))
    scaled_key = scale(tape, key)
    flops = shape.flops  # half of both products, i.e. one of them
    scores = tape.op(
        [scaled, scaled_key], num_scores, saves=[scaled, scaled_key], arithmetic=Arithmetic(attention_flops=flops)
    )
    scores = tape.op([scores], num_scores, passes=[True])
    scratch = tape.new(num_scores, 1)  # one byte of mask for each score
    shares = softmax(tape, scores)
    del scores, scratch
    mixed = tape.op(
        [shares, value],
        query.num_elems,
        saves=[shares, value],
        arithmetic=Arithmetic(attention_flops=flops, is_kept=True),
    )
    del mask
    return mixed


def rotate(tape: Tape, x: Tensor) -> Tensor:
    """Rotary positions of the in-tree transformer: in fp32, and back."""
    if tape.habits.is_fused:
        return scale(tape, x)
    # A view puts heads before positions. The gradient has the other memory layout, and is copied once.
    turned_view = tape.view(x, is_copied_back=True)
    first, second = tape.split(cast(tape, turned_view, 4), 2)
    turned = tape.cat(
        (
            subtract(tape, scale(tape, first), scale(tape, second)),
            add(tape, scale(tape, second), scale(tape, first)),
        )
    )
    return cast(tape, turned, x.itemsize)


def llama_rotate(tape: Tape, x: Tensor) -> Tensor:
    """transformers' rotary positions, in the compute dtype: x * cos + rotate_half(x) * sin."""
    if tape.habits.is_fused:
        return scale(tape, x)
    return add(tape, scale(tape, x), scale(tape, _rotate_half(tape, x)))


def _rotate_half(tape: Tape, x: Tensor) -> Tensor:
    first = tape.view(x, x.num_elems // 2)
    second = tape.view(x, x.num_elems // 2)
    return tape.cat((scale(tape, second), first))


@dataclass(frozen=True, slots=True)
class Setting:
    """A model's shape, the batch, and how it is run."""

    shape: ModelShape
    batch: int
    seq: int
    itemsize: int
    habits: Habits

    @property
    def attention(self) -> AttentionShape:
        shape = self.shape
        return AttentionShape(self.batch, self.seq, shape.heads, shape.kv_heads, shape.head_dim, self.itemsize)
