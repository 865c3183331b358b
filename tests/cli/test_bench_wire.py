"""`shardwise bench wire` from the outside: help, mistakes, what is asked for, and a real run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.bench import wire as session
from shardwise.bench.wire import Request
from shardwise.cli import main
from shardwise.cli.bench import FIXED, STRATEGIES, wire
from shardwise.trainer.settings import Settings
from tests.cli.asking import Asker


class Understood(Exception):  # noqa: N818, it carries what was understood
    def __init__(self, asked: Request) -> None:
        self.asked = asked


@pytest.fixture
def understand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What a command line would run, without running it."""
    monkeypatch.chdir(tmp_path)

    def understood(*arguments: str) -> Request:
        def stop(asked: Request, *_: object) -> None:
            raise Understood(asked)

        monkeypatch.setattr(session, "prepare", stop)
        monkeypatch.setattr(sys, "argv", ["shardwise", "bench", "wire", *arguments])
        with pytest.raises(Understood) as asked:
            main()
        return asked.value.asked

    return understood


def test_help_comes_without_torch() -> None:
    code = (
        "import sys\n"
        "from shardwise.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, "bench", "wire", "--help"]
    seen = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert seen.returncode == 0, seen.stderr
    for flag in ("--strategies", "--steps", "--train-file", "--nproc-per-node", "--runs"):
        assert flag in seen.stdout
    assert "--resume-from-checkpoint" not in seen.stdout


def test_what_is_asked_for_by_default(understand: Any) -> None:
    asked = understand("--device", "cpu")
    assert (asked.num_ranks, asked.node_size, asked.num_steps) == (4, 2, 300)
    assert list(asked.strategies) == STRATEGIES.split(",")
    assert asked.exact == "zero3"
    settings = asked.settings
    assert (settings.model, settings.precision, settings.logging_steps, settings.export) == ("tiny", "fp32", 1, False)
    assert (settings.learning_rate, settings.global_batch_size) == (3e-3, 16)
    assert len(asked.gradient_codecs) == 10
    assert "int8" in asked.weight_codecs


def test_a_file_for_train_will_do(understand: Any) -> None:
    Path("mine.yaml").write_text(
        "strategy: hsdp\nmax_steps: 7\nsave_steps: 3\nlearning_rate: 1e-4\nshape: {layers: 1}\n"
    )
    asked = understand("mine.yaml", "shape.hidden=96", "--seed", "3", "--steps", "9", "--no-compile", "--device", "cpu")
    settings: Settings = asked.settings
    assert (settings.max_steps, settings.save_steps, settings.strategy) == (9, 0, "zero3")
    assert (settings.learning_rate, settings.seed, settings.shape) == (1e-4, 3, {"layers": 1, "hidden": 96})


def examples() -> list[str]:
    return re.findall(r"shardwise bench wire *(.*)", (wire.__doc__ or "").replace("\\\n", ""))


@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_help_are_understood(understand: Any, example: str) -> None:
    Path("mine.yaml").write_text("learning_rate: 1e-4\n")
    Path("mine.jsonl").write_text('{"text": "words"}\n')
    assert understand(*shlex.split(example)).strategies


def test_what_the_bench_decides_are_settings_of_the_trainer() -> None:
    Settings(**{**FIXED, "strategy": "zero3"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategies zeropp,zero3", "put an exact one first"),
        ("--strategies zero3,zero3+grads_as=int5", "unknown kind 'int5'"),
        ("--strategies zero3,zero3+params_as=int4", "16 values are too few for weights"),
        ("--codecs int4:100", "a block of 100 elements"),
        ("max_steps=3", "max_steps: is set by bench wire for every run; use --steps"),
        ("save_steps=3", "save_steps: is set by bench wire for every run; leave it out"),
        ("--node-size 3", "4 ranks does not divide into nodes of 3"),
        ("--steps 2", "--steps"),
        ("--train-file nowhere.txt", "nowhere.txt"),
        ("lerning_rate=3", "did you mean 'learning_rate'?"),
        ("--strategy zero3", "--strateg"),
    ],
)
def test_mistakes_are_told_and_end_with_2(
    ask: Asker, arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = ask("bench", "wire", "--device", "cpu", *shlex.split(arguments))
    assert (answer.code, message in answer.err) == (2, True), answer.err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_empty_is_left_alone(ask: Asker, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    answer = ask("bench", "wire", "--runs", tmp_path / "mine", "--json", "--device", "cpu")
    assert answer.code == 2
    assert "is not empty: name an empty" in answer.err


def test_ranks_of_another_launcher_are_refused(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = ask("bench", "wire")
    assert answer.code == 2
    assert "this is rank 1 of 2" in answer.err


@pytest.mark.slow
def test_on_real_ranks(ask: Asker, tmp_path: Path) -> None:
    answer = ask(
        *shlex.split("bench wire shape.layers=1 shape.hidden=64 shape.ffn=128 shape.heads=2 --steps 4 --device cpu"),
        *shlex.split("--nproc-per-node 2 --node-size 1 --strategies zero3,zero3+params_as=int8+grads_as=int8"),
        *shlex.split("--codecs int8 --weight-codecs e4m3"),
        *("--runs", tmp_path / "runs", "--out", tmp_path / "out"),
    )
    assert answer.code == 0, answer.err
    assert "zero3+params_as=int8+grads_as=int8" in answer.out
    (file,) = (tmp_path / "out").glob("*-bench-wire-tiny-2-ranks.json")
    about = json.loads(file.read_text())
    exact, encoded = about["rows"]
    assert exact["status"] == encoded["status"] == "ok"
    assert 0 < encoded["largest_difference"] < 0.05
    assert abs(encoded["eval_difference"]) < 0.05
    assert [list(run["losses"]) for run in about["runs"]] == [["1", "2", "3", "4"]] * 2
    for row in (exact, encoded):
        assert row["wire_bytes"] == row["planned_wire_bytes"] == row["inter_node_bytes"]
        assert row["step_s"] > 0
    # All that is not a matrix, and scales, keep it from four times.
    assert 2 < encoded["fewer_between_nodes"] < 4
    (gradients,), (weights,) = about["codecs"]["gradients"], about["codecs"]["weights"]
    assert (gradients["codec"], weights["codec"]) == ("int8", "e4m3")
    assert 1e-3 < gradients["relative_rms"] < 3e-2
    assert weights["cosine"] > 0.999
    assert file.with_suffix(".md").read_text().count("| `zero3") == 2
    folders = sorted(place.name for place in (tmp_path / "runs").iterdir() if place.is_dir())
    assert folders == ["01-zero3", "02-zero3-params_as-int8-grads_as-int8", "data"]
    assert not list((tmp_path / "runs").glob("*/checkpoints"))
