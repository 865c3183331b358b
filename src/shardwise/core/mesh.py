"""Ranks and the named axes they form.

Rank r belongs to node r // node_size. The axis `node` joins the ranks of one node, `replicate` the ranks
with the same index in their nodes, `world` all ranks. Each axis has one communicator for gathers and
one for reductions, so that neither waits in the queue of the other.
"""

import atexit
import datetime
import os
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..base.errors import ConfigurationError, StateError, WireError
from .wire.collectives import Channel
from .wire.ledger import Ledger
from .wire.rank_watch import Limits, Watch

Lane = Literal["gather", "reduce"]
# The timeout is multiplied by this where ranks wait for disks.
_DISK_PATIENCE = 6


@dataclass(frozen=True)
class Axes:
    """The axes of this rank, with the ranks on each of them (`members`), before there are communicators."""

    rank: int
    world_size: int
    node_size: int
    members: dict[str, list[int]]


@dataclass(frozen=True)
class Mesh(Axes):
    """The axes with this rank's device, and for gathers and for reductions one channel (communicator) per axis."""

    device: torch.device
    channels: dict[Lane, dict[str, Channel]]
    ledger: Ledger

    @property
    def world(self) -> Channel:
        """The channel of all ranks, used for set-up and to agree on values."""
        return self.channels["gather"]["world"]

    def begin(self, phase: str) -> None:
        """Begin a phase of the training; the collectives that follow belong to it."""
        world = self.world
        if world.watch is not None and world.mesh is not None:
            world.watch.order.begin(phase, world.mesh)


def init(
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    hang_timeout_s: float | None = None,
) -> None:
    """Join the process group that torchrun's environment describes, or make a world of one.

    A group that exists already is used. `device` is this rank's (default: its GPU, else the CPU), `backend` that of
    torch.distributed (default: nccl for GPUs, gloo for CPUs). Collectives that take longer than `timeout_s` fail on
    every rank (default: 600). Ranks that wait in different collectives fail after `hang_timeout_s` (default: 10), or
    at once if a deadlock is certain. The values of an earlier call replace both defaults.
    On a GPU the allocator is set to expandable segments, unless PYTORCH_ALLOC_CONF is set.
    """
    global _device  # noqa: PLW0603
    chosen = _choose_device(device)
    timeout = _timeout(timeout_s)
    if not dist.is_initialized():
        backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            _join(backend, timeout)
        else:
            _refuse_other_launchers()
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif backend is not None and backend != dist.get_backend():
        exists = f"a process group with backend {dist.get_backend()!r} exists already"
        raise ConfigurationError(f"sw.init(backend={backend!r}): {exists}; leave backend out to adopt it")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        if not os.environ.get("PYTORCH_ALLOC_CONF") and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if _device is None:
        # A communicator's thread may drop its last tensors after `wait` has returned. If the interpreter has ended by
        # then, the process aborts: so wait a moment at exit.
        atexit.register(time.sleep, 0.1)
    _device = chosen
    _limits.timeout_s = timeout.total_seconds()
    _limits.hang_s = _limits.hang_s if hang_timeout_s is None else hang_timeout_s


def _timeout(timeout_s: float | None = None) -> datetime.timedelta:
    return datetime.timedelta(seconds=_limits.timeout_s if timeout_s is None else timeout_s)


def device() -> torch.device:
    """This rank's device."""
    if _device is None or not dist.is_initialized():
        raise StateError("no process group: call sw.init() before sw.shard()")
    return _device


def everyone() -> Channel:
    """Return a channel of all ranks over the default group. It needs no mesh."""
    device()
    return Channel("world", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, Ledger(), watch=_watch())


def hosts(timeout_s: float | None = None, purpose: str = "") -> Channel:
    """Return a channel of all ranks over a gloo group, to exchange values on the host while the devices compute.

    `timeout_s` replaces the timeout of `init`, for waits that may be long. Each `purpose` has a group of its own.
    """
    device()
    ranks = tuple(range(dist.get_world_size()))
    key = (dist.group.WORLD, f"hosts {_timeout(timeout_s)} {purpose}", ranks)
    if len(ranks) > 1 and key not in _groups:
        _groups[key] = dist.new_group(backend="gloo", timeout=_timeout(timeout_s), group_desc="shardwise_hosts")
    group, watch = _groups.get(key), _watch()
    return Channel("world", len(ranks), dist.get_rank(), group, Ledger(), watch=watch, patience_s=timeout_s or 0.0)


def patient_hosts() -> Channel:
    """Return a channel of all ranks for waits for disks. It uses gloo: NCCL's watchdog would end a long wait."""
    return hosts(_DISK_PATIENCE * _limits.timeout_s, purpose="checkpoints")


