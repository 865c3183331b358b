"""A run compared with its plan, as a value, as text and as parts of the page. The run may still be in progress.

All data comes from the files in the run's folder: `metrics.jsonl` has the measurements, `plan.json` the prediction, and
`traffic.json` the predicted and the measured bytes of a step. `notes` lists what is missing. A CPU has no allocator
statistics; the memory of the process is shown instead. In the JSON, predicted figures are `planned`, measured `seen`.
"""

import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..base.documents import MOST_JSON_BYTES, find, parse
from ..base.errors import ConfigurationError
from ..base.files import read_regular
from ..base.text import count, plural, seconds, size, terminal_width
from .charts import draw_curve
from .plan_facts import Json, Plan, Strategy, amount, mapping, number, percent, rows, text_of, whole

CONFIG, METRICS, LEFT, PLAN, TRAFFIC = "config.json", "metrics.jsonl", "metrics-left.jsonl", "plan.json", "traffic.json"
SAMPLES = "samples.jsonl"
MAX_SAMPLES, MAX_SAMPLE_LINES = 5, 3  # that the text shows
_MOST_ROWS_BYTES = 512 << 20  # maximum size of the metrics: a million rows
PROCESS = "whole process"
# The keys of a metrics row by memory class.
MEASURED = {
    "params": "memory_params",
    "grads": "memory_peak_grads",
    "optimizer": "memory_optimizer",
    "buffers": "memory_peak_buffers",
    "activations": "memory_peak_activations",
    "peak": "memory_peak",
    "reserved": "memory_reserved",
}


def read_run(folder: Path) -> tuple[Json, Json | None]:
    """Read a run folder. Return the run, and its plan if there is one."""
    notes: list[str] = []
    config = _config_in(folder, notes)
    metrics = _rows_in(folder / METRICS, notes)
    plan = _json_in(folder / PLAN, notes, "nothing to compare memory and time with")
    if plan is not None and not rows(plan.get("strategies")):
        notes.append("plan.json holds no strategy: nothing to compare memory and time with.")
        plan = None
    steps, evaluations = _by_step(metrics, "loss"), _by_step(metrics, "eval_loss")
    samples = _rows_in(folder / SAMPLES, notes)
    # Of the last evaluation. It was made twice if a finished run was started again.
    samples = [*{text_of(row.get("prompt")): row for row in samples if row["step"] == samples[-1]["step"]}.values()]
    if not steps:
        notes.append("No step is in metrics.jsonl yet: there is no loss, memory or time to show.")
    last = steps[-1] if steps else {}
    *earlier, (_, newest) = _starts(steps, plan)
    earlier = [(start, rows_of_start) for start, rows_of_start in earlier if rows_of_start]
    notes += [_summary(start, rows_of_start) for start, rows_of_start in earlier]
    planned = Plan(plan or {})
    run = {
        "folder": str(folder),
        "name": folder.resolve().name,
        **{name: text_of(config.get(name)) for name in ("model", "strategy", "precision")},
        "step": int(amount(last, "step")),
        "max_steps": number(config.get("max_steps")),
        "tokens": int(amount(last, "tokens")),
        "ranks": planned.world_size,
        "runs": text_of(rows(plan["strategies"])[0].get("name")) if plan else "",
        "device": planned.cluster_words,
        "loss": _loss(steps),
        "eval_loss": evaluations[-1]["eval_loss"] if evaluations else None,
        "earlier": [
            {**start, "memory": _memory(rows_of_start, None), "time": _time(rows_of_start, steps)}
            for start, rows_of_start in earlier
        ],
        "memory": _memory(newest, plan),
        "traffic": _traffic_in(folder / TRAFFIC, notes),
        "time": _time(newest, steps, plan),
        "curve": {
            "train": [[int(row["step"]), row["loss"]] for row in steps],
            "evaluation": [[int(row["step"]), row["eval_loss"]] for row in evaluations],
            "left": _abandoned(_rows_in(folder / LEFT, [])),
        },
        "samples": [{**sample, "step": int(sample["step"])} for sample in samples],
        "notes": notes,
    }
    return run, plan


