"""A model whose training state is larger than the host memory allowed to it, and how fast a disk's state is updated.

    python -m benchmarks.offload_limits --folder /nvme [--device cuda] [--megaparams 96] [--out benchmarks/results]

First part: processes that may have only so much memory (RLIMIT_DATA, which works without root and in any container;
all that is private and writable counts, whether it was touched or not). Told are the losses beside those of a run with
no limit, or how it ended. Second part: a step's updates of state on disk, from the step's call until the
last byte is written, beside a plain reader and writer at once in the same folder, in turns in one process. Needs torch
and nothing else. A block has 8 x hidden^2 parameters; they are made on the meta device, unit by unit.
"""

import argparse
import datetime
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.bench.pages import commit, processor
from shardwise.core.engine.guards import engine_of
from shardwise.core.offload.disk import Disk, Pending, Region

from .disk_store import PLAIN, Plain
from .pages import benchmark_page, show, spread, table

FROM_DISK, REFERENCE = "zero3_nvme", "zero3"
# What needs the host's memory for all of its state.
ON_HOST = {"cpu": ("zero3", "zero3_offload"), "cuda": ("zero3_offload",)}
STATE_BYTES = 16  # of a parameter: master, two moments and a gradient, in fp32
TARGET = 0.8


@dataclass(frozen=True)
class Case:
    strategy: str
    device: str
    hidden: int
    num_blocks: int
    num_rows: int
    num_steps: int
    folder: str
    limit_bytes: int | None = None  # beyond what the process has when it begins to build
    plain_bytes: int = 0
    num_repetitions: int = 0  # of updates and plain ones, in turns; none: losses are told

    @property
    def num_params(self) -> int:
        return self.num_blocks * 8 * self.hidden**2

    @property
    def state_bytes(self) -> int:
        return STATE_BYTES * self.num_params


# ---------------------------------------------------------------------------------------------------------
# in a process of its own


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.nn.functional.silu(self.up(x)))
        return out


