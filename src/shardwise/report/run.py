"""A run compared with its plan, from the files in its folder alone; the run may still be going on.

`metrics.jsonl` has the measurements, `plan.json` the prediction, `traffic.json` both for the bytes of a step. `notes`
lists what is missing. There are no allocator statistics on a CPU: the memory of the whole process is shown instead.
"""

import math
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..base.documents import MOST_JSON_BYTES, parse
from ..base.errors import ConfigurationError
from ..base.files import read_regular
from ..base.text import plural, size
from .charts import Curve, Point
from .descriptions import cluster_words
from .plan_facts import Json, amount, mapping, mfu, number, rows, text_of, world_size

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
    world = world_size(plan) if plan else 0
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
        "ranks": world,
        "runs": text_of(rows(plan.get("strategies"))[0].get("name")) if plan else "",
        "device": cluster_words(plan) if plan else "",
        "loss": _loss(steps),
        "eval_loss": evaluations[-1]["eval_loss"] if evaluations else None,
        "earlier": [
            {"name": start.name, "ranks": start.num_ranks, "first_step": start.first, "last_step": start.last}
            | {"memory": memory_beside(start.rows, None), "time": _time(start.rows, steps, None, 0)}
            for start in earlier
        ],
        "memory": memory_beside(newest.rows, plan),
        "traffic": _traffic(folder / TRAFFIC, notes),
        "time": _time(newest.rows, steps, plan, world),
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
    time = _time(start.rows, start.rows, None, 0)
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


def _traffic(file: Path, notes: list[str]) -> list[Json]:
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


def _time(timed: list[Json], steps: list[Json], plan: Json | None, world: int) -> Json:
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
        strategy = rows(plan.get("strategies"))[0]
        speed = number(strategy.get("tokens_per_second_per_gpu"))
        found |= {"planned_step_s": number(strategy.get("step_seconds")), "planned_mfu": mfu(plan, strategy)}
        found["planned_tokens_per_s"] = speed * world if speed is not None and world else None
    return found


def _tokens_per_step(steps: list[Json]) -> float | None:
    """Return tokens per step from the last two rows with a count: earlier batches may have had another size."""
    known = [row for row in steps if number(row.get("tokens")) is not None]
    if len(known) < 2:
        return known[0]["tokens"] / known[0]["step"] if known and known[0]["step"] else None
    return (known[-1]["tokens"] - known[-2]["tokens"]) / (known[-1]["step"] - known[-2]["step"])