def _config_in(folder: Path, notes: list[str]) -> Json:
    if find(folder) is None:
        raise ConfigurationError(f"{folder}: there is no such folder")
    why = f"it has no {CONFIG}"
    if find(folder / CONFIG) is not None:
        config = _json_in(folder / CONFIG, notes) or {}
        if "strategy" in config or (folder / METRICS).exists() or (folder / PLAN).exists():
            return config
        why = f"its {CONFIG} is not of a run, and it has no {METRICS}"
    raise ConfigurationError(f"{folder} is no run folder: {why}; give one that `shardwise train` made")


def _json_in(file: Path, notes: list[str], without: str = "") -> Json | None:
    """Read a JSON object. If that fails, add a note and return None. `without`: what the missing file leads to."""
    if not file.exists():
        notes.append(f"There is no {file.name} in this run's folder: {without}.")
        return None
    try:
        return mapping(parse(read_regular(file, MOST_JSON_BYTES)))
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read: {error}.")
        return None


def _rows_in(file: Path, notes: list[str]) -> list[Json]:
    """Return every complete row with a step. A last line that is still being written is left out."""
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


def _by_step(metrics: list[Json], key: str) -> list[Json]:
    """Return the rows with a number under `key`: one per step, the last one written, in order."""
    steps = {row["step"]: row for row in metrics if number(row.get(key)) is not None}
    return [steps[step] for step in sorted(steps)]


def _abandoned(left: list[Json]) -> list[list[list[float]]]:
    """Split rows into abandoned branches of the loss curve: a new one begins where the step number does not rise."""
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


def _starts(steps: list[Json], plan: Json | None) -> Iterator[tuple[Json, list[Json]]]:
    """Yield each start of the run (strategy, ranks, first and last step) with its rows, in order. The plan describes
    the last start. If the plan has no list of starts, all steps count as one start."""
    known = rows((plan or {}).get("starts")) or [{}]
    firsts = [int(amount(start, "first_step")) for start in known]
    for start, first, last in zip(known, firsts, [*firsts[1:], math.inf], strict=True):
        about = {"name": text_of(start.get("name")), "ranks": int(amount(start, "num_ranks"))}
        within = [row for row in steps if first < row["step"] <= last]
        yield {**about, "first_step": first + 1, "last_step": last}, within


def _summary(start: Json, within: list[Json]) -> str:
    time = _time(within, within)
    peak = max(amount(row, "memory_peak") for row in within)
    words = [f"{time['seen_tokens_per_s']:,.0f} tokens/s"] if "seen_tokens_per_s" in time else []
    words += [f"peak memory {size(peak)} a rank"] if peak else []
    return (
        f"Steps {start['first_step']:,} to {start['last_step']:,} ran as {start['name']} on "
        f"{plural(start['ranks'], 'rank')}{': ' if words else ''}{', '.join(words)}. "
        "Memory and time are of the steps after them."
    )


def _loss(steps: list[Json]) -> Json:
    """Return the first and the last loss. A row has the mean since the row before; `first_loss` is that of step 1."""
    if not steps:
        return {}
    known, begin = number(steps[0].get("first_loss")), int(steps[0]["step"])
    return {
        "first": steps[0]["loss"] if known is None else known,
        "first_step": begin if known is None else 1,
        "last": steps[-1]["loss"],
    }


def _predicted_memory(strategy: Json) -> dict[str, float | None]:
    """Return the predicted memory in the classes of a metrics row. Activations are the part of the peak that is neither
    persistent state nor buffers."""
    held, persistent = mapping(strategy.get("per_gpu_bytes")), mapping(strategy.get("rests"))
    found = {name: number(persistent.get(name, held.get(name))) for name in ("params", "grads", "optimizer")}
    buffers = amount(held, "gathered") + amount(held, "reduce")
    found["buffers"] = number(persistent.get("buffers", buffers)) if held else None
    peak = number(held.get("peak_active"))
    activations = None if peak is None else max(peak - sum(value or 0 for value in found.values()), 0)
    return {**found, "activations": activations, "peak": peak, "reserved": number(held.get("peak_reserved"))}


