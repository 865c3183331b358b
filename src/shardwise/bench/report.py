"""The results of `shardwise bench` for readers: columns of the table, the note that explains them, and the page."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ..planner.hardware.links import parse
from .compare import Findings, Session
from .model import num_params
from .names import label
from .overlap import Overlap, in_words
from .pages import Report, figure, machine
from .rows import Row, Spread, rows_of

Cell = Callable[[Row], str]

# Columns that are left out if all rows have the same value; the note mentions the value once.
CONSTANT = ("shape", "tokens", "link GB/s", "reduce")


def note_of(findings: Findings) -> str:
    """Explain how to read the figures."""
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
        f"{case.micro_batches} micro-batches per step" if case.micro_batches > 1 else "",
        f"gradients clipped to {case.clip:g}" if case.clip else "",
        "blocks compiled" if case.compile else "",
        f"{case.checkpointing} activation checkpointing" if case.checkpointing != "none" else "",
    ]
    repeated = f", then of {session.repetitions} repetitions" if session.repetitions > 1 else ""
    verdicts = findings.verdicts.values()
    compared = " or ".join(dict.fromkeys(verdict.compared_with for verdict in verdicts if verdict.compared_with))
    sentences = [
        f"{sizes}; {case.precision} on {where}{''.join(f', {word}' for word in how if word)}.",
        f"Gradients are reduced in {' or '.join(dict.fromkeys(s.reduce for s in session.settings))}.",
        f"Median of {case.steps} steps after {case.warmup}{repeated}; min-max over all steps.",
        "`vs` is the peer's time / ours, taken within a repetition.",
    ]
    if case.fabric:
        sentences += [
            f"Other ranks are copies, so only the first loss has a meaning; it was compared with that of {compared}.",
            "`intra s` and `inter s` are the seconds that a step's traffic takes on these wires if nothing else runs.",
        ]
    else:
        sentences += [f"Losses of all steps were compared with those of {compared}."]
    if case.device == "cuda":
        sentences += ["MFU: 6 x parameters (without the embedding) + 12 x layers x hidden x tokens FLOP per token."]
    if findings.num_left:
        sentences += [f"Unfinished: {findings.num_left} more runs were requested."]
    return " ".join(sentences)


def columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The cells of the table by column, without empty columns."""
    peers = dict.fromkeys(peer for row in rows for peer in row.ratios)
    wires = dict.fromkeys(wire for row in rows for wire, busy_s in row.wire_s.items() if busy_s)
    cells: dict[str, Cell] = {
        "contender": lambda row: row.contender,
        "shape": lambda row: row.shape,
        "tokens": lambda row: str(row.tokens),
        "link GB/s": lambda row: "" if row.kind == "floor" else figure(row.link_gigabytes_per_s, "g"),
        "reduce": lambda row: "" if row.kind == "floor" else row.reduce,
        "s per step": lambda row: f"{row.seconds.median:.4f}" if row.seconds else row.status,
        "min-max": lambda row: f"{row.seconds.min:.4f}-{row.seconds.max:.4f}" if row.seconds else "",
        **{f"vs {peer}": _ratio_to(peer) for peer in peers},
        "tokens/s/rank": lambda row: figure(row.tokens_per_s, ".0f"),
        "MFU": lambda row: figure(row.mfu, ".1%"),
        **{f"{wire} s": _wire_s(wire) for wire in wires},
        "moved GB": lambda row: figure(row.moved_bytes and row.moved_bytes / 1e9, ".3g"),
        **{f"{kind} GB": _memory(f"{kind}_gb") for kind in ("allocated", "active", "reserved", "host")},
        "calls": lambda row: figure(row.calls_per_unit, ".0f"),
        "set-up s": lambda row: figure(row.setup_s, ".1f"),
    }
    found = {title: [cell(row) for row in rows] for title, cell in cells.items()}
    return {
        title: texts
        for title, texts in found.items()
        if any(texts) and (title not in CONSTANT or len({*texts} - {""}) > 1)
    }


def _ratio_to(peer: str) -> Cell:
    def cell(row: Row) -> str:
        ratio: Spread | None = row.ratios.get(peer)
        if ratio is None:
            return ""
        return f"{ratio.median:.2f}" + (f" ({ratio.min:.2f}-{ratio.max:.2f})" if ratio.min != ratio.max else "")

    return cell


def _wire_s(wire: str) -> Cell:
    return lambda row: figure(row.wire_s.get(wire), ".4f")


def _memory(kind: str) -> Cell:
    return lambda row: figure(row.memory.get(kind), ".1f")


def report_of(findings: Findings) -> Report:
    rows = rows_of(findings)
    answers = [answer for runs in findings.outcomes.values() for outcome in runs for answer in outcome.answers]
    device, torch_version = (answers[0][key] if answers else "unknown" for key in ("device", "torch"))
    overlaps = [
        f"`{row.contender}`, {row.shape}, {row.tokens} tokens, one step under the profiler:\n\n"
        + textwrap.indent(in_words(Overlap(**row.overlap)), "    ")
        for row in rows
        if row.overlap
    ]
    figures = {
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
    problems = [f"{row.contender} ({row.status}): {row.error}" for row in rows if row.status != "ok"]
    tables = [(note_of(findings), columns(rows))]
    return Report("shardwise bench", machine(device, torch_version), figures, tables, problems, overlaps)


def name_of(session: Session) -> str:
    """The name of the files: the shapes and the world."""
    case = session.settings[0]
    shapes = "-".join(dict.fromkeys(setting.shape.name for setting in session.settings))
    if not case.fabric:
        return f"bench-{shapes}-{case.world_size}-ranks"
    fabric = parse(case.fabric)
    return f"bench-{shapes}-fabric-{fabric.num_nodes}x{fabric.node_size}"
