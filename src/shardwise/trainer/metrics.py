"""The record of a run's steps, as rows: always in `metrics.jsonl` in the run folder, and on the terminal; in trackers
on request. Divergence is recognised here too.

A row is a flat mapping from names to numbers, with its step. It covers the steps since the row before it: its loss is
the mean over all their targets. Every rank keeps the same records from the same numbers; only one rank writes them. A
resumed run first moves the rows after its checkpoint to another file, so that each step appears once. A terminal shows
a live block, which a thread draws four times a second, even if steps are slow; a log gets a plain line for every row.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..api.memory_report import Memory
from ..base.documents import read_object
from ..base.errors import ConfigurationError, printable_lines
from ..base.text import duration, size
from ..checkpoint.folder import CHECKPOINTS, find, newest_in, step_folder
from .run_folder import CONFIG, METRICS, SAMPLES, replace_file
from .settings import Settings

Row = Mapping[str, float | int | None]

NUM_LAST = 50  # steps that the report of a divergence shows
WINDOW = 10  # losses in the mean that is checked for divergence: single batches may be far off
MIN_RISE = 0.5  # nats: a loss near zero may rise to many times its lowest value in a healthy run
MAX_SKIPPED = 50  # overflowed steps in a row that are accepted with loss scaling

REFRESHES_PER_S = 4
BAR_WIDTH = 30
# Keys of a row, and how each is written: equally wide in every line.
_TRAINING: dict[str, Callable[[float], str]] = {
    "loss": "loss {:7.4f}".format,
    "learning_rate": "lr {:.2e}".format,
    "rewards/margins": "margin {:7.3f}".format,
    "rewards/accuracies": "right {:4.0%}".format,
    "grad_norm": lambda value: f"norm {value:7.3f}" if value < 1000 else f"norm {value:7.1e}",
    "tokens_per_s": "{:7,.0f} tok/s".format,
    "mfu": "MFU {:5.1%}".format,
}
_EVALUATION: dict[str, Callable[[float], str]] = {
    "eval_loss": "eval loss {:.4f}".format,
    "eval_perplexity": "perplexity {:.2f}".format,
    "eval_rewards/margins": "eval margin {:.3f}".format,
    "eval_rewards/accuracies": "eval right {:.0%}".format,
}
_MEMORY = ("now", "peak", "planned", "host", "disk")


@dataclass(frozen=True, slots=True)
class StepResult:
    """A finished step. `step` is its number, from 1."""

    step: int
    loss_sum: float
    num_targets: int
    grad_norm: float | None  # None: it was not computed
    learning_rate: float
    measured: tuple[float, ...] = ()  # sums of what the objective measures

    @property
    def loss(self) -> float:
        """Mean loss of the targets; 0 for a batch without any."""
        return self.loss_sum / self.num_targets if self.num_targets else 0.0


@dataclass(slots=True)
class Divergence:
    """Checks the losses of all steps. Their moving mean may be up to `ratio` times its lowest value; 0: no check."""

    ratio: float
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lowest: float = math.inf
    num_skipped: int = 0

    def complaint(self, step: int, loss: float, norm: float | None, may_overflow: bool) -> str:
        """Return how the training diverged at this step, or an empty string.

        With loss scaling (`may_overflow`), a norm that is not finite is a skipped step; MAX_SKIPPED in a row are fine.
        """
        if not self.ratio:
            return ""
        self.num_skipped = 0 if norm is None or math.isfinite(norm) else self.num_skipped + 1
        if not math.isfinite(loss) or self.num_skipped > (MAX_SKIPPED if may_overflow else 0):
            with_norm = "" if norm is None else f" and the gradient's norm {norm:g}"
            return f"step {step}: the loss is {loss:g}{with_norm}"
        self.losses.append(loss)
        mean = sum(self.losses) / len(self.losses)
        if len(self.losses) < WINDOW:
            return ""
        self.lowest = min(self.lowest, mean)
        if mean <= self.ratio * self.lowest or mean <= self.lowest + MIN_RISE:
            return ""
        high = f"{mean:.3f}, more than {self.ratio:g} times its lowest, {self.lowest:.3f}"
        return f"step {step}: the mean loss of {WINDOW} steps is {high}"


@dataclass(slots=True)
class Evaluations:
    """The best evaluation of a run, and the number of those since then that do not count as better.

    It follows from the rows in the run folder, so a resumed run counts on, whatever its strategy.
    """

    settings: Settings
    step: int = 0  # of the best one; 0: none
    value: float = math.nan
    last_step: int = 0
    num_worse: int = 0

    @classmethod
    def of(cls, settings: Settings, folder: Path, only_saved: bool = False) -> "Evaluations":
        """Read the rows of a run; `only_saved`: those of steps that have a checkpoint."""
        found, file, root = cls(settings), folder / METRICS, folder / CHECKPOINTS
        for line in file.read_text().splitlines() if file.is_file() else ():
            with suppress(ValueError, KeyError, TypeError):  # a line that a crash has cut short
                row = json.loads(line)
                if settings.best_metric in row and (not only_saved or find(step_folder(root, row["step"])) is not None):
                    found.add(row)
        return found

    def add(self, row: Row) -> bool:
        """Take a row; return whether it is the best evaluation so far. NaN (None in a file) is never better."""
        metric, step, sign = self.settings.best_metric, int(row["step"] or 0), -1 if self.settings.is_less_better else 1
        if metric not in row or step <= self.last_step:
            return False
        value = math.nan if (found := row[metric]) is None else found
        gain = sign * (value - (self.value if self.step else -sign * math.inf))
        self.last_step = step
        self.num_worse = 0 if gain > self.settings.early_stopping_threshold else self.num_worse + 1
        if gain > 0:
            self.step, self.value = step, value
        return gain > 0

    def is_exhausted(self) -> bool:
        """Return True if the run has to stop early."""
        return self.num_worse >= (self.settings.early_stopping_patience or math.inf)

    def __str__(self) -> str:
        return f"{self.settings.best_metric} {self.value:.4f} at step {self.step:,}"


def best_or_newest(path: Path) -> Path:
    """Return the checkpoint of the best evaluation if `path` is a run with load_best_model_at_end, else `newest_in`."""
    config = read_object(path / CONFIG) if (path / CONFIG).is_file() else {}
    if config.get("load_best_model_at_end"):
        settings = Settings(metric_for_best_model=config.get("metric_for_best_model"))
        if (best := Evaluations.of(settings, path, only_saved=True)).step:
            return step_folder(path / CHECKPOINTS, best.step)
    return newest_in(path)


@dataclass(slots=True)
class StepRecords:  # collects the results of steps, measures the speed, and writes rows
    tokens_per_step: int
    num_steps: int
    logging_steps: int
    flops_per_token: float
    peak_flops: float | None  # of all ranks together; None: unknown
    divergence: Divergence
    may_overflow: bool
    memory_row: Callable[[], Row]  # further numbers of a row
    write: Callable[[Row], None]
    measures: tuple[str, ...] = ()  # names of what the objective measures
    # Steps and tokens before this start of the run; a resumed run has several starts.
    first_step: int = 0
    first_tokens: int = 0
    # Sums since the last row. They are saved in checkpoints, so that a resumed run writes the same rows.
    loss_sum: float = 0.0
    num_targets: int = 0
    measured: tuple[float, ...] = ()
    first_loss: float = math.nan
    last_loss: float = math.nan
    complaint: str = ""
    last: deque[StepResult] = field(default_factory=lambda: deque(maxlen=NUM_LAST))
    seconds: float = 0.0  # of training, without saves, evaluations and the first row
    num_timed: int = 0
    _since: float = field(default_factory=time.perf_counter)
    _row_seconds: float = 0.0
    # Steps queued since the last row, for the speed. Results cannot be counted: they arrive late, several at the end.
    num_queued: int = 0
    _has_rows: bool = False

    def add(self, result: StepResult) -> None:
        self.last.append(result)
        self.loss_sum += result.loss_sum
        self.num_targets += result.num_targets
        self.measured = tuple(map(sum, zip_longest(self.measured, result.measured, fillvalue=0.0)))
        self.pause()
        if math.isnan(self.first_loss):
            self.first_loss = result.loss
        if result.num_targets:
            self.complaint = self.complaint or self.divergence.complaint(
                result.step, result.loss, result.grad_norm, self.may_overflow
            )
        if result.step % self.logging_steps == 0 or result.step == self.num_steps or self.complaint:
            self._write_row(result)

    def _write_row(self, result: StepResult) -> None:
        self.last_loss = self.loss_sum / self.num_targets if self.num_targets else 0.0
        row: dict[str, float] = {
            "step": result.step,
            "time": time.time(),
            "loss": self.last_loss,
            **({} if result.grad_norm is None else {"grad_norm": result.grad_norm}),
            "learning_rate": result.learning_rate,
            "tokens": self.num_tokens_after(result.step),
            **{name: each / max(self.num_targets, 1) for name, each in zip(self.measures, self.measured, strict=True)},
        }
        if result.step <= self.logging_steps:
            row["first_loss"] = self.first_loss
        if self.num_queued:  # 0 if the numbers of several steps arrived at once
            row["tokens_per_s"] = self.num_queued * self.tokens_per_step / max(self._row_seconds, 1e-9)
            if (mfu := self._mfu_at(row["tokens_per_s"])) is not None:
                row["mfu"] = mfu
        self.write({**row, **self.memory_row()})
        if self._has_rows:  # the first row of a start includes the warm-up
            self.seconds += self._row_seconds
            self.num_timed += self.num_queued
        self._has_rows = True
        self._row_seconds, self.num_queued = 0.0, 0
        self.loss_sum, self.num_targets, self.measured = 0.0, 0, ()

    def num_tokens_after(self, step: int) -> int:
        return self.first_tokens + (step - self.first_step) * self.tokens_per_step

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks, without the first row of this start."""
        return self.num_timed * self.tokens_per_step / self.seconds if self.num_timed else None

    @property
    def mfu(self) -> float | None:
        return None if self.tokens_per_s is None else self._mfu_at(self.tokens_per_s)

    def _mfu_at(self, tokens_per_s: float) -> float | None:
        return None if self.peak_flops is None else tokens_per_s * self.flops_per_token / self.peak_flops

    def pause(self) -> None:
        """Add the time since the last call to the training time. `go_on` then leaves out a save or an evaluation."""
        now = time.perf_counter()
        self._row_seconds += now - self._since
        self._since = now

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def to_extra(self) -> dict[str, Any]:
        """Return the part of the records that a checkpoint saves. Infinity becomes None, for JSON."""
        lowest = None if math.isinf(self.divergence.lowest) else self.divergence.lowest
        sums = {"loss_sum": self.loss_sum, "num_targets": self.num_targets, "first_loss": self.first_loss}
        measured = {"measured": list(self.measured)} if self.measured else {}
        return {**sums, **measured, "lowest": lowest, "losses": list(self.divergence.losses)}

    def from_extra(self, extra: Mapping[str, Any], is_same_data: bool = True) -> None:
        self.loss_sum, self.num_targets = extra["loss_sum"], extra["num_targets"]
        self.first_loss, self.measured = extra["first_loss"], tuple(extra.get("measured", ()))
        if is_same_data:  # losses of other data may be of another size
            self.divergence.lowest = math.inf if extra["lowest"] is None else extra["lowest"]
            self.divergence.losses.extend(extra["losses"])


