"""The metrics of a run: always `metrics.jsonl` in the run folder, TensorBoard and Weights & Biases on request.

A row is a flat mapping from names to numbers, with its step. Only one rank writes. A resumed run first sets aside the
rows after its checkpoint, so that each step is there once.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from ..api.memory_report import Memory
from ..base.errors import ConfigurationError
from .run_folder import METRICS

Row = Mapping[str, float | int | None]


def check_reporters(report_to: Sequence[str]) -> None:
    """Refuse trackers that are not installed, before anything has started."""
    for word in report_to:
        if find_spec(word) is None:
            raise ConfigurationError(f"report_to: {word} is not installed; pip install 'shardwise[{word}]'")


def memory_row(memory: Memory, planned_peak: int | None = None) -> dict[str, int]:
    """Return bytes by class as keys of a row: memory_params, ..., memory_now, memory_peak, memory_host, memory_disk.

    `memory_planned` is the planned peak, or that of the state alone if no peak is known. On a CPU, `memory_now` and
    `memory_peak` are those of the whole process.
    """
    others = {
        "peak_grads": memory.peak_grads,
        "peak_buffers": memory.peak_buffers,
        "peak_activations": memory.peak_activations,
        "now": memory.now,
        "peak": memory.peak,
        "reserved": memory.reserved,
        "planned": memory.planned.total if planned_peak is None else planned_peak,
    }
    # Without offload there are no such keys.
    others |= {"host": memory.host, "planned_host": memory.planned_host} if memory.planned_host or memory.host else {}
    others |= {"disk": memory.disk, "planned_disk": memory.planned_disk} if memory.planned_disk else {}
    known = {name: num_bytes for name, num_bytes in others.items() if num_bytes is not None}
    return {f"memory_{name}": num_bytes for name, num_bytes in (memory.by_class() | known).items()}


class Reporter(Protocol):
    def log(self, row: Row) -> None: ...
    def restart(self, step: int) -> None: ...
    def close(self) -> None: ...


class Metrics:
    def __init__(self, folder: Path, report_to: Sequence[str], config: Mapping[str, Any], is_writer: bool) -> None:
        self._file = folder / METRICS if is_writer else None
        self._reporters: list[Reporter] = []
        if is_writer:
            check_reporters(report_to)
            self._reporters = [_REPORTERS[word](folder, config) for word in report_to]

    def log(self, row: Row) -> None:
        """Append a row. It must have a `step`; `time`, in seconds since 1970, is added if it is missing."""
        if self._file is None:
            return
        row = {"step": row["step"], "time": round(time.time(), 3), **row}
        with self._file.open("a") as file:
            file.write(json.dumps({name: _json_number(value) for name, value in row.items()}) + "\n")
        for reporter in self._reporters:
            reporter.log(row)

    def truncate_after(self, step: int) -> None:
        """Move the rows after `step` to metrics-left.jsonl, and drop a line that a crash has cut short."""
        if self._file is None:
            return
        if self._file.exists():
            draft = self._file.with_suffix(".draft")
            lines = self._file.read_text().splitlines(keepends=True)
            draft.write_text("".join(line for line in lines if _step_of(line) <= step))
            if left := [line for line in lines if step < _step_of(line) < math.inf]:
                with self._file.with_name("metrics-left.jsonl").open("a") as file:
                    file.writelines(left)
            draft.replace(self._file)
        for reporter in self._reporters:
            reporter.restart(step)

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json_number(value: float | int | None) -> float | int | None:
    """JSON has neither NaN nor infinity: they become None."""
    return None if value is None or not math.isfinite(value) else value


class _TensorBoard:
    """Three groups of charts: train, eval and memory."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = str(folder / "tensorboard")
        self._writer = _summary_writer(self._folder, None)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```")

    def log(self, row: Row) -> None:
        for name, value in row.items():
            if value is not None and name not in ("step", "time"):
                tag = name.replace("_", "/", 1) if name.startswith(("memory_", "eval_")) else f"train/{name}"
                self._writer.add_scalar(tag, value, row["step"], row["time"])

    def restart(self, step: int) -> None:
        # A new file tells readers to drop the points from this step on.
        self._writer.close()
        self._writer = _summary_writer(self._folder, step + 1)

    def close(self) -> None:
        self._writer.close()


def _summary_writer(folder: str, purge_step: int | None) -> Any:
    return import_module("torch.utils.tensorboard").SummaryWriter(folder, purge_step=purge_step)


class _WandB:
    """One wandb run per run folder, also over several starts. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        remembered = folder / "wandb-id.txt"
        if not remembered.exists():
            remembered.write_text(uuid4().hex[:12])
        try:
            self._run = wandb.init(
                dir=str(folder),
                id=remembered.read_text(),
                name=folder.name,
                config=dict(config),
                resume="allow",
                # The console shows rank 0's progress block, redrawn many times.
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigurationError(f"report_to: wandb does not start: {error}; or set WANDB_MODE=offline") from error
        # Steps of our own: after a resume they begin again at an earlier one, which its counter refuses.
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None and name != "time"})

    def restart(self, step: int) -> None:
        """Do nothing: wandb cannot remove points, so it shows both points of a step that is repeated."""

    def close(self) -> None:
        self._run.finish()


_REPORTERS: dict[str, Callable[[Path, Mapping[str, Any]], Reporter]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
}
