"""The first gathers of a step wait for the updates of their own units. The computation waits for all updates.

Lanes do nothing on a CPU, so this looks at what is queued on them, in which order, and what waits for what.
"""

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.engine.streams import Lane
from shardwise.core.optim import groups
from tests.core.engine.test_offload import Stack, loss_of
from tests.harness import Pool
from tests.support.training import adamw

Log = list[tuple[str, Any]]


class LoggedLane(Lane):
    """Logs the marks that are made on it, waits for such marks, and its joins."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__(torch.device("cpu"))
        self.name, self.log = name, log

    def after(self, *marks: Any, name: str = "") -> Lane:
        self.log += [(f"{self.name} waits", mark) for mark in marks if mark is not None]
        return self

    def mark(self) -> Any:
        if self.name != "update":
            return None
        self.log.append(("updated", len(self.log)))
        return self.log[-1][1]

    def join(self) -> None:
        self.log.append((f"join {self.name}", None))


def log_of_a_step(clips: bool) -> tuple[Log, list[int]]:
    """Runs on every rank. The log, and the marks behind the updates of the first gathered units."""
    sw.init()
    torch.manual_seed(0)
    model: Any = Stack()
    before, groups.PART_ELEMS = groups.PART_ELEMS, 1
    try:
        model, optimizer = sw.shard(model, adamw(list(model.parameters())), "zero3", precision="fp32")
        engine, log = engine_of(model), Log()
        for step in range(2):
            loss_of(model, step).backward()
            if clips:
                optimizer.clip_grad_norm(1.0)
            if step == 1:
                engine.gathers.lane = LoggedLane("gather", log)
                engine.reductions._update_lane = LoggedLane("update", log)
            optimizer.step()
    finally:
        groups.PART_ELEMS = before
    assert not engine.reductions.updated
    return log, [place for place, (what, _) in enumerate(log) if what == "gather waits"]


@pytest.mark.parametrize("clips", [True, False])
def test_first_gathers_do_not_wait_for_all_updates(run_ranks: Pool, clips: bool) -> None:
    for log, waits in run_ranks(2, log_of_a_step, clips):
        marks = [mark for what, mark in log if what == "updated"]
        awaited = [log[place][1] for place in waits]
        assert len(marks) > len(set(awaited)) > 0
        assert max(waits) < log.index(("join update", None))
        if clips:
            # All gradients are there: the units of the first gathers are updated first.
            assert set(awaited) == set(marks[: len(set(awaited))])
