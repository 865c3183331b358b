"""The effect of codecs on training: one model, trained from the same weights on the same data under each strategy.

The first strategy is exact, and the others are compared with it. Every run is `shardwise train` in its own process and
folder, with the same settings; the data is tokenised once. The exact run's checkpoint then shows how much of its
gradients and weights each codec loses (`wire_codecs`).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.errors import ConfigurationError
from ..base.processes import as_child
from ..checkpoint.steps import CHECKPOINTS
from ..core.layout import layout_of
from ..core.wire.codec import parse
from ..core.wire.ledger import SHARE_OF_BUFFER, Call
from ..planner.events import crossing_bytes
from ..report.run import METRICS, read_run
from ..trainer.checks import check_all, look_ahead
from ..trainer.offload import is_auto
from ..trainer.run_folder import DATA
from ..trainer.settings import Settings
from .launch import Say
from .names import OURS, strategies_in

Strategy = str | dict[str, str]

# Exit codes of `shardwise train` with a meaning; any other is a crash.
STATUSES = {0: "ok", 2: "refused", 3: "oom", 4: "diverged"}
SECONDS_BETWEEN_LINES = 30.0
SECONDS_TO_END = 30.0
LONGEST = 300  # characters of an error


@dataclass(frozen=True, slots=True)
class Request:
    """`settings` are those of every run, apart from its strategy and folder. The first strategy is the exact one."""

    settings: Settings
    strategies: Mapping[str, Strategy]  # by name
    num_ranks: int
    gradient_codecs: tuple[str, ...] = ()
    weight_codecs: tuple[str, ...] = ()

    @property
    def exact(self) -> str:
        return next(iter(self.strategies))

    @property
    def node_size(self) -> int:
        return self.settings.node_size or self.num_ranks

    @property
    def num_steps(self) -> int:
        assert self.settings.max_steps is not None
        return self.settings.max_steps

    def check(self) -> None:
        """Raise ConfigurationError for a request that cannot run."""
        if self.num_ranks < 2:
            raise ConfigurationError("nproc_per_node: 1, but one rank sends nothing; use at least 2")
        for codec in (*self.gradient_codecs, *self.weight_codecs):
            if parse(codec).kind == "as_is":
                raise ConfigurationError(f"codec {codec!r} is exact, so there is nothing to measure; leave it out")
        _require_exact(self.exact, self.strategies[self.exact])
        for strategy in self.strategies.values():
            check_all(replace(self.settings, strategy=strategy), self.num_ranks)


def _require_exact(name: str, strategy: Strategy) -> None:
    if is_auto(strategy):
        raise ConfigurationError(f"--strategies: the first is the reference: name a preset instead of {name}")
    for row in strategy.values() if isinstance(strategy, dict) else [strategy]:
        if not layout_of(row).is_exact:
            raise ConfigurationError(
                f"--strategies: the others are compared with the first, {name}, which has "
                f"params_as={layout_of(row).params_as!r}, grads_as={layout_of(row).grads_as!r}; put an exact one first"
            )


def strategies_of(text: str) -> dict[str, Strategy]:
    """Parse --strategies: presets with codecs, or JSON mappings from unit patterns to them; by name."""
    found: dict[str, Strategy] = {}
    for contender in strategies_in(text):
        name = contender.removeprefix(f"{OURS}:")
        if "@" in name:
            raise ConfigurationError(f"--strategies: {name!r} has an @ modifier, which `shardwise train` does not know")
        rows = json.loads(name) if name.startswith("{") else name
        if isinstance(rows, dict) and not all(isinstance(row, str) for row in rows.values()):
            raise ConfigurationError(
                f"--strategies: {name!r} contains a layout as an object; use a name, as in zero3+grads_as=int8"
            )
        found[name] = rows
    if not found:
        raise ConfigurationError("--strategies: empty; name at least one")
    return found


def codecs_of(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names:
        parse(name)
    return names


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """The figures of one run. A failed or refused run has none, a diverged one those until then."""

    strategy: str
    status: str = "ok"  # ok, diverged, refused, oom or failed
    error: str = ""
    losses: Mapping[int, float] | None = None  # by step, from 1
    eval_loss: float | None = None
    step_s: float | None = None  # median
    wire_bytes: float | None = None  # that one rank sends per step
    planned_wire_bytes: float | None = None
    inter_node_bytes: float | None = None  # the part that crosses the border of the rank's node
    traffic: Sequence[Mapping[str, Any]] = ()
    tokens_per_step: float | None = None
    num_params: int | None = None


@dataclass(slots=True)
class Findings:
    request: Request
    runs: dict[str, TrainedRun] = field(default_factory=dict)
    codecs: dict[str, Any] = field(default_factory=dict)  # the result of `wire_codecs.measure`
    codecs_error: str = ""

    @property
    def num_left(self) -> int:
        return len(self.request.strategies) - len(self.runs)

    @property
    def wants_codecs(self) -> bool:
        return bool(self.request.gradient_codecs or self.request.weight_codecs)


def prepare(request: Request, folder: Path, say: Say) -> None:
    """Tokenise the data into a folder that all runs use, and check it."""
    look_ahead(replace(request.settings, output_dir=str(folder)), request.num_ranks, say)


def run(request: Request, folder: Path, say: Say) -> Iterator[Findings]:
    """Train under each strategy, and yield the findings after every run. `folder` gets the run folders."""
    findings = Findings(request)
    data = folder / DATA
    for index, (name, strategy) in enumerate(request.strategies.items(), 1):
        say(f"{name} ({index} of {len(request.strategies)})")
        place = folder / f"{index:02}-{_file_name(name)}"
        place.mkdir()
        (place / DATA).symlink_to(data.resolve())
        settings = replace(request.settings, strategy=strategy)
        trained = findings.runs[name] = train(settings, name, place, request.num_ranks, say)
        say(f"  {_in_words(trained)}")
        yield findings
        if name == request.exact and trained.status == "ok" and findings.wants_codecs:
            say("measuring codecs on its gradients and weights")
            findings.codecs, findings.codecs_error = _codecs(request, place)
            yield findings
        # Only figures are needed from here on, and a checkpoint is three times as large as the model.
        shutil.rmtree(place / CHECKPOINTS, ignore_errors=True)


def _in_words(run: TrainedRun) -> str:
    if run.status != "ok" or not run.losses:
        return f"{run.status}: {run.error}"
    *_, last = run.losses.values()
    return f"loss {last:.4f}" + (f", {run.step_s:.3f} s per step" if run.step_s else "")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-")[:60]


def _codecs(request: Request, run_folder: Path) -> tuple[dict[str, Any], str]:
    answer, log = run_folder.with_suffix(".codecs.json"), run_folder.with_suffix(".codecs.log")
    question = {
        "run": str(run_folder),
        "num_ranks": request.num_ranks,
        "step": request.num_steps,
        "gradients": request.gradient_codecs,
        "weights": request.weight_codecs,
    }
    # The same number of threads as a rank of the runs.
    num_threads = max(1, len(os.sched_getaffinity(0)) // request.num_ranks)
    environment = {"OMP_NUM_THREADS": str(num_threads), **os.environ}
    if request.settings.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("w") as sink:
        command = [sys.executable, "-m", "shardwise.bench.wire_codecs", json.dumps(question), str(answer)]
        worker = subprocess.Popen(command, env=as_child(environment), stdout=sink, stderr=subprocess.STDOUT)
        try:
            code = worker.wait()
        finally:
            end(worker)
    if code or not answer.exists():
        return {}, last_words(log.read_text(errors="replace"), code)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found, ""


def train(settings: Settings, strategy: str, folder: Path, num_ranks: int, say: Say) -> TrainedRun:
    """Run `shardwise train`. The run's settings and its output are files next to its folder."""
    config, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    config.write_text(replace(settings, output_dir=str(folder)).to_json())
    metrics = folder / METRICS
    with log.open("w") as sink:
        # In its own process group: Ctrl-C reaches this process only, which then ends the run once.
        worker = subprocess.Popen(
            [sys.executable, "-m", "shardwise", "train", str(config)],
            env=as_child(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            printed_s = time.monotonic()
            while worker.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - printed_s > SECONDS_BETWEEN_LINES:
                    printed_s = time.monotonic()
                    say(f"  {strategy}: {_progress(metrics, settings)}")
        finally:
            end(worker)
    status = STATUSES.get(worker.returncode, "failed")
    error = "" if status == "ok" else last_words(log.read_text(errors="replace"), worker.returncode)
    if status not in ("ok", "diverged"):
        return TrainedRun(strategy, status, error)
    return _with_figures(folder, TrainedRun(strategy, status, error), num_ranks, settings.node_size or num_ranks)


def end(worker: "subprocess.Popen[bytes]") -> None:
    """End the process. Its ranks end with it."""
    if worker.poll() is None:
        worker.terminate()
        try:
            worker.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            worker.kill()
    worker.wait()


def last_words(log: str, code: int) -> str:
    """The error in the output of a process: its last message, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    messages = [line.removeprefix("shardwise: ") for line in lines if line.startswith("shardwise: ")]
    return (messages or lines or [f"exit code {code}"])[-1][:LONGEST]


def _with_figures(folder: Path, trained: TrainedRun, num_ranks: int, node_size: int) -> TrainedRun:
    """`trained` with the figures in its folder."""
    run, plan = read_run(folder)
    rows = run["traffic"]
    step_s = run["time"].get("seen_step_s")
    speed = run["time"].get("seen_tokens_per_s")
    return replace(
        trained,
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
    """Traffic between nodes as the planner counts it: a node receives each element that it lacks once."""
    num_nodes = num_ranks // node_size
    sizes = {"world": num_ranks, "node": node_size, "replicate": num_nodes}
    total = 0.0
    for row in rows:
        size, kind = sizes[row["axis"]], row["kind"]
        # The ledger counts a share of the buffer, and a call is described by the size of the whole.
        whole = round((row["seen_bytes"] or 0.0) * size / (size - 1) / SHARE_OF_BUFFER[kind])
        total += crossing_bytes(Call(kind, row["axis"], row["dtype"], whole, size), num_nodes, node_size)
    return total


def _progress(metrics: Path, settings: Settings) -> str:
    """The last complete row of the metrics."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("loss") is not None:
            return f"step {row['step']} of {settings.max_steps}, loss {row['loss']:.4f}"
    return "setting up"