class Blocks(nn.Module):
    def __init__(self, hidden: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Training:
    def __init__(self, case: Case) -> None:
        self.case = case
        with torch.device("meta"):
            model: nn.Module = Blocks(case.hidden, case.num_blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        folder = case.folder if case.strategy == FROM_DISK else None
        self.model, self.optimizer = sw.shard(
            model, optimizer, case.strategy, precision="bf16", units=["Block"], seed=0, disk_path=folder
        )
        self.engine = engine_of(self.model)

    def loss(self, step: int) -> float:
        """Forward and backward."""
        case = self.case
        some = torch.Generator().manual_seed(step)
        rows = torch.randn(case.num_rows, case.hidden, generator=some).to(case.device)
        found = (self.model(rows).float() - rows.roll(1)).square().mean()
        found.backward()
        self.optimizer.clip_grad_norm(1.0)
        return float(found.detach())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update_to_the_end(self) -> None:
        self.update()
        self.engine.finish_updates()


def memory_of_process(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def limit_memory(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_of_process("VmData") + num_bytes, hard))


def warm_up(case: Case) -> None:
    """What a process has whatever it trains: libraries, threads, a context."""
    small = Training(replace(case, hidden=64, num_blocks=2))
    for step in range(2):
        small.loss(step)
        small.update()
    small.engine.finish_updates()


def run(case: Case) -> dict[str, Any]:
    sw.init(device=case.device)
    warm_up(case)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the highest is what it is now
    resident = memory_of_process("VmRSS")
    if case.limit_bytes is not None:
        limit_memory(case.limit_bytes)
    training = Training(case)
    if case.num_repetitions:
        return rates(training)
    losses, began = [], time.perf_counter()
    for step in range(case.num_steps):
        losses.append(training.loss(step))
        training.update()
    training.engine.finish_updates()
    seconds = (time.perf_counter() - began) / case.num_steps
    held = sw.memory(training.model, training.optimizer)
    on_device = held.planned.total + held.planned_buffers
    return {
        "losses": losses,
        "seconds_per_step": seconds,
        "grown_bytes": memory_of_process("VmHWM") - resident,
        "planned_bytes": held.planned_host + (on_device if case.device == "cpu" else 0),
        "disk_bytes": held.disk,
    }


def rates(training: Training) -> dict[str, Any]:
    """GB/s, of updates and of plain ones in turns; all that is read and written counts."""
    case, disk = training.case, training.engine.host.disk
    assert disk is not None
    plain = Plain(Path(case.folder), case.plain_bytes)
    plain.go("write", *PLAIN["1 thread, 64 MiB"])  # blocks that were never written are not on the disk yet
    found: dict[str, Any] = {"updates": [], "plain": [], "is_direct": disk.is_direct}
    moved = count_bytes(disk)
    for step in range(case.num_repetitions + 1):
        training.loss(step)
        training.engine.finish_updates()
        moved.clear()
        taken = seconds_of(training.update_to_the_end)
        if step:  # state was zero before, and not read
            found["updates"].append(sum(moved) / 1e9 / taken)
            best = min(seconds_of(partial(plain.go, "both at once", *way)) for way in PLAIN.values())
            found["plain"].append(2 * case.plain_bytes / 1e9 / best)
        found["update_bytes"] = sum(moved)
    plain.close()
    return found


def count_bytes(disk: Disk) -> list[int]:
    """The sizes of all requests from now on, without alignment."""
    moved: list[int] = []
    start = disk._start

    def counted(region: Region, tensor: Tensor, at: int, is_put: bool) -> Pending:
        moved.append(tensor.nbytes)
        return start(region, tensor, at, is_put)

    disk._start = counted  # type: ignore[method-assign]
    return moved


def seconds_of(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------------------------------
# those who ask


def ask(case: Case) -> dict[str, Any]:
    """What a process of its own found, or as `error` how it ended."""
    words = [sys.executable, "-m", __name__ if __name__ != "__main__" else "benchmarks.offload_limits"]
    done = subprocess.run([*words, "--case", json.dumps(asdict(case))], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": f"ended with {done.returncode}: {said[-1] if said else 'nothing was said'}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def limited(case: Case) -> dict[str, dict[str, Any]]:
    """By what was tried: the reference without a limit, and all others with it."""
    found = {f"{REFERENCE}, no limit": ask(replace(case, strategy=REFERENCE, limit_bytes=None))}
    for strategy in (*ON_HOST[case.device], FROM_DISK):
        found[f"{strategy}, limited"] = ask(replace(case, strategy=strategy))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to use; nothing is left in it")
    parser.add_argument("--device", choices=list(ON_HOST), default="cpu")
    parser.add_argument("--megaparams", type=float, default=96.0)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=16, help="of a batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-megabytes", type=float, help="unless given, half of the state (16 bytes a parameter)")
    parser.add_argument("--plain-gigabytes", type=float, default=1.0, help="that plain ones read, and write, each time")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=["limits", "rates"], default=["limits", "rates"])
    parser.add_argument("--out", type=Path, help="a folder for the dated results")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


def case_of(options: argparse.Namespace) -> Case:
    num_blocks = max(1, round(options.megaparams * 1e6 / (8 * options.hidden**2)))
    case = Case(FROM_DISK, options.device, options.hidden, num_blocks, options.rows, options.steps, str(options.folder))
    limit = case.state_bytes // 2 if options.limit_megabytes is None else round(options.limit_megabytes * 1e6)
    return replace(case, limit_bytes=limit)


def table_of_limits(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    expected = found[f"{REFERENCE}, no limit"].get("losses")
    for name, row in found.items():
        if "error" in row:
            rows.append((name, row["error"][:300], "", "", "", ""))
            continue
        same = "the reference" if "no limit" in name else "the same losses" if row["losses"] == expected else "OTHER"
        sizes = [f"{row[key] / 1e9:.2f} GB" for key in ("grown_bytes", "planned_bytes", "disk_bytes")]
        ended = f"{same}, {row['losses'][0]:.5f} to {row['losses'][-1]:.5f}"
        rows.append((name, ended, f"{row['seconds_per_step']:.2f}", *sizes))
    return table(("what", "how it ended", "s a step", "host memory, grown", "planned", "on disk"), rows)


def told_of_rates(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [found["error"]]
    shares = [ours / plain for ours, plain in zip(found["updates"], found["plain"], strict=True)]
    return [
        f"An update moves {found['update_bytes'] / 1e9:.2f} GB; O_DIRECT: {found['is_direct']}.",
        table(
            ("read and written at once", "GB/s"),
            [
                (f"plain, the best of {len(PLAIN)} ways", spread(found["plain"])),
                ("updates of the optimizer's state", spread(found["updates"])),
                (f"share, within a repetition (to reach: {TARGET})", spread(shares)),
            ],
        ),
    ]


def main() -> None:
    options = parse()
    if options.case:
        print(json.dumps(run(Case(**json.loads(options.case)))))
        return
    case = case_of(options)
    machine = {"processor": processor(), "torch": torch.__version__, "commit": commit()}
    if options.device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    began = datetime.datetime.now()
    figures: dict[str, Any] = {"case": asdict(case)}
    parts = []
    if "limits" in options.parts:
        figures["limits"] = limited(case)
        parts += [
            f"{case.num_params / 1e6:.0f}M parameters, {case.num_blocks} blocks; their state is "
            f"{case.state_bytes / 1e9:.2f} GB, the memory allowed {(case.limit_bytes or 0) / 1e9:.2f} GB.",
            table_of_limits(figures["limits"]),
        ]
    if "rates" in options.parts:
        plain_bytes = round(options.plain_gigabytes * 1e9) >> 26 << 26
        asked = replace(case, limit_bytes=None, plain_bytes=plain_bytes, num_repetitions=options.repetitions)
        figures["rates"] = ask(asked)
        parts += told_of_rates(figures["rates"])
    title = "State larger than the memory allowed, and updates from disk"
    page = benchmark_page("offload_limits", title, began, machine, figures, after=parts)
    show(page, options.out, options.device)


if __name__ == "__main__":
    main()
