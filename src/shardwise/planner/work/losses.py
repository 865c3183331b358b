"""The end of a language model as a tape: the last norm, the output projection and the loss.

chunked  trainer/loss.py: gradients are computed in the forward, a chunk of tokens at a time, and held in fp32
plain    logits in the compute dtype, in fp32, their log-softmax, and in the backward two gradients of that size
fused    Liger's: as chunked, with gradients in the compute dtype and chunks no larger than the hidden states
"""

from dataclasses import dataclass

from ..training import Loss
from .operations import Setting, cast, layer_norm, linear, llama_norm, rms_norm
from .tape import Buffers, Gradients, Tape, Tensor
from .work import Product

# Same value as in trainer/loss.py, which imports torch.
CHUNK_LOGITS_BYTES = 256 * 2**20
CHUNK_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Head:
    """Output projection and loss. `is_plain`: a plain linear layer, whose gradient can be written directly."""

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


def end(at: Setting, loss: Loss, is_ours: bool, t: Tape, x: Tensor) -> Tensor:
    """Run the end of the model: from the last block's output to the loss."""
    shape = at.shape
    is_in_tree = is_ours and shape.code == "in-tree"
    if shape.norm == "layer":
        states = layer_norm(t, x, shape.hidden, bias=shape.norm_bias)
    else:
        states = (rms_norm if is_in_tree else llama_norm)(t, x, shape.hidden)
    del x
    # A tied weight is reduced last, with the embedding: there is no memory yet to write its gradient directly.
    head = Head(shape.hidden, shape.vocab, loss, shape.code == "hf" and not shape.tied)
    return head(t, states)
