"""Documents from files: nothing lost, and what cannot be read named with its place."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.data.rows import Document, Reading, from_rows
from shardwise.trainer.data.sources import (
    find_files,
    json_file,
    json_lines,
    load_dataset,
    read,
    read_dataset,
    read_text,
)

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@given(st.text(st.sampled_from("ab \n\r\té日🙂"), max_size=300), st.integers(1, 40))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_pieces_of_a_text_are_the_text(tmp_path: Path, text: str, piece_bytes: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    pieces = list(read_text(path, piece_bytes))
    assert "".join(piece.texts[0][0] for piece in pieces) == text
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


def test_pieces_end_between_words(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One line of words\nand  another one.\n\n  Third\n" * 200)
    pieces = [piece.texts[0][0] for piece in read_text(path, 512)]
    assert len(pieces) > 10
    assert all(piece.endswith("\n") and not after[0].isspace() for piece, after in pairwise(pieces))
    path.write_text("word " * 2000)
    pieces = [piece.texts[0][0] for piece in read_text(path, 512)]
    assert all(piece.startswith(" word") for piece in pieces[1:])


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("é".encode() * 100 + b"\xff" + b"a" * 50)
    for piece_bytes in (7, 1000):
        with pytest.raises(ConfigurationError, match=r"a\.txt: not UTF-8 text: byte 200 is 0xff"):
            list(read_text(path, piece_bytes))
    path.write_bytes("é".encode()[:1])
    with pytest.raises(ConfigurationError, match="byte 0 is 0xc3"):
        list(read_text(path))


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert list(read_text(path)) == [Document(str(path), (("hello", True),))]
    path.write_bytes(b'\xef\xbb\xbf{"text": "hello"}')
    assert list(from_rows(json_lines(path), Reading())) == [Document(f"{path}:1", (("hello", True),))]


@pytest.mark.parametrize(
    ("row", "texts", "messages"),
    [
        ({"text": "a", "id": 3}, (("a", True),), ()),
        ({"prompt": "p", "completion": "c", "text": "t"}, (("p", False), ("c", True)), ()),
        ({"prompt": "", "completion": "c"}, (("", False), ("c", True)), ()),
        ({"prompt": "p", "messages": [USER, ANSWER]}, (), [USER, ANSWER]),
        ({"text": "a", "messages": None, "prompt": None}, (("a", True),), ()),
    ],
)
def test_rows(row: Any, texts: Any, messages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(row))
    assert list(from_rows(json_lines(Path("rows.jsonl")), Reading())) == [Document("rows.jsonl:1", texts, messages)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": ', "not JSON"),
        ("[1, 2]", "a JSON list, but a row must be an object"),
        ('{"txt": "a", "id": 1}', "has the keys txt, id, but needs text, prompt and completion, messages"),
        ('{"prompt": "a"}', "has the keys prompt, but needs"),
        ('{"text": 3}', "text is of type int, but must be a string"),
        ('{"prompt": 3, "completion": "b"}', "prompt is of type int"),
        ('{"text": "  "}', "text is empty"),
        ('{"prompt": "a", "completion": ""}', "completion is empty"),
        ('{"messages": []}', "messages must be a list of at least one message"),
        ('{"messages": {"role": "user"}}', "messages must be a list"),
        ('{"messages": [{"role": "assistant"}]}', "message 1 must have a role and a content that are strings"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
        ('{"text": "\\ud800"}', "half a surrogate pair"),
        ("[" * 100_000, "not JSON"),
        ('{"text": ' + "1" * 5000 + "}", "not JSON"),
        ('{"text": "' + "a" * 20_000 + '"}', "longer than 10000 bytes"),
    ],
)
def test_bad_rows_are_named_and_the_next_one_is_read(row: str, reason: str, write_rows: Callable[..., str]) -> None:
    path = write_rows({"text": "before"}, "", row, {"text": "after"})
    limit = 10_000 if "longer" in reason else 2**20
    before, bad, after = from_rows(json_lines(Path(path), limit), Reading())
    assert bad.where == f"{path}:3"
    assert bad.problem.startswith(reason)
    assert (before.texts, after.texts) == ((("before", True),), (("after", True),))


def test_a_row_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    (bad,) = from_rows(json_lines(path), Reading())
    assert bad.problem == "not UTF-8 (invalid continuation byte at byte 13 of the line)"


ROWS = [{"instruction": "1 + 1", "output": "2"}, {"instruction": 'say "é,\t', "output": "one\ntwo"}]


def as_table(delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerows([["instruction", "output"], *(row.values() for row in ROWS)])
    return text.getvalue().encode()


def as_parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=1)
    return file.getvalue()


def zstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.compress(content, codec="zstd", asbytes=True)


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
KINDS = {
    "a.jsonl": LINES,
    "lines.json": LINES,
    "list.json": json.dumps(ROWS, indent=1).encode(),
    "object.json": json.dumps({"version": 1, "data": ROWS}).encode(),
    "mark.csv": b"\xef\xbb\xbf" + as_table(","),
    "a.tsv": as_table("\t"),
    "a.parquet": as_parquet(),
    "a.jsonl.gz": gzip.compress(LINES, mtime=0),
    "a.csv.bz2": bz2.compress(as_table(",")),
    "a.json.xz": lzma.compress(json.dumps(ROWS).encode()),
    "a.jsonl.zst": zstd(LINES),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(KINDS[name])
    assert find_files(str(path)) == [path]
    found = list(read(path, Reading()))
    assert [[message["content"] for message in document.messages] for document in found] == [
        list(row.values()) for row in ROWS
    ]
    assert found[1].where == f"{path}:{3 if 'csv' in name or 'tsv' in name else 2}"


def test_compressed_text_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"some words and more of them\n" * 2**20))
    tracemalloc.start()
    num_characters = sum(len(document.texts[0][0]) for document in read(path, Reading()))
    assert num_characters == 28 * 2**20
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()


def test_one_row_group_of_parquet_is_in_memory(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path, table = tmp_path / "a.parquet", pyarrow.table({"text": [os.urandom(500).hex() for _ in range(1000)]})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(20):
            writer.write_table(table)
    del table
    before = largest = pyarrow.total_allocated_bytes()
    for _ in read(path, Reading()):
        largest = max(largest, pyarrow.total_allocated_bytes())
    assert 1_000_000 < largest - before < 5_000_000


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("cut.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "cut.jsonl.gz: cannot be read: Compressed file ended"),
        ("no.csv.xz", LINES, "no.csv.xz: cannot be read"),
        ("no.jsonl.zst", LINES, "no.jsonl.zst: cannot be read"),
        ("no.jsonl.gz", LINES, "no.jsonl.gz: cannot be read: Not a gzipped file"),
        ("no.parquet", LINES, "no.parquet: cannot be read as Parquet"),
        ("two.json", b'{"a": [1], "b": [2]}', "two.json: neither a list of objects nor an object with one list"),
        ("cut.json", b'[{"text": "a"}, {"te', r"cut.json: not JSON \(Unterminated string"),
        ("latin.csv", b"text\ncaf\xe9\n", "latin.csv: not UTF-8 text"),
        ("deep.json", b"[" * 100_000, "deep.json: not JSON"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=problem):
        list(read(path, Reading()))


def test_limits_and_lines_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(KINDS["list.json"])
    with pytest.raises(ConfigurationError, match=r"more than 50 bytes; write one object per line, as \.jsonl"):
        list(json_file(path, 50))
    path = tmp_path / "a.csv"
    path.write_text("text,id\none,1\ntwo\n\nthree,3,4\nfour,4\n")
    found = [(document.where.rpartition(":")[2], document.problem) for document in read(path, Reading())]
    assert found == [
        ("2", ""),
        ("3", "has 1 fields, but the first line 2"),
        ("5", "has 3 fields, but the first line 2"),
        ("6", ""),
    ]


def test_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv.gz", ".hidden.jsonl", ".git/d.json", "notes.pdf", "deep/c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [tmp_path / name for name in ("a.csv.gz", "b.jsonl", "deep/c.json")]
    assert find_files(str(tmp_path)) == names
    assert find_files(f"{tmp_path}/*.json*") == names[1:2]
    assert find_files(f"{tmp_path}/**/*.json*") == names[1:]
    (tmp_path / "README.md").write_text("x")
    for place, problem in (
        (tmp_path, "has both text and other files"),
        (tmp_path / "*.txt", "no file matches"),
        (tmp_path / "*.pdf", "notes.pdf: an unknown kind"),
        (tmp_path / "none.txt", "no such file"),
    ):
        with pytest.raises(ValueError, match=problem):
            find_files(str(place))


def test_datasets(tmp_path: Path, write_rows: Callable[..., str]) -> None:
    import datasets

    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER]}]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "two")
    for name in ("one", "two"):
        found = list(read_dataset(load_dataset(str(tmp_path / name), "train"), name, Reading()))
        assert found == [
            Document(f"{name}:1", messages=[USER, ANSWER]),
            Document(f"{name}:2", problem="no message of the assistant, so there is nothing to train on"),
        ]
    folder = tmp_path / "three"
    folder.mkdir()
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    (document,) = read_dataset(load_dataset(f"{folder}:b", "train"), "three", Reading())
    assert document.texts == (("b", True),)
    with pytest.raises(ConfigurationError, match="no split 'valid'; it has train, test"):
        load_dataset(str(tmp_path / "two"), "valid")
    with pytest.raises(ConfigurationError, match=r"saved without splits, so dataset_split 'test' is not in it"):
        load_dataset(str(tmp_path / "one"), "test")
    with pytest.raises(ConfigurationError, match=r"dataset /nowhere, split train: cannot be read"):
        load_dataset("/nowhere", "train")
