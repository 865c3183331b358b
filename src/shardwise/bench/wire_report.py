"""The results of `shardwise bench wire` for readers: the rows, the tables, and the notes that explain them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..base.text import count
from .pages import Columns, Report, figure, machine
from .wire import Findings, Request, TrainedRun

NUM_LAST = 20  # steps whose mean is the loss of a run


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy compared with the exact one. Differences are relative; an unknown figure is None."""

    strategy: str
    status: str
    error: str
    loss: float | None = None  # mean of the last steps
    loss_difference: float | None = None
    eval_loss: float | None = None
    eval_difference: float | None = None
    largest_difference: float | None = None  # of the loss of one step
    largest_at: int | None = None  # the number of that step
    wire_bytes: float | None = None
    planned_wire_bytes: float | None = None
    inter_node_bytes: float | None = None
    fewer_between_nodes: float | None = None  # the exact one's bytes / these
    step_s: float | None = None


def rows_of(findings: Findings) -> list[Row]:
    exact = findings.runs.get(findings.request.exact)
    return [_row(run, exact, findings.request.num_steps) for run in findings.runs.values()]


def _row(run: TrainedRun, exact: TrainedRun | None, num_steps: int) -> Row:
    about = {
        name: getattr(run, name)
        for name in ("strategy", "status", "error", "eval_loss", "wire_bytes", "planned_wire_bytes", "inter_node_bytes")
    }
    loss = _last(run, num_steps)
    if exact is None or exact.losses is None or run.losses is None:
        return Row(**about, loss=loss, step_s=run.step_s)
    own = {step: abs(_share(loss, exact.losses[step])) for step, loss in run.losses.items() if step in exact.losses}
    largest_at = max(own, key=own.__getitem__, default=None)
    exact_loss = _last(exact, num_steps)
    return Row(
        **about,
        loss=loss,
        loss_difference=None if loss is None or exact_loss is None else _share(loss, exact_loss),
        eval_difference=None
        if run.eval_loss is None or exact.eval_loss is None
        else _share(run.eval_loss, exact.eval_loss),
        largest_difference=None if largest_at is None else own[largest_at],
        largest_at=largest_at,
        fewer_between_nodes=exact.inter_node_bytes / run.inter_node_bytes
        if exact.inter_node_bytes and run.inter_node_bytes
        else None,
        step_s=run.step_s,
    )


def _share(own: float, exact: float) -> float:
    return own / exact - 1.0


def _last(run: TrainedRun, num_steps: int) -> float | None:
    """The mean loss of the last steps of a run that was completed."""
    losses = run.losses or {}
    last = [losses[step] for step in range(max(1, num_steps - NUM_LAST + 1), num_steps + 1) if step in losses]
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


def codecs_note(findings: Findings, kind: str) -> str:
    found = findings.codecs
    request, elements = findings.request, f"{count(found[f'num_{kind}'])} elements of matrices"
    when = f"after {request.num_steps} steps of {request.exact}, {elements}"
    if kind == "gradients":
        return f"Codecs on gradients: {found['gradient_dtype']}, of one micro-batch of one rank {when}."
    return f"Codecs on weights: {when}."


def strategy_columns(findings: Findings) -> Columns:
    """The cells of the main table by column, without empty columns."""
    exact, rows = findings.request.exact, rows_of(findings)
    # Differences of the exact one to itself are left out.
    others = [Row(row.strategy, row.status, row.error) if row.strategy == exact else row for row in rows]
    cells = {
        "strategy": [row.strategy for row in rows],
        "loss": [figure(row.loss, ".4f") or row.status for row in rows],
        f"vs {exact}": [figure(row.loss_difference, "+.2%") for row in others],
        "evaluation": [figure(row.eval_loss, ".4f") for row in rows],
        "vs": [figure(row.eval_difference, "+.2%") for row in others],
        "largest": [_largest(row) for row in others],
        "MB": [_megabytes(row.wire_bytes) for row in rows],
        "between nodes MB": [_megabytes(row.inter_node_bytes) for row in rows],
        "times fewer": [figure(row.fewer_between_nodes, ".2f") for row in others],
        "s per step": [figure(row.step_s, ".4f") for row in rows],
    }
    return {title: texts for title, texts in cells.items() if any(texts)}


def codec_columns(found: Sequence[Mapping[str, Any]]) -> Columns:
    return {
        "codec": [row["codec"] for row in found],
        "relative RMS error": [figure(row["relative_rms"], ".3e") or "not finite" for row in found],
        "of the worst unit": [figure(row["worst_relative_rms"], ".3e") or "not finite" for row in found],
        "cosine": [figure(row["cosine"], ".6f") or "not finite" for row in found],
        "bytes per element": [f"{row['bytes_per_elem']:.4f}" for row in found],
        "encode ms per million": [f"{row['encode_s'] * 1e3:.3f}" for row in found],
        "decode ms per million": [f"{row['decode_s'] * 1e3:.3f}" for row in found],
    }


def _largest(row: Row) -> str:
    return "" if row.largest_difference is None else f"{row.largest_difference:.2%} ({row.largest_at})"


def _megabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.4f}"


def report_of(findings: Findings) -> Report:
    request, codecs = findings.request, findings.codecs
    tables = [(note_of(findings), strategy_columns(findings))]
    kinds = [kind for kind in ("gradients", "weights") if codecs.get(kind)]
    tables += [(codecs_note(findings, kind), codec_columns(codecs[kind])) for kind in kinds]
    figures = {
        "settings": asdict(request.settings),
        "rows": [asdict(row) for row in rows_of(findings)],
        "runs": [asdict(run) for run in findings.runs.values()],
        "codecs": codecs,
    }
    device = torch.cuda.get_device_name() if request.settings.device == "cuda" else "cpu"
    return Report("shardwise bench wire", machine(device, torch.__version__), figures, tables, problems(findings))


def name_of(request: Request) -> str:
    """The name of the files."""
    model = Path(request.settings.model)
    return f"bench-wire-{model.stem if model.suffix == '.json' else model.name}-{request.num_ranks}-ranks"
