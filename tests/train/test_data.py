"""The data order is a function of the seed and the sample, whatever the world."""

import pytest
import torch

from shardwise.errors import ConfigurationError
from shardwise.train import data


def test_the_text_is_english_and_long() -> None:
    text = bytes(data.text().tolist()).decode()
    assert len(text) > 400_000
    assert "statement" in text


def test_targets_are_the_next_bytes() -> None:
    tokens, targets = data.batch(step=3, global_batch=4, seq=32, seed=1)
    assert tokens.shape == targets.shape == (4, 32)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert int(tokens.max()) < data.VOCAB


def test_a_sample_depends_on_its_index_and_the_seed_only() -> None:
    small = torch.cat([data.batch(step, 4, 32, seed=1)[0] for step in range(6)])
    large = torch.cat([data.batch(step, 8, 32, seed=1)[0] for step in range(3)])
    assert torch.equal(small, large)
    assert not torch.equal(small, data.batch(0, 24, 32, seed=2)[0])


def test_ranks_share_the_batch_without_overlap() -> None:
    tokens, _ = data.batch(0, 12, 16, seed=0)
    for num_ranks in (1, 2, 3, 4):
        assert torch.equal(torch.cat([data.share(tokens, r, num_ranks) for r in range(num_ranks)]), tokens)
    with pytest.raises(ConfigurationError, match="12 samples do not divide into 5 equal shares"):
        data.share(tokens, 0, 5)


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order() -> None:
    seq = 50_000
    num_windows = (data.text().numel() - 1) // seq
    first, _ = data.samples(0, num_windows, seq, seed=0)
    second, _ = data.samples(num_windows, num_windows, seq, seed=0)
    windows = {tuple(window[:64].tolist()) for window in first}
    assert len(windows) == num_windows
    assert {tuple(window[:64].tolist()) for window in second} == windows
    assert not torch.equal(first, second)


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="seq 10000000"):
        data.batch(0, 1, 10_000_000, seed=0)
