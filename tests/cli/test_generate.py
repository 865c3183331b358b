"""`shardwise generate` from the outside."""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.base.errors import CheckpointError, ConfigurationError, MemoryExceededError, ShardwiseError
from shardwise.cli import main
from shardwise.trainer.data.tokenizer import BYTES, Message, Tokenizer
from shardwise.trainer.model import Transformer
from shardwise.trainer.models import restore, sample
from shardwise.trainer.models.llama import llama_name
from shardwise.trainer.shapes import TransformerShape

SHAPE = TransformerShape(vocab=257, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40, max_seq=32)
CONFIG = (
    '{"model_type": "llama", "shardwise_shape": {"vocab": 257, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, '
    '"ffn": 40, "max_seq": 32, "tied": false}, "shardwise_tokenizer": "bytes"}'
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_an_export_is_continued(tmp_path: Path) -> None:
    torch.manual_seed(0)
    export = tmp_path / "run" / "export"
    export.mkdir(parents=True)
    weights = {llama_name(name): value for name, value in Transformer(SHAPE).state_dict().items()}
    save_file(weights, export / "model.safetensors")
    (export / "config.json").write_text(CONFIG)
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

    monkeypatch.setattr(restore, "restore", fail)
    monkeypatch.setattr(sys, "argv", ["shardwise", "generate", "somewhere"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert capsys.readouterr().err == "shardwise: in a sentence\n"


def test_help_shows_commands_that_parse() -> None:
    seen = run("--help")
    assert seen.returncode == 0
    for word in ("--prompt", "--max-new-tokens", "--temperature", "--top-k", "--seed", "shardwise generate runs/"):
        assert word in seen.stdout


def test_a_prompt_is_a_message_where_there_is_a_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def template(messages: Sequence[Message], asks: bool) -> str:
        return "".join(f"[{message['content']}]" for message in messages) + ("?" if asks else "")

    chats = dataclasses.replace(BYTES, template=template)

    def generated(tokenizer: Tokenizer, *words: str) -> str:
        found = (torch.nn.Linear(1, 1), tokenizer, 8)
        monkeypatch.setattr(restore, "restore", lambda *_: found)
        monkeypatch.setattr(sample, "sample", lambda _, __, prompt, *___, **____: f"<{prompt}>")
        monkeypatch.setattr(sys, "argv", ["shardwise", "generate", "somewhere", *words])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().out.rstrip("\n")

    assert generated(chats, "--prompt", "hi") == "<[hi]?>"
    assert generated(chats, "--prompt", "hi", "--raw") == "hi<hi>"
    assert generated(chats) == "<>"
    assert generated(BYTES, "--prompt", "hi") == "hi<hi>"
    assert generated(BYTES, "--prompt", "hi", "--chat") == "<user:\nhi\n\nassistant:\n>"
    monkeypatch.setattr(sys, "argv", ["shardwise", "generate", "somewhere", "--chat"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
