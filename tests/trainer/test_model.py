"""The in-tree transformer, as far as the engine and the comparisons rely on it."""

import math

import pytest
import torch

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.model import Transformer, rotary_at, rotate
from shardwise.trainer.shapes import TransformerShape

SHAPE = TransformerShape(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, max_seq=16)
TIED = TransformerShape(vocab=64, hidden=32, layers=2, heads=4, kv_heads=4, ffn=48, max_seq=16, tied=True)


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
def test_loss_is_the_cross_entropy_of_the_logits(shape: TransformerShape) -> None:
    model = Transformer(shape)
    tokens, targets = torch.randint(64, (2, 3, 16))
    logits = model(tokens)
    loss = model(tokens, targets)
    assert logits.shape == (3, 16, 64)
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits.view(-1, 64), targets.view(-1)).item())
    assert abs(loss.item() - math.log(64)) < 1.0
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def test_parameters_are_counted_as_the_shape_says() -> None:
    per_block = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
    assert sum(p.numel() for p in Transformer(SHAPE).parameters()) == 2 * per_block + 2 * 64 * 32 + 32
    tied = Transformer(TIED)
    assert tied.head.weight is tied.embed.weight


def test_the_past_does_not_see_the_future() -> None:
    model = Transformer(SHAPE)
    tokens = torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_rotary_scores_depend_on_the_distance_only() -> None:
    rotary = rotary_at(torch.arange(16), 8)
    query, key = (x.expand(16, 8) for x in torch.randn(2, 1, 8, dtype=torch.float32))
    scores = rotate(query, rotary) @ rotate(key, rotary).T
    torch.testing.assert_close(scores[5, 2], scores[13, 10])
    torch.testing.assert_close(rotate(query, rotary)[0], query[0])
    assert rotate(query.bfloat16(), rotary).dtype == torch.bfloat16


def test_built_on_meta_it_can_be_filled_in_by_its_modules() -> None:
    with torch.device("meta"):
        model = Transformer(TIED)
    model.to_empty(device="cpu")
    model.head.weight = model.embed.weight
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    assert not list(model.buffers())
    assert math.isfinite(model(*torch.randint(64, (2, 1, 16))).item())


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"hidden 30 / heads 4"):
        TransformerShape(vocab=64, hidden=30, layers=1, heads=4, kv_heads=2, ffn=8, max_seq=8)
    with pytest.raises(ConfigurationError, match=r"kv_heads 3"):
        TransformerShape(vocab=64, hidden=32, layers=1, heads=4, kv_heads=3, ffn=8, max_seq=8)
    with pytest.raises(ValueError, match="17 tokens"):
        Transformer(SHAPE)(torch.zeros(1, 17, dtype=torch.long))
