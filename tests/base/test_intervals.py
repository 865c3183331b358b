"""Interval arithmetic, for any shapes and any world: nothing is lost, nothing is held twice, nothing is cut."""

import itertools
from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.base.intervals import BLOCK_ELEMS, Interval, cuts, nested_shards, pieces, place, round_up

# Empty tensors, 0-dim ones (a single element), dims smaller than any world, uneven matrices.
shapes = st.one_of(
    st.just(()),
    st.just((0,)),
    st.just((17, 257)),
    st.just((3,)),
    st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    st.integers(1, 5000).map(lambda length: (length,)),
)
sizes_of_params = st.lists(shapes, max_size=12).map(lambda found: [prod(shape) for shape in found])
# Axes, outermost first; worlds to 1024.
axes = st.one_of(
    st.tuples(st.integers(1, 1024)),
    st.tuples(st.integers(1, 32), st.integers(1, 32)),
    st.just((8, 128)),
    st.just((1024,)),
)


def indices_of(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The place of a rank along each axis, when the last axis varies fastest."""
    found = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        found.append(index)
    return tuple(reversed(found))


def all_shards(num_elems: int, sizes: tuple[int, ...]) -> list[Interval]:
    return [nested_shards(num_elems, sizes, indices_of(rank, sizes))[-1] for rank in range(prod(sizes))]


@given(sizes_of_params, axes)
@example([17 * 257], (1024,))
@example([], (3,))
@example([0, 0], (2, 2))
@example([1, 0, 1], (1,))
def test_every_element_has_one_owner(params: list[int], sizes: tuple[int, ...]) -> None:
    world = prod(sizes)
    intervals, num_elems = place(params, world)
    shards = sorted(all_shards(num_elems, sizes))
    assert [shards[0].start, *(shard.stop for shard in shards)] == [
        *(shard.start for shard in shards),
        num_elems,
    ]
    assert len({shard.num_elems for shard in shards}) == 1
    owners = [0] * len(params)
    for shard in shards:
        for piece in pieces(intervals, shard):
            owners[piece.param] += piece.in_param.num_elems
    assert owners == params


@given(sizes_of_params, axes)
@example([17 * 257, 1, 3], (4,))
def test_pieces_rebuild_the_parameters(params: list[int], sizes: tuple[int, ...]) -> None:
    """Elements carry their own name; what shards hold, put back where the pieces say, is every parameter in order."""
    intervals, num_elems = place(params, prod(sizes))
    rebuilt: list[list[int]] = [[] for _ in params]
    for shard in sorted(all_shards(num_elems, sizes)):
        for piece in pieces(intervals, shard):
            assert piece.in_flat.num_elems == piece.in_param.num_elems
            assert len(rebuilt[piece.param]) == piece.in_param.start
            start = intervals[piece.param].start
            held = range(piece.in_flat.start, piece.in_flat.stop)
            rebuilt[piece.param].extend(element - start for element in held)
    assert rebuilt == [list(range(size)) for size in params]


@given(sizes_of_params, axes)
def test_no_boundary_cuts_a_quantisation_block(params: list[int], sizes: tuple[int, ...]) -> None:
    intervals, num_elems = place(params, prod(sizes))
    assert all(interval.start % BLOCK_ELEMS == 0 for interval in intervals)
    assert num_elems % (BLOCK_ELEMS * prod(sizes)) == 0
    spans = nested_shards(num_elems, sizes, (0,) * len(sizes))
    assert all(span.num_elems % BLOCK_ELEMS == 0 for span in spans)


@given(sizes_of_params, st.integers(1, 1024))
def test_padding_is_bounded(params: list[int], world: int) -> None:
    """Less than a block for each parameter and a block for each rank; one rank alone needs only the former."""
    _, num_elems = place(params, world)
    assert num_elems - sum(params) < BLOCK_ELEMS * (len(params) + world)
    _, alone = place(params, 1)
    assert alone == sum(round_up(size, BLOCK_ELEMS) for size in params)


@given(sizes_of_params, st.integers(1, 64))
def test_cuts_are_padding_and_parameters_in_turn(params: list[int], world: int) -> None:
    intervals, num_elems = place(params, world)
    lengths = cuts(intervals, num_elems)
    ends = list(itertools.accumulate(lengths))
    assert lengths[1::2] == params
    assert ends[1::2] == [part.stop for part in intervals]
    assert ends[-1] == num_elems
    assert min(lengths) >= 0


@given(axes, st.integers(0, 1023))
def test_shards_are_nested(sizes: tuple[int, ...], rank: int) -> None:
    num_elems = BLOCK_ELEMS * prod(sizes) * 3
    spans = nested_shards(num_elems, sizes, indices_of(rank % prod(sizes), sizes))
    assert spans[0] == Interval(0, num_elems)
    for outer, inner, size in zip(spans, spans[1:], sizes, strict=False):
        assert outer.start <= inner.start
        assert inner.stop <= outer.stop
        assert inner.num_elems * size == outer.num_elems
        assert inner.within(outer) == slice(inner.start - outer.start, inner.stop - outer.start)


intervals_ = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: Interval(min(ends), max(ends)))


@given(intervals_, intervals_)
def test_overlap_is_the_common_elements(one: Interval, other: Interval) -> None:
    common = one.overlap(other)
    expected = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    assert set(range(common.start, common.stop)) == expected
    assert one.start <= common.start <= common.stop <= one.stop
    assert common.num_elems == other.overlap(one).num_elems


def test_what_is_no_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="start 3, stop 2"):
        Interval(3, 2)
    with pytest.raises(ValueError, match="start -1, stop 2"):
        Interval(-1, 2)
    with pytest.raises(ValueError, match="is not inside"):
        Interval(0, 2).within(Interval(1, 3))
    with pytest.raises(ValueError, match="10 elements do not divide into 4"):
        nested_shards(10, (4,), (0,))


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up(num_elems: int, multiple: int) -> None:
    rounded = round_up(num_elems, multiple)
    assert rounded % multiple == 0
    assert num_elems <= rounded < num_elems + multiple
