"""The index is a pure value: any cut of a tensor is found in any other, and what is no cut of it is refused."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import CheckpointError
from shardwise.base.intervals import Interval
from shardwise.checkpoint.index import Check, File, Index, Optimizer, Piece, Saved, Stored, cut, require_sound

W = Saved(
    (2, 3),
    "F32",
    (Piece(0, 8, 0, 4), Piece(1, 16, 4, 6)),
    "parameter",
    is_trained=True,
    tied=("head.weight",),
    group=0,
    state={
        "exp_avg": Stored((2, 3), "BF16", (Piece(0, 24, 0, 4), Piece(1, 24, 4, 6))),
        "step": Stored((), "F32", (Piece(0, 32, 0, 1),)),
        "count": 3,
        "nothing": None,
    },
)
INDEX = Index(
    (
        File("rank-00000.safetensors", 100, (Check(0, 60, 1), Check(60, 40, 2))),
        File("deeper/rank-00001.safetensors", 90),
    ),
    {
        "w": W,
        "frozen": Saved((0, 4), "BF16", (), "parameter", is_trained=False),
        "mean": Saved((), "I64", (Piece(1, 80, 0, 1),), "buffer"),
        "theirs": Saved((2,), "F8_E4M3", (Piece(1, 88, 0, 2),)),
    },
    Optimizer("AdamW", ({"lr": 1e-3, "betas": [0.9, 0.95]},), {"scale": 65536.0}),
    {"step": 7, "nested": {"list": [1, "a", None]}},
    {"shardwise": "1.2.3"},
)


def test_pieces_are_a_whole_tensor() -> None:
    require_sound(INDEX)
    for pieces, words in (
        (W.pieces[:1], "for 4 of the 6 elements of 'w'"),
        (W.pieces[1:], "no piece, or two, for element 0 of 'w'"),
        (W.pieces[:1] * 2, "no piece, or two, for element 4 of 'w'"),
        ((Piece(2, 0, 0, 6),), "'w' in file 2, of 2"),
        ((Piece(0, 80, 0, 6),), "'w' up to byte 104 of 'rank-00000.safetensors', which is 100 bytes long"),
    ):
        wrong = replace(W, pieces=pieces)
        with pytest.raises(CheckpointError, match=words):
            require_sound(replace(INDEX, tensors={"w": wrong}))


cut_points = st.lists(st.integers(1, 99), unique=True).map(lambda points: [0, *sorted(points), 100])


@given(cut_points, cut_points)
def test_any_cut_is_read_from_any_other(saved: list[int], wanted: list[int]) -> None:
    stored = Stored((100,), "F32", tuple(Piece(number, 0, a, b) for number, (a, b) in enumerate(pairwise(saved))))
    for a, b in pairwise(wanted):
        read = []
        for piece in cut(stored, Interval(a, b)):
            whole = stored.pieces[piece.file]
            assert piece.offset == whole.offset + 4 * (piece.start - whole.start)
            read += range(piece.start, piece.stop)
        assert read == list(range(a, b))


def test_state_is_cut_like_its_parameter_where_it_is_shaped_like_it() -> None:
    assert W.is_split("exp_avg")
    assert not W.is_split("step")
    assert not W.is_split("count")
    number = replace(W, shape=(), pieces=(Piece(0, 0, 0, 1),))
    assert not number.is_split("step"), "a count of steps is none of a number's moments"
