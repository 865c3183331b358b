"""The end of a language model as a tape: the last norm, the output projection and the loss.

chunked  train/loss.py: gradients are computed in the forward, a chunk of tokens at a time, and held in fp32
plain    logits in the compute dtype, in fp32, their log-softmax, and in the backward two gradients of that size
fused    Liger's: as chunked, gradients in the compute dtype, chunks as small as keeps them at the hidden states' size
"""

from .blocks import Setting
from .operations import cast, layer_norm, linear, llama_norm, rms_norm
from .storages import Gradients, Tensor
from .tape import Tape
from .training import Loss
from .work import Product

# As in train/loss.py, which imports torch.
CHUNK_LOGITS_BYTES = 256 * 2**20
CHUNK_MULTIPLE = 64


def tokens_per_chunk(vocab: int) -> int:
    return max(CHUNK_LOGITS_BYTES // (4 * vocab) // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE


def end(at: Setting, loss: Loss, is_ours: bool, t: Tape, x: Tensor) -> Tensor:
    """From the last block's output to the loss, one number."""
    shape = at.shape
    if shape.norm == "layer":
        states = layer_norm(t, at.habits, x, shape.hidden, bias=shape.norm_bias)
    elif is_ours and shape.code == "in-tree":
        states = rms_norm(t, at.habits, x, shape.hidden)
    else:
        states = llama_norm(t, at.habits, x, shape.hidden)
    del x
    if loss == "plain":
        return _plain(at, t, states, holds_logits=not is_ours)
    chunk = tokens_per_chunk(shape.vocab) if loss == "chunked" else _liger_chunk(states, shape.hidden, shape.vocab)
    return _chunked(at, t, states, chunk, grad_itemsize=4 if loss == "chunked" else at.itemsize)


def _liger_chunk(states: Tensor, hidden: int, vocab: int) -> int:
    num_tokens = states.num_elems // hidden
    num_chunks = -(-vocab // hidden)
    return 1 << (-(-num_tokens // num_chunks) - 1).bit_length()


def _plain(at: Setting, t: Tape, states: Tensor, holds_logits: bool) -> Tensor:
    shape = at.shape
    logits = linear(t, at.habits, states, (shape.hidden, shape.vocab), "lm_head", plain=shape.code == "hf")
    del states
    scores = t.op([cast(t, logits, 4)], logits.num_elems, itemsize=4, saves_result=True)
    loss = t.op([scores], 1, itemsize=4, saves=[scores])
    if holds_logits and loss.node is not None:
        loss.node.saved.append(logits.alias())
    return loss


def _chunked(at: Setting, t: Tape, states: Tensor, chunk_tokens: int, grad_itemsize: int) -> Tensor:
    shape, weight = at.shape, at.habits.weight(at.shape.hidden * at.shape.vocab)
    num_tokens = states.num_elems // shape.hidden
    node = t.node((states,))
    if states.node is not None:
        node.saved.append(t.new(states.num_elems, grad_itemsize))
    if weight.trainable:
        node.saved.append(t.new(weight.num_elems, grad_itemsize))
    slopes: Tensor | None = None
    for begin in range(0, num_tokens, chunk_tokens):
        rows = min(chunk_tokens, num_tokens - begin)
        logits = t.new(rows * shape.vocab, 4)
        scores = t.new(rows * shape.vocab, 4)
        del logits
        # The last chunk's slopes are held by name until these take their place.
        slopes = scores if at.itemsize == 4 else t.new(rows * shape.vocab)
        del scores
        beside = [t.new(rows * shape.hidden, 4), t.new(rows * shape.hidden)]
        del beside
        t.products.append(Product(rows, shape.vocab, shape.hidden, trainable=weight.trainable))
        t.num_kernels += 12
        t.moved_bytes += rows * shape.vocab * (4 * 4 + 2 * 4 + 4 + at.itemsize)
        t.moved_bytes += rows * shape.hidden * (2 * 4 + 4 * at.itemsize)
    del slopes
    num_states = states.num_elems if states.node is not None else 0

    def backward(grads: Gradients) -> list[Tensor | None]:
        grads.clear()
        found = t.new(num_states) if num_states else None
        if weight.trainable:
            t.grads.append(t.new(weight.num_elems))
        return [found]

    node.backward = backward
    loss = t.new(1, 4)
    loss.node = node
    return loss
