"""What codecs do to training, for its readers: tables for people, JSON for programs, both in dated files."""

import datetime
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.text import count
from .machine import commit, processor
from .wire import Asked, Findings
from .wire_run import Seen

SCHEMA = 1
NUM_LAST = 20  # steps whose mean is the loss of a run

Cells = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy beside the exact one. Differences are shares of the exact one's; what is not known is None."""

    strategy: str
    status: str
    error: str
    loss: float | None = None  # mean of the last steps
    loss_difference: float | None = None
    eval_loss: float | None = None
    eval_difference: float | None = None
    largest_difference: float | None = None  # of a step's loss, over all steps
    largest_at: int | None = None  # that step
    wire_bytes: float | None = None
    planned_wire_bytes: float | None = None
    inter_node_bytes: float | None = None
    fewer_between_nodes: float | None = None  # the exact one's over these
    step_s: float | None = None


def rows_of(findings: Findings) -> list[Row]:
    exact = findings.runs.get(findings.asked.exact)
    return [_row(seen, exact, findings.asked.num_steps) for seen in findings.runs.values()]


def _row(seen: Seen, exact: Seen | None, num_steps: int) -> Row:
    about = {
        name: getattr(seen, name)
        for name in ("strategy", "status", "error", "eval_loss", "wire_bytes", "planned_wire_bytes", "inter_node_bytes")
    }
    loss = _last(seen, num_steps)
    if exact is None or exact.losses is None or seen.losses is None:
        return Row(**about, loss=loss, step_s=seen.step_s)
    own = {step: abs(_share(loss, exact.losses[step])) for step, loss in seen.losses.items() if step in exact.losses}
    largest_at = max(own, key=own.__getitem__, default=None)
    exact_loss = _last(exact, num_steps)
    return Row(
        **about,
        loss=loss,
        loss_difference=None if loss is None or exact_loss is None else _share(loss, exact_loss),
        eval_difference=None
        if seen.eval_loss is None or exact.eval_loss is None
        else _share(seen.eval_loss, exact.eval_loss),
        largest_difference=None if largest_at is None else own[largest_at],
        largest_at=largest_at,
        fewer_between_nodes=exact.inter_node_bytes / seen.inter_node_bytes
        if exact.inter_node_bytes and seen.inter_node_bytes
        else None,
        step_s=seen.step_s,
    )


def _share(own: float, exact: float) -> float:
    return own / exact - 1.0


def _last(seen: Seen, num_steps: int) -> float | None:
    """Of a run that came to its end."""
    losses = seen.losses or {}
    last = [losses[step] for step in range(max(1, num_steps - NUM_LAST + 1), num_steps + 1) if step in losses]
    return statistics.fmean(last) if num_steps in losses else None


def problems(findings: Findings) -> list[str]:
    told = [f"{seen.strategy} ({seen.status}): {seen.error}" for seen in findings.runs.values() if seen.status != "ok"]
    for seen in findings.runs.values():
        if seen.status == "ok" and seen.wire_bytes != seen.planned_wire_bytes:
            told.append(
                f"{seen.strategy}: a step moved {seen.wire_bytes} bytes, and {seen.planned_wire_bytes} were planned"
            )
    return told + ([f"what codecs lose was not measured: {findings.codecs_error}"] if findings.codecs_error else [])


def document(findings: Findings) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(["shardwise", *sys.argv[1:]]),
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "machine": machine(findings.asked),
        "note": note_of(findings),
        "settings": asdict(findings.asked.settings),
        "rows": [asdict(row) for row in rows_of(findings)],
        "runs": [asdict(seen) for seen in findings.runs.values()],
        "codecs": findings.codecs,
    }


def machine(asked: Asked) -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": torch.cuda.get_device_name() if asked.settings.device == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def note_of(findings: Findings) -> str:
    """How to read the figures."""
    asked = findings.asked
    known = next((seen for seen in findings.runs.values() if seen.num_params and seen.tokens_per_step), None)
    size = f", {count(known.num_params or 0)} parameters, {known.tokens_per_step:.0f} tokens a step" if known else ""
    sentences = [
        f"{asked.settings.model}{size}; {asked.settings.precision} on {asked.num_ranks} ranks in nodes of "
        f"{asked.node_size}, {asked.num_steps} steps each from the same weights on the same data.",
        f"`loss` is the mean of the last {min(NUM_LAST, asked.num_steps)} steps, `evaluation` that of samples that are "
        f"not trained on; `vs` are differences to {asked.exact}, `largest` is that of a step's loss, at that step.",
        "MB are what one rank sends in a step, as counted, and what of it has to cross its node's border.",
        "Matrices are encoded; norms, biases and embeddings travel as they are.",
    ]
    if findings.num_left:
        sentences.append(f"Cut short: {findings.num_left} more runs were asked for.")
    return " ".join(sentences)


