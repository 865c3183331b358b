"""`kill -9` at any moment, of one rank or of all: the newest complete checkpoint is good, and the run goes on from it.

A real run of two ranks saves after every step, in some of its lives in the background. It is killed again and again,
most often inside a save. In the end its losses are those of a run that nobody disturbed.
"""

import os
import random
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import find, latest
from shardwise.checkpoint.opened import open_checkpoint
from tests.checkpoint.by_hand import require_good
from tests.support.nursery import Nursery
from tests.support.running import losses, settings_for

SHAPE = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 48, "max_seq": 64}
MAX_STEPS = 100_000  # of a run that is killed before
STRATEGIES = ["zero3", "ddp", "zero1"]


@dataclass
class Tally:
    num_kills: int = 0
    num_of_all: int = 0
    num_inside_saves: int = 0
    num_left_unfinished: int = 0
    num_in_background: int = 0
    steps: list[int] = field(default_factory=list)  # at which the lives began


def settings(folder: Path, max_steps: int, life: int) -> str:
    return settings_for(
        folder,
        shape=SHAPE,
        max_steps=max_steps,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        divergence_ratio=0.0,
        eval_fraction=0.0,
        save_steps=1,
        save_total_limit=3,
        async_save=bool(life % 2),
        strategy=STRATEGIES[life % len(STRATEGIES)],
        resume_from_checkpoint="auto",
    ).to_json()


def endure(folder: Path, num_kills: int, seed: int) -> Tally:
    draw, tally = random.Random(seed), Tally()
    with Nursery() as nursery:
        for life in range(num_kills):
            log = folder.with_name(f"life-{life:02}")
            pids = nursery.start(settings(folder, MAX_STEPS, life), log)
            await_moment(folder / "checkpoints", log, draw)
            tally.num_inside_saves += bool(partials_in(folder / "checkpoints"))
            kills_all = draw.random() < 0.4
            for pid in draw.sample(pids, len(pids) if kills_all else 1):
                os.kill(pid, signal.SIGKILL)
            # Those who are left hear of it from the wire; a launcher would not wait for longer than this either.
            codes = nursery.wait(5.0)
            tally.num_kills += 1
            tally.num_of_all += kills_all
            tally.num_left_unfinished += bool(partials_in(folder / "checkpoints"))
            tally.num_in_background += life % 2
            assert -signal.SIGKILL in codes, (codes, log.read_text())
            tally.steps.append(check_after_a_kill(folder / "checkpoints", log))
        num_steps = tally.steps[-1] + 3
        for place, life in ((folder, num_kills), (folder.with_name("undisturbed"), 0)):
            log = place.with_name(f"{place.name}-last")
            nursery.start(settings(place, num_steps, life), log)
            assert nursery.wait(300.0) == [0, 0], log.read_text()
    assert losses(folder) == losses(folder.with_name("undisturbed"))
    assert len(losses(folder)) == num_steps
    return tally


def await_moment(root: Path, log: Path, draw: random.Random) -> None:
    """Mostly: some saves from now, a random part of the time after which one has begun. Else any moment."""
    deadline = time.monotonic() + 60
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0.0, 3.0))
        return
    known = partials_in(root)  # of the life before
    num_left = draw.randrange(1, 8)
    while time.monotonic() < deadline:
        fresh = partials_in(root) - known
        num_left -= len(fresh)
        known |= fresh
        if fresh and num_left <= 0:
            time.sleep(draw.uniform(0.0, 0.01))
            if fresh & partials_in(root):  # or it was quicker, and the next one is it
                return
        time.sleep(0.0005)
    raise AssertionError(f"no save within a minute: {log.read_text()}")


def partials_in(root: Path) -> set[str]:
    with suppress(FileNotFoundError):
        return {entry.name for entry in os.scandir(root) if entry.name.endswith(".partial")}
    return set()


def check_after_a_kill(root: Path, log: Path) -> int:
    """The step of the newest complete checkpoint, of which every checksum is right."""
    said = log.read_text() if log.exists() else ""
    newest = latest(root)
    told = [int(number) for number in re.findall(r"saved \S*step-(\d+)", said)]
    if newest is None:
        assert not told
        return 0
    opened = open_checkpoint(newest)
    with opened.reader() as reader:
        for number in range(len(opened.index.files)):
            require_good(reader, number)
    step = int(opened.index.extra["step"])
    assert newest.name == f"step-{step:06d}"
    assert step >= max(told, default=0), "what was said to be saved is saved"
    link = root / "latest"
    assert not link.is_symlink() or find(link) is not None, "latest leads to a complete one"
    damaged = [line for line in said.splitlines() if line.startswith("skipped") and "did not finish" not in line]
    assert not damaged, damaged
    return step


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    tally = endure(tmp_path / "run", 4, seed=1)
    assert tally.num_kills == 4


@pytest.mark.slow
def test_thirty_kills_at_random_moments(tmp_path: Path) -> None:
    tally = endure(tmp_path / "run", 30, seed=0)
    print(tally)
    assert tally.num_inside_saves > 15
