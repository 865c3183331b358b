"""Every case that was measured on one H200 is planned again: a change that makes the planner worse is seen here."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.planner_against_measured import RESULTS, findings, median
from benchmarks.planner_seen import Compared, compare

# Emulated gathers do not refill memory that was given back: products of what lies there draw less power.
FASTER_THAN_REAL = ("shard_grad_op", "hybrid_shard_zero2")


@pytest.fixture(scope="module")
def rows() -> list[Compared]:
    latest: Path = max(RESULTS.glob("*-planner-against-measured.json"))
    return compare(json.loads(latest.read_text()))


def ran(rows: Sequence[Compared]) -> list[Compared]:
    return [row for row in rows if row.seen.status == "ok"]


def test_memory_of_the_forward_is_near_and_at_most_that(rows: list[Compared]) -> None:
    errors = {row.case.name: row.forward_error for row in ran(rows) if row.case.loss == "chunked"}
    assert median(errors.values()) < 0.0005
    assert {name: error for name, error in errors.items() if error > 0.01} == {}


def test_a_backward_needs_no_more_than_before_slots_had_the_size_of_their_unit(rows: list[Compared]) -> None:
    assert {row.case.name: row.active_error for row in ran(rows) if row.active_error > 0.01} == {}


def test_traffic_is_the_ledgers_row_by_row(rows: list[Compared]) -> None:
    assert [row.case.name for row in ran(rows) if not row.traffic_is_equal] == []


def test_no_less_was_reserved_than_is_planned_as_the_least(rows: list[Compared]) -> None:
    kept = [row for row in ran(rows) if row.seen.reserved]
    assert [row.case.name for row in kept if row.seen.reserved < row.found.reserved.low] == []


def test_every_verdict_is_right(rows: list[Compared]) -> None:
    assert [row.case.name for row in rows if not row.verdict_is_right] == []
    assert any(row.seen.status == "oom" for row in rows)


def test_steps_that_the_host_does_not_limit_take_as_long_as_planned(rows: list[Compared]) -> None:
    errors = {
        row.case.name: row.step_error
        for row in ran(rows)
        if row.has_step and not row.is_host_bound and row.case.strategy not in FASTER_THAN_REAL
    }
    assert len(errors) > 30
    assert median(errors.values()) < 0.03
    assert {name: error for name, error in errors.items() if abs(error) > 0.1} == {}


def test_the_findings_can_be_told(rows: list[Compared]) -> None:
    assert all(line.startswith("- ") for line in findings(rows))
