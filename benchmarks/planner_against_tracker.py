"""The tapes held against torch's own memory tracker, which runs a step of a real model on fake tensors.

    python -m benchmarks.planner_against_tracker

A Llama as torchtitan writes it, unsharded, forward and backward, with every kind of checkpointing. The tracker sees
what operations return, on a CPU: no scratch memory of kernels, and gradients are never added up in place.
"""

import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.titan import Titan
from shardwise.plan.activations import works_of
from shardwise.plan.measure import chain
from shardwise.plan.shapes import ModelShape
from shardwise.plan.training import Checkpointing, Training


@dataclass(frozen=True, slots=True)
class Row:
    shape: ModelShape
    batch: int
    seq: int
    checkpointing: Checkpointing
    tracked_bytes: int
    planned_bytes: int
    tracked_s: float
    planned_s: float

    @property
    def error(self) -> float:
        return self.planned_bytes / self.tracked_bytes - 1

    def __str__(self) -> str:
        return (
            f"{self.shape.name:8} {self.batch} x {self.seq:<5} {self.checkpointing:10} tracked "
            f"{self.tracked_bytes / 1e6:7.1f} MB in {self.tracked_s:.2f} s, planned {self.planned_bytes / 1e6:7.1f} MB "
            f"in {1e3 * self.planned_s:5.2f} ms  {self.error:+.2%}"
        )


SMALL = ModelShape(name="small", layers=4, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1536, vocab=8192)
SHAPES = (
    SMALL,
    replace(SMALL, name="wide", layers=3, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=2816, vocab=4096),
    replace(SMALL, name="words", layers=2, vocab=64000),
)
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")


def compare(shape: ModelShape, batch: int, seq: int, checkpointing: Checkpointing) -> Row:
    begin = time.perf_counter()
    tracked = tracked_bytes(shape, batch, seq, checkpointing)
    middle = time.perf_counter()
    planned = planned_bytes(shape, batch, seq, checkpointing)
    return Row(shape, batch, seq, checkpointing, tracked, planned, middle - begin, time.perf_counter() - middle)


def planned_bytes(shape: ModelShape, batch: int, seq: int, checkpointing: Checkpointing) -> int:
    """Weights in bf16, and the most that one micro-batch adds to them. The tracker is not shown token ids."""
    training = Training(
        micro_batch=batch, seq=seq, checkpointing=checkpointing, engine="fsdp2", loss="plain", precision="pure-bf16"
    )
    works = list(works_of(shape, training).values())
    whole = chain(works)
    peak = max(whole.forward_peak_bytes, whole.saved_bytes + whole.output_bytes + whole.backward_peak_bytes)
    return 2 * shape.num_params + peak


def tracked_bytes(shape: ModelShape, batch: int, seq: int, checkpointing: Checkpointing) -> int:
    with FakeTensorMode():
        model = Titan(shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab, seq)
        for param in model.parameters():
            param.data = param.data.bfloat16()
        if checkpointing != "none":
            for block in model.layers:
                block.forward = partial(_checkpointed, block.forward, checkpointing)
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            loss.backward()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _checkpointed(forward, mode, *args):
    if mode == "full":
        return checkpoint(forward, *args, use_reentrant=False)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_every_second_product)


def _every_second_product():
    num_products = {False: 0, True: 0}

    def policy(context, op, *args, **kwargs):
        if op is torch.ops.aten.mm.default:
            num_products[context.is_recompute] += 1
            is_kept = num_products[context.is_recompute] % 2 == 1
        else:
            is_kept = "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main() -> None:
    rows = []
    for shape in SHAPES:
        for batch, seq in ((2, 512), (1, 2048)):
            for mode in MODES:
                rows.append(compare(shape, batch, seq, mode))
                print(rows[-1], flush=True)
    errors = sorted(abs(row.error) for row in rows)
    print(f"{len(rows)} rows: median error {errors[len(errors) // 2]:.2%}, worst {errors[-1]:.2%}")


if __name__ == "__main__":
    main()
