"""The results of `shardwise bench`: rows of medians, spreads, ratios and rates, the table, and the page."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..core.precision import precision_of
from ..planner.hardware.gpus import peak_flops
from ..planner.hardware.links import parse
from .case import FLOORS, OURS, Case, label
from .compare import Findings, Session, losses_of
from .model import flops_of, num_params
from .overlap import Overlap, in_words
from .pages import Columns, Page, cells, filled, machine, results_page

# Columns that are left out if all rows have the same value. The note then states the value once.
CONSTANT = ("shape", "tokens", "link GB/s", "reduce")


Row = dict[str, Any]
# The figures of a row whose status is not ok.
UNKNOWN: Row = {
    "seconds": None,
    "ratios": {},
    "tokens_per_s": None,
    "mfu": None,
    "wire_s": {},
    "wire_bytes": {},
    "moved_bytes": None,
    "memory": {},
    "overlap": {},
    "setup_s": None,
    "losses": [],
}


def rows_of(findings: Findings) -> list[Row]:
    """Return the rows of the JSON: one for each contender in each setting, over all repetitions. None means unknown."""
    return [_row(case, findings) for case in findings.outcomes]


def _row(case: Case, findings: Findings) -> Row:
    verdict, calls = findings.verdicts[case], findings.calls.get(case)
    is_ours = case.contender.partition(":")[0] == OURS
    row = {
        "contender": label(case.contender),
        "kind": "floor" if case.contender in FLOORS else "strategy" if is_ours else "peer",
        "shape": case.shape.name,
        "tokens": case.shape.tokens,  # per sequence
        "reduce": case.reduce,
        "fabric": case.fabric,
        **asdict(verdict),
        "link_gigabytes_per_s": parse(case.fabric).intra.gigabytes_per_s if case.fabric else None,  # inside a node
        "calls_per_unit": calls.per_unit if calls else None,
        "calls_besides": calls.besides if calls else None,
        **UNKNOWN,
    }
    if verdict.status != "ok":
        return row
    outcomes = findings.outcomes[case]
    first = outcomes[0].answers[0]
    every = [answer for outcome in outcomes for answer in outcome.answers]
    median_s = statistics.median(_medians(case, findings))
    tokens_per_s = case.tokens_per_step / median_s
    peak = peak_flops(first["device"], precision_of(case.precision, None).compute)
    wires = first["wires"]
    return row | {
        "seconds": _spread(median_s, [second for outcome in outcomes for second in outcome.answers[0]["seconds"]]),
        "ratios": _ratios(case, findings) if is_ours else {},  # peer's time / ours, by peer
        "tokens_per_s": tokens_per_s,  # per rank
        "mfu": tokens_per_s * flops_of(case.shape) / peak if peak else None,
        "wire_s": {wire: used["seconds"] for wire, used in wires.items()},  # per step
        "wire_bytes": {wire: used["bytes"] for wire, used in wires.items()},
        # Sent per step by one rank.
        "moved_bytes": sum(used["bytes"] for used in wires.values()) if wires else first["moved_bytes"],
        "memory": {kind: max(answer["memory"][kind] for answer in every) for kind in first["memory"]},  # peaks
        "overlap": first.get("overlap", {}),  # of the traced step: the fields of `overlap.Overlap`
        "setup_s": statistics.median(outcome.answers[0]["setup_s"] for outcome in outcomes),
        "losses": losses_of(outcomes[0]),  # by step
    }


def _spread(median: float, values: Sequence[float]) -> dict[str, float]:
    return {"median": median, "min": min(values), "max": max(values)}


def _medians(case: Case, findings: Findings) -> list[float]:
    """Median seconds per step, by repetition."""
    return [statistics.median(outcome.answers[0]["seconds"]) for outcome in findings.outcomes[case]]


def _ratios(case: Case, findings: Findings) -> dict[str, dict[str, float]]:
    """Return peer's time / ours for each peer. Both times are of one repetition, so that conditions were the same."""
    found = {}
    for peer in findings.session.peers:
        other = replace(case, contender=peer)
        if other in findings.verdicts and findings.verdicts[other].status == "ok":
            # In an unfinished session one of the two may have run once more than the other.
            pairs = zip(_medians(other, findings), _medians(case, findings), strict=False)
            ratios = [theirs / ours for theirs, ours in pairs]
            found[peer] = _spread(statistics.median(ratios), ratios)
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
    """Return the cells of the table by column, without empty columns."""
    peers = dict.fromkeys(peer for row in rows for peer in row["ratios"])
    wires = dict.fromkeys(wire for row in rows for wire, busy_s in row["wire_s"].items() if busy_s)
    kinds = ("allocated", "active", "reserved", "host")
    linked = [row | ({"link_gigabytes_per_s": None, "reduce": ""} if row["kind"] == "floor" else {}) for row in rows]
    found = filled(
        {
            "contender": cells(rows, "contender"),
            "shape": cells(rows, "shape"),
            "tokens": cells(rows, "tokens"),
            "link GB/s": cells(linked, "link_gigabytes_per_s", "g"),
            "reduce": cells(linked, "reduce"),
            "s per step": [
                "{median:.4f}".format(**row["seconds"]) if row["seconds"] else row["status"] for row in rows
            ],
            "min-max": ["{min:.4f}-{max:.4f}".format(**row["seconds"]) if row["seconds"] else "" for row in rows],
            **{f"vs {peer}": [_ratio(row["ratios"].get(peer)) for row in rows] for peer in peers},
            "tokens/s/rank": cells(rows, "tokens_per_s", ".0f"),
            "MFU": cells(rows, "mfu", ".1%"),
            **{f"{wire} s": cells([row["wire_s"] for row in rows], wire, ".4f") for wire in wires},
            "moved GB": cells(rows, "moved_bytes", ".3g", 1e9),
            **{f"{kind} GB": cells([row["memory"] for row in rows], f"{kind}_gb", ".1f") for kind in kinds},
            "calls": cells(rows, "calls_per_unit", ".0f"),
            "set-up s": cells(rows, "setup_s", ".1f"),
        }
    )
    return {title: texts for title, texts in found.items() if title not in CONSTANT or len({*texts} - {""}) > 1}


def _ratio(ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return ""
    form = "{median:.2f}" if ratio["min"] == ratio["max"] else "{median:.2f} ({min:.2f}-{max:.2f})"
    return form.format(**ratio)


def page_of(findings: Findings) -> Page:
    rows = rows_of(findings)
    answers = [answer for runs in findings.outcomes.values() for outcome in runs for answer in outcome.answers]
    device, torch_version = (answers[0][key] if answers else "unknown" for key in ("device", "torch"))
    overlaps = [
        f"`{row['contender']}`, {row['shape']}, {row['tokens']} tokens, one step under the profiler:\n\n"
        + textwrap.indent(in_words(Overlap(**row["overlap"])), "    ")
        for row in rows
        if row["overlap"]
    ]
    figures = {
        "rows": rows,
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
    problems = [f"{row['contender']} ({row['status']}): {row['error']}" for row in rows if row["status"] != "ok"]
    tables = [(note_of(findings), columns(rows))]
    return results_page("shardwise bench", machine(device, torch_version), figures, tables, problems, overlaps)


def name_of(session: Session) -> str:
    """Return the name for the result files, made of the shapes and the world size."""
    case = session.settings[0]
    shapes = "-".join(dict.fromkeys(setting.shape.name for setting in session.settings))
    if not case.fabric:
        return f"bench-{shapes}-{case.world_size}-ranks"
    fabric = parse(case.fabric)
    return f"bench-{shapes}-fabric-{fabric.num_nodes}x{fabric.node_size}"