def memory_row(memory: Memory, planned_peak: int | None = None) -> dict[str, int]:
    """Return bytes by class as keys of a row: memory_params, ..., memory_now, memory_peak, memory_host, memory_disk.

    `memory_planned` is the planned peak, or the planned state alone if no peak is known. On a CPU, `memory_now` and
    `memory_peak` are those of the whole process.
    """
    names = ["peak_grads", "peak_buffers", "peak_activations", "now", "peak", "reserved"]
    # Without offload there are no such keys.
    names += ["host", "planned_host"] if memory.planned_host or memory.host else []
    names += ["disk", "planned_disk"] if memory.planned_disk else []
    known = {name: getattr(memory, name) for name in names if getattr(memory, name) is not None}
    known["planned"] = memory.planned.total if planned_peak is None else planned_peak
    return {f"memory_{name}": num_bytes for name, num_bytes in (memory.by_class() | known).items()}


def json_number(value: float | int | None) -> float | int | None:
    """Return the number, or None for NaN and infinity, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else value


class Metrics:  # writes rows to the file and to trackers, on one rank only
    def __init__(self, folder: Path, report_to: Sequence[str], config: Mapping[str, Any], is_writer: bool) -> None:
        self._file = folder / METRICS if is_writer else None
        self._reporters = [_REPORTERS[word](folder, config) for word in report_to if is_writer]

    def log(self, row: Row) -> None:
        """Append a row. It must have a `step`; `time`, in seconds since 1970, is added if it is missing."""
        if self._file is None:
            return
        row = {"step": row["step"], "time": round(time.time(), 3), **row}
        with self._file.open("a") as file:
            file.write(json.dumps({name: json_number(value) for name, value in row.items()}) + "\n")
        for reporter in self._reporters:
            reporter.log(row)

    def log_samples(self, samples: Sequence[Mapping[str, object]]) -> None:
        """Append the texts that were generated at an evaluation."""
        if self._file is not None and samples:
            with self._file.with_name(SAMPLES).open("a") as file:
                file.writelines(json.dumps(sample) + "\n" for sample in samples)

    def truncate_after(self, step: int) -> None:
        """Move the rows after `step` to metrics-left.jsonl, and drop a line that a crash has cut short."""
        if self._file is None:
            return
        for path in filter(Path.exists, (self._file, self._file.with_name(SAMPLES))):
            lines = path.read_text().splitlines(keepends=True)
            if left := [line for line in lines if step < _step_of(line) < math.inf]:
                with path.with_name(f"{path.stem}-left.jsonl").open("a") as file:
                    file.writelines(left)
            replace_file(path, "".join(line for line in lines if _step_of(line) <= step))
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


class _TensorBoard:
    """Three groups of charts: train, eval and memory."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = str(folder / "tensorboard")
        self._writer = self._open(None)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```")

    def _open(self, purge_step: int | None) -> Any:
        return import_module("torch.utils.tensorboard").SummaryWriter(self._folder, purge_step=purge_step)

    def log(self, row: Row) -> None:
        for name, value in row.items():
            if value is not None and name not in ("step", "time"):
                tag = name.replace("_", "/", 1) if name.startswith(("memory_", "eval_")) else f"train/{name}"
                self._writer.add_scalar(tag, value, row["step"], row["time"])

    def restart(self, step: int) -> None:
        # A new file tells readers to drop the points from this step on.
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        self._writer.close()


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
        # Use our own steps: after a resume they go back to an earlier one, which wandb's counter refuses.
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None and name != "time"})

    def restart(self, step: int) -> None:
        """Do nothing: wandb cannot remove points, so it shows both points of a step that is repeated."""

    def close(self) -> None:
        self._run.finish()


_REPORTERS: dict[str, type[_TensorBoard | _WandB]] = {"tensorboard": _TensorBoard, "wandb": _WandB}


class Progress:
    """Shows rows as a live block or as lines. A context manager. `is_terminal` None: detect it."""

    def __init__(
        self, total_steps: int, first_step: int = 0, is_terminal: bool | None = None, is_shown: bool = True
    ) -> None:
        self._total = total_steps
        self._step = first_step
        self._is_shown = is_shown
        self._row: dict[str, float | int] = {}
        # Time and number of the first step of this start. It takes longer, so `_time_left` leaves it out.
        self._clock: tuple[float, int] | None = None
        self._live: Live | None = None
        self._console = Console(highlight=False, force_terminal=is_terminal)
        if is_shown and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._block, refresh_per_second=REFRESHES_PER_S)

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def advance(self, step: int) -> None:
        """Note that `step` steps are queued; their results may arrive much later."""
        self._step = step
        if self._clock is None:
            self._clock = (time.monotonic(), step)

    def update(self, row: Row) -> None:
        """Show the numbers of a step; those of earlier rows stay in the block."""
        known = {name: value for name, value in row.items() if value is not None}
        self.advance(max(int(known["step"]), self._step))
        self._row |= known
        if self._live is None:
            words = _words(known, _TRAINING) + _words(known, _EVALUATION)
            if "loss" in known:
                # Show only the peak of the memory, so that all fits on one line.
                words += _memory_words(known, ["peak"]) + self._time_left()
            self.say("  ".join([self._line_start(int(known["step"])), *words]))

    def say(self, text: str) -> None:
        """Print above the block."""
        if not self._is_shown:
            return
        text = printable_lines(text)  # it may contain names from a checkpoint
        # A character that the terminal or log cannot encode must not end a run.
        text = text.encode(self._console.encoding, "replace").decode(self._console.encoding)
        if self._live is not None:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def _line_start(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}"

    def _time_left(self) -> list[str]:
        if self._clock is None or self._step <= self._clock[1] or self._step >= self._total:
            return []
        passed_s = time.monotonic() - self._clock[0]
        left = (self._total - self._step) * passed_s / (self._step - self._clock[1])
        return [f"{duration(left)} left"]

    def _block(self) -> Group:
        row = dict(self._row)
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self._total, 1), completed=self._step, width=BAR_WIDTH)
        share = f"{self._step / max(self._total, 1):4.0%}"
        head.add_row(bar, self._line_start(self._step), share, *self._time_left())
        memory = _memory_words(row, _MEMORY)
        lines = [_words(row, _TRAINING), _words(row, _EVALUATION), ["memory", *memory] if memory else []]
        return Group(head, *[Text("  ".join(line), overflow="crop", no_wrap=True) for line in lines if line])


def _words(row: Mapping[str, float | int], written: Mapping[str, Callable[[float], str]]) -> list[str]:
    return [write(row[name]) for name, write in written.items() if name in row]


def _memory_words(row: Mapping[str, float | int], names: Sequence[str]) -> list[str]:
    return [f"{name} {size(row[f'memory_{name}'])}" for name in names if f"memory_{name}" in row]
