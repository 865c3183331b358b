"""Contenders are put side by side as promised. No process is started here: launches are played."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.bench import results
from shardwise.bench.case import SHAPES, Case, settings_of
from shardwise.bench.compare import Findings, Session, run
from shardwise.bench.launch import Outcome
from shardwise.bench.overlap import Overlap
from shardwise.bench.pages import new_page
from shardwise.bench.results import Row, rows_of
from shardwise.planner.hardware.links import parse
from tests.bench.cases import SMOKE, answer, outcome

OURS, PEER = "shardwise:zero3", "fsdp2"


def compare(outcomes: dict[str, Outcome], **session: object) -> tuple[Findings, dict[str, Row], list[Case]]:
    """Findings, rows by contender, and the cases in the order in which they were launched."""
    launched: list[Case] = []

    def launch(case: Case) -> Outcome:
        launched.append(case)
        return outcomes[case.contender]

    names = [name for name in outcomes if name not in ("plain", "compute", "compute+update")]
    asked = Session(
        **{
            "settings": [SMOKE],
            "strategies": [name for name in names if name.startswith("shardwise")],
            "peers": [name for name in names if not name.startswith("shardwise")],
            **session,
        }
    )
    *_, findings = run(asked, launch, say=lambda line: None)
    return findings, {row["contender"]: row for row in rows_of(findings)}, launched


def written(findings: Findings, folder: Path) -> Path:
    page = new_page(folder, results.name_of(findings.session))
    results.page_of(findings).write(page)
    return page


def test_a_ratio_is_the_peers_time_over_ours() -> None:
    _, rows, _ = compare({"plain": outcome(9), PEER: outcome(0.3), "ddp": outcome(0.1), OURS: outcome(0.2)})
    assert {peer: ratio["median"] for peer, ratio in rows[OURS]["ratios"].items()} == pytest.approx(
        {PEER: 1.5, "ddp": 0.5}
    )
    assert not rows[PEER]["ratios"]
    assert rows[OURS]["tokens_per_s"] == pytest.approx(16 / 0.2)
    assert rows[OURS]["compared_with"] == "one process"


def test_repetitions_are_interleaved() -> None:
    outcomes = {"plain": outcome(9), PEER: outcome(0.3), OURS: outcome(0.2)}
    _, _, launched = compare(outcomes, repetitions=3)
    assert [case.contender for case in launched] == ["plain", *[PEER, OURS] * 3]


def test_a_session_that_is_cut_short_has_what_it_saw(tmp_path: Path) -> None:
    times = {PEER: iter([0.3, 0.4]), OURS: iter([0.2])}

    def launch(case: Case) -> Outcome:
        return outcome(9) if case.contender == "plain" else outcome(next(times[case.contender]))

    progress = run(Session([SMOKE], [OURS], [PEER], repetitions=2), launch, say=lambda line: None)
    first, second, third = (next(progress) for _ in range(3))
    assert [row["contender"] for row in rows_of(first)] == [PEER]
    assert [findings.num_left for findings in (first, second, third)] == [3, 2, 1]
    # The peer is a repetition ahead: it is compared with ours where both ran.
    peer, ours = rows_of(third)
    assert peer["seconds"] is not None
    assert peer["seconds"]["max"] == 0.4
    assert ours["ratios"][PEER]["median"] == pytest.approx(1.5)
    assert "Unfinished: 1 more runs were requested." in written(third, tmp_path).read_text()


def test_who_fails_is_a_row_and_the_others_go_on() -> None:
    oom = Outcome(status="oom", error="out of memory: tried to allocate 2 GiB")
    findings, rows, launched = compare({"plain": outcome(9), PEER: oom, OURS: outcome(0.2)}, repetitions=2)
    assert (rows[PEER]["status"], rows[PEER]["error"]) == ("oom", oom.error)
    assert rows[PEER]["seconds"] is None
    assert rows[OURS]["status"] == "ok"
    assert not rows[OURS]["ratios"]
    assert [case.contender for case in launched].count(PEER) == 1
    assert results.page_of(findings).problems == [f"fsdp2 (oom): {oom.error}"]


def test_losses_that_differ_are_an_error_that_names_both() -> None:
    off = outcome(0.1, losses=(3.0, 2.001, 1.0))
    _, rows, _ = compare({"plain": outcome(9), PEER: off, OURS: outcome(0.2)})
    assert rows[PEER]["status"] == "differs"
    assert rows[PEER]["error"] == ("the loss of step 1 is 2.001, that of one process 2: 5.0e-04 apart, 1e-04 allowed")
    assert rows[PEER]["seconds"] is None
    assert not rows[OURS]["ratios"]


def test_a_loss_that_is_no_number_differs() -> None:
    _, rows, _ = compare({"plain": outcome(9), OURS: outcome(0.2, losses=(3.0, float("nan"), 1.0))})
    assert rows[OURS]["status"] == "differs"


def test_without_one_process_the_first_contender_is_the_measure() -> None:
    oom = Outcome(status="oom", error="out of memory")
    findings, rows, _ = compare({"plain": oom, PEER: outcome(0.3), OURS: outcome(0.2, losses=(3.0, 2.0, 1.1))})
    assert rows[OURS]["error"].startswith("the loss of step 2 is 1.1, that of fsdp2 1:")
    assert "compared with those of fsdp2." in results.note_of(findings)


def test_one_process_may_be_left_out() -> None:
    _, rows, launched = compare({PEER: outcome(0.3), OURS: outcome(0.2)}, with_reference=False)
    assert [case.contender for case in launched] == [PEER, OURS]
    assert rows[OURS]["compared_with"] == PEER


def test_what_rests_on_disk_wants_a_folder() -> None:
    for names in (
        {"strategies": ["shardwise:zero3_nvme"], "peers": []},
        {"strategies": [], "peers": ["deepspeed:3+nvme"]},
    ):
        with pytest.raises(ConfigurationError, match="offloads to disk: name a folder with --disk-path"):
            Session([SMOKE], **names).check()
        Session([replace(SMOKE, disk_path="/nvme")], **names).check()


def test_overlaps_are_on_the_page(tmp_path: Path) -> None:
    traced = Overlap(2.0, {"compute": 1.5, "host update": 1.0}, {"host update": 0.75}, 0.25)
    ours = Outcome(answers=(answer(0.2, overlap=asdict(traced)), answer(0.2)))
    findings, rows, _ = compare({"plain": outcome(9), PEER: outcome(0.3), OURS: ours})
    assert rows[OURS]["overlap"] == asdict(traced)
    page = written(findings, tmp_path).read_text()
    assert "`shardwise:zero3`, smoke, 16 tokens, one step under the profiler:\n\n    step" in page
    assert "host update         1.0000 s   50.0% of the step,  75.0% of it during compute" in page
    assert page.count("under the profiler") == 1


def test_bf16_is_compared_as_bf16() -> None:
    off = outcome(0.2, losses=(3.0, 2.01, 1.0))
    _, rows, _ = compare({"plain": outcome(9), OURS: off}, settings=[replace(SMOKE, precision="bf16")])
    assert rows[OURS]["status"] == "ok"
    assert rows[OURS]["loss_difference"] == pytest.approx(5e-3)


FABRIC = parse("2x4,intra=400GB/s")


def test_on_a_fabric_floors_stand_beside_and_only_first_losses_count() -> None:
    links = [replace(FABRIC, intra=replace(FABRIC.intra, gigabytes_per_s=speed)) for speed in (1000, 400)]
    settings = settings_of(SMOKE, [SHAPES["smoke"]], ["fp32", "bf16"], links)
    wires = {"intra": {"seconds": 0.01, "bytes": 4e6}, "inter": {"seconds": 0.02, "bytes": 1e6}}
    wild = outcome(0.2, losses=(3.0, 70.0, 80.0), wires=wires)
    floor = outcome(0.1)
    findings, rows, launched = compare(
        {"compute": floor, "compute+update": floor, PEER: outcome(0.3), OURS: wild}, settings=settings
    )
    assert [case.contender for case in launched] == ["compute", "compute+update", *[PEER, OURS] * 4]
    assert {(case.reduce, case.fabric) for case in launched if case.contender == OURS} == {
        (reduce, str(link)) for reduce in ("fp32", "bf16") for link in links
    }
    assert rows[OURS]["status"] == "ok"
    assert rows[OURS]["wire_s"] == {"intra": 0.01, "inter": 0.02}
    assert rows[OURS]["moved_bytes"] == 5e6
    cells = results.columns(rows_of(findings))
    assert cells["link GB/s"][:4] == ["", "", "1000", "1000"]
    assert cells["inter s"][3] == "0.0200"


def test_rates_of_a_known_gpu() -> None:
    shape = SHAPES["blocks-202m"]
    memory = {"allocated_gb": 11.0, "active_gb": 12.0, "reserved_gb": 15.0, "host_gb": 65.0}
    less = {**memory, "reserved_gb": 14.0}
    seen = [answer(0.1, memory=each, device="NVIDIA H200") for each in (less, memory)]
    _, rows, _ = compare(
        {"plain": outcome(9), OURS: Outcome(answers=tuple(seen))},
        settings=[replace(SMOKE, shape=shape, precision="bf16")],
    )
    blocks = 16 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
    flops = 6 * blocks + 12 * 16 * 4096 * 2048
    assert rows[OURS]["mfu"] == pytest.approx(2048 / 0.1 * flops / 989.5e12)
    assert rows[OURS]["memory"] == memory
    assert results.columns([rows[OURS]])["host GB"] == ["65.0"]


def test_calls_of_a_unit_are_told_from_those_of_a_step() -> None:
    def launch(case: Case) -> Outcome:
        if not case.count_calls:
            return outcome(0.1)
        added = 0 if case.contender == "plain" else 30 + 7 * case.shape.layers
        emulated = {"bench/fabric.py:EmulatedGroup.allreduce": 9 * added}
        return Outcome(answers=({"calls": {"a.py:f": 100 * case.shape.layers, "b.py:g": added, **emulated}},))

    lines: list[str] = []
    *_, findings = run(Session([SMOKE], [OURS], [], count_calls=True), launch, lines.append)
    row = rows_of(findings)[0]
    assert (row["calls_per_unit"], row["calls_besides"]) == (7, 30)
    assert lines[-1].endswith("7 per unit and step")


# What pages and scripts read.
KEYS = {"schema", "command", "date", "machine", "note", "rows", "runs", "calls"}
MACHINE = {"processor", "cores", "memory_gib", "device", "python", "torch", "commit"}


def test_the_json_has_its_schema_and_the_page_its_table(tmp_path: Path) -> None:
    mix = 'shardwise:{"blocks.[0-3]":"zero2","*":"zero3"}'
    failed = Outcome(status="failed", error="RuntimeError: no")
    findings, _, _ = compare({"plain": outcome(9), PEER: outcome(0.3), "ddp": failed, mix: outcome(0.2)})
    rows = rows_of(findings)
    page = written(findings, tmp_path)
    about = json.loads(page.with_suffix(".json").read_text())
    assert set(about) == KEYS
    assert about["schema"] == 1
    assert set(about["machine"]) == MACHINE
    assert about["rows"] == rows
    assert [row["contender"] for row in about["rows"]] == ["fsdp2", "ddp", "shardwise:blocks.[0-3]=zero2 *=zero3"]
    assert about["runs"][0]["case"]["shape"]["name"] == "smoke"
    text = page.read_text()
    assert "| `fsdp2` | 0.3000 |" in text
    assert "- ddp (failed): RuntimeError: no" in text
    assert page.name.endswith("bench-smoke-2-ranks.md")
    again = written(findings, tmp_path)
    assert again != page, "a second result of the same minute lies beside the first"
    assert page.read_text() == text


def test_the_table_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    mix = 'shardwise:{"blocks.[0-3]":"zero2","*":"zero3"}'
    findings, _, _ = compare({"plain": outcome(9), PEER: outcome(0.3), mix: outcome(0.2)})
    results.page_of(findings).show()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert re.split(" {2,}", lines[0]) == [
        "contender",
        "s per step",
        "min-max",
        "vs fsdp2",
        "tokens/s/rank",
        "set-up s",
    ]
    assert lines[3].startswith("shardwise:blocks.[0-3]=zero2 *=zero3")
    assert lines[3].split()[-1] == "1.0"