def _memory(steps: list[Json], plan: Json | None) -> list[Json]:
    expected = _predicted_memory(rows(plan["strategies"])[0] if plan else {})
    measured = {name: max(_numbers(steps, key), default=None) for name, key in MEASURED.items()}
    if measured["reserved"] is None:
        expected["reserved"] = None
        # On a CPU the peak includes the whole process, with Python and the data, which the plan does not predict.
        if steps:
            measured[PROCESS], measured["peak"] = measured["peak"], None
    found = [
        {"class": name, "planned_bytes": expected.get(name), "seen_bytes": seen} for name, seen in measured.items()
    ]
    return [row for row in found if row["planned_bytes"] is not None or row["seen_bytes"] is not None]


def _numbers(steps: list[Json], key: str) -> list[float]:
    return [value for row in steps if (value := number(row.get(key))) is not None]


def _traffic_in(file: Path, notes: list[str]) -> list[Json]:
    found = _json_in(file, notes, "what a step moved is not known") or {}
    names = ("axis", "kind", "dtype")
    sides = {
        side: {tuple(text_of(row.get(name)) for name in names): row for row in rows(found.get(side))}
        for side in ("planned", "seen")
    }
    return [
        {
            **dict(zip(names, key, strict=True)),
            **{f"{side}_calls": number(sides[side].get(key, {}).get("num_calls")) for side in sides},
            **{f"{side}_bytes": number(sides[side].get(key, {}).get("wire_bytes")) for side in sides},
        }
        for key in sorted({*sides["planned"], *sides["seen"]})
    ]


def _time(timed: list[Json], steps: list[Json], plan: Json | None = None) -> Json:
    """Compare step times. The measured one is the median of all rows but the first, which holds the warm-up."""
    timed = timed[1:] or timed
    speeds, mfus = _numbers(timed, "tokens_per_s"), _numbers(timed, "mfu")
    found: Json = {}
    if speeds:
        found["seen_tokens_per_s"] = median(speeds)
        if tokens := _tokens_per_step(steps):
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
    known = [(row["step"], row["tokens"]) for row in steps if number(row.get("tokens")) is not None]
    (before, tokens_before), (last, tokens) = [(0, 0), (0, 0), *known][-2:]
    return (tokens - tokens_before) / (last - before) if last > before else None


class Pair(NamedTuple):
    """One quantity, predicted and measured; None: unknown. `words` formats a number."""

    name: str
    planned: float | None
    seen: float | None
    words: Callable[[float | None], str] = lambda value: "-" if value is None else size(value)

    @property
    def cells(self) -> tuple[str, str, str]:
        ratio = f"{self.seen / self.planned:.3f}" if self.planned and self.seen is not None else "-"
        return self.words(self.planned), self.words(self.seen), ratio

    @property
    def bars(self) -> list[tuple[str, float, str]]:
        """(label, value, text) of two bars. The memory of a whole process has no bars: its scale is different."""
        if self.name == PROCESS:
            return []
        values = {"predicted": self.planned, "measured": self.seen}
        return [(side, value or 0.0, self.words(value)) for side, value in values.items()]


_TIMES = {"step_s": ("step", seconds), "tokens_per_s": ("tokens/s, all ranks", whole), "mfu": ("MFU", percent)}


def comparisons(run: Json) -> dict[str, list[Pair]]:
    """Return the tables of predicted and measured quantities by title, without empty ones."""
    memory = [Pair(row["class"], row["planned_bytes"], row["seen_bytes"]) for row in rows(run["memory"])]
    traffic = [
        Pair(f"{row['axis']} {row['kind'].replace('_', '-')} {row['dtype']}", row["planned_bytes"], row["seen_bytes"])
        for row in rows(run["traffic"])
    ]
    times = [
        Pair(name, run["time"].get(f"planned_{key}"), run["time"].get(f"seen_{key}"), words)
        for key, (name, words) in _TIMES.items()
    ]
    times = [pair for pair in times if pair.planned is not None or pair.seen is not None]
    found = {"memory of a rank": memory, "traffic of a step and rank": traffic, "time": times}
    return {title: pairs for title, pairs in found.items() if pairs}


