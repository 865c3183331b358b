"""What a block asks for: its tape, run forward and backward once, with or without checkpointing. Blocks in a row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from .storages import Gradients, Storage, Tensor
from .tape import Block, Tape
from .work import Work


def measure(
    block: Block,
    num_elems: int,
    itemsize: int,
    *,
    checkpointing: Literal["none", "selective", "full"] = "none",
    is_compiled: bool = False,
    input_itemsize: int | None = None,
    needs_input_grad: bool = True,
    kind: Literal["activations", "loss"] = "activations",
) -> Work:
    """What a block asks for, with an input of `num_elems`."""
    tape = Tape(itemsize)
    meter = tape.meter
    x = tape.input(num_elems, input_itemsize, needs_input_grad)
    before = meter.live
    if checkpointing == "none":
        out = block(tape, x)
    else:
        out = tape.checkpoint(block, x, checkpointing == "selective", is_compiled)
    del x
    output_bytes = out.storage.num_bytes
    saved_bytes, forward_peak = meter.live - output_bytes, meter.peak - before
    forward = Work(
        saved_bytes, forward_peak, 0, output_bytes, 0,
        tuple(tape.products), tape.attention_flops, tape.moved_bytes, tape.num_kernels, kind=kind,
    )  # fmt: skip
    if out.node is None:
        return forward
    tape.products, tape.attention_flops = [], 0.0
    grads: Gradients = [tape.new(out.num_elems, out.itemsize)]
    last = Tensor(Storage(meter, 0), 0, 0, out.node, out.slot)
    del out
    meter.peak = before = meter.live
    reached = tape.backward(last, grads)
    again = sum(product.flops for product in tape.products) + tape.attention_flops
    return replace(
        forward,
        backward_peak_bytes=meter.peak - before,
        grad_bytes=meter.live - sum(grad.storage.num_bytes for grad in reached.values()),
        recomputed=again / forward.flops if forward.flops else 0.0,
    )


def chain(works: Sequence[Work], input_bytes: int = 0) -> Work:
    """What several ask for that run one after the other. `input_bytes` is what the first one's input takes."""
    if len(works) == 1:
        return works[0]
    forward = backward = saved = 0
    before = input_bytes
    for work in works:
        forward = max(forward, saved + before + work.forward_peak_bytes)
        saved += work.saved_bytes
        before = work.output_bytes
    total, grads = saved, 0
    for work in reversed(works):
        backward = max(backward, saved + work.output_bytes + grads + work.backward_peak_bytes)
        saved -= work.saved_bytes
        grads += work.grad_bytes
    last = works[-1]
    flops = sum(work.flops for work in works)
    return Work(
        saved_bytes=total,
        forward_peak_bytes=forward - input_bytes,
        backward_peak_bytes=backward - total - last.output_bytes,
        output_bytes=last.output_bytes,
        grad_bytes=grads,
        products=tuple(product for work in works for product in work.products),
        attention_flops=sum(work.attention_flops for work in works),
        moved_bytes=sum(work.moved_bytes for work in works),
        num_kernels=sum(work.num_kernels for work in works),
        recomputed=sum(work.recomputed * work.flops for work in works) / flops if flops else 0.0,
        kind=last.kind,
    )
