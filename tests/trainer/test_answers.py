"""Answers to a file of prompts: their order, what is written when, and what is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.trainer.answers import Request, answer_file, answer_prompt, prepare
from shardwise.trainer.models.build import build
from shardwise.trainer.models.export import export
from shardwise.trainer.models.generation import Sampling
from shardwise.trainer.settings import Settings
from tests.harness import Pool

ROWS: list[dict[str, Any]] = [
    {"prompt": "The"},
    {"id": 7, "messages": [{"role": "user", "content": "1 + 1?"}]},
    {"prompt": "A longer prompt", "id": "x"},
    {"prompt": "b"},
    {"prompt": "é"},
]


def exported(folder: Path) -> Path:
    settings = Settings(model="tiny", shape={"hidden": 24, "layers": 2, "heads": 4, "ffn": 40, "max_seq": 48}, seed=3)
    built = build(settings, 257, torch.device("cpu"))
    model, _ = sw.shard(built.model, None, "ddp", precision="fp32", seed=3)
    export(model, built, settings, folder / "model")
    return folder / "model"


def request(folder: Path, rows: Sequence[Any] = ROWS, **changes: Any) -> Request:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    values = {"prompts": str(prompts), "out": str(folder / "answers.jsonl"), "batch_size": 2, "strategy": "ddp"}
    return Request(
        **{"path": str(folder / "model"), "sampling": Sampling(max_new_tokens=6, seed=1), **values, **changes}
    )


def never() -> bool:
    return False


def after(num: int) -> Any:
    """Stop when it is asked for the `num`-th time."""
    calls = iter(range(num))
    return lambda: next(calls, None) is None


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows_in_order_and_again(folder: Path) -> list[dict[str, Any]]:
    sw.init()
    exported(folder)
    asked, out, partial = request(folder), folder / "answers.jsonl", folder / "answers.jsonl.partial"
    assert Request.from_json(asked.to_json()).to_json() == asked.to_json()
    answer_file(prepare(asked), never)
    whole = read(out)
    assert not partial.exists()
    out.unlink()

    answer_file(prepare(asked), after(8))
    assert not out.exists()
    done = read(partial)[1:]
    assert 0 < len(done) < len(ROWS)
    with partial.open("a") as file:
        file.write('{"row": 4, "answer": "half')
    with pytest.raises(sw.ConfigurationError, match="answers to another request"):
        answer_file(prepare(replace(asked, sampling=Sampling(max_new_tokens=5))), never)
    answer_file(prepare(replace(asked, batch_size=5)), never)
    assert read(out) == whole
    return whole


def test_answers_are_in_the_order_of_the_prompts_and_a_stopped_command_goes_on(run_ranks: Pool, tmp_path: Path) -> None:
    [found] = run_ranks(1, rows_in_order_and_again, tmp_path)
    assert [{key: row[key] for key in row if key in ("prompt", "messages", "id")} for row in found] == ROWS
    assert all([*row][-3:] == ["answer", "num_tokens", "end"] for row in found)
    assert {row["end"] for row in found} <= {"stop", "length"}
    assert all(row["num_tokens"] == 6 for row in found if row["end"] == "length")


def on_two_ranks(asked: Request) -> bool:
    sw.init()
    return answer_file(prepare(asked), never)


def one_text(folder: Path) -> str | None:
    sw.init()
    exported(folder)
    return answer_prompt(prepare(request(folder, prompts=None, out=None, prompt="The")), never)


def test_ranks_with_their_weights_on_the_host_answer_the_same(run_ranks: Pool, tmp_path: Path) -> None:
    [text] = run_ranks(1, one_text, tmp_path)
    asked = request(tmp_path, strategy="zero3", offload=["params=host"])
    assert run_ranks(2, on_two_ranks, asked) == [True, True]
    assert read(tmp_path / "answers.jsonl")[0]["answer"] == text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "prompts.jsonl:2: not JSON"),
        ('["a"]', "prompts.jsonl:2: a JSON list, but a row is an object"),
        ({"id": 1}, "prompts.jsonl:2: it has no prompt and no messages"),
        ({"prompt": "a", "messages": []}, "prompts.jsonl:2: it has a prompt and messages"),
        ({"promt": "a"}, "prompts.jsonl:2: unknown key 'promt'; did you mean 'prompt'"),
        ({"prompt": 3}, "prompts.jsonl:2: a prompt is a text, not 3"),
        ({"prompt": " "}, "prompts.jsonl:2: its prompt is empty"),
        ({"prompt": "\ud800"}, "prompts.jsonl:2: half a surrogate pair"),
        ({"messages": []}, "prompts.jsonl:2: each of its messages needs a role and a content"),
        ({"messages": [{"role": "user"}]}, "prompts.jsonl:2: each of its messages needs a role and a content"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "prompts.jsonl:2: its last message is the assistant's",
        ),
        ({"prompt": "a" * 48}, "prompts.jsonl:2 has 48 tokens, and the model takes 48"),
    ],
)
def test_a_wrong_row_is_named(row: Any, words: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(sw.ConfigurationError) as error:
        prepare(request(tmp_path, [{"prompt": "a"}, row]))
    assert words in str(error.value)


def write_model(folder: Path) -> None:
    """What `prepare` reads of a model: everything but weights."""
    (folder / "model").mkdir()
    shape = {"vocab": 257, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 40, "max_seq": 48}
    about = {"model_type": "llama", "shardwise_shape": shape, "shardwise_tokenizer": "bytes"}
    (folder / "model" / "config.json").write_text(json.dumps(about))
    (folder / "model" / "model.safetensors").touch()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": None}, "--prompts needs a file for the answers"),
        ({"out": "prompts.jsonl"}, "prompts.jsonl exists: remove it"),
        ({"out": "none/answers.jsonl"}, "its folder is not there"),
        ({"prompts": "none.jsonl"}, "none.jsonl cannot be read"),
        ({"prompts": "prompts.csv"}, "ends in .jsonl or .txt"),
        ({"prompts": "empty.txt"}, "empty.txt: there is no prompt in it"),
        ({"chat": False}, "prompts.jsonl:2: messages are a chat"),
        ({"offload": ["grads=host"]}, "generating has nothing but parameters"),
        ({"strategy": "zero3", "offload": ["params=disk"]}, "no folder is named"),
        ({"strategy": "zero3", "offload": ["params=disk:none"]}, "none is not a folder"),
        ({"precision": "int3"}, "unknown precision 'int3'"),
        ({"strategy": "zero4"}, "unknown strategy 'zero4'"),
        ({"path": "none"}, "there is no such folder"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_read(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(sw.ConfigurationError) as error:
        prepare(replace(request(tmp_path), **changes))
    assert words in str(error.value)


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\ntwo \u2028three\n".encode())
    rows = prepare(request(tmp_path, prompts=str(tmp_path / "a.txt"))).rows
    assert [row.given for row in rows] == [{"prompt": "one"}, {"prompt": "two \u2028three"}]
    assert [row.prompt.ids for row in rows] == [list(b"one"), list("two \u2028three".encode())]
