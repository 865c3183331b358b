"""Checkpoints with escape sequences wherever a name can stand: none of them reaches a terminal."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import CheckpointError, ConfigurationError, ShardwiseError, WireError
from shardwise.checkpoint import folder
from shardwise.trainer.metrics import Progress
from tests.checkpoint.by_hand import save_by_hand
from tests.cli.asking import Asker

# A command of a terminal, one in a single C1 character, the title of a window, a line of one's own, and text backwards.
NASTY = "\x1b[2J\x9b31m\x1b]0;owned\x07\nshardwise: good\r\u202egood\u2066\x7f"
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def nasty(path: Path, **changes: Any) -> Path:
    """A checkpoint that is good, with names that are not."""
    name = f"block.{NASTY}.weight"
    save_by_hand(path, {name: torch.ones(4, 2), "b": torch.ones(2)}, tied={name: (f"tied{NASTY}",)}, extra={"a": 1})
    index = json.loads((path / folder.INDEX).read_bytes())
    index["origin"] = {"format": f"ours{NASTY}", NASTY: NASTY}
    index["extra"] = {NASTY: NASTY, "half": "\ud800"}
    index["optimizer"]["name"] = f"Adam{NASTY}"
    index["optimizer"]["groups"][0][NASTY] = NASTY
    file = index["files"][0]
    (path / file["name"]).rename(path / f"file{NASTY}")
    file["name"] = f"file{NASTY}"
    text = json.dumps({**index, **changes}).encode()
    (path / folder.INDEX).write_bytes(text)
    (path / folder.MARKER).write_text(hashlib.sha256(text).hexdigest())
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return nasty(tmp_path / f"run{NASTY.replace('/', '')}" / "checkpoints" / "step-000001")


def assert_clean(text: str, most_lines: int | None = None) -> None:
    assert not CONTROL.search(text), repr(CONTROL.search(text))
    assert "\nshardwise: good" not in text
    assert most_lines is None or len(text.splitlines()) <= most_lines


@pytest.mark.parametrize("is_terminal", [False, True], ids=["piped", "terminal"])
def test_inspect(ask: Asker, place: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    seen = ask("inspect", place)
    assert seen.code == 0
    assert_clean(re.sub("\x1b\\[[0-9;]*m", "", seen.out) if is_terminal else seen.out)
    assert "\\x1b[2J" in seen.out.replace("\n", "")


def test_verify(ask: Asker, place: Path) -> None:
    good = ask("verify", place.parent.parent)
    assert good.code == 0
    assert_clean(good.out + good.err, 2)
    next(place.glob("file*")).unlink()
    seen = ask("verify", place)
    assert seen.code == 5
    assert_clean(seen.out + seen.err, 2)
    assert "\\x1b[2J" in seen.out


@pytest.mark.parametrize("form", ["shardwise", "dcp", "hugging-face"])
def test_convert(ask: Asker, place: Path, tmp_path: Path, form: str) -> None:
    seen = ask("convert", place, tmp_path / f"out{NASTY}", "--to", form)
    assert_clean(seen.out + seen.err, 2)
    assert seen.code == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"format": NASTY},
        {"tensors": {NASTY: {"shape": [1], "dtype": NASTY}}},
        {"files": [{"name": f"../{NASTY}", "num_bytes": 0, "checks": []}]},
        {"files": [{"name": f"not there {NASTY}", "num_bytes": 8, "checks": []}], "tensors": {}},
    ],
    ids=["format", "dtype", "outside", "missing"],
)
@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "export", "generate"])
def test_errors(ask: Asker, tmp_path: Path, command: str, changes: dict[str, Any]) -> None:
    path = nasty(tmp_path / f"place{NASTY}", **changes)
    seen = ask(command, path, *([tmp_path / "out"] if command in ("convert", "export") else []))
    assert_clean(seen.out + seen.err)


def test_train_from_it(ask: Asker, tmp_path: Path) -> None:
    path = nasty(tmp_path / f"place{NASTY}", format=NASTY)
    seen = ask("train", "--resume-from-checkpoint", path, "--output-dir", tmp_path / "run", "--device", "cpu")
    assert seen.code == CheckpointError.exit_code
    assert_clean(seen.err, 1)


def test_what_a_run_says(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(10, is_shown=True)
    progress.say(f"weights are rounded: {NASTY!s}")
    assert not CONTROL.search(capsys.readouterr().out)


def test_errors_are_printable_wherever_they_are_printed() -> None:
    for kind in (ShardwiseError, ConfigurationError):
        assert not CONTROL.search(str(kind(NASTY)))
    assert str(CheckpointError("a\x1bb\nc")) == "a\\x1bb\\nc"
    assert str(WireError("two\nlines")) == "two\nlines"
