"""Attention and rotary positions on a tape, each written like the torch code that it stands for."""

from .kernels import AttentionShape
from .operations import Habits, add, cast, scale, softmax, subtract
from .storages import ROUND_BYTES, Tensor, rounded
from .tape import Tape


def attention(tape: Tape, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal, without a mask."""
    if shape.kernel == "math":
        return _written_out(tape, shape, query, key, value)
    return tape.op(
        [query, key, value],
        query.num_elems,
        saves=[query, key, value],
        saves_result=True,
        extra_bytes=rounded(shape.statistics_bytes) + 2 * ROUND_BYTES,  # and the state of a random generator
        scratch_bytes=shape.scratch_bytes,
        is_kept=True,
        attention_flops=shape.flops,
    )


def _written_out(tape: Tape, shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All scores in memory; the mask is a matrix of numbers, keys and values are repeated for every head."""
    num_scores = shape.batch * shape.heads * shape.seq * shape.seq
    scaled = scale(tape, query)
    mask = tape.new(shape.seq * shape.seq)
    key, value = (tape.op([part], query.num_elems) for part in (key, value))
    scaled_key = scale(tape, key)
    flops = shape.flops  # half of what both products take, so as much as one of them
    scores = tape.op([scaled, scaled_key], num_scores, saves=[scaled, scaled_key], attention_flops=flops)
    scores = tape.op([scores], num_scores, passes=[True])
    scratch = tape.new(shape.softmax_scratch_bytes, 1)
    shares = softmax(tape, scores)
    del scores, scratch
    mixed = tape.op([shares, value], query.num_elems, saves=[shares, value], attention_flops=flops, is_kept=True)
    del mask
    return mixed


def rotate(tape: Tape, habits: Habits, x: Tensor) -> Tensor:
    """Rotary positions of the in-tree transformer: in fp32, and back."""
    if habits.is_fused:
        return scale(tape, x)
    # The heads are brought before the positions by a view. The gradient lies the other way, and is copied once.
    turned_view = tape.view(x, is_copied_back=True)
    first, second = tape.split(cast(tape, turned_view, 4), 2)
    turned = tape.cat(
        (
            subtract(tape, scale(tape, first), scale(tape, second)),
            add(tape, scale(tape, second), scale(tape, first)),
        )
    )
    return cast(tape, turned, x.itemsize)


def llama_rotate(tape: Tape, habits: Habits, x: Tensor) -> Tensor:
    """transformers' rotary positions, in the compute dtype: x * cos + rotate_half(x) * sin."""
    if habits.is_fused:
        return scale(tape, x)
    return add(tape, scale(tape, x), scale(tape, _rotate_half(tape, x)))


def _rotate_half(tape: Tape, x: Tensor) -> Tensor:
    first = tape.view(x, x.num_elems // 2)
    second = tape.view(x, x.num_elems // 2)
    return tape.cat((scale(tape, second), first))
