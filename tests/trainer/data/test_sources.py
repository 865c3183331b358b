"""Documents from files: nothing lost, and what cannot be read named with its place."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.data.rows import Document, Reading, from_rows
from shardwise.trainer.data.sources import json_lines, load_dataset, read_dataset, read_text

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
        ('{"prompt": ["a"], "completion": "b"}', "prompt is of type list"),
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
    with pytest.raises(ConfigurationError, match="no split 'valid'; it has train, test"):
        load_dataset(str(tmp_path / "two"), "valid")
    with pytest.raises(ConfigurationError, match=r"saved without splits, so dataset_split 'test' is not in it"):
        load_dataset(str(tmp_path / "one"), "test")
    with pytest.raises(ConfigurationError, match=r"dataset /nowhere, split train: cannot be read"):
        load_dataset("/nowhere", "train")
