"""Predicted and measured memory, traffic and time of a run: text for a terminal, and parts of the page."""

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from markupsafe import Markup

from ..base.text import count, plural, size, terminal_width
from .charts import draw, plain_bar
from .plan_facts import Json, mapping, number, rows, seconds, text_of
from .run import PROCESS, curve_of

TIMES = {"step_s": "step", "tokens_per_s": "tokens/s, all ranks", "mfu": "MFU"}


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
    chart = draw(curve) if curve.train or curve.evaluation else None
    conditions = [("folder", run["folder"]), *((key, run[key]) for key in ("model", "strategy", "precision"))]
    return {
        "about": about(run),
        "tiles": list(_tiles(run)),
        "chart": None if chart is None else chart | {key: Markup(chart[key]) for key in ("drawing", "axis")},
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
    for key, name in TIMES.items():
        planned, seen = (number(mapping(run["time"]).get(f"{side}_{key}")) for side in ("planned", "seen"))
        if planned is not None or seen is not None:
            found.append(Pair(name, planned, seen, (_timed(key, planned), _timed(key, seen))))
    return found


def _timed(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return seconds(value) if key == "step_s" else f"{value:.1%}" if key == "mfu" else f"{value:,.0f}"


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
            "bars": [
                Markup(plain_bar(value or 0.0, most, kind, f"{pair.name}, {kind}: {words}"))
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
