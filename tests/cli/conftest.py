"""What the tests of the command line may ask for."""

from collections.abc import Iterator

import pytest
import torch

from tests.cli.asking import Asker


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Asker]:
    num_threads = torch.get_num_threads()
    yield Asker(monkeypatch, capsys)
    torch.set_num_threads(num_threads)
