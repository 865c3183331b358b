"""A captured step trains as the same step does without a graph. A world of one: gloo cannot be captured."""

from collections.abc import Iterator

import pytest
import torch

import shardwise as sw
from shardwise.api.cuda_graph import NUM_EAGER_CALLS
from shardwise.base.errors import StateError
from shardwise.core.layout import PRESETS
from shardwise.trainer.model import Transformer
from shardwise.trainer.shapes import TransformerShape

pytestmark = pytest.mark.gpu

SHAPE = TransformerShape(vocab=512, hidden=256, layers=6, heads=4, kv_heads=2, ffn=768, max_seq=64)
NUM_STEPS = NUM_EAGER_CALLS + 5


@pytest.fixture(autouse=True, scope="module")
def no_group_is_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(strategy: str, captured: bool, precision: str, **options: bool) -> tuple[list[float], torch.Tensor]:
    sw.init()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(SHAPE)
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    model, optimizer = sw.shard(model, optimizer, strategy, precision=precision, **options)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        if not options:
            optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = sw.capture(model, optimizer, step) if captured else step
    losses = []
    for index in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(index)
        batch = torch.randint(0, SHAPE.vocab, (4, 33), generator=generator).cuda()
        rate.fill_(1e-3 / (1 + index))
        losses.append(float(run(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())))
        if index == NUM_EAGER_CALLS + 2:
            with torch.no_grad():
                model(batch[:, :-1])  # an evaluation takes the slots
    if captured:
        with pytest.raises(StateError, match="constant shapes"):
            run(batch[:2, :-1].contiguous(), batch[:2, 1:].contiguous())
    weights = sw.full_state_dict(model)
    return losses, torch.cat([weight.flatten() for weight in weights.values()])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", [name for name, layout in PRESETS.items() if not layout.uses_host])
def test_a_captured_step_is_the_step(strategy: str, precision: str) -> None:
    losses, weights = train(strategy, captured=False, precision=precision)
    seen, seen_weights = train(strategy, captured=True, precision=precision)
    assert seen == losses
    assert torch.equal(seen_weights, weights)


def test_a_captured_step_with_early_updates() -> None:
    losses, weights = train("zero3", captured=False, precision="bf16", early_update=True)
    seen, seen_weights = train("zero3", captured=True, precision="bf16", early_update=True)
    assert seen == losses
    assert torch.equal(seen_weights, weights)
