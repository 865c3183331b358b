"""What is written down of steps, and when a run counts as diverged."""

import math

import pytest

from shardwise.trainer.metrics import MAX_SKIPPED, WINDOW, Divergence, Row, StepRecords, StepResult


def records(
    written: list[Row], logging_steps: int = 2, ratio: float = 3.0, peak_flops: float | None = None
) -> StepRecords:
    return StepRecords(
        tokens_per_step=100,
        num_steps=20,
        logging_steps=logging_steps,
        flops_per_token=7.0,
        peak_flops=peak_flops,
        divergence=Divergence(ratio),
        may_overflow=False,
        memory_row=lambda: {"memory_params": 5},
        write=written.append,
    )


def result(step: int, loss: float, num_targets: int = 10, norm: float = 1.0) -> StepResult:
    return StepResult(step, loss * num_targets, num_targets, norm, 0.5)


def test_a_row_is_the_mean_over_the_targets_of_its_steps() -> None:
    written: list[Row] = []
    kept = records(written, peak_flops=1e6)
    kept.num_queued += 1
    kept.add(result(1, 4.0, num_targets=30))
    kept.add(result(2, 2.0, num_targets=10))
    (row,) = written
    assert row["loss"] == pytest.approx((4.0 * 30 + 2.0 * 10) / 40)
    assert (row["step"], row["tokens"], row["learning_rate"], row["memory_params"]) == (2, 200, 0.5, 5)
    assert row["mfu"] == pytest.approx(row["tokens_per_s"] * 7.0 / 1e6)


def test_a_norm_that_nobody_took_is_left_out() -> None:
    written: list[Row] = []
    kept = records(written, logging_steps=1)
    kept.add(StepResult(1, 4.0, 2, None, 0.5))
    assert "grad_norm" not in written[0]
    kept.add(StepResult(2, math.nan, 2, None, 0.5))
    assert kept.complaint == "step 2: the loss is nan"


def test_the_last_step_has_a_row_whatever_the_interval() -> None:
    written: list[Row] = []
    kept = records(written, logging_steps=8)
    for step in range(1, 21):
        kept.add(result(step, 1.0))
    assert [row["step"] for row in written] == [8, 16, 20]


def test_the_first_row_has_the_loss_of_the_first_step() -> None:
    written: list[Row] = []
    kept = records(written, logging_steps=4)
    for step in range(1, 9):
        kept.add(result(step, 10.0 - step))
    assert [row.get("first_loss") for row in written] == [9.0, None]


def test_a_resumed_book_writes_the_rows_of_one_that_never_stopped() -> None:
    whole: list[Row] = []
    parts: list[Row] = []
    kept, first = records(whole, logging_steps=4), records(parts, logging_steps=4)
    for step in range(1, 7):
        kept.add(result(step, float(step)))
        first.add(result(step, float(step)))
    second = records(parts, logging_steps=4)
    second.from_extra(first.to_extra())
    for step in range(7, 13):
        kept.add(result(step, float(step)))
        second.add(result(step, float(step)))
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    assert second.first_loss == 1.0


def test_a_batch_without_targets_is_no_division_by_zero() -> None:
    written: list[Row] = []
    kept = records(written, logging_steps=1)
    kept.add(StepResult(1, 0.0, 0, 0.0, 0.5))
    assert written[0]["loss"] == 0.0
    assert not kept.complaint


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan)])
def test_what_is_no_number_is_a_divergence(loss: float, norm: float) -> None:
    written: list[Row] = []
    kept = records(written, logging_steps=100)
    kept.add(result(1, loss, norm=norm))
    assert "step 1" in kept.complaint
    assert written, "the row of the step that diverged is written"


def test_a_norm_that_overflowed_is_a_skipped_step_under_loss_scaling() -> None:
    kept = records([])
    kept.may_overflow = True
    kept.add(result(1, 2.0, norm=math.inf))
    assert not kept.complaint


def test_a_mean_loss_far_above_its_lowest_is_a_divergence() -> None:
    kept = records([])
    for step in range(1, 2 * WINDOW):
        kept.add(result(step, 1.0))
    kept.add(result(2 * WINDOW, 15.0))
    assert not kept.complaint, "one bad batch is not enough"
    for step in range(2 * WINDOW + 1, 3 * WINDOW):
        kept.add(result(step, 15.0))
    assert "more than 3 times its lowest, 1.000" in kept.complaint


def test_batches_without_targets_say_nothing_about_the_loss() -> None:
    kept = records([])
    for step in range(1, 5 * WINDOW):
        kept.add(result(step, 2.0, num_targets=10 if step % 3 == 0 else 0))
    assert not kept.complaint


def test_a_loss_near_zero_may_be_many_times_its_lowest() -> None:
    kept = records([])
    for step in range(1, 5 * WINDOW):
        kept.add(result(step, 0.001 if step < 2 * WINDOW else 0.1))
    assert not kept.complaint


def test_overflows_without_end_are_the_end() -> None:
    kept = records([])
    kept.may_overflow = True
    for step in range(1, MAX_SKIPPED + 2):
        assert not kept.complaint
        kept.add(result(step, 2.0, norm=math.inf))
    assert "norm inf" in kept.complaint


def test_other_data_begins_with_a_lowest_of_its_own() -> None:
    first, second = records([]), records([])
    for step in range(1, 2 * WINDOW):
        first.add(result(step, 0.5))
    second.from_extra(first.to_extra(), is_same_data=False)
    for step in range(1, 2 * WINDOW):
        second.add(result(step, 5.0))
    assert not second.complaint


def test_ratio_zero_goes_on() -> None:
    kept = records([], ratio=0.0)
    kept.add(result(1, math.nan))
    assert not kept.complaint
