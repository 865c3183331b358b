"""The effect of codecs on training: one model, trained from the same weights on the same data under each strategy.

The first strategy is exact, and the others are compared with it. Every run is `shardwise train` in its own process and
folder, with the same settings; the data is tokenised once. `wire_codecs` then loads the exact run's checkpoint, and
measures the error of each codec on its gradients and weights.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..base.errors import ConfigurationError
from ..base.processes import as_child
from ..base.text import count
from ..checkpoint.folder import CHECKPOINTS
from ..core.layout import layout_of
from ..core.wire.codec import parse
from ..core.wire.ledger import SHARE_OF_BUFFER, Call
from ..planner.events import crossing_bytes
from ..report.run import METRICS, read_run
from ..trainer.checks import check_all, look_ahead
from ..trainer.offload import is_auto
from ..trainer.run_folder import DATA
from ..trainer.settings import Settings
from .case import OURS, strategies_in
from .launch import Say
from .pages import Columns, Page, cells, filled, machine, results_page

Strategy = str | dict[str, str]

# The known exit codes of `shardwise train`. Any other means a crash.
STATUSES = {0: "ok", 2: "refused", 3: "oom", 4: "diverged"}
SECONDS_BETWEEN_LINES = 30.0
SECONDS_TO_END = 30.0
LONGEST = 300  # characters of an error
NUM_LAST = 20  # the loss of a run is the mean over this many last steps


@dataclass(frozen=True, slots=True)
class Request:
    """A request to `shardwise bench wire`. Runs differ in strategy and folder only. The first strategy is exact."""

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
        exact = self.strategies[self.exact]
        if is_auto(exact):
            raise ConfigurationError(f"--strategies: the first is the reference: name a preset instead of {self.exact}")
        for layout in map(layout_of, exact.values() if isinstance(exact, dict) else [exact]):
            if not layout.is_exact:
                raise ConfigurationError(
                    f"--strategies: the others are compared with the first, {self.exact}, which has "
                    f"params_as={layout.params_as!r}, grads_as={layout.grads_as!r}; put an exact one first"
                )
        for strategy in self.strategies.values():
            check_all(replace(self.settings, strategy=strategy), self.num_ranks)


def strategies_of(text: str) -> dict[str, Strategy]:
    """Parse --strategies into a dict by name: presets with codecs, or JSON mappings from unit patterns to presets."""
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
    """The figures of one run. A failed or refused run has none. A diverged run has those up to the divergence."""

    strategy: str
    status: str = "ok"  # ok, diverged, refused, oom or failed
    error: str = ""
    losses: Mapping[int, float] | None = None  # by step, from 1
    eval_loss: float | None = None
    step_s: float | None = None  # median
    wire_bytes: float | None = None  # that one rank sends per step
    planned_wire_bytes: float | None = None
    inter_node_bytes: float | None = None  # the part of them that leaves the rank's node
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


def prepare(request: Request, folder: Path, say: Say) -> None:
    """Tokenise the data into a folder that all runs use, and check it."""
    look_ahead(replace(request.settings, output_dir=str(folder)), request.num_ranks, say)


def run(request: Request, folder: Path, say: Say) -> Iterator[Findings]:
    """Train under each strategy, and yield the findings after every run. `folder` gets the run folders."""
    findings = Findings(request)
    for index, (name, strategy) in enumerate(request.strategies.items(), 1):
        say(f"{name} ({index} of {len(request.strategies)})")
        file_name = re.sub(r"[^\w.-]+", "-", name).strip("-")[:60]
        place = folder / f"{index:02}-{file_name}"
        place.mkdir()
        (place / DATA).symlink_to((folder / DATA).resolve())
        settings = replace(request.settings, strategy=strategy)
        trained = findings.runs[name] = train(settings, name, place, request.num_ranks, say)
        if trained.status == "ok" and trained.losses:
            speed = f", {trained.step_s:.3f} s per step" if trained.step_s else ""
            say(f"  loss {list(trained.losses.values())[-1]:.4f}{speed}")
        else:
            say(f"  {trained.status}: {trained.error}")
        yield findings
        if name == request.exact and trained.status == "ok" and (request.gradient_codecs or request.weight_codecs):
            say("measuring codecs on its gradients and weights")
            findings.codecs, findings.codecs_error = _codecs(request, place)
            yield findings
        # The checkpoint, three times as large as the model, is no longer needed.
        shutil.rmtree(place / CHECKPOINTS, ignore_errors=True)


def _codecs(request: Request, run_folder: Path) -> tuple[dict[str, Any], str]:
    """Return the result of `wire_codecs`, and the error if there is no result."""
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
    code = _run(["shardwise.bench.wire_codecs", json.dumps(question), str(answer)], environment, log)
    if code or not answer.exists():
        return {}, last_error(log.read_text(errors="replace"), code)
    return json.loads(answer.read_text()), ""


def train(settings: Settings, strategy: str, folder: Path, num_ranks: int, say: Say) -> TrainedRun:
    """Run `shardwise train`. The run's settings and its output are files next to its folder."""
    config, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    config.write_text(replace(settings, output_dir=str(folder)).to_json())
    progress = partial(_progress, folder / METRICS, settings)
    code = _run(["shardwise", "train", str(config)], os.environ, log, lambda: say(f"  {strategy}: {progress()}"))
    status = STATUSES.get(code, "failed")
    error = "" if status == "ok" else last_error(log.read_text(errors="replace"), code)
    if status not in ("ok", "diverged"):
        return TrainedRun(strategy, status, error)
    run, plan = read_run(folder)
    rows, step_s, speed = run["traffic"], run["time"].get("seen_step_s"), run["time"].get("seen_tokens_per_s")
    totals = {key: sum(row[key] or 0.0 for row in rows) if rows else None for key in ("seen_bytes", "planned_bytes")}
    return TrainedRun(
        strategy,
        status,
        error,
        losses={int(step): loss for step, loss in run["curve"]["train"]},
        eval_loss=run["eval_loss"],
        step_s=step_s,
        wire_bytes=totals["seen_bytes"],
        planned_wire_bytes=totals["planned_bytes"],
        inter_node_bytes=inter_node_bytes(rows, num_ranks, settings.node_size or num_ranks) if rows else None,
        traffic=rows,
        tokens_per_step=step_s * speed if step_s and speed else None,
        num_params=plan["model"]["num_params"] if plan else None,
    )


