"""The learning rate of every step, by schedule."""

import itertools
import math
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.optimizers import learning_rate, learning_rate_warning
from shardwise.trainer.settings import Settings


def rates(num_steps: int = 100, **said: Any) -> list[float]:
    settings = Settings(learning_rate=2.0, warmup_steps=10, min_lr_ratio=0.1, **said)
    return [learning_rate(settings, step, num_steps) for step in range(num_steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_warms_up_to_the_highest(schedule: str) -> None:
    found = rates(lr_scheduler_type=schedule)
    assert found[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert max(found) == pytest.approx(2.0)
    assert found[10] == pytest.approx(2.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_what_decays_ends_at_the_least(schedule: str) -> None:
    found = rates(lr_scheduler_type=schedule)
    assert found[-1] == pytest.approx(0.2)
    assert all(earlier >= later for earlier, later in itertools.pairwise(found[10:]))


def test_halfway() -> None:
    settings = Settings(learning_rate=1.0, min_lr_ratio=0.0)
    assert learning_rate(settings, 50, 101) == pytest.approx(0.5)
    linear = Settings(learning_rate=1.0, min_lr_ratio=0.0, lr_scheduler_type="linear")
    assert learning_rate(linear, 25, 101) == pytest.approx(0.75)


def test_wsd_is_constant_until_it_decays() -> None:
    assert set(rates(lr_scheduler_type="wsd")[10:80]) == {2.0}
    found = rates(lr_scheduler_type="wsd", decay_steps=40)
    assert set(found[10:60]) == {2.0}
    assert found[61] < 2.0


def test_constant_stays() -> None:
    assert set(rates(lr_scheduler_type="constant")[10:]) == {2.0}


def test_runs_that_are_all_warm_up_or_one_step_long() -> None:
    assert learning_rate(Settings(learning_rate=1.0, warmup_steps=10), 2, 3) == pytest.approx(0.3)
    assert learning_rate(Settings(learning_rate=1.0), 0, 1) == pytest.approx(1.0)


def test_schedules_of_deepspeed_are_one_step_late() -> None:
    """Against DeepSpeed itself: tests/migrate/test_deepspeed_peers.py."""
    linear = rates(lr_scheduler_type="warmup-lr", warmup_min_ratio=0.5)
    assert linear[:3] == pytest.approx([1.0, 1.0, 1.1])
    assert set(linear[11:]) == {2.0}
    decaying = rates(lr_scheduler_type="warmup-decay-lr", warmup_type="log", schedule_steps=50)
    assert decaying[2] == pytest.approx(2.0 * math.log(2) / math.log(10))
    assert decaying[30] == pytest.approx(2.0 * 21 / 40)
    assert set(decaying[51:]) == {0.0}
    cosine = rates(lr_scheduler_type="warmup-cosine-lr")
    assert cosine[0] == 0.0
    assert cosine[-1] == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize("said", [{"warmup_type": "log"}, {"warmup_min_ratio": 0.1}, {"schedule_steps": 5}])
def test_settings_of_deepspeeds_schedules_belong_to_them(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="belongs to lr_scheduler_type warmup-lr"):
        Settings(**said)


def test_a_warm_up_below_one_is_a_part_of_all_steps() -> None:
    part, steps = (Settings(warmup_steps=asked, lr_scheduler_type="linear") for asked in (0.101, 11))
    for step in range(100):
        assert learning_rate(part, step, 100) == learning_rate(steps, step, 100)
    with pytest.raises(ConfigurationError, match=r"warmup_steps: 1\.5 is no number of steps"):
        Settings(warmup_steps=1.5)


def test_a_longer_schedule_that_raises_the_rate_is_told() -> None:
    settings = Settings(learning_rate=2.0, min_lr_ratio=0.1)
    last = learning_rate(settings, 99, 100)
    assert "from 2.00e-01 at step 100 to" in learning_rate_warning(settings, last, 100, 200)
    assert "--lr-scheduler-type constant --learning-rate 0.2" in learning_rate_warning(settings, last, 100, 200)
    # The same schedule, also while it warms up, and one that goes down, need no word; nor does what is not known.
    warming = Settings(learning_rate=2.0, warmup_steps=50)
    assert learning_rate_warning(warming, learning_rate(warming, 9, 100), 10, 100) == ""
    assert learning_rate_warning(settings, learning_rate(settings, 49, 100), 50, 80) == ""
    assert learning_rate_warning(settings, None, 100, 200) == ""
    constant = Settings(learning_rate=2.0, lr_scheduler_type="constant")
    assert learning_rate_warning(constant, 2.0, 100, 200) == ""
