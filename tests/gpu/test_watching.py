"""On a GPU: bytes by class against the allocator's own books, numbers that arrive later, and a trace with kernels."""

import gzip
import json
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.api.memory_report import Memory
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.streams import PendingHostCopy
from shardwise.trainer.profile import traced_steps
from tests.gpu.test_gpu import batch, build
from tests.harness import Pool

pytestmark = pytest.mark.gpu

# Every tensor takes whole blocks of this many bytes.
BLOCK_BYTES = 512


def watched(strategy: str) -> tuple[Memory, Memory, int, int]:
    """Before a step and after it; the allocator's bytes, and the number of tensors that may be rounded up."""
    sw.init(device="cuda:0")
    model, optimizer = build()
    model, optimizer = sw.shard(model, optimizer, strategy, precision="bf16")
    for step in range(3):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(*batch(3)).backward()
    engine_of(model).await_gradients()
    before = sw.memory(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # 64 MiB that would count as activations
    num_tensors = 6 * len(list(model.parameters()))
    return before, sw.memory(model, optimizer), torch.cuda.memory_allocated(), num_tensors


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "shard_grad_op"])
def test_memory_by_class_is_the_allocators(run_ranks: Pool, strategy: str) -> None:
    for before, after, allocated, num_tensors in run_ranks(2, watched, strategy):
        assert (before.params, before.grads) == (before.planned.params, before.planned.grads)
        assert 0.99 * before.planned.optimizer < before.optimizer <= before.planned.optimizer
        assert (after.grads, after.peak_grads) == (0, before.grads)  # given back
        assert after.seen == before.seen
        assert after.now == allocated
        assert sum(after.by_class().values()) == allocated
        # Between steps nothing is left but what is accounted for.
        assert after.activations is not None
        assert 0 <= after.activations < num_tensors * BLOCK_BYTES
        assert after.reserved is not None
        assert after.reserved >= after.peak > before.now
        assert 0 <= after.peak_buffers - after.planned_buffers <= num_tensors * BLOCK_BYTES
        assert after.peak_activations is not None
        assert after.peak == after.seen.total + after.peak_buffers + after.peak_activations


def test_numbers_read_later_wait_for_their_copy_alone() -> None:
    source = torch.full((3,), 2.5, device="cuda")
    torch.cuda.synchronize()
    later = PendingHostCopy(source)
    source.zero_()
    torch.cuda._sleep(2_000_000_000)  # about a second of other work
    behind = torch.cuda.Event()
    behind.record()
    assert later.read() == [2.5] * 3
    assert not behind.query()
    torch.cuda.synchronize()


def trace(folder: Path) -> None:
    sw.init(device="cuda:0")
    model, optimizer = build()
    model, optimizer = sw.shard(model, optimizer, "zero3", precision="bf16")
    engine = engine_of(model)
    with traced_steps(folder, "cuda", engine.gathers.settle, engine.finish_updates) as after_step:
        for step in range(6):
            model(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step()


def test_a_trace_has_kernels_and_our_ranges(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(1, trace, tmp_path)
    with gzip.open(tmp_path / "trace-rank-0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert {"kernel", "cpu_op"} <= {event.get("cat") for event in events}
    assert any(event.get("name") == "shardwise::reduce blocks.3" for event in events)
