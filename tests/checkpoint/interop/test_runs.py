"""Rectangles of a tensor become intervals of its elements, wherever they lie."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import CheckpointError
from shardwise.checkpoint.index import Piece, Stored, in_order, require_cover
from shardwise.checkpoint.interop.described import Budget, place, stored_of
from shardwise.checkpoint.interop.pickles import Strided

SIZE = 4
BUDGET = Budget()


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """A shape, and where each of its dimensions is cut."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    cuts = [sorted({0, length, *draw(st.sets(st.integers(0, length), max_size=2))}) for length in shape]
    return shape, cuts


def rectangles(cuts: list[list[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for edges in cuts:
        found = [
            ((*offsets, begin), (*lengths, end - begin)) for offsets, lengths in found for begin, end in pairwise(edges)
        ]
    return found


@given(tilings(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_rectangles_that_tile_a_tensor_are_the_tensor(
    tiling: tuple[tuple[int, ...], list[list[int]]], is_permuted: bool
) -> None:
    shape, cuts = tiling
    expected = torch.arange(prod(shape)).view(shape)
    content: list[int] = []
    pieces: list[Piece] = []
    for offsets, lengths in rectangles(cuts):
        part = expected[tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))]
        # As they may be written: in order, or with the dimensions the other way round.
        dims = list(range(part.ndim))[:: -1 if is_permuted else 1]
        laid = part.permute(dims).contiguous()
        stride = tuple(laid.stride()[dims.index(dim)] for dim in range(part.ndim))
        strided = Strided(0, len(content) * SIZE, torch.float32, lengths, stride)
        pieces += place(stored_of(strided, BUDGET), offsets, shape, BUDGET)
        content += laid.flatten().tolist()
    pieces = list(in_order(pieces))
    require_cover("it", pieces, prod(shape))
    found = [content[piece.offset // SIZE + at] for piece in pieces for at in range(piece.stop - piece.start)]
    assert found == expected.flatten().tolist()


def test_rows_stay_one_piece() -> None:
    chunk = Stored((3, 4), "F32", (Piece(0, 100, 0, 12),))
    assert place(chunk, (2, 0), (7, 4), BUDGET) == [Piece(0, 100, 8, 20)]
    assert place(chunk, (0, 4), (3, 8), BUDGET) == [Piece(0, 100, 4, 8), Piece(0, 116, 12, 16), Piece(0, 132, 20, 24)]


@pytest.mark.parametrize(("offsets", "shape"), [((2, 0), (4, 4)), ((0, 1), (3, 4)), ((0,), (3,))])
def test_parts_outside_of_their_tensor_are_refused(offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="does not lie in a tensor"):
        place(Stored((3, 4), "F32", (Piece(0, 0, 0, 12),)), offsets, shape, BUDGET)
