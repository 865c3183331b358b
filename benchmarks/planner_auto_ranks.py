"""`auto` against every preset on two real ranks of this machine (gloo, one thread each), for `planner_auto`.

All contenders live in the same two processes and take their steps in turn, a few each, in an order that rotates from
round to round: whatever else the machine does meets all of them. Rooms are values as on a GPU, but nothing holds a
process to them; a preset fits where the planner says so.
"""

import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw
from benchmarks.planner_auto import ENDLESS, Setting, batch_of, chosen, limits, room, told
from benchmarks.planner_cases import Case
from benchmarks.planner_measure import SEED, Answer, Run, batches_of, build
from shardwise.api.sharding import chosen_plan
from shardwise.core.layout import AUTO
from shardwise.planner.planning import Plan
from shardwise.trainer.optimizers import optimizer_for
from shardwise.trainer.settings import Settings

NUM_RANKS = 2
NUM_ROUNDS, STEPS_OF_ROUND, WARM_UP = 12, 2, 3
HERE = "1x2"
CPU = torch.device("cpu")


def settings() -> list[Setting]:
    small = Case(model="30m", seq=64, fabric=HERE, precision="fp32")
    return [
        Setting(small),
        Setting(replace(small, num_micro_batches=4), ("all", "part")),
        Setting(replace(small, seq=256, micro_batch=2), ("all", "part")),
    ]


def on_ranks(patterns: Sequence[str]) -> Iterator[tuple[str, Callable[[], Answer]]]:
    for setting in settings():
        if not patterns or any(fnmatchcase(setting.name, pattern) for pattern in patterns):
            yield setting.name, lambda setting=setting: _measured(setting)


def _measured(setting: Setting) -> Answer:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        file = Path(folder) / "answer.json"
        mp.spawn(_rank, (setting, port, file), NUM_RANKS)  # type: ignore[no-untyped-call]
        answer: Answer = json.loads(file.read_text())
        return answer


def _rank(rank: int, setting: Setting, port: int, file: Path) -> None:
    size = str(NUM_RANKS)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    sw.init(device=CPU)
    answer = _compare(setting)
    if rank == 0:
        file.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _set_up(case: Case) -> Run:
    model = build(case, CPU)
    model, optimizer = sw.shard(
        model,
        optimizer_for(model, Settings()),
        case.strategy,
        precision=case.precision,
        reduce_dtype=case.reduce,
        seed=SEED,
        batch=batch_of(case) if case.strategy == AUTO else None,
    )
    return Run(case, model, optimizer, batches_of(case, CPU))


def _compare(setting: Setting) -> Answer:
    case = replace(setting.case, strategy=AUTO)
    plan = _plan_with_all(case)
    sizes = limits(plan, ENDLESS)
    entries = {entry.name: entry for entry in plan.found}
    autos: list[Answer] = [{"room": name, "limit_bytes": sizes[name], "held": []} for name in setting.rooms]
    presets: list[Answer] = [
        {"preset": name, "predicted_s": entries[name].timing.step_s, "needed_bytes": entries[name].needed_bytes}
        for name in setting.presets
    ]
    runs: list[Run] = []
    for auto in autos:
        with room(auto["limit_bytes"], CPU):
            runs.append(_set_up(case))
    runs += [_set_up(replace(case, strategy=preset["preset"])) for preset in presets]
    for run in runs:
        for _ in range(WARM_UP):
            run.step()
    contenders = [*autos, *presets]
    for contender in contenders:
        contender["rounds"] = []
    for index in range(NUM_ROUNDS):
        for turn in range(len(runs)):
            place = (index + turn) % len(runs)
            contenders[place]["rounds"].append(_steps(runs[place]))
    for auto, run in zip(autos, runs, strict=False):
        for seen in auto["rounds"]:
            seen["chosen"] = chosen(run)
    if dist.get_rank() == 0:
        for contender in contenders:
            every = [each for seen in contender["rounds"] for each in seen["steps_s"]]
            told(
                contender.get("preset", f"auto, {contender.get('room')}"), {**contender["rounds"][0], "steps_s": every}
            )
    return {**setting.case.described(), "name": setting.name, "autos": autos, "presets": presets}


def _steps(run: Run) -> Answer:
    dist.barrier()
    instants = [time.perf_counter()]
    for _ in range(STEPS_OF_ROUND):
        run.step()
        instants.append(time.perf_counter())
    steps_s = [end - begin for begin, end in itertools.pairwise(instants)]
    return {"status": "ok", "steps_s": steps_s, "peak": {}}


def _plan_with_all(case: Case) -> Plan:
    with room(ENDLESS, CPU):
        plan = chosen_plan(_set_up(case).model)
    assert plan is not None
    return plan
