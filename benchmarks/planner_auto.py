"""`strategy="auto"`, measured: never slower than the best preset, and how much faster than zero3.

    python -m benchmarks.planner_auto --device cuda --out FILE.json [--settings PATTERN ...] [--limit-s 400]
    python -m benchmarks.planner_auto --device cpu --out FILE.json

On a GPU one process plays rank 0 of an emulated fabric, contender after contender. A setting is a model and a fabric,
and rooms: how much memory a rank may use. `auto` goes the way a user's call goes, through `sw.shard`, and measures the
links itself; only what is free is a value, and the allocator is held to it. Presets run with all memory there is, and
count as fitting where what they reserved is within the room; where the planner is not sure, they are held to the room
as well, and that run counts. Everything is measured twice: the autos, the presets, and both again in the other order.
The step clips, as the trainer's does.

On a CPU there are two real ranks (`planner_auto_ranks.py`). `--smoke` takes the GPU's path on a CPU in a minute.
`FILE.md` beside the file is the table (`planner_auto_table.py`). Both are written after every setting.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.planner_auto_table import table
from benchmarks.planner_cases import SPLIT_BY_NODE, Case
from benchmarks.planner_measure import (
    LONG_S,
    SEED,
    Answer,
    Books,
    DeviceMemory,
    HostMemory,
    Run,
    batches_of,
    build,
    machine,
    seconds_alone,
    set_up,
    timed,
)
from shardwise.api import sharding
from shardwise.api.sharding import chosen_plan
from shardwise.bench import fabric
from shardwise.bench.measure import failure
from shardwise.core.layout import AUTO, PRESETS
from shardwise.core.mesh import everyone, make_axes
from shardwise.core.optim.probe import num_moments
from shardwise.core.precision import precision_of
from shardwise.core.schedule.units import find_units
from shardwise.planner.assess import Assessment
from shardwise.planner.auto import AutoRequest, choose, machine_here
from shardwise.planner.hardware import links
from shardwise.planner.planning import Plan
from shardwise.planner.search import strategy_of
from shardwise.planner.training import Training
from shardwise.trainer.optimizers import optimizer_for
from shardwise.trainer.settings import Settings

ENDLESS = 10**15
WARM_UP, SETTLE = 2, 2
STEPS = {False: 7, True: 4}  # of long steps
ROOMS = ("all", "part", "least")


@dataclass(frozen=True, slots=True)
class Setting:
    """`case` says the model, the batch and the fabric; its strategy is whoever runs."""

    case: Case
    rooms: tuple[str, ...] = ROOMS

    @property
    def name(self) -> str:
        model, _, *rest = self.case.name.split("/")
        return "/".join([model, *rest])

    @property
    def presets(self) -> list[str]:
        """Those that differ: in one node, node and world are the same."""
        is_one_node = links.parse(self.case.fabric).num_nodes == 1
        return [name for name in PRESETS if not (is_one_node and name in SPLIT_BY_NODE)]


def _node(gigabytes_per_s: float) -> str:
    return f"1x8,intra={gigabytes_per_s:g}GB/s,inter=50GB/s"


def _nodes(shape: str, gigabytes_per_s: float) -> str:
    return f"{shape},intra=400GB/s,inter={gigabytes_per_s:g}GB/s"


def settings() -> list[Setting]:
    """The most telling first."""
    return [
        Setting(Case(model="1b", fabric=_nodes("2x4", 12.5)), (*ROOMS, "tight")),
        Setting(Case(model="3b", seq=4096, fabric=_node(50)), ("all", "part", "tight")),
        Setting(Case(model="3b", seq=4096, fabric=_node(400)), ("all", "part")),
        Setting(Case(model="8b", fabric=_node(100), checkpointing="full"), ("all", "part")),
        Setting(Case(model="1b", fabric=_node(50), num_micro_batches=4)),
        Setting(Case(model="1b", fabric=_node(50), reduce="bf16")),
        Setting(Case(model="3b", seq=4096, fabric=_nodes("8x8", 25)), ("all", "part")),
        Setting(Case(model="3b", fabric=_nodes("2x4", 25)), ("all", "part")),
        Setting(Case(model="1b", seq=4096, fabric=_node(100)), ("all", "part")),
        Setting(Case(model="8b", fabric=_nodes("2x4", 25), checkpointing="full"), ("part", "least")),
        Setting(Case(model="1b", fabric=_nodes("8x8", 50))),
        Setting(Case(model="3b", fabric=_nodes("2x4", 12.5), num_micro_batches=4), ("all", "part")),
    ]


def smoke() -> list[Setting]:
    tiny = Case(model="tiny", seq=32, fabric="1x8,intra=0.1GB/s,inter=1GB/s")
    return [
        Setting(tiny, ("part",)),
        Setting(replace(tiny, fabric="2x4,intra=0.1GB/s,inter=0.01GB/s", num_micro_batches=2), ("all",)),
    ]


# ---------------------------------------------------------------------------------------------------------
# rooms


def plan_with_all(case: Case, device: torch.device) -> Plan:
    """What the planner says of every strategy where memory does not matter."""
    with played(case, device) as emulated:
        model = build(case, device)
        precision = precision_of(case.precision, case.reduce)
        training = Training(
            precision=precision,
            moments=num_moments(optimizer_for(model, Settings()), precision),
            micro_batch=case.micro_batch,
            seq=case.seq,
            num_micro_batches=case.num_micro_batches,
        )
        axes = make_axes(emulated.node_size)
        here = machine_here(everyone(), axes, ENDLESS)
        return choose(model, find_units(model, "auto"), AutoRequest(training, batch_of(case), "auto", None, ()), here)


def batch_of(case: Case) -> tuple[int, int, int]:
    return case.micro_batch, case.seq, case.num_micro_batches


def limits(plan: Plan, there_bytes: int) -> dict[str, int]:
    """all: every preset has room, or as many as the device allows. part: half way between zero3 and what is kept
    gathered. least: zero3, and hardly more. tight: the fastest preset, if nothing is wasted that may be."""
    sizes = {entry.name: entry.reserved for entry in plan.found}
    split, kept = sizes["zero3"].high, min(sizes["zero2"].expected, sizes["shard_grad_op"].expected)
    fastest = min((entry for entry in plan.found if entry.name in PRESETS), key=lambda entry: entry.timing.step_s)
    return {
        "all": min(there_bytes, round(max(size.high for size in sizes.values()) * 1.02)),
        "part": (split + kept) // 2,
        "least": round(split * 1.005),
        "tight": (fastest.reserved.expected + fastest.reserved.high) // 2,
    }


@contextmanager
def room(limit_bytes: int, device: torch.device) -> Iterator[None]:
    """What is free is a value, and on a GPU the allocator cannot take more."""
    before = sharding.free_bytes_here
    sharding.free_bytes_here = lambda: limit_bytes
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        sharding.free_bytes_here = before
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)


# ---------------------------------------------------------------------------------------------------------
# one contender


@contextmanager
def played(case: Case, device: torch.device) -> Iterator[links.Fabric]:
    emulated = links.parse(case.fabric)
    fabric.start(emulated)
    sw.init(device=device)
    try:
        yield emulated
    finally:
        dist.destroy_process_group()


def set_up_auto(case: Case, device: torch.device) -> Run:
    """As `planner_measure.set_up`, with the batch that auto asks for."""
    emulated = links.parse(case.fabric)
    fabric.start(emulated)
    sw.init(device=device)
    model = build(case, device)
    model, optimizer = sw.shard(
        model,
        optimizer_for(model, Settings()),
        AUTO,
        precision=case.precision,
        reduce_dtype=case.reduce,
        node_size=emulated.node_size,
        seed=SEED,
        batch=batch_of(case),
    )
    return Run(case, model, optimizer, batches_of(case, device))


def chosen(run: Run) -> Answer:
    plan = chosen_plan(run.model)
    assert plan is not None
    assert plan.recommended is not None
    cluster = plan.machine.cluster
    return {
        "choice": plan.recommended.name,
        "strategy": strategy_of(plan.recommended),
        "predicted_s": plan.recommended.timing.step_s,
        "needed_bytes": plan.recommended.needed_bytes,
        "links": {"intra": cluster.intra.gigabytes_per_s, "inter": cluster.inter.gigabytes_per_s},
        "predicted": {entry.name: entry.timing.step_s for entry in plan.found if entry.fits},
    }


def observe(case: Case, device: torch.device, books: Books) -> Answer:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    books.forget()
    began = time.perf_counter()
    run = set_up_auto(case, device) if case.strategy == AUTO else set_up(case, device)
    answer: Answer = {"set_up_s": time.perf_counter() - began}
    if case.strategy == AUTO:
        answer["chosen"] = chosen(run)
    for _ in range(WARM_UP):
        host_s, alone_s = seconds_alone(run, wait)
    books.forget()
    for _ in range(SETTLE):
        run.step()
    before = num_retries(device)
    seen = timed(run, STEPS[alone_s > LONG_S])
    answer |= {key: seen[key] for key in ("steps_s", "step_s", "wire_busy_s", "wire_bytes")}
    answer["peak"] = books.now()
    answer["retries"] = num_retries(device) - before
    answer["host_s"] = host_s
    return answer


def num_retries(device: torch.device) -> int:
    """How often the allocator had to give back what it kept, before it could take more."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if device.type == "cuda" else 0