def restarts() -> int:
    """Number of restarts by an elastic launcher."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def local_rank() -> int:
    """Return the index of this rank among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_ranks() -> int:
    """Number of ranks of this machine; all ranks if LOCAL_WORLD_SIZE is not set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def is_first() -> bool:
    """True on rank 0, also before there is a process group."""
    return int(os.environ.get("RANK", "0")) == 0


def is_joined() -> bool:
    """True once there is a process group."""
    return dist.is_initialized()


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        _close_watches()
        dist.destroy_process_group()


def make_axes(node_size: int | None) -> Axes:
    """Return the axes for nodes of `node_size` ranks (default: torchrun's ranks per node)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    node_size = num_local_ranks() if node_size is None else node_size
    require_nodes(world_size, node_size)
    node, index = divmod(rank, node_size)
    members = {
        "world": list(range(world_size)),
        "node": list(range(node * node_size, (node + 1) * node_size)),
        "replicate": list(range(index, world_size, node_size)),
    }
    return Axes(rank, world_size, node_size, members)


def require_nodes(world_size: int, node_size: int) -> None:
    """Refuse a world that does not divide into nodes of this size."""
    if node_size < 1 or world_size % node_size:
        num_nodes, rest = divmod(world_size, max(node_size, 1))
        raise ConfigurationError(
            f"a world of {world_size} ranks does not divide into nodes of {node_size}: "
            f"{world_size} = {num_nodes} x {node_size} + {rest}; set node_size to a divisor of the world"
        )


def connect(axes: Axes) -> Mesh:
    """Create the communicators. All ranks must call this with the same node size."""
    ledger = Ledger()
    # The backend's mean multiplies by 1/N in the dtype that is sent. That is exact only if N is a power of two.
    averages = dist.get_backend() in AVERAGING and axes.world_size.bit_count() == 1
    watch = _watch()
    number = 0 if watch is None else watch.number_mesh()
    channels: dict[Lane, dict[str, Channel]] = {"gather": {}, "reduce": {}}
    for lane, of_axes in channels.items():
        for axis, ranks in axes.members.items():
            group, index = _group(lane, axis, ranks), ranks.index(axes.rank)
            of_axes[axis] = Channel(axis, len(ranks), index, group, ledger, averages, watch, number)
    return Mesh(**vars(axes), device=device(), channels=channels, ledger=ledger)


# Backends that can compute means; gloo only sums.
AVERAGING = ("nccl", "emulated")

_device: torch.device | None = None
_limits = Limits(hang_s=10.0, timeout_s=600.0)
# Communicators cost memory and time: one is made per lane and set of ranks, and kept as long as the default group.
_groups: dict[tuple[object, str, tuple[int, ...]], dist.ProcessGroup] = {}
_watches: dict[object, Watch] = {}


def _watch() -> Watch | None:
    """Return the hang detector of the default group; None for a single rank or an emulated fabric."""
    group, num_ranks = dist.group.WORLD, dist.get_world_size()
    if num_ranks == 1 or dist.get_backend() == "emulated":
        return None
    if group not in _watches:
        store = dist.distributed_c10d._get_default_store()
        if not _watches:
            atexit.register(_close_watches)
        _watches[group] = Watch(store, dist.get_rank(), num_ranks, _limits)
    return _watches[group]


def _close_watches() -> None:
    while _watches:
        _watches.popitem()[1].close()


def _group(lane: Lane, axis: str, ranks: list[int]) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    key = (dist.group.WORLD, lane, tuple(ranks))
    if key not in _groups:
        # Only the members of a group synchronise here. Every rank makes its groups in the same order of axes.
        try:
            _groups[key] = dist.new_group(
                ranks, timeout=_timeout(), use_local_synchronization=True, group_desc=f"shardwise_{lane}"
            )
        except RuntimeError as error:
            within = f"within {_limits.timeout_s:.0f} s"
            raise WireError(f"ranks {ranks} could not meet on axis {axis!r} {within}: {error}") from error
    return _groups[key]


def _refuse_other_launchers() -> None:
    # A batch script also has Slurm's variables, but it is a single process: only srun starts several.
    is_task = "SLURM_PROCID" in os.environ and ("SLURM_STEP_ID" in os.environ or "SLURM_STEPID" in os.environ)
    tasks = "SLURM_STEP_NUM_TASKS" if os.environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    for name in (tasks, "OMPI_COMM_WORLD_SIZE") if is_task else ("OMPI_COMM_WORLD_SIZE",):
        if int(os.environ.get(name, "1")) > 1:
            raise ConfigurationError(
                f"sw.init: {name} is {os.environ[name]}, but RANK and WORLD_SIZE are not set, so every process would "
                "train alone: start a torchrun per node, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
            )


def _join(backend: str, timeout: datetime.timedelta) -> None:
    """Join the process group of torchrun's environment. After a timeout, the error names the missing ranks."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = None
    try:
        store, *_ = next(rendezvous("env://", rank, num_ranks, timeout=timeout))
        store.set(f"shardwise_here/{rank}", "")
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=PrefixStore("default_pg", store), rank=rank, world_size=num_ranks, timeout=timeout
        )
    except dist.DistError as error:
        if store is None:  # rank 0, which serves the store, is missing; if this is rank 0, others are
            missing = ["0, which serves the store,"] if rank else ["other than 0"]
        else:
            missing = [str(other) for other in range(num_ranks) if not store.check([f"shardwise_here/{other}"])]
        if not missing:
            raise
        raise WireError(
            f"rank {rank} could not join the process group of {num_ranks} ranks within {timeout.total_seconds():g} s: "
            f"rank {', '.join(missing)} has not come; {str(error).splitlines()[0]}"
        ) from error


def _choose_device(device: str | torch.device | None) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if str(chosen) != "cuda":
        return chosen
    index, num_gpus = local_rank(), torch.cuda.device_count()
    if index < num_gpus:
        return torch.device("cuda", index)
    has = f"LOCAL_RANK {index} has no GPU, this machine has {num_gpus}"
    raise ConfigurationError(f"sw.init: {has}; start one process per GPU, or give device=")
