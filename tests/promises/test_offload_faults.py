"""What goes wrong under state on disk, in runs of two real ranks: a file cut short, bytes that came back
changed, a disk that is full, a limit on the size of files, too little room from the start, a rank killed in an update.

Each time the rank concerned says once and clearly which folder and which unit it was, the other one does not wait for
it, nothing is left in the folder, and the checkpoint from before is good: a run that resumes from it ends up where one
that nobody disturbed does.
"""

import atexit
import ctypes
import gc
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.base.errors import NoRoomError, ShardwiseError
from shardwise.checkpoint.folder import find
from shardwise.checkpoint.verification import look_at, verify
from shardwise.core.offload.disk import Pending, Region
from shardwise.core.offload.host_memory import Rows
from shardwise.trainer.run import run_rank
from tests.core.offload.conftest import Mount, mount  # noqa: F401  a fixture
from tests.harness import Pool
from tests.support.models import IN_TREE, MODELS, tokens
from tests.support.running import settings_for
from tests.support.strategies import slow_but
from tests.support.training import CLIP, adamw

NUM_RANKS = 2
NUM_STEPS = 6
SAVED_AFTER, HURT_AFTER = 2, 3  # steps
HURT = 1  # the rank
PATIENCE_S = 60.0  # far more than it takes, on a machine that has much else to do
STRATEGIES = ["zero3_nvme", "zero2+optimizer=disk"]


# ---------------------------------------------------------------------------------------------------------
# a run


@dataclass(frozen=True)
class Run:
    """`disk` is the folder for state, `place` that for checkpoints and whatever else is told. Ranks wait to be hurt
    after a step, or one of them waits in the update that follows it. Then the training goes on, or is to be saved."""

    strategy: str
    disk: Path
    place: Path
    in_update: bool = False
    then_saves: bool = False
    port: int = 0

    @property
    def checkpoint(self) -> Path:
        return self.place / "saved"

    @property
    def second(self) -> Path:
        return self.place / "saved-again"

    @property
    def go(self) -> Path:
        return self.place / "go"

    def log(self, rank: int) -> Path:
        return self.place / f"log-{rank}"

    def ready(self, rank: int) -> Path:
        """In an update it has the offset and the size of what is to be written."""
        return self.place / f"ready-{rank}"


