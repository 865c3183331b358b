"""A run compared with its plan, as a value, as text and as parts of the page. The run may still be going on.

Everything comes from the files in its folder: `metrics.jsonl` has the measurements, `plan.json` the prediction,
`traffic.json` both for the bytes of a step. `notes` lists what is missing. There are no allocator statistics on a CPU:
the memory of the whole process is shown instead.
"""

import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..base.documents import MOST_JSON_BYTES, parse
from ..base.errors import ConfigurationError
from ..base.files import read_regular
from ..base.text import count, plural, size, terminal_width
from .charts import Curve, Point, draw
from .plan_facts import Json, Plan, Strategy, amount, mapping, number, percent, rows, seconds, text_of, whole

PROCESS = "whole process"

SEEN = {
    "params": "memory_params",
    "grads": "memory_peak_grads",
    "optimizer": "memory_optimizer",
    "buffers": "memory_peak_buffers",
    "activations": "memory_peak_activations",
    "peak": "memory_peak",
    "reserved": "memory_reserved",
}


def _planned(strategy: Json) -> dict[str, float | None]:
    """Predicted memory in the classes of a metrics row: persistent state and buffers; activations are the rest of the
    peak."""
    held, rests = mapping(strategy.get("per_gpu_bytes")), mapping(strategy.get("rests"))
    state = {name: number(rests.get(name, held.get(name))) for name in ("params", "grads", "optimizer")}
    buffers = number(rests.get("buffers", amount(held, "gathered") + amount(held, "reduce"))) if held else None
    resting, peak = {**state, "buffers": buffers}, number(held.get("peak_active"))
    known = [value for value in resting.values() if value is not None]
    return {
        **resting,
        "activations": None if peak is None else max(peak - sum(known), 0),
        "peak": peak,
        "reserved": number(held.get("peak_reserved")),
    }


def memory_beside(steps: list[Json], plan: Json | None) -> list[Json]:
    expected = _planned(rows(plan.get("strategies"))[0] if plan else {})
    on_gpu = any(number(row.get("memory_reserved")) is not None for row in steps)
    found = []
    for name, key in SEEN.items():
        seen = max((value for row in steps if (value := number(row.get(key))) is not None), default=None)
        planned = expected[name]
        if seen is not None or (planned is not None and name != "reserved"):
            found.append({"class": name, "planned_bytes": planned, "seen_bytes": seen})
    if steps and not on_gpu:
        # On a CPU the peak includes the whole process, with Python and the data, which the plan does not predict.
        peak = next((row for row in found if row["class"] == "peak"), {})
        if number(peak.get("seen_bytes")) is not None:
            found.append({"class": PROCESS, "planned_bytes": None, "seen_bytes": peak["seen_bytes"]})
            peak["seen_bytes"] = None
        found = [row for row in found if row["planned_bytes"] is not None or row["seen_bytes"] is not None]
    return found


CONFIG, METRICS, LEFT, PLAN, TRAFFIC = "config.json", "metrics.jsonl", "metrics-left.jsonl", "plan.json", "traffic.json"
_MOST_ROWS_BYTES = 512 << 20  # maximum size of the metrics: a million rows


def read_run(folder: Path) -> tuple[Json, Json | None]:
    """Return the run, and its plan if there is one."""
    _require_run(folder)
    notes: list[str] = []
    config = mapping(_json_in(folder / CONFIG, notes))
    metrics = _rows_in(folder / METRICS, notes)
    plan = _plan_in(folder / PLAN, notes)
    steps = _by_step(row for row in metrics if number(row.get("loss")) is not None)
    evaluations = _by_step(row for row in metrics if number(row.get("eval_loss")) is not None)
    if not steps:
        notes.append("No step is in metrics.jsonl yet: there is no loss, memory or time to show.")
    left = _rows_in(folder / LEFT, []) if (folder / LEFT).exists() else []
    *earlier, newest = _starts(steps, plan)
    earlier = [start for start in earlier if start.rows]
    notes += [_told(start) for start in earlier]
    run = {
        "folder": str(folder),
        "name": folder.resolve().name,
        "model": text_of(config.get("model")),
        "strategy": text_of(config.get("strategy")),
        "precision": text_of(config.get("precision")),
        "step": int(amount(steps[-1], "step")) if steps else 0,
        "max_steps": number(config.get("max_steps")),
        "tokens": int(amount(steps[-1], "tokens")) if steps else 0,
        "ranks": Plan(plan).world_size if plan else 0,
        "runs": text_of(rows(plan.get("strategies"))[0].get("name")) if plan else "",
        "device": Plan(plan).cluster_words if plan else "",
        "loss": _loss(steps),
        "eval_loss": evaluations[-1]["eval_loss"] if evaluations else None,
        "earlier": [
            {"name": start.name, "ranks": start.num_ranks, "first_step": start.first, "last_step": start.last}
            | {"memory": memory_beside(start.rows, None), "time": _time(start.rows, steps)}
            for start in earlier
        ],
        "memory": memory_beside(newest.rows, plan),
        "traffic": _traffic_in(folder / TRAFFIC, notes),
        "time": _time(newest.rows, steps, plan),
        "curve": {
            "train": [[int(row["step"]), row["loss"]] for row in steps],
            "evaluation": [[int(row["step"]), row["eval_loss"]] for row in evaluations],
            "left": _given_up(left),
        },
        "notes": notes,
    }
    return run, plan


