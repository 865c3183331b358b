"""What the tests of the planner may ask for."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.asking import Asker

Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asker:
    return Asker(monkeypatch, capsys)


@pytest.fixture
def plan(ask: Asker) -> Answer:
    """`shardwise plan ... --json`, read."""

    def planned(*words: object) -> dict[str, Any]:
        answer = ask("plan", *words, "--json")
        assert answer.code == 0, answer.err
        found: dict[str, Any] = json.loads(answer.out)
        return found

    return planned
