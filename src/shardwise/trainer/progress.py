"""The progress of a run: a live block on a terminal, otherwise a plain line for every logged row.

Numbers come as rows of `metrics.py`; missing ones are left out. A thread draws the block four times a second, whatever
the pace of the steps.
"""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..base.errors import printable_lines
from ..base.text import duration, size
from .metrics import Row

REFRESHES_PER_S = 4
BAR_WIDTH = 30

# Keys of a row, and how each is written: equally wide in every line.
_TRAINING: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:7.4f}",
    "learning_rate": lambda value: f"lr {value:.2e}",
    "grad_norm": lambda value: f"norm {value:7.3f}" if value < 1000 else f"norm {value:7.1e}",
    "tokens_per_s": lambda value: f"{value:7,.0f} tok/s",
    "mfu": lambda value: f"MFU {value:5.1%}",
}
_EVALUATION: dict[str, Callable[[float], str]] = {
    "eval_loss": lambda value: f"eval loss {value:.4f}",
    "eval_perplexity": lambda value: f"perplexity {value:.2f}",
}
_MEMORY: dict[str, Callable[[float], str]] = {
    "memory_now": lambda value: f"now {size(value)}",
    "memory_peak": lambda value: f"peak {size(value)}",
    "memory_planned": lambda value: f"planned {size(value)}",
    "memory_host": lambda value: f"host {size(value)}",
    "memory_disk": lambda value: f"disk {size(value)}",
}


class Progress:
    """A context manager. `is_terminal` None: detect it. Only a rank with `is_shown` prints."""

    def __init__(
        self, total_steps: int, first_step: int = 0, is_terminal: bool | None = None, is_shown: bool = True
    ) -> None:
        self._total = total_steps
        self._step = first_step
        self._is_shown = is_shown
        self._row: dict[str, float | int] = {}
        # Time and number of the first step of this start, which takes longer than the others.
        self._clock: tuple[float, int] | None = None
        self._live: Live | None = None
        self._console = Console(highlight=False, force_terminal=is_terminal)
        if is_shown and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._block, refresh_per_second=REFRESHES_PER_S)

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def advance(self, step: int) -> None:
        """Note that `step` steps are done; their numbers may arrive much later."""
        self._step = step
        if self._clock is None:
            self._clock = (time.monotonic(), step)

    def update(self, row: Row) -> None:
        """Show the numbers of a step; those of earlier rows stay in the block."""
        known = {name: value for name, value in row.items() if value is not None}
        self.advance(max(int(known["step"]), self._step))
        self._row |= known
        if self._live is None:
            words = [*_words(known, _TRAINING), *_words(known, _EVALUATION)]
            if "loss" in known:
                # Of the memory only the peak, so that all fits on one line.
                words += _words(known, {"memory_peak": _MEMORY["memory_peak"]}) + self._time_left()
            self.say("  ".join([self._line_start(int(known["step"])), *words]))

    def say(self, text: str) -> None:
        """Print above the block."""
        if not self._is_shown:
            return
        text = printable_lines(text)  # it may contain names from a checkpoint
        # A terminal or a log that knows only ASCII must not end a run.
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
        training, evaluation, memory = (_words(row, written) for written in (_TRAINING, _EVALUATION, _MEMORY))
        lines = ["  ".join(training), "  ".join(evaluation), "  ".join(["memory", *memory]) if memory else ""]
        return Group(head, *[Text(line, overflow="crop", no_wrap=True) for line in lines if line])


def _words(row: dict[str, float | int], written: dict[str, Callable[[float], str]]) -> list[str]:
    return [write(row[name]) for name, write in written.items() if name in row]