def codecs_note(findings: Findings, what: str) -> str:
    found = findings.codecs
    asked, elements = findings.asked, f"{count(found[f'num_{what}'])} elements of matrices"
    when = f"after {asked.num_steps} steps of {asked.exact}, {elements}"
    if what == "gradients":
        return f"Codecs on gradients: {found['gradient_dtype']}, of one micro-batch of one rank {when}."
    return f"Codecs on weights: {when}."


def strategy_cells(findings: Findings) -> Cells:
    """The table by column, without columns that say nothing."""
    exact, rows = findings.asked.exact, rows_of(findings)
    # The exact one differs from itself in nothing.
    beside = [Row(row.strategy, row.status, row.error) if row.strategy == exact else row for row in rows]
    cells = {
        "strategy": [row.strategy for row in rows],
        "loss": [_figure(row.loss, ".4f") or row.status for row in rows],
        f"vs {exact}": [_figure(row.loss_difference, "+.2%") for row in beside],
        "evaluation": [_figure(row.eval_loss, ".4f") for row in rows],
        "vs": [_figure(row.eval_difference, "+.2%") for row in beside],
        "largest": [_largest(row) for row in beside],
        "MB": [_megabytes(row.wire_bytes) for row in rows],
        "between nodes MB": [_megabytes(row.inter_node_bytes) for row in rows],
        "times fewer": [_figure(row.fewer_between_nodes, ".2f") for row in beside],
        "s per step": [_figure(row.step_s, ".4f") for row in rows],
    }
    return {title: texts for title, texts in cells.items() if any(texts)}


def codec_cells(found: Sequence[Mapping[str, Any]]) -> Cells:
    return {
        "codec": [row["codec"] for row in found],
        "relative RMS error": [_figure(row["relative_rms"], ".3e") or "not finite" for row in found],
        "of the worst unit": [_figure(row["worst_relative_rms"], ".3e") or "not finite" for row in found],
        "cosine": [_figure(row["cosine"], ".6f") or "not finite" for row in found],
        "bytes per element": [f"{row['bytes_per_elem']:.4f}" for row in found],
        "encode ms per million": [f"{row['encode_s'] * 1e3:.3f}" for row in found],
        "decode ms per million": [f"{row['decode_s'] * 1e3:.3f}" for row in found],
    }


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _largest(row: Row) -> str:
    return "" if row.largest_difference is None else f"{row.largest_difference:.2%} ({row.largest_at})"


def _megabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.4f}"


def _sections(findings: Findings) -> list[tuple[str, Cells]]:
    tables = [(note_of(findings), strategy_cells(findings))]
    for what in ("gradients", "weights"):
        if findings.codecs.get(what):
            tables.append((codecs_note(findings, what), codec_cells(findings.codecs[what])))
    return tables


def print_tables(findings: Findings) -> None:
    console = Console(highlight=False)
    for note, cells in _sections(findings):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for index, title in enumerate(cells):
            table.add_column(Text(title), justify="right" if index else "left", no_wrap=True)
        for texts in zip(*cells.values(), strict=True):
            table.add_row(*map(Text, texts))
        needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
        Console(width=max(console.width, needed)).print(table)  # a wide table is wrapped by the terminal, not cut
        console.print(note, markup=False)
    for problem in problems(findings):
        console.print(problem, style="red", markup=False)


def markdown(findings: Findings, about: Mapping[str, Any]) -> str:
    (note, cells), *codecs = _sections(findings)
    described = ", ".join(f"{key} {value}" for key, value in about["machine"].items())
    parts = [f"# shardwise bench wire, {about['date']}", note, f"    {about['command']}", described, _as_table(cells)]
    parts += [f"- {problem}" for problem in problems(findings)]
    for words, more in codecs:
        parts += [words, _as_table(more)]
    return "\n\n".join(parts) + "\n"


def _as_table(cells: Cells) -> str:
    lines = ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    lines += [f"| `{name}` | " + " | ".join(texts) + " |" for name, *texts in zip(*cells.values(), strict=True)]
    return "\n".join(lines)


def write(findings: Findings, page: Path) -> None:
    """The tables, and beside them everything in JSON."""
    about = document(findings)
    page.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    page.write_text(markdown(findings, about))


def name_of(asked: Asked) -> str:
    """For the files."""
    model = Path(asked.settings.model)
    return f"bench-wire-{model.stem if model.suffix == '.json' else model.name}-{asked.num_ranks}-ranks"
