"""On a GPU: the first units of a backward share one reduction slot, with the same bits and less memory."""

import pytest
import torch

import shardwise as sw
from shardwise.core.engine import reductions
from shardwise.core.engine.guards import engine_of
from shardwise.planner.training import Checkpointing
from shardwise.trainer.checkpointing import checkpoint_blocks
from shardwise.trainer.model import Transformer
from shardwise.trainer.shapes import TransformerShape
from tests.harness import Pool

pytestmark = pytest.mark.gpu

# Four blocks of 80 MB in fp32: all of them are among the first units of a backward.
SHAPE = TransformerShape(vocab=512, hidden=1024, layers=4, heads=8, kv_heads=8, ffn=5120, max_seq=64)


def train(num_late: int, strategy: str, checkpointing: Checkpointing) -> tuple[list[float], int, int]:
    """Losses, the peak of allocated memory, and the bytes of a block's slot."""
    reductions.NUM_LATE = num_late
    sw.init(device="cuda:0")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(SHAPE)
    checkpoint_blocks(model, checkpointing)
    model, optimizer = sw.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), strategy, precision="bf16"
    )
    losses = []
    for step in range(4):
        tokens = torch.randint(0, SHAPE.vocab, (2, 33), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    return losses, torch.cuda.max_memory_allocated(), engine_of(model).schedule.reduction_slot_bytes


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_late_gradients_are_the_same_in_less_memory(
    run_ranks: Pool, strategy: str, checkpointing: Checkpointing
) -> None:
    now = run_ranks(2, train, 0, strategy, checkpointing)
    late = run_ranks(2, train, 5, strategy, checkpointing)
    for (losses, peak, slot_bytes), (same, lower, _) in zip(now, late, strict=True):
        assert losses == same
        assert lower < peak - slot_bytes // 2