def curve_of(run: Json) -> Curve:
    curve = mapping(run.get("curve"))
    train, evaluation = ([Point(*pair) for pair in curve.get(name, [])] for name in ("train", "evaluation"))
    return Curve(train, evaluation, [[Point(*pair) for pair in part] for part in curve.get("left", [])])


class _Start(NamedTuple):
    """Steps that ran under one strategy on one number of ranks."""

    name: str
    num_ranks: int
    first: int  # first step
    last: float  # last step; infinite for the newest start
    rows: list[Json]


def _starts(steps: list[Json], plan: Json | None) -> list[_Start]:
    """Return the starts in order; the plan belongs to the last one. If the plan lacks this, all steps are one start."""
    known = rows(plan.get("starts")) if plan else []
    firsts = [int(amount(start, "first_step")) for start in known] or [0]
    return [
        _Start(
            text_of(start.get("name")),
            int(amount(start, "num_ranks")),
            first + 1,
            last,
            [row for row in steps if first < row["step"] <= last],
        )
        for start, first, last in zip(known or [{}], firsts, [*firsts[1:], math.inf], strict=True)
    ]


def _told(start: _Start) -> str:
    time = _time(start.rows, start.rows)
    peak = max((amount(row, "memory_peak") for row in start.rows), default=0)
    words = [f"{time['seen_tokens_per_s']:,.0f} tokens/s"] if "seen_tokens_per_s" in time else []
    words += [f"peak memory {size(peak)} a rank"] if peak else []
    return (
        f"Steps {start.first:,} to {start.last:,.0f} ran as {start.name} on {plural(start.num_ranks, 'rank')}"
        f"{': ' if words else ''}{', '.join(words)}. Memory and time are of the steps after them."
    )


def _require_run(folder: Path) -> None:
    try:
        if not folder.exists():
            raise ConfigurationError(f"{folder}: there is no such folder")
        is_run = (folder / CONFIG).is_file() and folder.is_dir()
        has_more = any((folder / name).exists() for name in (METRICS, PLAN))
    except OSError as error:
        raise ConfigurationError(f"{folder}: {error.strerror or error}") from error
    if not is_run:
        raise ConfigurationError(f"{folder} is no run folder: it has no {CONFIG}; give one that `shardwise train` made")
    if not has_more and "strategy" not in mapping(_json_in(folder / CONFIG, [])):
        raise ConfigurationError(
            f"{folder} is no run folder: its {CONFIG} is not of a run, and it has no {METRICS}; give one that "
            "`shardwise train` made"
        )


def _json_in(file: Path, notes: list[str]) -> object:
    try:
        return parse(read_regular(file, MOST_JSON_BYTES))
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read: {error}.")
        return None


def _rows_in(file: Path, notes: list[str]) -> list[Json]:
    """Every complete row with a step; a last line that is being written is left out."""
    found: list[Any] = []
    try:
        text = read_regular(file, _MOST_ROWS_BYTES) if file.exists() else b""
    except OSError as error:
        notes.append(f"{file.name} cannot be read: {error}.")
        return []
    for line in text.splitlines():
        try:
            found.append(parse(line))
        except ValueError:
            continue
    return [row for row in rows(found) if number(row.get("step")) is not None]


def _plan_in(file: Path, notes: list[str]) -> Json | None:
    if not file.exists():
        notes.append("There is no plan.json in this run's folder: nothing to compare memory and time with.")
        return None
    plan = _json_in(file, notes)
    if plan is not None and not rows(mapping(plan).get("strategies")):
        notes.append("plan.json holds no strategy: nothing to compare memory and time with.")
    return mapping(plan) if rows(mapping(plan).get("strategies")) else None


