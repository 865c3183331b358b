"""YAML and JSON as trees of texts."""

import os
import time
from pathlib import Path

import pytest

from shardwise.base.documents import MOST_BYTES, json_tree, read_object, read_text, yaml_tree
from shardwise.base.errors import ConfigurationError


def test_json_may_have_comments_and_a_comma_behind_the_last() -> None:
    text = """{ // a comment
      "rate": 5e8, # another
      "address": "http://host#part", /* one
      of two lines */ "list": [1, true, null,],
      "inner": {"quoted": "a \\" // b", "number": "1e-4", // and
      },
    }"""
    assert json_tree(text, "ds.json") == {
        "rate": "5e8",
        "address": "http://host#part",
        "list": ["1", "true", None],
        "inner": {"quoted": 'a " // b', "number": "1e-4"},
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "a": 2}', "ds.json: a is said twice"),
        ('{"b": {"a": 1, "a": 1}}', "ds.json: a is said twice"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1\n "b": 2}', "line 2 is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("", "line 1 is not JSON"),
    ],
)
def test_what_is_no_json(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        json_tree(text, "ds.json")


def test_numbers_stay_as_they_were_written() -> None:
    assert json_tree('{"a": 1e400, "b": ' + "9" * 5000 + "}", "it") == {"a": "1e400", "b": "9" * 5000}


def test_yaml_means_what_is_written() -> None:
    text = "mixed_precision: no\nwhen: 2020-01-01\nratio: 1:30\nnothing: null\ninner: {list: [1, yes]}\n"
    assert yaml_tree(text, "it", most_depth=3) == {
        "mixed_precision": "no",
        "when": "2020-01-01",
        "ratio": "1:30",
        "nothing": None,
        "inner": {"list": ["1", "yes"]},
    }


BOMB = "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\na: 2\n", "a is said twice, in line 1 and line 2"),
        ("a: !!python/object/apply:os.system [ls]\n", "the tag .* is not understood"),
        ("a: {b: {c: {d: 1}}}\n", "nested too deep"),
        ("a: &loop\n  b: *loop\n", "refers to itself"),
        ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + BOMB, "aliases stand for too much"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n", "merging"),
        ("a: [1\n", "is not YAML"),
        ("? [1, 2]\n: 3\n", "a key must be a plain word"),
    ],
)
def test_what_is_no_yaml_here(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        yaml_tree(text, "it", most_depth=2)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "huge").write_bytes(b" " * (MOST_BYTES + 1))
    for name, told in (
        ("bytes", "cannot be read"),
        ("huge", "at most 4,000,000 are read"),
        ("none", "No such file"),
        ("", "a folder"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            read_text(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    ["{" + '"a": 1,' + "#" * 100_000, "/*" * 100_000, '"' + '\\"' * 100_000, ", /* */" * 50_000, "[" * 700],
    ids=range(5),
)
def test_no_text_takes_longer_than_it_is_long(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigurationError):
        json_tree(text, "file")
    assert time.process_time() - began < 2


def test_commas_and_comments_in_strings_stay() -> None:
    tree = json_tree('{"a": "x,] // no # /* */", /* c , ] */ "b": [1,2, // c\n ], # d\n}', "file")
    assert tree == {"a": "x,] // no # /* */", "b": ["1", "2"]}


@pytest.mark.parametrize("name", ["pipe.json", "zero.json"])
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigurationError, match="only regular files are read"):
        read_text(tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"it cannot be read: .*only regular files are read"):
        read_object(tmp_path / name, "it")


def test_json_of_lists_alone_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "many.json").write_bytes(b'{"a": [' + b"[]," * 2_000_000 + b"[]]}")
    with pytest.raises(ConfigurationError, match="too many to be read"):
        read_object(tmp_path / "many.json", "it")
