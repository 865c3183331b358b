"""What a run did beside what was planned, from its folder."""

import json
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.report.run import read_run, text
from tests.report.runs import OPTIMIZER, PARAMS, TOKENS, evaluation, make_run, moved, row, small_plan, trained


def test_memory_traffic_and_time_are_set_beside_the_plan(tmp_path: Path) -> None:
    run, plan = read_run(trained(tmp_path / "run"))
    assert plan == small_plan()
    memory = {each["class"]: (each["planned_bytes"], each["seen_bytes"]) for each in run["memory"]}
    assert memory == {
        "params": (PARAMS, PARAMS),
        "grads": (PARAMS, PARAMS),
        "optimizer": (OPTIMIZER, OPTIMIZER),
        "buffers": (468, 468),
        "activations": (94_000_000 - 2 * PARAMS - OPTIMIZER - 468, 64_000_000),
        "peak": (94_000_000, 95_000_000),
        "reserved": (118_000_000, 120_000_000),
    }
    (traffic,) = run["traffic"]
    assert (traffic["planned_bytes"], traffic["seen_bytes"], traffic["seen_calls"]) == (PARAMS, PARAMS, 5)
    assert run["time"]["seen_step_s"] == pytest.approx(TOKENS / 10_000)
    assert (run["time"]["planned_step_s"], run["time"]["planned_tokens_per_s"]) == (0.2, 10_240)
    assert run["notes"] == []


def test_the_text_has_a_line_for_each(tmp_path: Path) -> None:
    lines = text(read_run(trained(tmp_path / "run"))[0]).splitlines()
    found = {" ".join(line.split()) for line in lines}
    for line in (
        "loss 6.2500 -> 2.0000, evaluation 2.1000",
        "optimizer 13.4 MB 13.4 MB 1.000",
        "peak 94.0 MB 95.0 MB 1.011",
        "world all-reduce float32 6.70 MB 6.70 MB 1.000",
        "step 200 ms 205 ms 1.024",
        "MFU 30.0% - -",
    ):
        assert line in found, line
    assert not any(line.endswith(" ") for line in lines)


def test_a_run_without_plan_and_traffic_says_so(tmp_path: Path) -> None:
    run, plan = read_run(trained(tmp_path / "run", with_plan=False))
    assert plan is None
    assert run["memory"][0] == {"class": "params", "planned_bytes": None, "seen_bytes": PARAMS}
    assert [note.split(" in ")[0] for note in run["notes"]] == ["There is no plan.json", "There is no traffic.json"]
    assert "There is no plan.json" in text(run)


def test_what_a_resume_gave_up_is_kept_apart(tmp_path: Path) -> None:
    left = [row(22, 5.0), row(24, 4.9), row(22, 5.1), evaluation(22, 5.0), row(24, 5.2)]
    rows = [row(20, 3.0), row(22, 9.0), row(22, 2.0), row(10, 4.0)]
    run, _ = read_run(make_run(tmp_path / "run", rows, left))
    assert run["curve"]["train"] == [[10, 4.0], [20, 3.0], [22, 2.0]]
    assert run["curve"]["left"] == [[[22, 5.0], [24, 4.9]], [[22, 5.1], [24, 5.2]]]


def test_on_cpu_the_process_is_not_compared(tmp_path: Path) -> None:
    run, _ = read_run(make_run(tmp_path / "run", [row(2, 5.0, memory_peak=561_000_000)], plan=small_plan()))
    assert run["memory"][-1] == {"class": "whole process", "planned_bytes": None, "seen_bytes": 561_000_000}
    assert run["memory"][-2] == {"class": "peak", "planned_bytes": 94_000_000, "seen_bytes": None}


def test_planned_state_is_what_rests(tmp_path: Path) -> None:
    plan = small_plan()
    plan["strategies"][0]["rests"] = {"params": 1, "grads": 2, "optimizer": 3, "buffers": 4}
    run, _ = read_run(make_run(tmp_path / "run", [row(2, 5.0)], plan=plan))
    found = {each["class"]: each["planned_bytes"] for each in run["memory"]}
    assert found == {"params": 1, "grads": 2, "optimizer": 3, "buffers": 4, "activations": 93_999_990, "peak": 94e6}


def test_a_cpu_has_no_planned_mfu(tmp_path: Path) -> None:
    plan = small_plan()
    plan["cluster"]["gpu"]["name"] = "cpu"
    run, _ = read_run(make_run(tmp_path / "run", [row(10, 5.0)], plan=plan))
    assert "MFU" not in text(run)
    assert "loss  5.0000 (step 10) -> 5.0000" in text(run)


def test_a_run_that_has_just_begun_has_no_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [], plan=small_plan(), traffic=moved())
    (folder / "metrics.jsonl").unlink()
    run, _ = read_run(folder)
    assert any("No step" in note for note in run["notes"])
    assert "step 0 of 60" in text(run)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [row(2, 5.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert read_run(folder)[0]["step"] == 2


@pytest.mark.parametrize(
    "content", ["", "[1, 2", "[]", '"x"', '{"strategies": 3}', '{"strategies": [7]}', "{}", "[" * 9999]
)
def test_files_that_are_no_plan_are_told_of(tmp_path: Path, content: str) -> None:
    folder = trained(tmp_path / "run")
    for name in ("plan.json", "traffic.json", "config.json"):
        (folder / name).write_text(content)
    run, plan = read_run(folder)
    assert plan is None
    assert any("plan.json" in note for note in run["notes"])
    json.dumps(run)
    text(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"is no run folder: it has no config\.json"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigurationError, match=r"its config\.json is not of a run"):
        read_run(tmp_path)


def test_figures_are_of_the_strategy_that_the_plan_is_of(tmp_path: Path) -> None:
    plan = small_plan()
    plan["starts"] = [
        {"first_step": 0, "name": "zero3", "num_ranks": 4},
        {"first_step": 30, "name": "zero2", "num_ranks": 4},  # wrote no row
        {"first_step": 30, "name": "ddp", "num_ranks": 2},
    ]
    before = {"memory_params": 4 * PARAMS, "tokens_per_s": 100.0, "memory_reserved": 9, "memory_peak": 7_000_000}
    after = {"memory_peak": 95_000_000, "memory_reserved": 120_000_000}
    steps = [row(step, 5.0, **(before if step <= 30 else after)) for step in range(2, 61, 2)]
    run, _ = read_run(make_run(tmp_path / "run", steps, plan=plan, traffic=moved()))
    assert run["memory"][0] == {"class": "params", "planned_bytes": PARAMS, "seen_bytes": PARAMS}
    assert run["time"]["seen_tokens_per_s"] == 10_000
    (earlier,) = run["earlier"]
    assert (earlier["name"], earlier["first_step"], earlier["last_step"]) == ("zero3", 1, 30)
    assert earlier["time"]["seen_tokens_per_s"] == 100
    assert "Steps 1 to 30 ran as zero3 on 4 ranks: 100 tokens/s, peak memory 7.00 MB a rank." in text(run)
    assert [len(run["curve"][name]) for name in ("train", "evaluation")] == [30, 0]