def _by_step(found: Any) -> list[Json]:
    """Return one row per step, the last one written, in order."""
    steps = {row["step"]: row for row in found}
    return [steps[step] for step in sorted(steps)]


def _given_up(left: list[Json]) -> list[list[list[float]]]:
    """Split the rows of abandoned branches where the step number falls back."""
    parts: list[list[list[float]]] = []
    last = math.inf
    for row in left:
        if number(row.get("loss")) is None:
            continue
        if row["step"] <= last:
            parts.append([])
        parts[-1].append([int(row["step"]), row["loss"]])
        last = row["step"]
    return parts


def _loss(steps: list[Json]) -> Json:
    """Summarise the loss. `first_step`: the step of `first`. Other rows hold the mean since the row before."""
    if not steps:
        return {}
    known, begin = number(steps[0].get("first_loss")), int(steps[0]["step"])
    return {
        "first": steps[0]["loss"] if known is None else known,
        "first_step": begin if known is None else 1,
        "last": steps[-1]["loss"],
    }


def _traffic_in(file: Path, notes: list[str]) -> list[Json]:
    if not file.exists():
        notes.append("There is no traffic.json in this run's folder: what a step moved is not known.")
        return []
    found = mapping(_json_in(file, notes))
    sides = {kind: {_key(row): row for row in rows(found.get(kind))} for kind in ("planned", "seen")}
    return [
        {
            **dict(zip(("axis", "kind", "dtype"), key, strict=True)),
            **{f"{side}_calls": number(sides[side].get(key, {}).get("num_calls")) for side in sides},
            **{f"{side}_bytes": number(sides[side].get(key, {}).get("wire_bytes")) for side in sides},
        }
        for key in sorted({*sides["planned"], *sides["seen"]})
    ]


def _key(row: Json) -> tuple[str, str, str]:
    return text_of(row.get("axis")), text_of(row.get("kind")), text_of(row.get("dtype"))


def _time(timed: list[Json], steps: list[Json], plan: Json | None = None) -> Json:
    """Compare step times. The measured one is the median of all rows but the first, which holds the warm-up."""
    timed = timed[1:] or timed
    speeds, mfus = ([v for row in timed if (v := number(row.get(key))) is not None] for key in ("tokens_per_s", "mfu"))
    tokens = _tokens_per_step(steps)
    found: Json = {}
    if speeds:
        found["seen_tokens_per_s"] = median(speeds)
        if tokens:
            found["seen_step_s"] = tokens / max(median(speeds), 1e-9)
    if mfus:
        found["seen_mfu"] = median(mfus)
    if plan:
        planned = Plan(plan)
        first = Strategy(rows(plan["strategies"])[0], planned)
        all_ranks = first.speed * planned.world_size if first.speed is not None and planned.world_size else None
        found |= {"planned_step_s": first.step_s, "planned_mfu": first.mfu, "planned_tokens_per_s": all_ranks}
    return found


def _tokens_per_step(steps: list[Json]) -> float | None:
    """Return tokens per step from the last two rows with a count: earlier batches may have had another size."""
    known = [row for row in steps if number(row.get("tokens")) is not None]
    if len(known) < 2:
        return known[0]["tokens"] / known[0]["step"] if known and known[0]["step"] else None
    return (known[-1]["tokens"] - known[-2]["tokens"]) / (known[-1]["step"] - known[-2]["step"])


TIMES = {"step_s": ("step", seconds), "tokens_per_s": ("tokens/s, all ranks", whole), "mfu": ("MFU", percent)}


class Pair(NamedTuple):
    """One predicted and measured quantity, as numbers and as text; None: unknown."""

    name: str
    planned: float | None
    seen: float | None
    words: tuple[str, str]

    @property
    def ratio(self) -> str:
        return f"{self.seen / self.planned:.3f}" if self.planned and self.seen is not None else "-"