def text(run: Json) -> str:
    of = f" of {run['max_steps']:,.0f}" if run["max_steps"] else ""
    lines = [f"{run['folder']}: {about(run)}", f"  step {run['step']:,}{of}, {count(run['tokens'])} tokens", ""]
    if loss := mapping(run["loss"]):
        evaluation = "" if run["eval_loss"] is None else f", evaluation {run['eval_loss']:.4f}"
        lines += [f"  loss  {_first(loss)} -> {loss['last']:.4f}{evaluation}", ""]
    table: list[tuple[str, ...]] = []
    for title, pairs in comparisons(run).items():
        table += [(title, "predicted", "measured", "ratio"), *((f"  {pair.name}", *pair.cells) for pair in pairs)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *cells in table:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"  {name:<{widths[0]}}", *numbers]).rstrip())
    lines += [""] if table else []
    wrapper = textwrap.TextWrapper(terminal_width(), break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent = wrapper.subsequent_indent = "  "
    lines += [f"  generated at step {run['samples'][0]['step']:,}:"] if run["samples"] else []
    for sample in run["samples"][:MAX_SAMPLES]:
        shown = wrapper.wrap(f"{text_of(sample.get('prompt'))} -> {text_of(sample.get('text'))}")
        lines += [*shown[:MAX_SAMPLE_LINES], *(["  ..."] if len(shown) > MAX_SAMPLE_LINES else [])]
    lines += [""] if run["samples"] else []
    for note in run["notes"]:
        lines += wrapper.wrap(note)
    return "\n".join(lines).rstrip()


def _first(loss: Json) -> str:
    step = loss["first_step"]
    return f"{loss['first']:.4f}" + (f" (step {step:,})" if step > 1 else "")


def about(run: Json) -> str:
    """Describe the run and its machine, for example "tiny, ddp (auto) on 2 x cpu, fp32"."""
    requested, runs = text_of(run["strategy"]), run["runs"]
    strategy = f"{runs} ({requested})" if runs and requested and requested != runs else runs or requested
    where = f" on {run['device']}" if run["device"] else ""
    words = (run["model"], f"{strategy}{where}", run["precision"])
    return ", ".join(text_of(word) for word in words if word)


def page_parts(run: Json) -> Json:
    curve = run["curve"]
    return {
        "about": about(run),
        "tiles": list(_tiles(run)),
        "curve": curve,
        "chart": draw_curve(curve) if curve["train"] or curve["evaluation"] else None,
        "comparisons": comparisons(run),
        "conditions": {name: text_of(run[name]) for name in ("folder", "model", "strategy", "precision") if run[name]},
        "notes": run["notes"],
    }


def _tiles(run: Json) -> Iterator[tuple[str, str, str]]:
    """Yield the tiles of the page: name, figure, and a note below it."""
    of = f" of {run['max_steps']:,.0f}" if run["max_steps"] else ""
    yield "trained", f"{plural(run['step'], 'step')}{of}", f"{count(run['tokens'])} tokens"
    if loss := mapping(run["loss"]):
        evaluation = "" if run["eval_loss"] is None else f", evaluation {run['eval_loss']:.4f}"
        yield "loss", f"{loss['last']:.4f}", f"from {_first(loss)}{evaluation}"
    if "seen_tokens_per_s" in run["time"]:
        yield "speed", whole(run["time"]["seen_tokens_per_s"]), "tokens/s on all ranks"
    for row in rows(run["memory"]):
        if row["class"] in ("peak", PROCESS) and row["seen_bytes"] is not None:
            yield "peak memory", size(row["seen_bytes"]), "of a rank" if row["class"] == "peak" else "of a process"
