"""The order is a permutation in each epoch, and a function of the seed and the position alone."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.trainer.data import order


@given(count=st.integers(1, 400), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_visits_every_sample_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(order.endless(seed, epoch * count, count, count)) == list(range(count))


@given(st.integers(1, 10**12), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_large_counts_need_no_list(count: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20, unique=True))
    values = [order.permuted(position, count, key) for position in positions]
    assert len(set(values)) == len(values)
    assert all(0 <= value < count for value in values)


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(order.endless(seed, epoch * 50, 50, 50)) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == len(orders)


def test_any_part_of_the_order_can_be_asked_for() -> None:
    whole = list(order.endless(3, 0, 100, 30))
    assert [next(order.endless(3, at, 1, 30)) for at in range(100)] == whole


@pytest.mark.parametrize("count", [4, 7])
def test_samples_come_to_every_place_equally_often(count: int) -> None:
    """3000 epochs: each sample comes first within five standard deviations of as often as by chance."""
    num_epochs = 3000
    for place in (0, count - 1):
        seen = Counter(next(order.endless(0, epoch * count + place, 1, count)) for epoch in range(num_epochs))
        chance = 1 / count
        deviation = (num_epochs * chance * (1 - chance)) ** 0.5
        assert all(abs(seen[sample] - num_epochs * chance) < 5 * deviation for sample in range(count))


def test_the_order_never_changes() -> None:
    """A checkpoint holds a position only, so a resume by a later version must find the same order."""
    assert list(order.endless(0, 0, 8, 8)) == [2, 1, 5, 0, 4, 6, 7, 3]
    assert order.permuted(123_456_789, 10**9, order.key("split", 7)) == 766950283


def test_sources_with_weights() -> None:
    """Every epoch has the exact shares; a source begins again only when all of its samples were there."""
    counts, draws = [10, 6], order.shares([0.25, 0.75], 16)
    assert draws == (4, 12)
    seen = list(order.mixed(3, 0, 16 * 5, counts, draws))
    assert list(order.mixed(3, 37, 20, counts, draws)) == seen[37:57]
    first = [sample for sample in seen if sample < 10]
    second = [sample for sample in seen if sample >= 10]
    for epoch in range(5):
        assert sum(sample < 10 for sample in seen[16 * epoch : 16 * epoch + 16]) == 4
    assert len(first) == 20
    assert {*first[:12]} == {*range(10)}  # 4 + 4 + 4 draws end the first pass
    assert [first.count(sample) for sample in range(10)] == [2] * 10
    assert [second.count(sample) for sample in range(10, 16)] == [10] * 6


def test_shares_are_exact() -> None:
    assert order.shares([1, 1, 1], 10) == (4, 3, 3)
    assert order.shares([0.7, 0.2, 0.1], 1000) == (700, 200, 100)
    assert order.shares([1e-9, 1], 7) == (0, 7)
