"""Results as rows of medians, spreads, ratios and rates. Tables, JSON and pages are made from these."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.precision import precision_of
from ..planner.hardware.gpus import peak_flops
from ..planner.hardware.links import parse
from .case import Case
from .compare import Findings, losses_of
from .model import flops_of
from .names import FLOORS, OURS, label


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


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
    return [row_of(case, findings) for case in findings.outcomes]


def row_of(case: Case, findings: Findings) -> Row:
    verdict = findings.verdicts[case]
    is_floor = case.contender in FLOORS
    is_ours = case.contender.partition(":")[0] == OURS
    calls = findings.calls.get(case)
    about: dict[str, Any] = {
        "contender": label(case.contender),
        "kind": "floor" if is_floor else "strategy" if is_ours else "peer",
        "shape": case.shape.name,
        "tokens": case.shape.tokens,
        "reduce": case.reduce,
        "fabric": case.fabric,
        "link_gigabytes_per_s": parse(case.fabric).intra.gigabytes_per_s if case.fabric else None,
        "status": verdict.status,
        "error": verdict.error,
        "compared_with": verdict.compared_with,
        "loss_difference": verdict.loss_difference,
        "calls_per_unit": calls.per_unit if calls else None,
        "calls_besides": calls.besides if calls else None,
    }
    if verdict.status != "ok":
        return Row(**about)
    outcomes = findings.outcomes[case]
    firsts = [outcome.answers[0] for outcome in outcomes]
    every = [answer for outcome in outcomes for answer in outcome.answers]
    seconds = spread([second for answer in firsts for second in answer["seconds"]])
    median_s = statistics.median(medians_of(case, findings))
    tokens_per_s = case.tokens_per_step / median_s
    peak = peak_flops(firsts[0]["device"], precision_of(case.precision, None).compute)
    wires = firsts[0]["wires"]
    return Row(
        **about,
        losses=losses_of(outcomes[0]),
        seconds=Spread(median_s, seconds.min, seconds.max),
        ratios=ratios_of(case, findings) if is_ours else {},
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * flops_of(case.shape) / peak if peak else None,
        wire_s={wire: seen["seconds"] for wire, seen in wires.items()},
        wire_bytes={wire: seen["bytes"] for wire, seen in wires.items()},
        moved_bytes=sum(seen["bytes"] for seen in wires.values()) if wires else firsts[0]["moved_bytes"],
        memory={kind: max(answer["memory"][kind] for answer in every) for kind in firsts[0]["memory"]},
        overlap=firsts[0].get("overlap", {}),
        setup_s=statistics.median(answer["setup_s"] for answer in firsts),
    )


def medians_of(case: Case, findings: Findings) -> list[float]:
    """Median seconds per step, by repetition."""
    return [statistics.median(outcome.answers[0]["seconds"]) for outcome in findings.outcomes[case]]


def ratios_of(case: Case, findings: Findings) -> dict[str, Spread]:
    """The peers' time / ours, taken within a repetition, so that both had the same conditions."""
    found = {}
    for peer in findings.session.peers:
        other = replace(case, contender=peer)
        if other in findings.verdicts and findings.verdicts[other].status == "ok":
            # In an unfinished session one of them may be a repetition ahead.
            pairs = zip(medians_of(other, findings), medians_of(case, findings), strict=False)
            found[peer] = spread([theirs / ours for theirs, ours in pairs])
    return found
