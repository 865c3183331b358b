"""`shardwise generate` from the outside."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.base.errors import CheckpointError, ConfigurationError, MemoryExceededError, ShardwiseError
from shardwise.cli import main
from shardwise.trainer import answers
from shardwise.trainer.data.tokenizer import BYTES, Message, Tokenizer
from shardwise.trainer.model import Transformer
from shardwise.trainer.models.facts import ModelFacts
from shardwise.trainer.models.generation import Sampling
from shardwise.trainer.models.llama import llama_name
from shardwise.trainer.models.restore import Restorable
from shardwise.trainer.settings import Settings
from shardwise.trainer.shapes import TransformerShape

SHAPE = TransformerShape(vocab=257, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40, max_seq=32)
CONFIG = (
    '{"model_type": "llama", "shardwise_shape": {"vocab": 257, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, '
    '"ffn": 40, "max_seq": 32, "tied": false}, "shardwise_tokenizer": "bytes"}'
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def write_export(folder: Path) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    weights = {llama_name(name): value for name, value in Transformer(SHAPE).state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(CONFIG)


@pytest.mark.slow
def test_an_export_is_continued(tmp_path: Path) -> None:
    write_export(tmp_path / "run" / "export")
    seen = run(str(tmp_path / "run"), "--prompt", "Hello", "--max_new_tokens", "8", "--temperature", "0")
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.startswith("Hello")
    assert seen.stderr == ""


def test_what_is_not_there_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, words in ((tmp_path / "none", "there is no such folder"), (tmp_path, "complete checkpoint")):
        monkeypatch.setattr(sys, "argv", ["shardwise", "generate", str(path)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ShardwiseError, 1), (ConfigurationError, 2), (MemoryExceededError, 3), (CheckpointError, 5)]
)
def test_an_error_says_what_the_command_ends_with(
    error: type[ShardwiseError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error("in a sentence")

    monkeypatch.setattr(answers, "prepare", fail)
    monkeypatch.setattr(sys, "argv", ["shardwise", "generate", "somewhere"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert capsys.readouterr().err == "shardwise: in a sentence\n"


def test_help_shows_commands_that_parse() -> None:
    seen = run("--help")
    assert seen.returncode == 0
    options = (
        "--prompt",
        "--prompts",
        "--out",
        "--batch-size",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--seed",
    )
    for word in (*options, "--top-p", "--stop", "--offload", "--nproc-per-node", "shardwise generate runs/"):
        assert word in seen.stdout


def test_a_prompt_is_a_message_where_there_is_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def template(messages: Sequence[Message], asks: bool) -> str:
        return "".join(f"[{message['content']}]" for message in messages) + ("?" if asks else "")

    chats = dataclasses.replace(BYTES, template=template)
    facts = ModelFacts("in-tree", 32, 257, "bytes", "somewhere")

    def asked(tokenizer: Tokenizer, prompt: str, chat: bool | None) -> tuple[str, bool]:
        found = Restorable(Path("somewhere"), Settings(), facts, tokenizer, None)
        monkeypatch.setattr(answers, "find_model_in", lambda *_: found)
        prepared = answers.prepare(answers.Request("somewhere", "ddp", Sampling(), prompt, chat=chat))
        return BYTES.decode(prepared.rows[0].prompt.ids), prepared.is_chat

    assert asked(chats, "hi", None) == ("[hi]?", True)
    assert asked(chats, "hi", False) == ("hi", False)
    assert asked(chats, "", None) == ("", False)
    assert asked(BYTES, "hi", None) == ("hi", False)
    assert asked(BYTES, "hi", True) == ("user:\nhi\n\nassistant:\n", True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--chat"], "--chat needs a message"),
        (["--prompt", "a", "--prompts", "b.jsonl"], "leave one out"),
        (["--out", "b.jsonl"], "is for the answers to --prompts"),
        (["--prompt", "a", "--top-p", "0"], "top_p 0 is a probability"),
        (["--prompt", "a", "--stop", ""], "stop: an empty text"),
    ],
)
def test_options_that_contradict_each_other(
    words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", "generate", "somewhere", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_stop_and_go_on(tmp_path: Path) -> None:
    """Ctrl-C keeps the answers that are finished."""
    model = tmp_path / "model"
    write_export(model)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("".join(f"Prompt {number}\n" for number in range(60)))
    words = [str(model), "--prompts", str(prompts), "--out", str(out), "--batch-size", "2", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "shardwise", "generate", *words]
    partial = tmp_path / "answers.jsonl.partial"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first:
        while first.poll() is None and not (partial.exists() and partial.read_text().count("\n") > 4):
            time.sleep(0.1)
        first.send_signal(signal.SIGINT)
        said = first.communicate(timeout=120)[1]
    assert first.returncode == 130, said
    done = partial.read_text().splitlines()[1:]
    assert f"{len(done)} of 60 answers are in {partial}" in said
    seen = run(*words)
    assert seen.returncode == 0, seen.stderr
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in written] == prompts.read_text().splitlines()
    for line in map(json.loads, done):
        assert written[line.pop("row")] == line
