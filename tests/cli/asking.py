"""The command line from the inside: in this process, with what it printed and how it ended."""

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from shardwise.cli import main


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


class Asker:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: Any) -> Answer:
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["shardwise", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        seen = self._capsys.readouterr()
        code = end.value.code
        return Answer(code if isinstance(code, int) else 0, seen.out, seen.err)
