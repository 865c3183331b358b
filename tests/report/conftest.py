"""What the tests of reports may ask for."""

import pytest

from tests.cli.asking import Asker


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asker:
    return Asker(monkeypatch, capsys)
