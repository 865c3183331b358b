"""What was found, for its readers: a table for people, JSON for programs, both in dated files for the record."""

import datetime
import itertools
import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..planner.hardware.links import parse
from .compare import Findings, Session
from .machine import machine
from .model import num_params
from .names import label
from .overlap import Overlap, in_words
from .rows import Row, Spread, rows_of

__all__ = ["document", "name_of", "new_page", "print_table", "problems", "rows_of", "write"]

SCHEMA = 1


def note_of(findings: Findings) -> str:
    """How to read the figures."""
    session = findings.session
    case = session.settings[0]
    models = dict.fromkeys(setting.shape for setting in session.settings)
    sizes = "; ".join(
        f"{shape.name}: {num_params(shape) / 1e6:.1f}M parameters, {case.batch} x {shape.tokens} tokens"
        for shape in models
    )
    fabrics = " or ".join(dict.fromkeys(setting.fabric for setting in session.settings))
    where = (
        f"one process playing rank 0 of an emulated fabric ({fabrics})"
        if case.fabric
        else f"{case.world_size} ranks in nodes of {case.node_size} ({'nccl' if case.device == 'cuda' else 'gloo'})"
    )
    how = [
        f"{case.micro_batches} micro-batches a step" if case.micro_batches > 1 else "",
        f"gradients clipped to {case.clip:g}" if case.clip else "",
        "blocks compiled" if case.compile else "",
        f"{case.checkpointing} activation checkpointing" if case.checkpointing != "none" else "",
    ]
    repeated = f", then of {session.repetitions} repetitions" if session.repetitions > 1 else ""
    compared = " or ".join(
        dict.fromkeys(seen.compared_with for seen in findings.verdicts.values() if seen.compared_with)
    )
    sentences = [
        f"{sizes}; {case.precision} on {where}{''.join(f', {word}' for word in how if word)}.",
        f"Gradients are reduced in {' or '.join(dict.fromkeys(s.reduce for s in session.settings))}.",
        f"Median of {case.steps} steps after {case.warmup}{repeated}; min-max over all steps.",
        "`vs` is the peer's time / ours, taken within a repetition.",
    ]
    if case.fabric:
        sentences += [
            f"Other ranks are copies, so losses mean nothing here; the first was compared with that of {compared}.",
            "`intra s` and `inter s` are what the traffic of a step takes on these wires if nothing else runs.",
        ]
    else:
        sentences += [f"Losses of all steps were compared with those of {compared}."]
    if case.device == "cuda":
        sentences += ["MFU: 6 x parameters (without the embedding) + 12 x layers x hidden x tokens FLOP for a token."]
    if findings.num_left:
        sentences += [f"Cut short: {findings.num_left} more runs were asked for."]
    return " ".join(sentences)


def document(findings: Findings, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(["shardwise", *sys.argv[1:]]),
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "machine": machine(findings),
        "note": note_of(findings),
        "rows": [asdict(row) for row in rows],
        "runs": [
            {"case": asdict(case), "outcomes": [asdict(outcome) for outcome in outcomes]}
            for case, outcomes in findings.outcomes.items()
        ],
        "calls": {
            f"{label(case.contender)}, {case.shape.name}": dict(
                sorted(calls.by_function.items(), key=lambda item: -item[1])
            )
            for case, calls in findings.calls.items()
        },
    }


Cell = Callable[[Row], str]

# Columns that are left out where they say the same in every row; the note says it once.
SAID_ONCE = ("shape", "tokens", "link GB/s", "reduce")


def columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The cells of the table by column, without columns that say nothing."""
    peers = dict.fromkeys(peer for row in rows for peer in row.ratios)
    wires = dict.fromkeys(wire for row in rows for wire, busy_s in row.wire_s.items() if busy_s)
    cells: dict[str, Cell] = {
        "contender": lambda row: row.contender,
        "shape": lambda row: row.shape,
        "tokens": lambda row: str(row.tokens),
        "link GB/s": lambda row: "" if row.kind == "floor" else _figure(row.link_gigabytes_per_s, "g"),
        "reduce": lambda row: "" if row.kind == "floor" else row.reduce,
        "s per step": lambda row: f"{row.seconds.median:.4f}" if row.seconds else row.status,
        "min-max": lambda row: f"{row.seconds.min:.4f}-{row.seconds.max:.4f}" if row.seconds else "",
        **{f"vs {peer}": _ratio_to(peer) for peer in peers},
        "tokens/s/rank": lambda row: _figure(row.tokens_per_s, ".0f"),
        "MFU": lambda row: _figure(row.mfu, ".1%"),
        **{f"{wire} s": _wire_s(wire) for wire in wires},
        "moved GB": lambda row: _figure(row.moved_bytes and row.moved_bytes / 1e9, ".3g"),
        **{f"{kind} GB": _memory(f"{kind}_gb") for kind in ("allocated", "active", "reserved", "host")},
        "calls": lambda row: _figure(row.calls_per_unit, ".0f"),
        "set-up s": lambda row: _figure(row.setup_s, ".1f"),
    }
    found = {title: [cell(row) for row in rows] for title, cell in cells.items()}
    return {
        title: texts
        for title, texts in found.items()
        if any(texts) and (title not in SAID_ONCE or len({*texts} - {""}) > 1)
    }


def _ratio_to(peer: str) -> Cell:
    return lambda row: _ratio(row.ratios.get(peer))


def _wire_s(wire: str) -> Cell:
    return lambda row: _figure(row.wire_s.get(wire), ".4f")


def _memory(kind: str) -> Cell:
    return lambda row: _figure(row.memory.get(kind), ".1f")


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _ratio(ratio: Spread | None) -> str:
    if ratio is None:
        return ""
    around = f" ({ratio.min:.2f}-{ratio.max:.2f})" if ratio.min != ratio.max else ""
    return f"{ratio.median:.2f}{around}"


def problems(rows: Sequence[Row]) -> list[str]:
    return [f"{row.contender} ({row.status}): {row.error}" for row in rows if row.status != "ok"]


def print_table(rows: Sequence[Row], note: str) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    cells = columns(rows)
    for title in cells:
        table.add_column(title, justify="left" if title == "contender" else "right", no_wrap=True)
    for texts in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, texts))  # as it is: names of mixes have brackets
    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(width=max(console.width, needed)).print(table)  # a wide table is wrapped by the terminal, not cut
    console.print(note, markup=False)
    for problem in problems(rows):
        console.print(problem, style="red", markup=False)


def markdown(about: dict[str, Any], rows: Sequence[Row]) -> str:
    cells = columns(rows)
    lines = ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    lines += [f"| `{name}` | " + " | ".join(texts) + " |" for name, *texts in zip(*cells.values(), strict=True)]
    described = ", ".join(f"{key} {value}" for key, value in about["machine"].items())
    parts = [f"# shardwise bench, {about['date']}", about["note"], f"    {about['command']}", described]
    parts += ["\n".join(lines), *(f"- {problem}" for problem in problems(rows)), *_overlaps(rows)]
    return "\n\n".join(parts) + "\n"


def _overlaps(rows: Sequence[Row]) -> list[str]:
    """Of the steps that were traced, under the profiler: a block for each."""
    return [
        f"`{row.contender}`, {row.shape}, {row.tokens} tokens, one step under the profiler:\n\n"
        + textwrap.indent(in_words(Overlap(**row.overlap)), "    ")
        for row in rows
        if row.overlap
    ]


def new_page(folder: Path, name: str) -> Path:
    """`<date>-<name>.md`, beside what is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = f"{datetime.datetime.now():%Y-%m-%d-%H%M}-{name}"
    names = (begin if number == 1 else f"{begin}-{number}" for number in itertools.count(1))
    return next(folder / f"{name}.md" for name in names if not (folder / f"{name}.json").exists())


def write(findings: Findings, page: Path) -> None:
    """The table, and beside it everything in JSON."""
    rows = rows_of(findings)
    about = document(findings, rows)
    page.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    page.write_text(markdown(about, rows))


def name_of(session: Session) -> str:
    """For the files: the shapes, and where they ran."""
    case = session.settings[0]
    shapes = "-".join(dict.fromkeys(setting.shape.name for setting in session.settings))
    if not case.fabric:
        return f"bench-{shapes}-{case.world_size}-ranks"
    fabric = parse(case.fabric)
    return f"bench-{shapes}-fabric-{fabric.num_nodes}x{fabric.node_size}"
