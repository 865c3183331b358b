"""One strategy, trained: `shardwise train` in a process of its own, and what its run folder tells in the end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.processes import as_child
from ..core.schedule.traffic import crossing_bytes
from ..core.wire.ledger import SHARE_OF_BUFFER, Call
from ..report.run import METRICS, read_run
from ..trainer.settings import Settings
from .launch import Say

Strategy = str | dict[str, str]

# Exit codes of `shardwise train` that were decided; what is not here is a crash.
STATUSES = {0: "ok", 2: "refused", 3: "oom", 4: "diverged"}
SECONDS_BETWEEN_LINES = 30.0
SECONDS_TO_END = 30.0
LONGEST = 300  # characters of an error


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one run. Who was refused or failed has no figures, who diverged has those until then."""

    strategy: str
    status: str = "ok"  # ok, diverged, refused, oom or failed
    error: str = ""
    losses: Mapping[int, float] | None = None  # by step, from 1
    eval_loss: float | None = None
    step_s: float | None = None  # median
    wire_bytes: float | None = None  # that one rank sends in a step
    planned_wire_bytes: float | None = None
    inter_node_bytes: float | None = None  # of them, what has to cross its node's border
    traffic: Sequence[Mapping[str, Any]] = ()
    tokens_per_step: float | None = None
    num_params: int | None = None


def train(settings: Settings, strategy: str, folder: Path, num_ranks: int, say: Say) -> Seen:
    """The run's settings lie beside its folder, and so does what it has said."""
    config, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    config.write_text(replace(settings, output_dir=str(folder)).to_json())
    metrics = folder / METRICS
    with log.open("w") as sink:
        # A group of its own: who interrupts this process ends the run below, once.
        worker = subprocess.Popen(
            [sys.executable, "-m", "shardwise", "train", str(config)],
            env=as_child(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            told_s = time.monotonic()
            while worker.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - told_s > SECONDS_BETWEEN_LINES:
                    told_s = time.monotonic()
                    say(f"  {strategy}: {_progress(metrics, settings)}")
        finally:
            end(worker)
    status = STATUSES.get(worker.returncode, "failed")
    error = "" if status == "ok" else last_words(log.read_text(errors="replace"), worker.returncode)
    if status not in ("ok", "diverged"):
        return Seen(strategy, status, error)
    return seen_in(folder, Seen(strategy, status, error), num_ranks, settings.node_size or num_ranks)


def end(worker: "subprocess.Popen[bytes]") -> None:
    """Its ranks end with it, whatever it is ended by."""
    if worker.poll() is None:
        worker.terminate()
        try:
            worker.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            worker.kill()
    worker.wait()


def last_words(log: str, code: int) -> str:
    """What a process has said of its end."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line.removeprefix("shardwise: ") for line in lines if line.startswith("shardwise: ")]
    return (told or lines or [f"exit code {code}"])[-1][:LONGEST]


def seen_in(folder: Path, seen: Seen, num_ranks: int, node_size: int) -> Seen:
    """With what stands in the run's folder."""
    run, plan = read_run(folder)
    rows = run["traffic"]
    step_s = run["time"].get("seen_step_s")
    speed = run["time"].get("seen_tokens_per_s")
    return replace(
        seen,
        losses={int(step): loss for step, loss in run["curve"]["train"]},
        eval_loss=run["eval_loss"],
        step_s=step_s,
        wire_bytes=_total(rows, "seen_bytes"),
        planned_wire_bytes=_total(rows, "planned_bytes"),
        inter_node_bytes=inter_node_bytes(rows, num_ranks, node_size) if rows else None,
        traffic=rows,
        tokens_per_step=step_s * speed if step_s and speed else None,
        num_params=plan["model"]["num_params"] if plan else None,
    )


def _total(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return sum(row[key] or 0.0 for row in rows) if rows else None


def inter_node_bytes(rows: Sequence[Mapping[str, Any]], num_ranks: int, node_size: int) -> float:
    """As the planner counts it: every element that a node lacks comes in once, and its ranks share the work."""
    num_nodes = num_ranks // node_size
    sizes = {"world": num_ranks, "node": node_size, "replicate": num_nodes}
    total = 0.0
    for row in rows:
        size, kind = sizes[row["axis"]], row["kind"]
        # The ledger's bytes are a share of the buffer; a call is told by the whole of it.
        whole = round((row["seen_bytes"] or 0.0) * size / (size - 1) / SHARE_OF_BUFFER[kind])
        total += crossing_bytes(Call(kind, row["axis"], row["dtype"], whole, size), num_nodes, node_size)
    return total


def _progress(metrics: Path, settings: Settings) -> str:
    """The last row that is complete."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("loss") is not None:
            return f"step {row['step']} of {settings.max_steps}, loss {row['loss']:.4f}"
    return "is being set up"
