"""From the command line to cases: where state rests, what losses are compared with, and clipping."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.bench import compare
from shardwise.bench.compare import Session
from shardwise.bench.model import num_params
from shardwise.cli import main


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    def understood(*arguments: str) -> Session:
        asked: list[Session] = []

        def stop(session: Session, *_: object) -> None:
            asked.append(session)
            raise SystemExit(0)

        monkeypatch.setattr(compare, "run", stop)
        monkeypatch.setattr(sys, "argv", ["shardwise", "bench", "--device", "cpu", *arguments])
        with pytest.raises(SystemExit):
            main()
        return asked[0]

    return understood


def test_a_folder_for_what_rests_on_disk(ask: Callable[..., Session], tmp_path: Path) -> None:
    session = ask("--strategies", "zero3_nvme", "--peers", "deepspeed:3+nvme", "--disk-path", str(tmp_path))
    assert {case.disk_path for case in session.cases} == {str(tmp_path)}
    assert not ask().settings[0].disk_path


@pytest.mark.parametrize("option", ["--clip", "--max-grad-norm", "--max_grad_norm"])
def test_clipping_by_either_name(ask: Callable[..., Session], option: str) -> None:
    assert ask(option, "0.5").settings[0].clip == 0.5


def test_the_reference_may_be_left_out(ask: Callable[..., Session]) -> None:
    assert ask().with_reference
    assert not ask("--no-reference").with_reference


@pytest.mark.parametrize(("shape", "billions"), [("blocks-202m-20", 4.05), ("blocks-13b", 12.7)])
def test_large_shapes_on_one_rank(ask: Callable[..., Session], shape: str, billions: float) -> None:
    settings = ask("--world-size", "1", "--shape", shape, "--tokens", "8192,32768", "--checkpointing", "full").settings
    assert [(case.world_size, case.shape.tokens) for case in settings] == [(1, 8192), (1, 32768)]
    assert num_params(settings[0].shape) == pytest.approx(billions * 1e9, rel=0.005)