def train(run: Run, first_step: int, between: Callable[[int], None] = lambda step: None) -> list[float]:
    """The losses of the steps from the first one on. `between` is called after each of them, with its number."""
    sw.init()
    spec, rank = MODELS[IN_TREE], dist.get_rank()
    model = spec.fresh()
    model, optimizer = sw.shard(
        model, adamw(list(model.parameters())), run.strategy, precision="bf16", disk_path=run.disk
    )
    if first_step:
        assert sw.load(run.checkpoint, model, optimizer) == {"step": first_step}
    losses = []
    for step in range(first_step, NUM_STEPS):
        loss = spec.loss(model, tokens(step, rank, NUM_RANKS))
        loss.backward()
        optimizer.clip_grad_norm(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED_AFTER and not first_step:
            sw.save(run.checkpoint, model, optimizer, extra={"step": step + 1})
        between(step + 1)
        if step + 1 == HURT_AFTER and run.then_saves:
            sw.save(run.second, model, optimizer, extra={"step": step + 1})
    sw.full_state_dict(model)  # all updates have been made
    return losses


# ---------------------------------------------------------------------------------------------------------
# ranks that may end in any way


def be_a_rank(rank: int, run: Run) -> None:
    """A process of its own, from its beginning to the end of its interpreter."""
    file = os.open(run.log(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(NUM_RANKS),
        LOCAL_WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(run.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    code = 0
    try:
        train(run, 0, lambda step: wait_to_be_hurt(run, rank) if step == HURT_AFTER else None)
    except ShardwiseError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except BaseException:  # noqa: BLE001  as an interpreter's end does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(code)


def wait_to_be_hurt(run: Run, rank: int) -> None:
    if not run.in_update:
        wait_after(run, rank, "")
    elif rank == HURT:
        wait_in_an_update(run)


def wait_after(run: Run, rank: int, telling: str) -> None:
    draft = run.ready(rank).with_suffix(".draft")
    draft.write_text(telling)
    draft.rename(run.ready(rank))
    while not run.go.exists():
        time.sleep(0.005)


def wait_in_an_update(run: Run) -> None:
    """When the second chunk of state should be written, in the thread of the updates."""
    write, num_left = Rows.put, 2

    def put(rows: Rows, region: Region, *others: Any) -> Pending:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            wait_after(run, HURT, f"{region.offset} {region.num_bytes}")
        return write(rows, region, *others)

    Rows.put = put  # type: ignore[assignment, method-assign]


@contextmanager
def ranks_of(run: Run) -> Iterator[list[ForkServerProcess]]:
    """Forked from a process in which everything is imported."""
    # Kept here, so that the rendezvous outlives any rank, as under torchrun.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = replace(run, port=store.port)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = [context.Process(target=be_a_rank, args=(rank, run)) for rank in range(NUM_RANKS)]
    try:
        for process in ranks:
            process.start()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def await_all(ranks: list[ForkServerProcess]) -> list[int | None]:
    """Their exit codes; None if one hangs."""
    deadline = time.monotonic() + PATIENCE_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in ranks]


def await_ready(ranks: list[ForkServerProcess], run: Run) -> None:
    deadline = time.monotonic() + PATIENCE_S
    waiting = [HURT] if run.in_update else range(NUM_RANKS)
    while not all(run.ready(rank).exists() for rank in waiting):
        assert time.monotonic() < deadline, said(run)
        assert all(process.is_alive() for process in ranks), said(run)
        time.sleep(0.005)


def said(run: Run) -> list[str]:
    return [run.log(rank).read_text() if run.log(rank).exists() else "" for rank in range(NUM_RANKS)]


# ---------------------------------------------------------------------------------------------------------
# what is done to them


def file_of(pid: int, folder: Path) -> Path:
    """The file of a rank has no name, but its process can be asked for it."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if str(path.readlink()).startswith(f"{folder}/"):
                found.append(path)
    (path,) = found
    return path


def cut_short(pid: int, run: Run) -> None:
    os.truncate(file_of(pid, run.disk), 4096)


def change_bytes(pid: int, run: Run) -> None:
    """One bit of every page."""
    with file_of(pid, run.disk).open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for page in range(0, size, 4096):
            (byte,) = os.pread(file.fileno(), 1, page + 7)
            os.pwrite(file.fileno(), bytes([byte ^ 4]), page + 7)


def limit_files(pid: int, run: Run) -> None:
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (8192, hard))  # what it says is shorter


def fill_disk(pid: int, run: Run) -> None:
    """Somebody takes the room that was reserved for what is to be written next, and all the rest."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    offset, length = (ctypes.c_long(int(word)) for word in run.ready(HURT).read_text().split())
    with file_of(pid, run.disk).open("r+b", buffering=0) as file:
        assert libc.fallocate(file.fileno(), keep_size | punch_hole, offset, length) == 0, ctypes.get_errno()
    with (run.disk / "filler").open("wb") as filler:
        filler.write(bytes(free_bytes(run.disk)))


def kill(pid: int, run: Run) -> None:
    os.kill(pid, signal.SIGKILL)


def free_bytes(folder: Path) -> int:
    seen = os.statvfs(folder)
    return seen.f_bavail * seen.f_frsize


# ---------------------------------------------------------------------------------------------------------
# what must be so afterwards


def require_nothing_left(folder: Path) -> None:
    """Neither names nor files without one, which somebody would have to hold."""
    assert list(folder.iterdir()) == []
    holders = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(path.readlink()).startswith(f"{folder}/"):
                holders.append(path)
    assert holders == []


def require_going_on(pool: Pool, run: Run, undisturbed: list[list[float]]) -> None:
    """The checkpoint is whole, and a run from it is as if nothing had been."""
    report, opened = look_at(run.checkpoint)
    assert opened is not None
    verify(report, opened, lambda num_bytes: None)
    assert report.is_usable
    assert report.problems == []
    resumed = pool(NUM_RANKS, train, run, SAVED_AFTER)
    assert resumed == [losses[SAVED_AFTER:] for losses in undisturbed]


@pytest.fixture(scope="module", params=slow_but(STRATEGIES[:1], STRATEGIES))
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(run_ranks: Pool, tmp_path_factory: pytest.TempPathFactory, strategy: str) -> list[list[float]]:
    run = Run(strategy, tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("place"))
    losses = run_ranks(NUM_RANKS, train, run, 0)
    assert all(len(each) == NUM_STEPS for each in losses)
    return list(losses)


def endure(run: Run, hurt: Callable[[int, Run], None]) -> tuple[list[int | None], list[str]]:
    """Exit codes, and what was said."""
    with ranks_of(run) as ranks:
        await_ready(ranks, run)
        pid = ranks[HURT].pid
        assert pid is not None
        hurt(pid, run)
        run.go.touch()
        codes = await_all(ranks)
    (run.disk / "filler").unlink(missing_ok=True)
    return codes, said(run)


UNIT = r"(parameters|the optimizer's state) of unit '[\w.]+'"
READ = rf"bytes \d+ to \d+ of {UNIT}.* could not be read: "
WRITTEN = rf"bytes \d+ to \d+ of {UNIT}.* could not be written: "

HURTS = {
    "a file cut short": (cut_short, READ + r"(the file ends \d+ bytes before them|the disk returned other bytes)"),
    "changed bytes": (change_bytes, READ + "the disk returned other bytes than were written"),
    "a limit on files": (limit_files, WRITTEN + r"File too large\. .*ulimit -f"),
}


def require_one_clear_error(told: str, run: Run, pattern: str) -> None:
    lines = [line for line in told.splitlines() if line.startswith("StoreError: ")]
    assert len(lines) == 1, told
    assert re.search(rf"^StoreError: {re.escape(str(run.disk))}: {pattern}", lines[0]), lines
    assert lines[0].endswith("resume from the last checkpoint, which is as it was")


@pytest.mark.quick("*-changed bytes")
@pytest.mark.parametrize("what", HURTS)
def test_a_disk_that_fails_in_a_run(
    run_ranks: Pool, tmp_path: Path, undisturbed: list[list[float]], strategy: str, what: str
) -> None:
    hurt, pattern = HURTS[what]
    run = Run(strategy, tmp_path / "disk", tmp_path)
    run.disk.mkdir()
    codes, told = endure(run, hurt)
    assert codes == [1, 1], told
    require_one_clear_error(told[HURT], run, pattern)
    assert "WireError" in told[1 - HURT]
    require_nothing_left(run.disk)
    require_going_on(run_ranks, run, undisturbed)


def test_a_disk_that_is_full_in_a_run(
    run_ranks: Pool,
    tmp_path: Path,
    mount: Mount,  # noqa: F811
    undisturbed: list[list[float]],
    strategy: str,
) -> None:
    run = Run(strategy, mount("tmpfs", "size=8m"), tmp_path, in_update=True)
    all_of_it = free_bytes(run.disk)
    codes, told = endure(run, fill_disk)
    assert codes == [1, 1], told
    require_one_clear_error(told[HURT], run, WRITTEN + r"No space left on device\. .*make room there")
    assert "WireError" in told[1 - HURT]
    require_nothing_left(run.disk)
    assert free_bytes(run.disk) == all_of_it
    require_going_on(run_ranks, run, undisturbed)


@pytest.mark.slow
def test_a_disk_that_fails_in_a_save(
    run_ranks: Pool, tmp_path: Path, undisturbed: list[list[float]], strategy: str
) -> None:
    """What was begun is no checkpoint."""
    run = Run(strategy, tmp_path / "disk", tmp_path, then_saves=True)
    run.disk.mkdir()
    codes, told = endure(run, change_bytes)
    assert codes == [1, 1], told
    assert re.search(rf"{re.escape(str(run.disk))}: {READ}the disk returned other bytes", told[HURT])
    assert find(run.second) is None
    require_nothing_left(run.disk)
    require_going_on(run_ranks, run, undisturbed)


def test_a_rank_killed_in_an_update(
    run_ranks: Pool, tmp_path: Path, undisturbed: list[list[float]], strategy: str
) -> None:
    run = Run(strategy, tmp_path / "disk", tmp_path, in_update=True)
    run.disk.mkdir()
    codes, told = endure(run, kill)
    assert codes[HURT] == -signal.SIGKILL
    assert codes[1 - HURT] == 1, told
    assert "WireError" in told[1 - HURT]
    require_nothing_left(run.disk)
    require_going_on(run_ranks, run, undisturbed)


# ---------------------------------------------------------------------------------------------------------
# too little room


def needed_bytes(run: Run) -> int:
    sw.init()
    model = MODELS[IN_TREE].fresh()
    optimizer = adamw(list(model.parameters()))
    model, optimizer = sw.shard(model, optimizer, run.strategy, disk_path=run.disk)
    return sw.memory(model, optimizer).disk


def refused_and_free(run: Run, full: Path) -> tuple[str, int, int]:
    """What a rank was told, its exit code, and how much is free in the folder once that was caught."""
    sw.init()
    model = MODELS[IN_TREE].fresh()
    optimizer = adamw(list(model.parameters()))
    try:
        sw.shard(model, optimizer, run.strategy, disk_path=full)
    except NoRoomError as error:
        told = (str(error), error.exit_code)
    gc.collect()
    dist.barrier()
    free = free_bytes(full)
    train(run, 0)  # the same processes may go on elsewhere
    return *told, free


def test_room_for_one_rank_of_two(
    run_ranks: Pool,
    tmp_path: Path,
    mount: Mount,  # noqa: F811
) -> None:
    """Every rank hears of it, with the exit code of what does not fit, and what was reserved is given back."""
    run = Run("zero3_nvme", tmp_path / "disk", tmp_path)
    run.disk.mkdir()
    needed = max(run_ranks(NUM_RANKS, needed_bytes, run))
    full = mount("tmpfs", f"size={needed * 3 // 2 // 4096 * 4096}")
    all_of_it = free_bytes(full)
    found = run_ranks(NUM_RANKS, refused_and_free, run, full)
    for message, code, free in found:
        assert f"{full}: {needed} bytes are needed for state that is offloaded to disk, and " in message
        assert "make room, name a folder on a larger disk, or offload less to disk" in message
        assert code == 3
        assert free == all_of_it
    require_nothing_left(full)


def test_a_run_that_does_not_fit(
    run_ranks: Pool,
    tmp_path: Path,
    mount: Mount,  # noqa: F811
) -> None:
    """It ends as everything does that does not fit, on every rank, before its first step."""
    full = mount("tmpfs", "size=4096")
    settings = settings_for(tmp_path / "run", strategy="zero3-nvme", offload=(f"disk:{full}",))
    assert run_ranks(NUM_RANKS, run_rank, settings.to_json()) == [3, 3]
    require_nothing_left(full)
    assert free_bytes(full) == 4096