def text(run: Json) -> str:
    of = f" of {run['max_steps']:,.0f}" if run["max_steps"] else ""
    lines = [f"{run['folder']}: {about(run)}", f"  step {run['step']:,}{of}, {count(run['tokens'])} tokens", ""]
    if loss := mapping(run["loss"]):
        evaluation = "" if run["eval_loss"] is None else f", evaluation {run['eval_loss']:.4f}"
        lines += [f"  loss  {_first(loss)} -> {loss['last']:.4f}{evaluation}", ""]
    table = [("memory of a rank", "planned", "seen", "ratio")] if run["memory"] else []
    table += _cells(_memory(run))
    if run["traffic"]:
        table += [("traffic of a step and rank", "planned", "seen", "ratio"), *_cells(_traffic(run))]
    if run["time"]:
        table += [("time", "planned", "seen", "ratio"), *_cells(_times(run))]
    if table:
        widths = [max(len(row[at]) for row in table) for at in range(4)]
        for name, *cells in table:
            numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            lines.append("  ".join([f"  {name:<{widths[0]}}", *numbers]).rstrip())
        lines += [""] if run["notes"] else []
    for note in run["notes"]:
        lines += textwrap.wrap(
            note,
            terminal_width(),
            initial_indent="  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines).rstrip()


def _first(loss: Json) -> str:
    step = loss["first_step"]
    return f"{loss['first']:.4f}" + (f" (step {step:,})" if step > 1 else "")


def about(run: Json) -> str:
    """Describe the run and its machine: tiny, ddp (auto) on 2 x cpu, fp32."""
    asked, runs = text_of(run["strategy"]), run["runs"]
    strategy = f"{runs} ({asked})" if runs and asked and asked != runs else runs or asked
    where = f" on {run['device']}" if run["device"] else ""
    words = (run["model"], f"{strategy}{where}", run["precision"])
    return ", ".join(text_of(word) for word in words if word)


def page_parts(run: Json) -> dict[str, Any]:
    curve = curve_of(run)
    conditions = [("folder", run["folder"]), *((key, run[key]) for key in ("model", "strategy", "precision"))]
    return {
        "about": about(run),
        "tiles": list(_tiles(run)),
        "chart": draw(curve) if curve.train or curve.evaluation else None,
        "has_evaluations": bool(curve.evaluation),
        "has_left": any(curve.left),
        "memory": _with_bars(_memory(run)),
        "traffic": _with_bars(_traffic(run)),
        "time": _cells(_times(run)),
        "conditions": [(name, text_of(value)) for name, value in conditions if value],
        "notes": run["notes"],
    }


def _memory(run: Json) -> list[Pair]:
    return [_sizes(row["class"], row["planned_bytes"], row["seen_bytes"]) for row in rows(run["memory"])]


def _traffic(run: Json) -> list[Pair]:
    return [
        _sizes(f"{row['axis']} {row['kind'].replace('_', '-')} {row['dtype']}", row["planned_bytes"], row["seen_bytes"])
        for row in rows(run["traffic"])
    ]


def _sizes(name: str, planned: float | None, seen: float | None) -> Pair:
    first, second = ("-" if value is None else size(value) for value in (planned, seen))
    return Pair(name, planned, seen, (first, second))


def _times(run: Json) -> list[Pair]:
    found = []
    for key, (name, words) in TIMES.items():
        planned, seen = (number(mapping(run["time"]).get(f"{side}_{key}")) for side in ("planned", "seen"))
        if planned is not None or seen is not None:
            found.append(Pair(name, planned, seen, (words(planned), words(seen))))
    return found


def _cells(pairs: list[Pair]) -> list[tuple[str, str, str, str]]:
    return [(f"  {pair.name}", *pair.words, pair.ratio) for pair in pairs]


def _with_bars(pairs: list[Pair]) -> list[dict[str, Any]]:
    """Return rows with bars; the memory of a whole process is not on the same scale, and gets none."""
    most = max((value or 0.0 for pair in pairs if pair.name != PROCESS for value in pair[1:3]), default=0.0)
    return [
        {
            "name": pair.name,
            "cells": pair.words,
            "ratio": pair.ratio,
            "most": most,
            "bars": [
                (kind, value or 0.0, words)
                for kind, value, words in zip(("planned", "seen"), pair[1:3], pair.words, strict=True)
                if pair.name != PROCESS
            ],
        }
        for pair in pairs
    ]


def _tiles(run: Json) -> Iterator[tuple[str, str, str]]:
    """Return the tiles of the page: name, figure, and a note below it."""
    of = f" of {run['max_steps']:,.0f}" if run["max_steps"] else ""
    yield "trained", f"{plural(run['step'], 'step')}{of}", f"{count(run['tokens'])} tokens"
    if loss := mapping(run["loss"]):
        evaluation = run["eval_loss"]
        yield (
            "loss",
            f"{loss['last']:.4f}",
            f"from {_first(loss)}" + ("" if evaluation is None else f", evaluation {evaluation:.4f}"),
        )
    speed = number(run["time"].get("seen_tokens_per_s"))
    if speed is not None:
        yield "speed", f"{speed:,.0f}", "tokens/s on all ranks"
    for row in rows(run["memory"]):
        if row["class"] in ("peak", PROCESS) and row["seen_bytes"] is not None:
            yield "peak memory", size(row["seen_bytes"]), "of a rank" if row["class"] == "peak" else "of a process"
