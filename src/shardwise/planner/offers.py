"""Clusters compared, and the smallest one that fits or that trains a model in time: days, GPU-hours and dollars.

Each cluster is planned like `sw.plan` does, with the presets alone. The answers are JSON; a cluster has the keys of the
strategy that it would run, as in the JSON of a plan. The search for the smallest cluster brackets it with one strategy,
which takes milliseconds, and then plans the clusters next to it with all presets.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any

from ..base.errors import ConfigurationError
from ..core.layout import MOST_SPLIT
from ..version import VERSION
from .assess import Assessment, Machine
from .hardware.cluster import Cluster, usual_node
from .hardware.gpus import Gpu
from .plan_json import Json, cluster_as_json, days_of, strategy_as_json
from .planning import Plan, machine_of, plan
from .search import TIE, fastest
from .states import States
from .subject import Planned

Prices = float | Mapping[str, float]  # dollars per GPU-hour: of every GPU, or by name
TIE_OF_PRICES = 0.05  # of clusters whose dollars differ by at most this fraction, the fastest is taken
MOST_NODES = 1024  # maximum number of nodes that `smallest` tries
MANY_GPUS = 512  # beyond this size, most trainings of others also use tensor or pipeline parallelism


def compare(
    model: Planned,
    clusters: Sequence[str | Cluster | Machine],
    *,
    num_tokens: float | None = None,
    prices: Prices | None = None,
    **asked: Any,
) -> Json:
    """Plan the model on each cluster. `asked`: the arguments of `sw.plan`. Recommended is the cheapest cluster if there
    are prices, else the fastest. A cluster that does not fit or cannot be planned has the reason in `why_not`."""
    offers = [_offer(model, machine_of(cluster), asked) for cluster in clusters]
    rows = [_as_row(offer, num_tokens, prices) for offer in offers]
    if not any("facts" in row for row in rows):
        raise ConfigurationError(rows[0]["why_not"] if rows else "--compare: name clusters: 8xH100,16xA100-80GB")
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        return _answer(rows, None, "nothing fits on any of them", asked)
    speed = itemgetter("tokens_per_second")
    fast = max(fitting, key=speed)
    # Of clusters that are as fast, the one with the fewest GPUs.
    best = min((row for row in fitting if speed(row) >= speed(fast) * (1 - TIE)), key=_num_gpus)
    why = "the fastest"
    if prices is not None and num_tokens is not None:
        least = min(row["dollars"] for row in fitting)
        cheap = [row for row in fitting if row["dollars"] <= least * (1 + TIE_OF_PRICES)]
        best = max(cheap, key=speed)
        why = "the cheapest" if len(cheap) == 1 else f"the fastest of those within {TIE_OF_PRICES:.0%} of the cheapest"
    if best is not fast and _num_gpus(best) < _num_gpus(fast) and speed(best) >= speed(fast) * (1 - TIE):
        why += f"; {fast['cluster']['name']} is as fast, with more GPUs"
    elif speed(best) < speed(fast) * (1 - TIE):
        why += f"; {fast['cluster']['name']} is {speed(fast) / speed(best):.2f}x as fast"
    return _answer(rows, best, why, asked)


def smallest(
    model: Planned,
    cluster: str | Cluster | Machine,
    *,
    days: float | None = None,
    num_tokens: float | None = None,
    prices: Prices | None = None,
    **asked: Any,
) -> Json:
    """Find the smallest number of GPUs that trains the model on `num_tokens` tokens in `days`; without days, the
    smallest number that fits, and the smallest that fits without state on host or disk.

    cluster: the largest node to use, such as "8xH100-80GB". Tried are 1, 2, 4, ... GPUs of one node, and 2 to 1024
        whole nodes; with a global batch only numbers of GPUs among which it divides. `asked`: arguments of `sw.plan`.
    """
    if days is not None and (num_tokens is None or not 0 < days < 1e9):
        fix = "give a number above 0 and below 1e9, and --tokens, the length of the training"
        raise ConfigurationError(f"--days {days:g}: {fix}")
    global_batch, node = asked.get("global_batch"), machine_of(cluster)
    if node.cluster.num_nodes > 1:
        raise ConfigurationError(f"GPUs: {node.cluster}: the number of nodes is searched; name one node")
    sizes = _sizes(node)
    machines = [m for m in sizes if global_batch is None or global_batch % m.cluster.world_size == 0]
    quick = {**asked, "strategy": asked.get("strategy") or MOST_SPLIT}

    @cache
    def offer(at: int, is_quick: bool) -> Offer:  # called with positions only, as `cache` tells keywords apart
        found = _offer(model, machines[at], quick if is_quick else asked)
        if isinstance(found.plan, str):  # no size can be planned
            raise ConfigurationError(found.plan)
        return found

    def row(at: int, on_device: bool) -> Json:
        return _as_row(offer(at, False), num_tokens, prices, on_device)

    def first(on_device: bool, is_quick: bool) -> int | None:
        def meets(at: int, is_quick: bool = False) -> bool:
            found = offer(at, is_quick).best(on_device)
            if found is None or days is None or num_tokens is None:
                return found is not None
            return days_of(num_tokens, found) <= days

        return _first(len(machines), lambda at: meets(at, is_quick), meets)

    at = first(False, days is not None)
    if at is None:
        rows, most = [row(len(machines) - 1, False)], machines[-1].cluster
        why = f"not even {most} is enough: "
        why += f"it takes {rows[0]['days']:,.3g} days, not {days:g}" if rows[0]["fits"] else rows[0]["why_not"]
        if most.num_nodes < MOST_NODES:
            why += f"; more GPUs do not divide a global batch of {global_batch} sequences: give a larger one"
        return _answer(rows, None, why, asked, sizes)
    rows, why = [row(at, False)], "the smallest that fits"
    if days is not None:
        rows, why = [*([row(at - 1, False)] if at else []), *rows], f"the smallest that takes at most {days:g} days"
    elif rows[0]["host_bytes"] or rows[0]["disk_bytes"]:
        why += " with state on host or disk; without, not even the largest does"
        if (at := first(True, True)) is not None:
            rows.append(row(at, True))
            why = f"the smallest that fits without state on host or disk; with it, {rows[0]['cluster']['name']} does"
    return _answer(rows, rows[-1], why, asked, sizes)


def _num_gpus(row: Json) -> int:
    return int(row["cluster"]["world_size"])


@dataclass(frozen=True)
class Offer:
    """One cluster and its plan, or the reason why it cannot be planned."""

    machine: Machine
    plan: Plan | str
    precision: str = ""

    def best(self, on_device: bool) -> Assessment | None:
        """Return the recommended strategy. `on_device`: of those without state on host or disk."""
        if isinstance(self.plan, str) or not on_device:
            return None if isinstance(self.plan, str) else self.plan.recommended
        return fastest(entry for entry in self.plan.found if entry.is_on_device and entry.is_exact)


def _offer(model: Planned, machine: Machine, asked: Mapping[str, Any]) -> Offer:
    try:
        precision = precision_for(machine.cluster.gpu, asked.get("precision"))
        made = plan(model, machine, **{**asked, "search": False, "precision": precision})
    except ConfigurationError as error:
        return Offer(machine, str(error))
    if isinstance(made, States):
        raise ConfigurationError("without the sizes of a model its time is not known: plan one cluster at a time")
    return Offer(machine, made, precision)


def _as_row(offer: Offer, num_tokens: float | None, prices: Prices | None, on_device: bool = False) -> Json:
    cluster, price, made = offer.machine.cluster, price_for(offer.machine.cluster.gpu, prices), offer.plan
    row: Json = {"cluster": cluster_as_json(offer.machine), "fits": False, "price": price}
    if isinstance(made, str):
        return {**row, "why_not": made}
    row |= {"facts": dict(made.facts), "training": asdict(made.training), "precision": offer.precision}
    best = offer.best(on_device)
    if best is None:
        return {**row, "why_not": made.why}
    row |= strategy_as_json(best, made, num_tokens)
    row["tokens_per_step"] = best.training.num_tokens * best.training.num_micro_batches * cluster.world_size
    row["tokens_per_second"] = best.tokens_per_s * cluster.world_size
    return row | _costs(row, cluster.world_size, price)


def add_costs(answer: Json, price: float | None) -> None:
    """Add to a plan in JSON GPU-hours and dollars of the strategies whose days are known, and notes."""
    num_gpus, node_size = answer["cluster"]["world_size"], answer["cluster"]["node_size"]
    for row in answer["strategies"]:
        row |= _costs(row, num_gpus, price)
    answer["notes"] = notes_for(answer["model"], num_gpus)
    if node_size > (usual := usual_node(answer["cluster"]["gpu"]["name"])):
        answer["notes"].append(f"one node has {node_size} GPUs, more than the usual {usual}: all share its fast links")


def _costs(row: Json, num_gpus: int, price: float | None) -> Json:
    hours = None if row.get("days") is None else row["days"] * 24 * num_gpus
    return {"gpu_hours": hours, "dollars": None if hours is None or price is None else hours * price}


def _answer(
    rows: list[Json], best: Json | None, why: str, asked: Mapping[str, Any], sizes: Sequence[Machine] = ()
) -> Json:
    made: Json = best or next((row for row in rows if "facts" in row), {})
    facts, own, batch = made.get("facts", {}), made.get("training", {}), asked.get("global_batch")
    notes = [] if asked.get("strategy") else ["only presets are compared; the plan of one cluster also tries mixtures"]
    if batch is None and len({row["cluster"]["world_size"] for row in rows}) > 1:
        tokens = f"{own['micro_batch'] * own['num_micro_batches']} x {own['seq']:,} tokens"
        notes.append(f"each GPU gets {tokens} a step, so more GPUs take larger steps; --global-batch-size fixes them")
    precisions = {row["precision"]: row["cluster"]["name"] for row in rows if "precision" in row}
    if own and (other := {row: name for row, name in precisions.items() if row != made["precision"]}):
        notes.append(", ".join(f"{name} trains in {precision}" for precision, name in other.items()))
    if best is not None and best["tight"]:
        why += f"; tight: only {best['room_bytes'] / 1e9:,.1f} GB stay free"
    notes += [str(facts["note"])] if facts.get("note") else []
    counts = [machine.cluster.world_size for machine in sizes]
    if skipped := [f"{size:,}" for size in counts if batch is not None and batch % size and size < batch]:
        words = ", ".join(skipped[:5]) + (f" and {len(skipped) - 5:,} more" if len(skipped) > 5 else "")
        notes.append(f"skipped numbers of GPUs among which a global batch of {batch} does not divide: {words}")
    return {
        "version": VERSION,
        "model": facts,
        "training": own and {**own, "checkpointing": asked.get("checkpointing", "auto")},
        "clusters": [{key: row[key] for key in row if key not in ("facts", "training")} for row in rows],
        "recommended": None if best is None else rows.index(best),
        "why": why,
        "notes": notes + notes_for(facts, max(row["cluster"]["world_size"] for row in rows)),
    }


def notes_for(facts: Mapping[str, object], num_gpus: int) -> list[str]:
    """Return sentences about parallelism that the plan does not model, where it would matter."""
    found, unknown = [], "not modelled, because shardwise does not run"
    if "num_experts" in facts:
        found.append(f"expert parallelism is {unknown} it: every GPU gathers all experts")
    if num_gpus > MANY_GPUS:
        found.append(f"tensor and pipeline parallelism are {unknown} them; on {num_gpus:,} GPUs others use them")
    return found


def _first(num: int, might: Callable[[int], bool], does: Callable[[int], bool]) -> int | None:
    """Return the first index for which `does` holds, None if there is none. `might` is a quick approximation; both
    are taken to hold for all larger indices."""
    high = 1
    while high < num and not might(high - 1):
        high *= 2
    at, step = bisect_left(range(min(high, num)), True, lo=high // 2, key=might), 1
    while at >= step and does(at - step):
        at, step = at - step, 2 * step
    at = bisect_left(range(num), True, lo=max(at - step + 1, 0), hi=at, key=does)
    while at < num and not does(at):
        at = bisect_left(range(num), True, lo=at + 1, key=does)
    return at if at < num else None


def _sizes(machine: Machine) -> list[Machine]:
    """Return machines of growing size. A part of a node gets its share of the host."""
    cluster, node_size = machine.cluster, machine.cluster.node_size
    parts = [1 << power for power in range(node_size.bit_length()) if 1 << power < node_size]
    found = [replace(cluster, num_nodes=num) for num in range(1, MOST_NODES + 1)]
    for size in reversed(parts):
        host_bytes, disk_bytes = (whole * size // node_size for whole in (cluster.host_bytes, cluster.disk_bytes))
        part = replace(found[0], node_size=size, host_bytes=host_bytes, disk_bytes=disk_bytes)
        found.insert(0, replace(part, host_adam_elems_per_s=cluster.host_adam_elems_per_s * size / node_size))
    return [replace(machine, cluster=made) for made in found]


def price_for(gpu: Gpu, prices: Prices | None) -> float | None:
    if isinstance(prices, Mapping) and gpu.name not in prices:
        raise ConfigurationError(f"--price: no price for {gpu.name}; add {gpu.name}=..., or give one number for all")
    return prices[gpu.name] if isinstance(prices, Mapping) else prices


def precision_for(gpu: Gpu, precision: str | None) -> str:
    if precision is not None and "bf16" in precision and not gpu.has_bf16:
        raise ConfigurationError(f"--precision: {precision}, but {gpu.name} has no bf16; use fp16 or fp32")
    return precision or ("bf16" if gpu.has_bf16 else "fp16")
