"""`shardwise bench wire`: what is asked for, and what happens with it when runs end in every way."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.bench import wire
from shardwise.bench.wire import Findings, Request, TrainedRun, codecs_of, inter_node_bytes, last_error, strategies_of
from shardwise.trainer.settings import Settings

INT8 = "zero3+grads_as=int8"
SETTINGS = Settings(max_steps=4, node_size=2, device="cpu", precision="fp32")


def request_for(strategies: str = f"zero3,{INT8}", **more: Any) -> Request:
    return Request(**{"settings": SETTINGS, "strategies": strategies_of(strategies), "num_ranks": 4, **more})


def seen(strategy: str, losses: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0), **more: Any) -> TrainedRun:
    figures = {"eval_loss": 2.0, "step_s": 0.1, "wire_bytes": 4e6, "planned_wire_bytes": 4e6, "inter_node_bytes": 1e6}
    return TrainedRun(strategy, losses=dict(enumerate(losses, 1)), **{**figures, **more})


def found(*runs: TrainedRun, **more: Any) -> Findings:
    return Findings(request_for(**more), {run.strategy: run for run in runs})


def test_strategies_are_names_and_mixes() -> None:
    mix = '{"blocks.*":"zero3+grads_as=int4:feedback","*":"zero3"}'
    assert strategies_of(f"zero3, {INT8} ,{mix}") == {"zero3": "zero3", INT8: INT8, mix: json.loads(mix)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; name at least one"),
        ("zero3+grads_as=int9", "unknown kind 'int9'"),
        ("zero3@early", "'zero3@early' has an @ modifier"),
        (
            '{"*":{"params":"world","grads":"world","optimizer":"world","gathered_until":"forward"}}',
            "use a name, as in",
        ),
    ],
)
def test_strategies_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategies_of(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategies": f"{INT8},zero3"}, "grads_as='int8'; put an exact one first"),
        ({"strategies": '{"blocks.0":"zero3+params_as=int8","*":"zero3"}'}, "params_as='int8'"),
        ({"strategies": "auto"}, "name a preset instead"),
        ({"num_ranks": 1}, "one rank sends nothing"),
        ({"settings": replace(SETTINGS, node_size=3)}, "4 ranks does not divide into nodes of 3"),
        ({"gradient_codecs": ("as_is",)}, "'as_is' is exact"),
        ({"settings": replace(SETTINGS, model="tinny")}, "tinny"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        request_for(**changes).check()


def test_codecs_are_checked_and_told_once() -> None:
    assert codecs_of("int8, int4:64,int8") == ("int8", "int4:64")
    assert codecs_of("") == ()
    with pytest.raises(ConfigurationError, match="a block of 63 elements"):
        codecs_of("int4:63")


def test_differences_are_to_the_first_step_by_step() -> None:
    off = seen(INT8, (4.0, 3.3, 2.0, 1.05), eval_loss=2.1, inter_node_bytes=2.5e5)
    exact, row = wire.rows_of(found(seen("zero3"), off))
    assert (exact["loss"], exact["loss_difference"], exact["largest_difference"]) == (2.5, 0.0, 0.0)
    assert row["loss"] == pytest.approx((4.0 + 3.3 + 2.0 + 1.05) / 4)
    assert row["loss_difference"] == pytest.approx(0.35 / 10)
    assert row["eval_difference"] == pytest.approx(0.05)
    assert (row["largest_difference"], row["largest_at"]) == (pytest.approx(0.1), 2)
    assert row["fewer_between_nodes"] == 4.0


def test_the_loss_is_that_of_the_last_twenty_steps() -> None:
    losses = (100.0,) * 5 + (2.0,) * 20
    (row,) = wire.rows_of(found(seen("zero3", losses), settings=replace(SETTINGS, max_steps=25)))
    assert row["loss"] == 2.0


def test_who_diverged_has_what_was_seen_and_no_loss() -> None:
    findings = found(
        seen("zero3"), seen(INT8, (4.0, 9.0), status="diverged", error="the loss of step 2", eval_loss=None)
    )
    row = wire.rows_of(findings)[1]
    assert (row["loss"], row["loss_difference"], row["eval_difference"]) == (None, None, None)
    assert row["largest_difference"] == pytest.approx(2.0)
    assert wire.strategy_columns(findings)["loss"] == ["2.5000", "diverged"]
    assert wire.problems(findings) == [f"{INT8} (diverged): the loss of step 2"]


def test_without_the_exact_run_there_is_nothing_to_compare_with() -> None:
    findings = found(TrainedRun("zero3", "failed", "no"), seen(INT8))
    row = wire.rows_of(findings)[1]
    assert (row["loss"], row["loss_difference"]) == (2.5, None)
    assert "vs zero3" not in wire.strategy_columns(findings)


def test_bytes_that_were_not_planned_are_a_problem() -> None:
    (problem,) = wire.problems(found(seen("zero3", wire_bytes=5e6)))
    assert "zero3: a step moved 5000000.0 bytes, but 4000000.0 were planned" in problem


def test_between_nodes_every_element_comes_in_once() -> None:
    def row(axis: str, kind: str, seen_bytes: float) -> dict[str, Any]:
        return {"axis": axis, "kind": kind, "dtype": "float32", "seen_bytes": seen_bytes}

    # A gather of 800 bytes over 4 ranks in 2 nodes: 400 come from the other node, and two ranks share the work.
    assert inter_node_bytes([row("world", "all_gather", 600.0)], 4, 2) == 200.0
    assert inter_node_bytes([row("world", "all_reduce", 1200.0)], 4, 2) == 400.0
    assert inter_node_bytes([row("node", "all_gather", 600.0), row("replicate", "all_gather", 50.0)], 4, 2) == 50.0
    assert inter_node_bytes([row("world", "all_gather", 600.0)], 4, 4) == 0.0


def test_the_last_words_of_a_run_are_its_own() -> None:
    assert last_error("step 1\nshardwise: memory is short\n  at line 3\n", 3) == "memory is short"
    assert last_error("step 1\nTraceback\nValueError: no\n", 1) == "ValueError: no"
    assert last_error("", -9) == "exit code -9"


LOST = {
    "codec": "int4",
    "relative_rms": 0.1,
    "worst_relative_rms": None,
    "cosine": 0.99,
    "bytes_per_elem": 0.5157,
    "encode_s": 0.002,
    "decode_s": 0.001,
}


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Findings]:
    """A session whose runs leave a checkpoint each, and train nothing."""

    def train(settings: Settings, strategy: str, folder: Path, *_: Any) -> TrainedRun:
        assert (folder / "data").resolve() == tmp_path / "data"
        (folder / "checkpoints" / "step-000004").mkdir(parents=True)
        assert settings.strategy == strategy
        return seen(strategy)

    def codecs(asked: Request, folder: Path) -> tuple[dict[str, Any], str]:
        assert (folder / "checkpoints" / "step-000004").is_dir(), (
            "the exact run's checkpoint is there as long as needed"
        )
        about = {"num_gradients": 1000, "num_weights": 1000, "gradient_dtype": "float32"}
        return {**about, "gradients": [LOST], "weights": []}, ""

    monkeypatch.setattr(wire, "train", train)
    monkeypatch.setattr(wire, "_codecs", codecs)
    return wire.run(request_for(gradient_codecs=("int4",)), tmp_path, lambda line: None)


def test_a_session_that_is_cut_short_has_what_it_saw(progress: Iterator[Findings], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    findings = next(progress)
    assert findings.num_left == 1
    wire.page_of(findings).write(page)
    assert "Unfinished: 1 more runs were requested." in page.read_text()
    assert "Codecs on gradients" not in page.read_text()
    wire.page_of(next(progress)).write(page)
    assert "| `int4` | 1.000e-01 | not finite | 0.990000 | 0.5157 | 2.000 | 1.000 |" in page.read_text()
    *_, last = progress
    assert list(last.runs) == ["zero3", INT8]
    assert not list(tmp_path.glob("*/checkpoints"))


def test_the_json_has_everything_and_the_page_its_tables(progress: Iterator[Findings], tmp_path: Path) -> None:
    *_, findings = progress
    page = tmp_path / "page.md"
    wire.page_of(findings).write(page)
    about = json.loads(page.with_suffix(".json").read_text())
    assert set(about) == {"schema", "command", "date", "machine", "note", "settings", "rows", "runs", "codecs"}
    assert [row["strategy"] for row in about["rows"]] == ["zero3", INT8]
    assert about["runs"][1]["losses"] == {"1": 4.0, "2": 3.0, "3": 2.0, "4": 1.0}
    assert about["codecs"]["gradients"] == [LOST]
    assert f"| `{INT8}` | 2.5000 | +0.00% | 2.0000 | +0.00% | 0.00% (1) | 4.0000 | 1.0000 | 1.00 | 0.1000 |" in (
        page.read_text()
    )
    assert wire.name_of(findings.request) == "bench-wire-tiny-4-ranks"


def test_tables_are_printed_whole(progress: Iterator[Findings], capsys: pytest.CaptureFixture[str]) -> None:
    *_, findings = progress
    wire.page_of(findings).show()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].startswith("strategy")
    assert lines[0].endswith("s per step")
    assert any(line.startswith(INT8) and line.endswith("0.1000") for line in lines)
