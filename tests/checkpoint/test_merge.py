"""What the ranks wrote comes together, in whatever order it is heard of."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.index import Piece, Saved, Stored, require_sound
from shardwise.checkpoint.share import merge_shares
from tests.checkpoint.test_index import INDEX, W, cut_points


def by_rank(stored: Stored, number: int) -> Stored:
    return replace(stored, pieces=pieces_of(stored, number))


def pieces_of(stored: Stored, number: int) -> tuple[Piece, ...]:
    return tuple(piece for piece in stored.pieces if piece.file == number)


def share(number: int) -> dict[str, Saved]:
    state = {key: by_rank(item, number) if isinstance(item, Stored) else item for key, item in W.state.items()}
    return {"w": replace(W, pieces=pieces_of(W, number), state=state)}


def test_what_the_ranks_wrote_comes_together() -> None:
    frozen = {"frozen": INDEX.tensors["frozen"]}
    expected = {"w": W, **frozen}
    assert merge_shares([share(1) | frozen, share(0) | frozen]) == expected
    # A rank that holds nothing of a parameter knows its shape, and no state.
    idle = {"w": replace(W, pieces=(), state={})}
    assert merge_shares([idle, share(0) | frozen, share(1)]) == expected
    # What is missing is for `require_sound` to find.
    with pytest.raises(CheckpointError, match="for 4 of the 6 elements of 'w'"):
        require_sound(replace(INDEX, tensors=merge_shares([share(0), frozen])))
    without = {"w": replace(share(1)["w"], state={"exp_avg": share(1)["w"].state["exp_avg"]})}
    with pytest.raises(CheckpointError, match=r"state of parameter 'w' is .* cannot be merged"):
        merge_shares([share(0), without])


def test_plain_values_are_those_of_the_rank_that_comes_first() -> None:
    other = replace(share(1)["w"], state=share(1)["w"].state | {"count": 4})
    assert merge_shares([{"w": other}, share(0)])["w"].state["count"] == 3


@given(cut_points, st.integers(1, 3))
def test_pieces_side_by_side_become_one(ends: list[int], num_files: int) -> None:
    """However many ranks wrote into few files, each file's part of a tensor is one piece if it lies in one stretch."""
    pieces = [Piece(a * num_files // 100, 1000 + 4 * a, a, b) for a, b in pairwise(ends)]
    shares = [{"w": Saved((100,), "F32", (piece,), "parameter")} for piece in reversed(pieces)]
    merged = merge_shares(shares)["w"].pieces
    assert len(merged) == len({piece.file for piece in pieces})
    assert (merged[0].start, merged[-1].stop) == (0, 100)
    assert all(piece.offset == 1000 + 4 * piece.start for piece in merged)
    apart = [{"w": Saved((100,), "F32", (p._replace(offset=p.offset + 8 * n),))} for n, p in enumerate(pieces)]
    assert merge_shares(apart)["w"].pieces == tuple(p._replace(offset=p.offset + 8 * n) for n, p in enumerate(pieces))