def _run(module: list[str], environment: Mapping[str, str], log: Path, watch: Callable[[], None] | None = None) -> int:
    """Run `python -m MODULE` with its output in a file. Call `watch` at intervals. Return the exit code."""
    with log.open("w") as sink:
        # In its own session: Ctrl-C reaches only this process, which then terminates the run.
        worker = subprocess.Popen(
            [sys.executable, "-m", *module],
            env=as_child(environment),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    return worker.wait(SECONDS_BETWEEN_LINES)
                except subprocess.TimeoutExpired:
                    if watch is not None:
                        watch()
        finally:
            worker.terminate()  # its ranks end with it
            try:
                worker.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def last_error(log: str, code: int) -> str:
    """Return the error in the output of a process: the last message of shardwise, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    messages = [line.removeprefix("shardwise: ") for line in lines if line.startswith("shardwise: ")]
    return (messages or lines or [f"exit code {code}"])[-1][:LONGEST]


def inter_node_bytes(rows: Sequence[Mapping[str, Any]], num_ranks: int, node_size: int) -> float:
    """Return one rank's traffic between nodes, counted as in the planner: a node receives each missing element once."""
    num_nodes = num_ranks // node_size
    sizes = {"world": num_ranks, "node": node_size, "replicate": num_nodes}
    total = 0.0
    for row in rows:
        size, kind = sizes[row["axis"]], row["kind"]
        # The ledger has the bytes that a rank sent. `Call` needs the size of the whole buffer.
        whole = round((row["seen_bytes"] or 0.0) * size / (size - 1) / SHARE_OF_BUFFER[kind])
        total += crossing_bytes(Call(kind, row["axis"], row["dtype"], whole, size), num_nodes, node_size)
    return total


def _progress(metrics: Path, settings: Settings) -> str:
    """Return step and loss of the last complete row of the metrics."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("loss") is not None:
            return f"step {row['step']} of {settings.max_steps}, loss {row['loss']:.4f}"
    return "setting up"


def rows_of(findings: Findings) -> list[dict[str, Any]]:
    """Return a row for each strategy, compared with the exact one. Differences are relative. None means unknown."""
    exact = findings.runs.get(findings.request.exact, TrainedRun(""))
    return [_row(run, exact, findings.request.num_steps) for run in findings.runs.values()]


def _row(run: TrainedRun, exact: TrainedRun, num_steps: int) -> dict[str, Any]:
    expected, loss = exact.losses or {}, _last(run, num_steps)
    apart = {step: abs(loss / expected[step] - 1.0) for step, loss in (run.losses or {}).items() if step in expected}
    largest_at = max(apart, key=apart.__getitem__, default=None)
    theirs, ours = exact.inter_node_bytes, run.inter_node_bytes
    return {
        "strategy": run.strategy,
        "status": run.status,
        "error": run.error,
        "loss": loss,  # mean of the last steps
        "loss_difference": _difference(loss, _last(exact, num_steps)),
        "eval_loss": run.eval_loss,
        "eval_difference": _difference(run.eval_loss, exact.eval_loss),
        "largest_difference": None if largest_at is None else apart[largest_at],  # of the loss of one step
        "largest_at": largest_at,  # the number of that step
        "wire_bytes": run.wire_bytes,
        "planned_wire_bytes": run.planned_wire_bytes,
        "inter_node_bytes": ours,
        "fewer_between_nodes": theirs / ours if theirs and ours else None,
        "step_s": run.step_s,
    }


def _difference(own: float | None, exact: float | None) -> float | None:
    return None if own is None or exact is None else own / exact - 1.0


def _last(run: TrainedRun, num_steps: int) -> float | None:
    """Return the mean loss of the last steps; None if the run was not completed."""
    losses = run.losses or {}
    last = [loss for step, loss in losses.items() if num_steps - NUM_LAST < step <= num_steps]
    return statistics.fmean(last) if num_steps in losses else None


def problems(findings: Findings) -> list[str]:
    runs = findings.runs.values()
    failed = [f"{run.strategy} ({run.status}): {run.error}" for run in runs if run.status != "ok"]
    unplanned = [
        f"{run.strategy}: a step moved {run.wire_bytes} bytes, but {run.planned_wire_bytes} were planned"
        for run in runs
        if run.status == "ok" and run.wire_bytes != run.planned_wire_bytes
    ]
    codecs = [f"codecs were not measured: {findings.codecs_error}"] if findings.codecs_error else []
    return failed + unplanned + codecs


def note_of(findings: Findings) -> str:
    """Explain how to read the figures."""
    request = findings.request
    known = next((run for run in findings.runs.values() if run.num_params and run.tokens_per_step), None)
    size = f", {count(known.num_params or 0)} parameters, {known.tokens_per_step:.0f} tokens per step" if known else ""
    sentences = [
        f"{request.settings.model}{size}; {request.settings.precision} on {request.num_ranks} ranks in nodes of "
        f"{request.node_size}, {request.num_steps} steps each from the same weights on the same data.",
        f"`loss` is the mean of the last {min(NUM_LAST, request.num_steps)} steps, `evaluation` that of samples that "
        f"are not trained on; `vs` are differences to {request.exact}, `largest` is that of one step's loss.",
        "MB are counted: the bytes that one rank sends per step, and the part that leaves its node.",
        "Matrices are encoded; norms, biases and embeddings are sent unchanged.",
    ]
    if findings.num_left:
        sentences.append(f"Unfinished: {findings.num_left} more runs were requested.")
    return " ".join(sentences)


def strategy_columns(findings: Findings) -> Columns:
    """Return the cells of the main table by column, without empty columns."""
    exact, rows = findings.request.exact, rows_of(findings)
    # The row of the exact strategy shows no differences: they would be 0.
    others = [{} if row["strategy"] == exact else row for row in rows]
    largest = zip(cells(others, "largest_difference", ".2%"), rows, strict=True)
    return filled(
        {
            "strategy": cells(rows, "strategy"),
            "loss": [text or row["status"] for text, row in zip(cells(rows, "loss", ".4f"), rows, strict=True)],
            f"vs {exact}": cells(others, "loss_difference", "+.2%"),
            "evaluation": cells(rows, "eval_loss", ".4f"),
            "vs": cells(others, "eval_difference", "+.2%"),
            "largest": [f"{text} ({row['largest_at']})" if text else "" for text, row in largest],
            "MB": cells(rows, "wire_bytes", ".4f", 1e6),
            "between nodes MB": cells(rows, "inter_node_bytes", ".4f", 1e6),
            "times fewer": cells(others, "fewer_between_nodes", ".2f"),
            "s per step": cells(rows, "step_s", ".4f"),
        }
    )


def codec_columns(found: Sequence[Mapping[str, Any]]) -> Columns:
    columns = {
        "codec": cells(found, "codec"),
        "relative RMS error": cells(found, "relative_rms", ".3e"),
        "of the worst unit": cells(found, "worst_relative_rms", ".3e"),
        "cosine": cells(found, "cosine", ".6f"),
        "bytes per element": cells(found, "bytes_per_elem", ".4f"),
        "encode ms per million": cells(found, "encode_s", ".3f", 1e-3),
        "decode ms per million": cells(found, "decode_s", ".3f", 1e-3),
    }
    return {title: [text or "not finite" for text in texts] for title, texts in columns.items()}


def page_of(findings: Findings) -> Page:
    request, codecs = findings.request, findings.codecs
    tables = [(note_of(findings), strategy_columns(findings))]
    for kind in ("gradients", "weights"):
        if codecs.get(kind):
            of = f"{codecs['gradient_dtype']}, of one micro-batch of one rank " if kind == "gradients" else ""
            after = f"after {request.num_steps} steps of {request.exact}"
            note = f"Codecs on {kind}: {of}{after}, {count(codecs[f'num_{kind}'])} elements of matrices."
            tables.append((note, codec_columns(codecs[kind])))
    figures = {
        "settings": asdict(request.settings),
        "rows": rows_of(findings),
        "runs": [asdict(run) for run in findings.runs.values()],
        "codecs": codecs,
    }
    device = torch.cuda.get_device_name() if request.settings.device == "cuda" else "cpu"
    return results_page("shardwise bench wire", machine(device, torch.__version__), figures, tables, problems(findings))


def name_of(request: Request) -> str:
    """Return the name for the result files."""
    model = Path(request.settings.model)
    return f"bench-wire-{model.stem if model.suffix == '.json' else model.name}-{request.num_ranks}-ranks"
