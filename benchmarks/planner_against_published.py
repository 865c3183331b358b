"""Predicted speed against what others have published, with the error of every row.

    python -m benchmarks.planner_against_published
    python -m benchmarks.planner_against_published --out benchmarks/results

The rows (`planner_published_rows.json`) are of llm-foundry, torchtitan, Answer.AI and IBM. The step of each is played
by `cost.step_time` (`planner_published.py` says how a row becomes a step), and its time is set against the published
one. Four tables of errors:

1. with the constants that `shardwise plan` has, for the rows with flash-attention 2, which these constants are for.
2. fitted on llm-foundry alone: torchtitan, Answer.AI and IBM are test data.
3. leaving one cluster (source, GPU, network) out: fitted on all others, tested on it. The fit has seen no row of it.
4. fitted on everything but IBM, to see what the model can at best. IBM's rows are in no fit.

The fit is least squares on the logarithm of the time over the constants below, robust against outliers (Huber, from
5 % on), and drawn lightly to where it starts, so that what no row speaks of stays there.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from shardwise.planner.hardware.gpus import DATA, REAL, Efficiency, Overheads, efficiency_of

from .planner_published import Row, Step, predicted_s, steps_and_left_out, unit_seconds

HUBER = 0.05
RIDGE = 0.02
NUM_ROUNDS = 6
SMALL = 1e-3  # a round that changes no constant by more ends the fit
FAR = 0.1
SECOND = ("torch 2.2", "torch 2.3+")  # stacks with flash-attention 2
TEST = "IBM"


@dataclass(frozen=True)
class Constants:
    """What is fitted. `*_products` are those of an A100 and an H100; other GPUs keep their ratio to these in the table.
    `*_attention`, `ramp` and `narrow` are of flash-attention 1, which llm-foundry used: with version 2, which torch has
    had since 2.2, attention has the shares of the table, which are those of published kernels. `tail_waves`: the part
    of a wave of tiles that a product wastes at its end."""

    ampere_products: float = 0.75
    ampere_attention: float = 0.33
    hopper_products: float = 0.65
    hopper_attention: float = 0.2
    memory: float = 0.7
    ramp: float = 200.0
    narrow: float = 0.95
    prologue: float = 60.0
    tail_waves: float = 0.05
    contention: float = 2.0
    hop_us: float = 20.0


TILE = 128 * 256  # outputs of a product that a multiprocessor computes at a time
GAP_S = 3e-6


def efficiency_for(step: Step, constants: Constants) -> Efficiency:
    gpu = step.cluster.gpu
    table = efficiency_of(gpu.name)
    # The GPU whose share for products scales that of others: an A100 for those whose other constants are an A100's.
    name = next(row[DATA["columns"].index("efficiency")] for row in DATA["gpus"] if row[0] == gpu.name)
    while "rest like" in DATA["efficiency"][name]:
        name = DATA["efficiency"][name]["rest like"]
    like = "A100-80GB" if name == "A100" else "H100-80GB"
    family = "ampere" if like.startswith("A100") else "hopper"
    found = replace(
        table,
        products=getattr(constants, f"{family}_products") * table.products / efficiency_of(like).products,
        memory=constants.memory,
        prologue=constants.prologue,
        tail=constants.tail_waves * gpu.multiprocessors * TILE,
        source="fit",
        gap_s=GAP_S,
    )
    if step.row.stack in SECOND:
        return found
    attention = getattr(constants, f"{family}_attention")
    return replace(found, attention=attention, backward=1.0, ramp=constants.ramp, narrow=constants.narrow)


def wear_for(constants: Constants) -> Overheads:
    return Overheads(constants.contention, constants.hop_us)


def time_of(step: Step, constants: Constants) -> float:
    return predicted_s(step, efficiency_for(step, constants), wear_for(constants))


def compute_of(step: Step, constants: Constants) -> float:
    """Forwards and backwards alone, without playing the step."""
    seconds = unit_seconds(step, efficiency_for(step, constants)).values()
    return step.row.num_micro_batches * sum(unit.forward + unit.backward for unit in seconds)


def fit(steps: Sequence[Step], start: Constants, near: Constants | None = None) -> Constants:
    """Gauss-Newton in the logarithms of the constants. `near`: where it begins; it is drawn to `start` all the same."""
    names = [field.name for field in fields(Constants)]
    beside = ("contention", "hop_us")
    now = near or start
    for _ in range(NUM_ROUNDS):
        times = [time_of(step, now) for step in steps]
        computes = [compute_of(step, now) for step in steps]
        residuals = [math.log(time / step.row.seen_s) for time, step in zip(times, steps, strict=True)]
        weights = [1.0 if abs(r) < HUBER else HUBER / abs(r) for r in residuals]
        slopes: list[list[float]] = []
        for name in names:
            moved = replace(now, **{name: getattr(now, name) * 1.01})
            if name in beside:
                changes = [time_of(step, moved) - time for step, time in zip(steps, times, strict=True)]
            else:
                # Waits and collectives hardly depend on these.
                changes = [compute_of(step, moved) - s for step, s in zip(steps, computes, strict=True)]
            slopes.append([change / time / math.log(1.01) for change, time in zip(changes, times, strict=True)])
        away = [math.log(getattr(now, name) / getattr(start, name)) for name in names]
        matrix = [
            [sum(w * a * b for w, a, b in zip(weights, left, right, strict=True)) for right in slopes]
            for left in slopes
        ]
        wanted = [-sum(w * a * r for w, a, r in zip(weights, left, residuals, strict=True)) for left in slopes]
        for index in range(len(names)):
            matrix[index][index] += RIDGE
            wanted[index] -= RIDGE * away[index]
        change = solve(matrix, wanted)
        now = replace(
            now,
            **{
                name: getattr(now, name) * math.exp(max(-0.3, min(0.3, step)))
                for name, step in zip(names, change, strict=True)
            },
        )
        if max(map(abs, change)) < SMALL:
            break
    return now


def solve(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """Gauss, with the largest pivot."""
    rows = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    for column in range(len(rows)):
        pivot = max(range(column, len(rows)), key=lambda at: abs(rows[at][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for at in range(len(rows)):
            if at != column:
                factor = rows[at][column] / rows[column][column]
                rows[at] = [a - factor * b for a, b in zip(rows[at], rows[column], strict=True)]
    return [row[-1] / row[column] for column, row in enumerate(rows)]


# Why rows are far off, as far as can be seen. Ids begin with these words; the last that fits counts.
REASONS = {
    "mpt30b-s8192-n8": "at the limit of memory; half as many tokens a GPU is faster for both GPUs",
    "mpt70b-s2048-n64-a100_40gb-mb2": "at the limit of memory; 128 GPUs reach 65 % of the peak, these 48 %",
    "mpt13b-s8192-n8-a100_40gb": "at the limit of memory, as the other 13B rows on 8 GPUs of 40 GB",
    "mpt13b-s4096-n8-a100_40gb": "the same",
    "mpt13b-s2048-n8-a100_40gb": "the same; 16 GPUs reach 70 % of the peak, these 59 %",
    "mpt13b-s1024-n8-a100_40gb": "the same",
    "mpt13b-s512-n8-a100_40gb": "the same",
    "mpt760m-s512-n8-a100_80gb": "slower than longer sequences of the same model, which no other model is",
    "mpt760m-s1024-n8-a100_80gb": "the same",
    "mpt1b-s2048-n32-a100_40gb": "16 and 64 GPUs are 22 % faster: a bad run",
    "tt072": "the same case as tt046 and tt049, 27 % faster: a later torch",
    "tt049": "the same case as tt046, 6 % faster",
    "tt050": "the same case as tt046, 6 % faster",
    "tt06": "torch.compile of early 2024, which fused less than is counted",
    "tt054": "compiled, and slower than tt049, which is not",
    "answerai": "slow lanes of an older board, not stated how many; gathers at 3 GB/s would explain the first two",
    "answerai13": "elementwise operations at an A100's share of memory; the cache of a 4090 is as large as its tensors",
    "answerai14": "the same",
    "ibm03": "one sample a step: probably at the limit of memory",
    "ibm06": "not known",
    "tt083": "gathers next to slow memory (HBM2e) are counted as too great a loss",
    "tt084": "the same",
    "tt077": "the same",
}


def reason_for(row: Row) -> str:
    return next((why for words, why in reversed(REASONS.items()) if row.id.startswith(words)), "not known")


@dataclass(frozen=True)
class Finding:
    """`error` is predicted / published tokens/s - 1."""

    row: Row
    predicted_tokens_per_s: float
    error: float


def finding(row: Row, step_s: float) -> Finding:
    tokens_per_s = row.num_micro_batches * row.num_tokens / step_s
    return Finding(row, tokens_per_s, tokens_per_s / row.tokens_per_s_per_gpu - 1)


def findings(steps: Sequence[Step], constants: Constants) -> list[Finding]:
    return [finding(step.row, time_of(step, constants)) for step in steps]


def planned(steps: Sequence[Step]) -> list[Finding]:
    recent = [step for step in steps if step.row.stack in SECOND]
    return [finding(step.row, predicted_s(step, efficiency_of(step.cluster.gpu.name), REAL)) for step in recent]


def of_clusters(found: Sequence[Finding]) -> list[str]:
    """Rows of a table: errors by cluster, and of all rows."""
    clusters = list(dict.fromkeys(finding.row.cluster for finding in found))
    lines = ["| cluster | rows | mean error | median | largest | bias |", "|---|---|---|---|---|---|"]
    groups = {name: [finding.error for finding in found if finding.row.cluster == name] for name in clusters}
    without = [f.error for f in found if not f.row.cluster.startswith(("Answer.AI", TEST))]
    groups["llm-foundry and torchtitan"] = without
    groups["all rows"] = [finding.error for finding in found]
    for name, errors in groups.items():
        sizes = [abs(error) for error in errors]
        lines.append(
            f"| {name} | {len(errors)} | {statistics.mean(sizes):.1%} | {statistics.median(sizes):.1%} | "
            f"{max(sizes):.1%} | {statistics.median(errors):+.1%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder for a dated .md and .json")
    out: Path | None = parser.parse_args().out
    steps, left_out = steps_and_left_out()
    fitted = [step for step in steps if not step.row.cluster.startswith(TEST)]
    on_source = fit([step for step in fitted if step.row.cluster.startswith("llm-foundry")], Constants())
    tested = findings(steps, on_source)
    on_all = fit(fitted, Constants(), on_source)
    unseen: list[Finding] = []
    fits: dict[str, Constants] = {}
    for cluster in dict.fromkeys(step.row.cluster for step in steps):
        others = [step for step in fitted if step.row.cluster != cluster]
        fits[cluster] = on_all if cluster.startswith(TEST) else fit(others, Constants(), on_all)
        unseen += findings([step for step in steps if step.row.cluster == cluster], fits[cluster])
    text = "\n".join(
        [
            "## As planned: the constants of the planner, for rows with flash-attention 2\n",
            *of_clusters(planned(steps)),
            "\n",
            "## Fitted on llm-foundry, tested on the others\n",
            *of_clusters(tested),
            "\n## Leaving one cluster out\n",
            *of_clusters(unseen),
            "\n## Fitted on everything but IBM (in-sample for the others)\n",
            *of_clusters(findings(steps, on_all)),
            "\n## Constants\n",
            f"On llm-foundry: {describe(on_source)}\n",
            f"On everything: {describe(on_all)}",
        ]
    )
    print(text)
    if out:
        write(out, text, tested, unseen, left_out, {"llm-foundry": on_source, "all": on_all, **fits})


def describe(constants: Constants) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in asdict(constants).items())


def write(
    out: Path,
    text: str,
    tested: Sequence[Finding],
    unseen: Sequence[Finding],
    left_out: Sequence[Sequence[str]],
    fits: dict[str, Constants],
) -> None:
    now = datetime.now(UTC)
    stem = out / f"{now:%Y-%m-%d-%H%M}-planner-against-published"
    by_id = {finding.row.id: finding for finding in unseen}
    lines = [
        f"# Planned speed against published, {now:%Y-%m-%d %H:%M}\n",
        "    python -m benchmarks.planner_against_published --out benchmarks/results\n",
        "Errors are predicted / published tokens/s - 1. The bars of the field on llm-foundry: 17 % (half of the peak),",
        "12.8 % (a constant for each GPU), 9.1 % (one for each GPU and checkpointing mode, in-sample).\n",
        text,
        "\n## Every row\n",
        "`a`: constants from llm-foundry alone. `b`: its cluster left out.\n",
        "| row | GPUs | published tokens/s/GPU | a | error | b | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for finding in tested:
        row, other = finding.row, by_id[finding.row.id]
        lines.append(
            f"| {row.id} | {row.num_nodes * row.node_size} x {row.gpu} | {row.tokens_per_s_per_gpu:g} | "
            f"{finding.predicted_tokens_per_s:.0f} | {finding.error:+.1%} | {other.predicted_tokens_per_s:.0f} | "
            f"{other.error:+.1%} |"
        )
    lines += ["\n## More than 10 % off (a)\n", "| row | error | why, as far as can be seen |", "|---|---|---|"]
    far = [finding for finding in tested if abs(finding.error) > FAR]
    lines += [f"| {finding.row.id} | {finding.error:+.1%} | {reason_for(finding.row)} |" for finding in far]
    lines += ["\n## Left out\n", "| row | why |", "|---|---|", *(f"| {name} | {why} |" for name, why in left_out)]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    table = {
        "schema": 1,
        "command": "python -m benchmarks.planner_against_published --out benchmarks/results",
        "date": f"{now:%Y-%m-%d %H:%M}",
        "constants": {name: asdict(constants) for name, constants in fits.items()},
        "rows": [
            {
                "id": finding.row.id,
                "cluster": finding.row.cluster,
                "published": finding.row.tokens_per_s_per_gpu,
                "from_llm_foundry": finding.predicted_tokens_per_s,
                "left_out": by_id[finding.row.id].predicted_tokens_per_s,
            }
            for finding in tested
        ],
    }
    stem.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