def attempt(case: Case, device: torch.device, books: Books) -> Answer:
    """No frame of it outlives this, and so none of its tensors."""
    try:
        return {"status": "ok", **observe(case, device, books)}
    except Exception as error:  # noqa: BLE001, who fails is a result
        error.__traceback__ = None
        return failure(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------
# one setting


def compare(setting: Setting, device: torch.device, books: Books) -> Answer:
    there = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ENDLESS
    plan = plan_with_all(setting.case, device)
    sizes = limits(plan, there)
    predicted = {entry.name: entry for entry in plan.found}
    autos: list[Answer] = [
        {
            "room": name,
            "limit_bytes": sizes[name],
            "rounds": [],
            "held": [],
        }
        for name in setting.rooms
    ]
    presets: list[Answer] = [
        {
            "preset": name,
            "predicted_s": predicted[name].timing.step_s,
            "needed_bytes": predicted[name].needed_bytes,
            "rounds": [],
        }
        for name in setting.presets
        if predicted[name].reserved.low <= there
    ]
    for order in (1, -1):
        for auto in autos[::order]:
            name = f"{auto['room']} ({auto['limit_bytes'] / 1e9:.1f} GB)"
            with room(auto["limit_bytes"], device):
                auto["rounds"].append(attempt(replace(setting.case, strategy=AUTO), device, books))
                told(f"auto, {name}", auto["rounds"][-1])
                if order == 1:
                    auto["held"] = rivals(auto, [predicted[preset] for preset in setting.presets])
                for held in auto["held"]:
                    books.forget()
                    held["rounds"].append(attempt(replace(setting.case, strategy=held["preset"]), device, books))
                    told(f"{held['preset']}, {name}", held["rounds"][-1])
            books.forget()
        for preset in presets[::order]:
            preset["rounds"].append(attempt(replace(setting.case, strategy=preset["preset"]), device, books))
            told(preset["preset"], preset["rounds"][-1])
            books.forget()
    return {**setting.case.described(), "name": setting.name, "autos": autos, "presets": presets}


def rivals(auto: Answer, presets: Sequence[Assessment]) -> list[Answer]:
    """Presets that may fit or not, and that may be faster than what was chosen."""
    chosen_s = auto["rounds"][0].get("chosen", {}).get("predicted_s", math.inf)
    return [
        {"preset": entry.name, "rounds": []}
        for entry in presets
        if entry.reserved.low <= auto["limit_bytes"] < entry.reserved.high and entry.timing.step_s < 1.02 * chosen_s
    ]


def told(name: str, seen: Answer) -> None:
    if seen["status"] != "ok":
        print(f"    {name}: {seen['status']}: {seen['error']}", flush=True)
        return
    if "chosen" in seen:
        links = "/".join(f"{value:.0f}" for value in seen["chosen"]["links"].values())
        name += f" -> {seen['chosen']['choice']}, predicted {seen['chosen']['predicted_s'] * 1e3:.1f} at {links} GB/s"
    reserved = f", reserved {seen['peak']['reserved_peak'] / 1e9:.2f} GB" if seen["peak"] else ""
    spread = f"{min(seen['steps_s']) * 1e3:.1f}-{max(seen['steps_s']) * 1e3:.1f}"
    print(f"    {name}: {statistics.median(seen['steps_s']) * 1e3:.1f} ms ({spread}){reserved}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="*", default=[], help="patterns of names; all unless given")
    parser.add_argument("--done", nargs="*", type=Path, default=[], help="files of earlier runs: not measured again")
    parser.add_argument("--limit-s", type=float, default=400.0, help="no setting is begun that would end later")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the emulated fabric")
    parser.add_argument("--list", action="store_true", help="only say which settings there are")
    return parser.parse_args()


def asked_for(options: argparse.Namespace) -> list[Setting]:
    done = {row["name"] for file in options.done for row in json.loads(file.read_text())["settings"]}
    return [
        each
        for each in (smoke() if options.smoke else settings())
        if each.name not in done
        and (not options.settings or any(fnmatchcase(each.name, pattern) for pattern in options.settings))
    ]


def main() -> None:
    options = parse()
    began = time.perf_counter()
    if options.device == "cpu" and not options.smoke:
        from benchmarks.planner_auto_ranks import on_ranks

        found: Iterator[tuple[str, Any]] = on_ranks(options.settings)
        device = torch.device("cpu")
    else:
        device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        torch.set_num_threads(1)
        asked = asked_for(options)
        if options.list:
            print("\n".join(f"{each.name} {' '.join(each.rooms)}" for each in asked))
            return
        books: Books = HostMemory()
        if device.type == "cuda":
            torch.cuda.init()
            books = DeviceMemory()
        found = ((each.name, lambda each=each: compare(each, device, books)) for each in asked)
    document: Answer = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "benchmarks.planner_auto", *sys.argv[1:]]),
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "machine": machine(device),
        "settings": [],
    }
    longest_s = 0.0
    for name, measure in found:
        begun_s = time.perf_counter() - began
        if begun_s + longest_s > options.limit_s:
            print(f"{name} and what follows is left: {begun_s:.0f} s have passed", flush=True)
            break
        print(name, flush=True)
        document["settings"].append(measure())
        spent_s = time.perf_counter() - began - begun_s
        longest_s = max(longest_s, spent_s)
        print(f"  {spent_s:.0f} s", flush=True)
        beside = options.out.with_suffix(".part")
        beside.write_text(json.dumps(document) + "\n")
        beside.replace(options.out)
        options.out.with_suffix(".md").write_text(table(document))


if __name__ == "__main__":
    main()
