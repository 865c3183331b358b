"""An index comes back from JSON as it was, and anything else is refused with a reason."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.index import DTYPES, File, Index, Piece, Saved, Stored, from_json, require_sound, to_json
from tests.checkpoint.test_index import INDEX


def test_the_index_comes_back_from_json() -> None:
    require_sound(INDEX)
    assert from_json(to_json(INDEX)) == INDEX
    assert from_json(to_json(INDEX).encode()) == INDEX
    without = Index((), {})
    assert from_json(to_json(without)) == without


def test_the_text_is_plain_json() -> None:
    given = json.loads(to_json(INDEX))
    assert (given["format"], given["version"]) == ("shardwise checkpoint", 2)
    assert given["extra"] == INDEX.extra
    assert given["tensors"]["w"]["pieces"] == [[0, 8, 0, 4], [1, 16, 4, 6]]


counts = st.integers(0, 1 << 48)
names = st.text(min_size=1).filter(lambda name: not any("\ud800" <= c <= "\udfff" for c in name))


@st.composite
def whole_tensors(draw: st.DrawFn) -> Stored:
    """Any tensor, in any number of pieces, somewhere in the one file."""
    shape = tuple(draw(st.lists(st.integers(0, 30), max_size=3)))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    num_elems = Stored(shape, dtype, ()).num_elems
    inner = draw(st.sets(st.integers(1, num_elems - 1), max_size=4)) if num_elems > 1 else set()
    ends = [0, *sorted(inner), num_elems] if num_elems else [0]
    return Stored(shape, dtype, tuple(Piece(0, draw(counts), a, b) for a, b in pairwise(ends)))


plain_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names
saved_tensors = st.builds(
    lambda stored, *rest: Saved(stored.shape, stored.dtype, stored.pieces, *rest),
    whole_tensors(),
    st.sampled_from(["parameter", "buffer", "unknown"]),
    st.none() | st.booleans(),
    st.lists(names, max_size=2).map(tuple),
    st.none() | counts,
    st.dictionaries(names, whole_tensors() | plain_values, max_size=2),
)


@given(st.dictionaries(names, saved_tensors, max_size=3))
def test_any_index_comes_back_from_json(tensors: dict[str, Saved]) -> None:
    index = Index((File("all", 1 << 62),), tensors)
    assert from_json(to_json(index)) == index


def changed(path: list[str | int], value: Any) -> str:
    found = json.loads(to_json(INDEX))
    inner = found
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(found)


@pytest.mark.parametrize("name", ["../rank-0", "/etc/passwd", "a/../../b", "..", ".", "", "a\\b", "a\0b"])
def test_files_lie_in_the_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match="which is not inside the checkpoint"):
        from_json(changed(["files", 0, "name"], name))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["files"], None),
        (["files", 0, "name"], 3),
        (["files", 0, "name"], None),
        (["files", 0, "name"], "\ud800"),
        (["files", 0, "num_bytes"], -1),
        (["files", 0, "num_bytes"], 1.5),
        (["files", 0, "checks"], 3),
        (["files", 0, "checks", 0], [0, 60]),
        (["files", 0, "checks", 0], [0, 60, -1]),
        (["tensors"], []),
        (["tensors", "w"], None),
        (["tensors", "\udfff"], json.loads(to_json(INDEX))["tensors"]["w"]),
        (["tensors", "w", "dtype"], "F31"),
        (["tensors", "w", "dtype"], {}),
        (["tensors", "w", "shape"], ["a"]),
        (["tensors", "w", "shape"], [-2, -3]),
        (["tensors", "w", "shape"], [1 << 40, 1 << 40]),
        (["tensors", "w", "shape"], [1] * 65),
        (["tensors", "w", "shape"], 6),
        (["tensors", "w", "kind"], "function"),
        (["tensors", "w", "kind"], []),
        (["tensors", "w", "tied"], [3]),
        (["tensors", "w", "group"], "first"),
        (["tensors", "w", "pieces", 0], [0, 8, 0]),
        (["tensors", "w", "pieces", 0], [0, 8, 0, True]),
        (["tensors", "w", "pieces", 0], [-1, 8, 0, 4]),
        (["tensors", "w", "pieces", 0, 1], 1 << 63),
        (["tensors", "w", "pieces", 0, 3], float("inf")),
        (["tensors", "w", "state"], [1]),
        (["tensors", "w", "state", "step"], [1]),
        (["tensors", "w", "state", "step"], {"dtype": "F32"}),
        (["tensors", "mean"], {}),
        (["optimizer"], "AdamW"),
        (["optimizer", "name"], None),
        (["optimizer", "groups"], [3]),
        (["optimizer", "scaler"], 0),
        (["optimizer", "scaler"], []),
        (["optimizer", "scaler", "scale"], "large"),
        (["optimizer", "scaler", "scale"], 10**400),
        (["extra"], 3),
        (["origin"], None),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, list) else "",
)
def test_nonsense_is_refused(path: list[str | int], value: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be understood"):
        from_json(changed(path, value))


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{}", '{"format": 1}', b"\xff", "[" * 100_000, "9" * 10_000], ids=range(8)
)
def test_other_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be understood"):
        from_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format"', "it is no JSON: Expecting ':' delimiter at line 1, column 10"),
        (b"\xff\xff{}", "it is no text: byte 0 is none of UTF-8"),
        ("{}", "it has no 'format'"),
        ("[]", "a value in it is of another kind than it should be"),
    ],
)
def test_why_it_is_no_index_is_told_in_words(text: str | bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_json(text)


def test_other_versions_are_refused_by_number() -> None:
    with pytest.raises(CheckpointError, match="version 3, and this shardwise reads 'shardwise checkpoint' version 2"):
        from_json(changed(["version"], 3))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["tensors", "w", "pieces", 0, 0], 2, "has 'w' in file 2, of 2"),
        (["tensors", "w", "pieces", 0, 1], 1 << 62, "has 'w' up to byte .* which is 100 bytes long"),
        (["tensors", "w", "pieces", 1, 1], 83, "has 'w' up to byte 91 of 'deeper/rank-00001.safetensors'"),
        (["tensors", "w", "pieces"], [[0, 8, 0, 4], [1, 16, 5, 6]], "for element 4 of 'w'"),
        (["tensors", "w", "pieces"], [[0, 8, 0, 4], [1, 16, 3, 6]], "for element 4 of 'w'"),
        (["tensors", "w", "pieces"], [[0, 8, 4, 6], [1, 16, 0, 4]], "for element 0 of 'w'"),
        (["tensors", "w", "pieces"], [[0, 8, 0, 7], [1, 16, 7, 6]], "for element 7 of 'w'"),
        (["tensors", "w", "pieces"], [[0, 8, 0, 4]], "for 4 of the 6 elements of 'w'"),
        (["tensors", "w", "pieces"], [], "for 0 of the 6 elements of 'w'"),
        (["tensors", "w", "shape"], [1 << 31, 1 << 31], "for 6 of the 4611686018427387904 elements of 'w'"),
        (["tensors", "w", "state", "exp_avg", "pieces"], [], "elements of 'exp_avg of w'"),
        (["tensors", "mean", "pieces", 0, 1], 86, "has 'mean' up to byte 94"),
        (["files", 0, "num_bytes"], 10, "checksums for 100 of the 10 bytes"),
        (["files", 0, "checks"], [[0, 60, 1], [61, 39, 2]], "no checksum, or two, for byte 60"),
        (["files", 0, "checks"], [[0, 60, 1], [59, 41, 2]], "no checksum, or two, for byte 60"),
        (["files", 0, "checks"], [[0, 60, 1]], "checksums for 60 of the 100 bytes"),
    ],
)
def test_what_leads_astray_is_refused(path: list[str | int], value: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_json(changed(path, value))
