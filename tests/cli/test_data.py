"""`shardwise data`: what a training would make of data."""

import json
from pathlib import Path

import pytest

from tests.cli.asking import Asker


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": "x" * n}]}
        for n in range(1, 41)
    ]
    lines = [json.dumps(row) for row in [*rows[:20], {"messages": []}, {"txt": 1}, *rows[20:]]]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return tmp_path / "chats.jsonl"


def test_the_text(chats: Path, ask: Asker) -> None:
    said = ask("data", "chats.jsonl", "--seq-length", "64")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[:3] == [
        "format     messages: 40",
        "bad rows   2",
        "           chats.jsonl:21: messages must be a list of at least one message",
    ]
    assert "[[x<end>]]" in said.out
    assert said.out.count("sample ") == 3
    assert any(line.startswith("at 64   3 of 40 documents are cut; padding ") for line in lines)


def test_the_json_and_other_roles(chats: Path, ask: Asker) -> None:
    found = json.loads(ask("data", "chats.jsonl", "--json", "--train-roles", "user").out)
    assert (found["formats"], found["num_documents"], found["num_bad_rows"]) == ({"messages": 40}, 40, 2)
    assert sum(found["histogram"].values()) == 40
    assert found["num_trained"] == sum(len(f"{n} + {n}?") for n in range(1, 41))
    assert [text for text, is_trained in found["samples"]["1"] if is_trained] == ["1 + 1?"]
    assert 0 < found["padding"]["packed"] < found["padding"]["padded"] < 1


def test_the_data_of_a_configuration(chats: Path, ask: Asker) -> None:
    Path("run.yaml").write_text("train_file: chats.jsonl\nseq_length: 32\ntrain_roles: all\n")
    found = json.loads(ask("data", "run.yaml", "--json").out)
    assert (found["seq_length"], found["num_trained"]) == (32, found["num_tokens"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere.jsonl", "train_file nowhere.jsonl: no such file"),
        ("chats.jsonl --max-bad-rows 1", "more than 1 rows cannot be read (max_bad_rows)"),
        ("chats.jsonl --columns messages=chat", "columns.messages: no row of the training data has 'chat'"),
        ("chats.jsonl --columns message=chat", "did you mean 'messages'"),
        ("chats.jsonl --train-roles me", "train_roles"),
    ],
)
def test_requests_that_are_refused(chats: Path, ask: Asker, arguments: str, message: str) -> None:
    said = ask("data", *arguments.split())
    assert said.code == 2
    assert message in said.err
