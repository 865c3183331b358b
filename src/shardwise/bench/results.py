"""The results of `shardwise bench`: rows of medians, spreads, ratios and rates, the table, and the page."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..core.precision import precision_of
from ..planner.hardware.gpus import peak_flops
from ..planner.hardware.links import parse
from .case import FLOORS, OURS, Case, label
from .compare import Findings, Session, losses_of
from .model import flops_of, num_params
from .overlap import Overlap, in_words
from .pages import Columns, Page, figure, filled, machine, results_page

# Columns that are left out if all rows have the same value; the note mentions the value once.
CONSTANT = ("shape", "tokens", "link GB/s", "reduce")


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one setting, over all repetitions. Only an ok row has figures; an unknown figure is None."""

    contender: str
    kind: str  # strategy, peer or floor
    shape: str
    tokens: int  # per sequence
    reduce: str
    fabric: str
    status: str  # ok, differs, refused, missing, oom or failed
    error: str
    link_gigabytes_per_s: float | None = None  # of the emulated link inside a node
    seconds: Spread | None = None  # per step
    ratios: dict[str, Spread] = field(default_factory=dict)  # peer's time / ours, by peer
    tokens_per_s: float | None = None  # per rank
    mfu: float | None = None
    wire_s: dict[str, float] = field(default_factory=dict)  # seconds per step, by wire
    wire_bytes: dict[str, float] = field(default_factory=dict)  # per step, by wire
    moved_bytes: float | None = None  # per step, by one rank
    memory: dict[str, float] = field(default_factory=dict)  # largest peak of all ranks
    overlap: dict[str, Any] = field(default_factory=dict)  # of the traced step: the fields of `overlap.Overlap`
    setup_s: float | None = None
    losses: list[float] = field(default_factory=list)  # by step
    compared_with: str = ""  # the contender with the reference losses
    loss_difference: float | None = None
    calls_per_unit: float | None = None
    calls_besides: float | None = None


def rows_of(findings: Findings) -> list[Row]:
    return [_row(case, findings) for case in findings.outcomes]


def _row(case: Case, findings: Findings) -> Row:
    verdict, calls = findings.verdicts[case], findings.calls.get(case)
    is_ours = case.contender.partition(":")[0] == OURS
    about: dict[str, Any] = {
        "contender": label(case.contender),
        "kind": "floor" if case.contender in FLOORS else "strategy" if is_ours else "peer",
        "shape": case.shape.name,
        "tokens": case.shape.tokens,
        "reduce": case.reduce,
        "fabric": case.fabric,
        "link_gigabytes_per_s": parse(case.fabric).intra.gigabytes_per_s if case.fabric else None,
        **asdict(verdict),
        "calls_per_unit": calls.per_unit if calls else None,
        "calls_besides": calls.besides if calls else None,
    }
    if verdict.status != "ok":
        return Row(**about)
    outcomes = findings.outcomes[case]
    firsts = [outcome.answers[0] for outcome in outcomes]
    every = [answer for outcome in outcomes for answer in outcome.answers]
    seconds = [second for answer in firsts for second in answer["seconds"]]
    median_s = statistics.median(_medians(case, findings))
    tokens_per_s = case.tokens_per_step / median_s
    peak = peak_flops(firsts[0]["device"], precision_of(case.precision, None).compute)
    wires = firsts[0]["wires"]
    return Row(
        **about,
        losses=losses_of(outcomes[0]),
        seconds=Spread(median_s, min(seconds), max(seconds)),
        ratios=_ratios(case, findings) if is_ours else {},
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * flops_of(case.shape) / peak if peak else None,
        wire_s={wire: seen["seconds"] for wire, seen in wires.items()},
        wire_bytes={wire: seen["bytes"] for wire, seen in wires.items()},
        moved_bytes=sum(seen["bytes"] for seen in wires.values()) if wires else firsts[0]["moved_bytes"],
        memory={kind: max(answer["memory"][kind] for answer in every) for kind in firsts[0]["memory"]},
        overlap=firsts[0].get("overlap", {}),
        setup_s=statistics.median(answer["setup_s"] for answer in firsts),
    )


