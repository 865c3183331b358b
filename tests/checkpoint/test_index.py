"""The index is a pure value: it comes back from JSON as it was, and anything else is refused with a reason."""

import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.index import (
    Buffer,
    File,
    Index,
    Optimizer,
    Param,
    Piece,
    StateItem,
    from_json,
    merge,
    parts_of,
)
from shardwise.errors import CheckpointError
from shardwise.shard import Interval

STATE = {
    "exp_avg": StateItem("split", "F32"),
    "step": StateItem("whole", "F32", ()),
    "count": StateItem("value", value=3),
    "nothing": StateItem("value"),
}
INDEX = Index(
    (File("rank-00000.safetensors", 100), File("rank-00001.safetensors", 90)),
    {
        "w": Param((2, 3), "F32", (Piece(0, 0, 4), Piece(1, 4, 6)), 0, STATE),
        "frozen": Param((0,), "BF16", (), None, {}),
    },
    {"mean": Buffer((), "I64")},
    Optimizer("AdamW", ({"lr": 1e-3, "betas": [0.9, 0.95]},), {"scale": 65536.0}),
    {"step": 7, "nested": {"list": [1, "a", None]}},
)


def test_the_index_comes_back_from_json() -> None:
    assert from_json(INDEX.to_json()) == INDEX
    assert from_json(INDEX.to_json().encode()) == INDEX
    without = Index((), {}, {}, None, {})
    assert from_json(without.to_json()) == without


def changed(path: list[str | int], value: Any) -> str:
    found = json.loads(INDEX.to_json())
    inner = found
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(found)


@pytest.mark.parametrize("name", ["../rank-0", "/etc/passwd", "a/b", "..", ".", "", "a\\b", 3, None])
def test_files_lie_in_the_folder(name: object) -> None:
    with pytest.raises(CheckpointError, match="not a plain name"):
        from_json(changed(["files", 0, "name"], name))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["files"], None),
        (["files", 0, "num_bytes"], -1),
        (["files", 0, "num_bytes"], 1.5),
        (["params"], []),
        (["params", "w"], None),
        (["params", "w", "dtype"], "F31"),
        (["params", "w", "dtype"], {}),
        (["params", "w", "shape"], ["a"]),
        (["params", "w", "shape"], 6),
        (["params", "w", "group"], "first"),
        (["params", "w", "pieces", 0, "file"], 2),
        (["params", "w", "pieces", 0, "start"], 5),
        (["params", "w", "pieces", 0, "stop"], True),
        (["params", "w", "state", "step", "kind"], "function"),
        (["params", "w", "state"], [1]),
        (["buffers", "mean"], {}),
        (["optimizer"], "AdamW"),
        (["optimizer", "groups"], [3]),
        (["extra"], 3),
    ],
)
def test_nonsense_is_refused(path: list[str | int], value: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be understood"):
        from_json(changed(path, value))


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"format": 1}', b"\xff"])
def test_other_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be understood"):
        from_json(text)


def test_other_versions_are_refused_by_number() -> None:
    with pytest.raises(CheckpointError, match="version 2, and this shardwise reads 'shardwise checkpoint' version 1"):
        from_json(changed(["version"], 2))


cut_points = st.lists(st.integers(1, 99), unique=True).map(lambda points: [0, *sorted(points), 100])


@given(cut_points, cut_points)
def test_any_cut_is_read_from_any_other(saved: list[int], wanted: list[int]) -> None:
    pieces = [Piece(number, a, b) for number, (a, b) in enumerate(pairwise(saved))]
    for a, b in pairwise(wanted):
        read = []
        for part in parts_of("w", pieces[::-1], Interval(a, b)):
            assert part.at == len(read)
            start = part.piece.start + part.first
            read += range(start, start + part.num_elems)
        assert read == list(range(a, b))


@pytest.mark.parametrize(
    "pieces", [[], [(0, 4)], [(0, 4), (5, 10)], [(0, 6), (4, 10)], [(1, 10)], [(0, 4), (0, 4), (4, 10)]]
)
def test_gaps_and_overlaps_are_refused(pieces: list[tuple[int, int]]) -> None:
    with pytest.raises(CheckpointError, match=r"for element . of parameter 'w'"):
        parts_of("w", [Piece(0, *piece) for piece in pieces], Interval(0, 10))


def test_what_the_ranks_wrote_comes_together() -> None:
    mine = {"w": (Piece(0, 0, 4), 0, STATE)}
    other = {"w": (Piece(1, 4, 6), 0, STATE)}
    shapes = {"w": ((2, 3), "F32"), "frozen": ((0,), "BF16")}
    assert merge([other, mine], shapes) == INDEX.params
    with pytest.raises(CheckpointError, match="for element 4 of parameter 'w'"):
        merge([mine, {}], shapes)
    without = {"w": (Piece(1, 4, 6), 0, {})}
    with pytest.raises(CheckpointError, match=r"state of parameter 'w' is .* on rank 0 and .* on rank 1"):
        merge([mine, without], shapes)


def test_the_text_is_plain_json() -> None:
    assert json.loads(INDEX.to_json())["extra"] == asdict(INDEX)["extra"]
