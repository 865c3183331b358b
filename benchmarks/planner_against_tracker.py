"""The plan of FSDP2's memory held against torch's own tracker of it, which runs a step on fake tensors.

    python -m benchmarks.planner_against_tracker
    python -m benchmarks.planner_against_tracker --out benchmarks/results

A Llama as torchtitan writes it, wrapped by `fully_shard` in a fake process group of 1 to 64 ranks: forward and backward
of the second step, with every kind of checkpointing. `FSDPMemTracker` sees what operations return, on a CPU: no scratch
memory of kernels, and no memory of libraries, which the plan counts and this comparison takes off again. It gives units
of several modules hooks for each of them, so the last norm is left to the root here. The optimizer's step is not
compared: under fake tensors its temporaries are never freed.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.planner_memory_published import schedule_of
from benchmarks.titan import Titan
from shardwise.planner.cost.fsdp import Wrapping, fsdp_memory_of
from shardwise.planner.cost.peak import WORKSPACE_BYTES, Memory
from shardwise.planner.shapes.shape import ModelShape
from shardwise.planner.training import Checkpointing, Training
from shardwise.planner.work.activations import works_of

SMALL = ModelShape(name="small", layers=4, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1536, vocab=8192,
                   code="titan")  # fmt: skip
SHAPES = (
    SMALL,
    replace(SMALL, name="wide", layers=3, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=2816, vocab=4096),
    replace(SMALL, name="words", layers=2, vocab=64000),
    replace(SMALL, name="tied", tied=True),
    replace(SMALL, name="deep", layers=8, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=2048),
)
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Case:
    """`strategy`: zero3, or shard_grad_op where units stay gathered until their backward."""

    shape: ModelShape
    world_size: int
    checkpointing: Checkpointing
    strategy: str = "zero3"
    wrapping: Wrapping = field(default_factory=Wrapping)

    @property
    def training(self) -> Training:
        batch, seq = (2, 512) if self.world_size < 64 else (1, 128)
        return Training(
            micro_batch=batch, seq=seq, checkpointing=self.checkpointing, engine="fsdp2", loss="plain", reduce="fp32"
        )

    def __str__(self) -> str:
        wrapping = self.wrapping
        ends = "ends apart" if wrapping.ends_apart else "ends in the root"
        last = "last kept" if wrapping.keeps_last else "last let go"
        logits = ", logits kept" if wrapping.kept_logit_bytes else ""
        return f"{self.shape.name} on {self.world_size}, {self.checkpointing}, {self.strategy}, {ends}, {last}{logits}"


def cases() -> Iterator[Case]:
    """Every shape, number of ranks and kind of checkpointing, and the ways of wrapping in turn."""
    ways = itertools.cycle(itertools.product((False, True), (True, False), (False, True), ("zero3", "shard_grad_op")))
    for shape, world_size, mode in itertools.product(SHAPES, (1, 2, 8, 64), MODES):
        apart, last, logits, strategy = next(ways)
        # Ends that are small beside a block are the root's for us, always.
        apart = apart and shape.name in ("small", "words")
        wrapping = Wrapping(ends_apart=apart, keeps_last=last, kept_logit_bytes=2 * logits)
        yield Case(shape, world_size, mode, strategy, wrapping)


def planned(case: Case) -> Memory:
    schedule = schedule_of(case.shape, case.training, case.strategy, 1, case.world_size)
    return fsdp_memory_of(schedule, works_of(case.shape, case.training), case.training, case.wrapping)


def planned_bytes(case: Case) -> int:
    return max(instant.total for instant in planned(case).instants if instant.name != "update") - WORKSPACE_BYTES


def tracked_bytes(case: Case) -> int:
    dist.init_process_group("fake", rank=0, world_size=case.world_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (case.world_size,))
        with FakeTensorMode():
            return _tracked(case, mesh)
    finally:
        dist.destroy_process_group()


def _tracked(case: Case, mesh: DeviceMesh) -> int:
    training = case.training
    model = wrapped(case, mesh)
    # Its temporaries stay under fake tensors, and count as states: one parameter at a time they are small.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.zeros(training.micro_batch, training.seq, dtype=torch.int64)
    held: list[torch.Tensor] = []

    def forward_and_backward() -> None:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        held[:] = [logits] if case.wrapping.kept_logit_bytes else []
        del logits
        loss.backward()

    forward_and_backward()
    optimizer.step()
    optimizer.zero_grad()
    held.clear()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((tokens,))
    with tracker:
        forward_and_backward()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def wrapped(case: Case, mesh: DeviceMesh) -> Any:
    shape, wrapping = case.shape, case.wrapping
    model = Titan(shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab, case.training.seq)
    if shape.tied:
        model.output.weight = model.embed.weight
    if case.checkpointing != "none":
        for block in model.layers:
            block.forward = partial(_checkpointed, block.forward, case.checkpointing)
    settings = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    units = [*model.layers]
    if wrapping.ends_apart:
        units = [model.embed, *units, model.output]
    for unit in units:
        is_kept = wrapping.keeps_last and unit is units[-1]
        fully_shard(unit, **settings, reshard_after_forward=case.strategy == "zero3" and not is_kept)
    return fully_shard(model, **settings)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder for a dated .md")
    out: Path | None = parser.parse_args().out
    lines = ["| case | tracked MB | in s | planned MB | in ms | error |", "|---|---|---|---|---|---|"]
    errors = []
    for case in cases():
        begin = time.perf_counter()
        tracked = tracked_bytes(case)
        middle = time.perf_counter()
        plan = planned_bytes(case)
        took = 1e3 * (time.perf_counter() - middle)
        errors.append(plan / tracked - 1)
        seconds = middle - begin
        lines.append(
            f"| {case} | {tracked / 1e6:.1f} | {seconds:.1f} | {plan / 1e6:.1f} | {took:.1f} | {errors[-1]:+.2%} |"
        )
        print(lines[-1], flush=True)
    sizes = [abs(error) for error in errors]
    summary = f"{len(sizes)} cases: median error {statistics.median(sizes):.2%}, largest {max(sizes):.2%}."
    print(summary)
    if out:
        now = datetime.now(UTC)
        head = f"# Planned memory of FSDP2 against torch {torch.__version__}'s tracker, {now:%Y-%m-%d %H:%M}\n\n"
        command = "    python -m benchmarks.planner_against_tracker --out benchmarks/results\n\n"
        text = head + command + summary + "\n\n" + "\n".join(lines) + "\n"
        (out / f"{now:%Y-%m-%d-%H%M}-planner-against-tracker.md").write_text(text)


if __name__ == "__main__":
    main()
