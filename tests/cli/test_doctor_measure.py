"""`shardwise doctor --measure` on this machine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.doctor import measure
from shardwise.planner.hardware.cluster import cluster_in, read_measured
from tests.cli.asking import Asker


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_a_machine_is_measured_and_can_be_planned_for(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    seen = run("--measure", str(file), "--folder", str(tmp_path / "runs"))
    assert seen.returncode == 0, seen.stderr
    found = read_measured(file)
    assert f"for plans: {file}" in seen.stdout
    assert found.flops > 1e8
    assert found.memory_bytes_per_s > 1e8
    assert cluster_in(found).world_size >= 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    seen = run("--measure", str(tmp_path / "no" / "hardware.json"))
    assert seen.returncode == 2
    assert "No such file or directory" in seen.stderr


def test_a_place_where_no_file_can_be(tmp_path: Path, ask: Asker) -> None:
    """Said before anything is measured."""
    answer = ask("doctor", "--measure", tmp_path)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "Is a directory" in answer.err
    answer = ask("doctor", "--measure", tmp_path / ("long" * 100))
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "cannot be written" in answer.err


def test_a_rate_is_what_calls_do_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "BUDGET_S", 0.02)
    calls: list[int] = []
    rate = measure.rate(lambda: calls.append(1), 5.0, torch.device("cpu"))
    assert rate <= 5.0 * (len(calls) - 1) / 0.02
    assert measure._processor().startswith("cpu (")


@pytest.mark.slow
def test_ranks_that_do_not_meet_measure_nothing() -> None:
    assert measure.measure_collectives("no backend", 1) == {}
