"""The planner held against what was measured: memory, traffic and seconds of every case of `planner_cases.py`.

    python -m benchmarks.planner_against_measured FILE.json [--write]

FILE is what `planner_measure.py` wrote, or what this script keeps of it. `--write` puts both beside the other results:
the figures that are compared, and the tables as markdown. Of a case that ran out of memory the verdict is compared.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from benchmarks.planner_seen import HOST_BOUND, Compared, Document, compact, compare
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.planning import plan

RESULTS = Path(__file__).parent / "results"

Rows = Sequence[Compared]

NOTES = """\
Three things changed after most of these cases were measured. The norm of the gradients no longer makes an fp64 copy of
the largest flat: where that was the peak, the peak of the other phases is compared, and what was reserved is not. A
recompute stops before its block's last product: steps with checkpointing are compared where they were measured again.
Gather slots of an embedding and a head are one, and a reduction slot has the size of the unit that uses it, and is
opened later: most cases are planned with less memory than they took.

`shard_grad_op` and `hybrid_shard_zero2` were faster than planned for large models: the emulated fabric does not fill
memory again that was given back, products of what is left there draw less power, and the device clocks higher. The
host of this machine is slow and varies by a quarter from run to run, so steps that it limits are told apart.
""".splitlines()


def median(errors: Iterable[float]) -> float:
    return statistics.median(map(abs, errors))


def worst(errors: Iterable[float]) -> float:
    return max(errors, key=abs)


def groups(rows: Rows) -> Iterator[tuple[str, Rows]]:
    yield "all", rows
    for mode in ("none", "selective", "full"):
        yield f"checkpointing {mode}", [row for row in rows if row.case.checkpointing == mode]
    for name in dict.fromkeys(row.case.strategy for row in rows if isinstance(row.case.strategy, str)):
        yield name, [row for row in rows if row.case.strategy == name]
    yield "mixed layouts", [row for row in rows if not isinstance(row.case.strategy, str)]
    for model in dict.fromkeys(row.case.model for row in rows):
        yield f"model {model}", [row for row in rows if row.case.model == model]
    yield "compiled", [row for row in rows if row.case.compile]
    yield "of transformers", [row for row in rows if row.case.code == "hf"]
    yield "several micro-batches", [row for row in rows if row.case.num_micro_batches > 1]


def summary(rows: Rows) -> Iterator[str]:
    head = ["cases", "", "active, median", "worst", "reserved, median", "worst", "in the interval"]
    yield _line(*head, "step, median", "worst", "step, host-bound")
    yield "|---" * 10 + "|"
    for name, group in groups(rows):
        kept = [row for row in group if row.seen.reserved]
        steps = [row.step_error for row in group if row.has_step and not row.is_host_bound]
        bound = [row.step_error for row in group if row.has_step and row.is_host_bound]
        yield _line(
            name,
            str(len(group)),
            *_errors([row.active_error for row in group], 2),
            *_errors([row.reserved_error for row in kept]),
            f"{sum(row.is_covered for row in kept)} of {len(kept)}",
            *_errors(steps),
            _errors(bound)[0],
        )


def _errors(errors: Sequence[float], digits: int = 1) -> tuple[str, str]:
    return (f"{median(errors):.{digits}%}", f"{worst(errors):+.{digits}%}") if errors else ("", "")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(rows: Rows) -> Iterator[str]:
    head = [
        "case",
        "active",
        "measured",
        "error",
        "peak at",
        "reserved",
        "measured",
        "step",
        "measured",
        "error",
        "host",
    ]
    yield _line(*head)
    yield "|---" * len(head) + "|"
    for row in rows:
        found, seen = row.found, row.seen
        low, expected, high = (
            f"{size / 1e9:.2f}" for size in (found.reserved.low, found.reserved.expected, found.reserved.high)
        )
        reserved = f"{seen.reserved / 1e9:.2f}" if seen.reserved else "-"
        yield _line(
            row.case.name,
            f"{found.memory.peak.total / 1e9:.3f}",
            f"{seen.active / 1e9:.3f}",
            f"{row.active_error:+.2%}",
            found.memory.peak.name,
            f"{expected} ({low} to {high})",
            reserved if not seen.reserved or row.is_covered else f"**{reserved}**",
            f"{found.timing.step_s * 1e3:.1f}",
            f"{seen.step_s * 1e3:.1f}" if row.has_step else "",
            f"{row.step_error:+.1%}" if row.has_step else "",
            f"**{seen.host_s * 1e3:.0f}**" if row.is_host_bound else f"{seen.host_s * 1e3:.0f}",
        )


def instants(rows: Rows) -> Iterator[str]:
    """Peaks while each module ran, planned and measured: whether a peak is right for the right reason."""
    yield _line("case", "instants", "median error", "worst", "at")
    yield "|---" * 5 + "|"
    for row in (row for row in rows if row.seen.modules):
        found = {instant.name: instant.total for instant in row.found.memory.instants}
        errors = {
            name: max(found[name], found.get(name.replace("backward", "reduce"), 0)) / peak - 1
            for name, peak in _spans(row.seen.modules)
            if name in found
        }
        far = max(errors, key=lambda name: abs(errors[name]))
        yield _line(row.case.name, str(len(errors)), *_errors(list(errors.values()), 2), far)


def _spans(modules: Sequence[tuple[str, str, int, int]]) -> Iterator[tuple[str, int]]:
    """Forwards and backwards of modules, and their peaks; a backward lasts until the next one begins."""
    verbs = {"begins": "forward", "backward begins": "backward"}
    for (name, when, *_), (_, _, _, peak) in pairwise(modules):
        if when in verbs:
            yield f"{verbs[when]} {name}", peak


def timings() -> Iterator[str]:
    """What planning itself takes, the second time."""
    for words, model, nodes, strategy in (
        ("one strategy, 70B on 1024 GPUs", "llama-3-70b", 128, "zero3"),
        ("a search, 70B on 1024 GPUs", "llama-3-70b", 128, None),
        ("a search, 8B on 8 GPUs", "llama-3-8b", 1, None),
    ):
        cluster = make_cluster("8xH100-80GB", nodes)
        for _ in range(2):
            began = time.perf_counter()
            plan(model, cluster, strategy=strategy, checkpointing="auto")
            passed_s = time.perf_counter() - began
        yield f"- {words}: planned in {passed_s * 1e3:.0f} ms"


def findings(rows: Rows) -> Iterator[str]:
    ran = [row for row in rows if row.seen.status == "ok"]
    active = [row.active_error for row in ran]
    yield (
        f"- active (allocated) peak: median error {median(active):.3%}, worst {worst(active):+.1%}; "
        f"{sum(abs(error) < 0.005 for error in active)} of {len(active)} within 0.5 %"
    )
    kept = [row for row in ran if row.seen.reserved]
    reserved = [row.reserved_error for row in kept]
    yield (
        f"- reserved peak: median error {median(reserved):.1%}, worst {worst(reserved):+.1%}; "
        f"{sum(row.is_covered for row in kept)} of {len(kept)} inside the interval"
    )
    unequal = [row.case.name for row in ran if not row.traffic_is_equal]
    yield f"- traffic: {len(ran) - len(unequal)} of {len(ran)} equal to the ledger, row by row" + _but(unequal)
    wrong = [row.case.name for row in rows if not row.verdict_is_right]
    yield f"- fits or not: {len(rows) - len(wrong)} of {len(rows)} right" + _but(wrong)
    steps = [row.step_error for row in ran if row.has_step and not row.is_host_bound]
    bound = [row.step_error for row in ran if row.has_step and row.is_host_bound]
    yield (
        f"- step: median error {median(steps):.1%}, worst {worst(steps):+.1%}, "
        f"{sum(abs(error) <= 0.1 for error in steps)} of {len(steps)} within 10 %"
    )
    yield (
        f"- step where the host is the limit, which queues {HOST_BOUND:.0%} of it or more (bold in the table): median "
        f"error {median(bound):.1%}, worst {worst(bound):+.1%}, "
        f"{sum(abs(error) <= 0.1 for error in bound)} of {len(bound)} within 10 %"
    )


def _but(names: Sequence[str]) -> str:
    return f"; not: {', '.join(names)}" if names else ""


def report(document: Document, rows: Rows, command: str) -> str:
    ran = [row for row in rows if row.seen.status == "ok"]
    machine = document["machine"]
    lines = [
        f"# The planner against {len(rows)} measured cases",
        "",
        f"{datetime.now():%Y-%m-%d %H:%M}, `{command}`.",
        f"Measured {document['date']} on one {machine['device'].removeprefix('NVIDIA ')}, torch {machine['torch']},",
        "as rank 0 of an emulated fabric (`python -m benchmarks.planner_measure`). GB are 1e9 bytes, steps in ms.",
        "",
        *findings(rows),
        *timings(),
        "",
        *NOTES,
        "",
        *summary(ran),
        "",
        "## Instant by instant",
        "",
        "The span of a backward ends when the place of the next unit's gradients is open: the last block's has two.",
        "",
        *instants(ran),
        "",
        "## Every case",
        "",
        *table(ran),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the tables, and what was compared, in results/")
    options = parser.parse_args()
    document = json.loads(options.file.read_text())
    kept = compact(document) if document["schema"] == 1 else document
    stem = f"{datetime.now():%Y-%m-%d-%H%M}-planner-against-measured"
    name = f"benchmarks/results/{stem}.json" if options.write else str(options.file)
    text = report(kept, compare(kept), f"python -m benchmarks.planner_against_measured {name}")
    print(text)
    if options.write:
        (RESULTS / f"{stem}.md").write_text(text)
        (RESULTS / f"{stem}.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