def _medians(case: Case, findings: Findings) -> list[float]:
    """Median seconds per step, by repetition."""
    return [statistics.median(outcome.answers[0]["seconds"]) for outcome in findings.outcomes[case]]


def _ratios(case: Case, findings: Findings) -> dict[str, Spread]:
    """The peers' time / ours, taken within a repetition, so that both had the same conditions."""
    found = {}
    for peer in findings.session.peers:
        other = replace(case, contender=peer)
        if other in findings.verdicts and findings.verdicts[other].status == "ok":
            # In an unfinished session one of them may be a repetition ahead.
            pairs = zip(_medians(other, findings), _medians(case, findings), strict=False)
            ratios = [theirs / ours for theirs, ours in pairs]
            found[peer] = Spread(statistics.median(ratios), min(ratios), max(ratios))
    return found


def note_of(findings: Findings) -> str:
    """Explain how to read the figures."""
    session = findings.session
    case = session.settings[0]
    sizes = "; ".join(
        f"{shape.name}: {num_params(shape) / 1e6:.1f}M parameters, {case.batch} x {shape.tokens} tokens"
        for shape in dict.fromkeys(setting.shape for setting in session.settings)
    )
    where = f"{case.world_size} ranks in nodes of {case.node_size} ({'nccl' if case.device == 'cuda' else 'gloo'})"
    if case.fabric:
        fabrics = " or ".join(dict.fromkeys(setting.fabric for setting in session.settings))
        where = f"one process playing rank 0 of an emulated fabric ({fabrics})"
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


def columns(rows: Sequence[Row]) -> Columns:
    """The cells of the table by column, without empty columns."""
    peers = dict.fromkeys(peer for row in rows for peer in row.ratios)
    wires = dict.fromkeys(wire for row in rows for wire, busy_s in row.wire_s.items() if busy_s)
    kinds = ("allocated", "active", "reserved", "host")
    found = filled(
        {
            "contender": [row.contender for row in rows],
            "shape": [row.shape for row in rows],
            "tokens": [str(row.tokens) for row in rows],
            "link GB/s": ["" if row.kind == "floor" else figure(row.link_gigabytes_per_s, "g") for row in rows],
            "reduce": ["" if row.kind == "floor" else row.reduce for row in rows],
            "s per step": [f"{row.seconds.median:.4f}" if row.seconds else row.status for row in rows],
            "min-max": [f"{row.seconds.min:.4f}-{row.seconds.max:.4f}" if row.seconds else "" for row in rows],
            **{f"vs {peer}": [_ratio(row.ratios.get(peer)) for row in rows] for peer in peers},
            "tokens/s/rank": [figure(row.tokens_per_s, ".0f") for row in rows],
            "MFU": [figure(row.mfu, ".1%") for row in rows],
            **{f"{wire} s": [figure(row.wire_s.get(wire), ".4f") for row in rows] for wire in wires},
            "moved GB": [figure(row.moved_bytes and row.moved_bytes / 1e9, ".3g") for row in rows],
            **{f"{kind} GB": [figure(row.memory.get(f"{kind}_gb"), ".1f") for row in rows] for kind in kinds},
            "calls": [figure(row.calls_per_unit, ".0f") for row in rows],
            "set-up s": [figure(row.setup_s, ".1f") for row in rows],
        }
    )
    return {title: texts for title, texts in found.items() if title not in CONSTANT or len({*texts} - {""}) > 1}


def _ratio(ratio: Spread | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.median:.2f}" + (f" ({ratio.min:.2f}-{ratio.max:.2f})" if ratio.min != ratio.max else "")


def page_of(findings: Findings) -> Page:
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
    return results_page("shardwise bench", machine(device, torch_version), figures, tables, problems, overlaps)


def name_of(session: Session) -> str:
    """The name of the files: the shapes and the world."""
    case = session.settings[0]
    shapes = "-".join(dict.fromkeys(setting.shape.name for setting in session.settings))
    if not case.fabric:
        return f"bench-{shapes}-{case.world_size}-ranks"
    fabric = parse(case.fabric)
    return f"bench-{shapes}-fabric-{fabric.num_nodes}x{fabric.node_size}"
