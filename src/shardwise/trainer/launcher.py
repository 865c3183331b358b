"""From one command to ranks, on one machine or on many, and from their endings to one exit code.

Under torchrun, or srun with a task per rank, this process is a rank already. Otherwise it becomes a launcher: torch's
elastic agent runs in it and starts the ranks of this machine. Several launchers meet at --rdzv-endpoint; under srun
with a task per node they find it in Slurm's variables.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..base.container_limits import cgroup_values, cpu_limit
from ..base.errors import ConfigurationError, MemoryExceededError, did_you_mean, printable_lines
from . import signals, slurm
from .run_folder import LOGS, choose, oom_reports, run_folder
from .settings import Settings, num_nodes

ENTRY = "shardwise.trainer.run:run_rank"
# What a launcher decides. Where another has made the ranks, these settings would do nothing.
DECIDED = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "max_restarts")
BACKENDS = ("c10d", "static", "etcd", "etcd-v2")
MEETING_S = 600  # machines of one job may be started minutes apart


def _look(settings: Settings, num_ranks: int) -> None:
    from .checks import look_ahead  # with torch, which a process that becomes a rank imports after its threads are set

    look_ahead(settings, num_ranks, partial(print, flush=True))


def launch(
    settings: Settings, origin: Mapping[str, str], entry: str = ENTRY, look: Callable[[Settings, int], None] = _look
) -> int:
    """The exit code of a run. `origin` says where each setting came from; each rank runs `entry`, MODULE:FUNCTION.

    `look` is given the settings and the number of ranks before any of them exists.
    """
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _be_a_rank(settings, origin, entry, {})
        if slurm.is_rank(os.environ):
            return _be_a_rank(settings, origin, entry, slurm.rank_variables(os.environ))
        return _start_ranks(settings, origin, entry, look)
    except KeyboardInterrupt:  # before there were ranks, or twice in one
        return signals.INTERRUPTED


def _start_ranks(
    settings: Settings, origin: Mapping[str, str], entry: str, look: Callable[[Settings, int], None]
) -> int:
    _refuse_mpi()
    settings = _with_slurm(settings, origin)
    min_nodes, max_nodes = num_nodes(settings.nnodes)
    _check_meeting(settings, min_nodes, max_nodes)
    nproc_per_node = ranks_here(settings)
    is_alone = max_nodes == 1
    # Alone, it refuses early and settles the folder's name. What to go on from stays as it was said: the first rank
    # chooses, each time that it is started. A machine that joins others finds their folder taken, and by them.
    folder = run_folder(choose(settings) if is_alone else settings).expanduser()
    settings = replace(settings, output_dir=str(folder))
    look(settings, nproc_per_node * min_nodes)
    logs = folder.absolute() / LOGS
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output_dir {settings.output_dir}: cannot be written: {error.strerror}") from error
    _set_threads(nproc_per_node)
    # Else ranks that are started again meet at the store of those that crashed, and find their addresses there.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Reports of broken connections, which follow every failure and are never its cause.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from ..core.wire import loopback
    from .agent import Machines, run_agent
    from .rank import Task
    from .rendezvous import ALONE, SIGNED, random_id, shared_key

    if is_alone:
        os.environ.update(loopback.interfaces(os.environ))
        machines = Machines(1, 1, nproc_per_node, ALONE)
    else:
        key = shared_key(logs)
        configs: dict[str, object] = {"read_timeout": MEETING_S, "join_timeout": MEETING_S, "key": str(key)}
        if settings.rdzv_backend == "static":
            configs["rank"] = settings.node_rank
        elif settings.node_rank is not None:
            configs["is_host"] = settings.node_rank == 0
        machines = Machines(
            min_nodes,
            max_nodes,
            nproc_per_node,
            backend=SIGNED if settings.rdzv_backend == "c10d" else settings.rdzv_backend,
            endpoint=settings.rdzv_endpoint or "",
            run_id=settings.rdzv_id or random_id(key),
            configs=configs,
        )
    task = Task(entry, settings.to_json(), str(logs), os.getpid())
    code = run_agent(machines, settings.max_restarts, task, socket.gethostname(), settings.timeout)
    if code == MemoryExceededError.exit_code:
        _tell_of_memory(folder)
    return code


def _tell_of_memory(folder: Path) -> None:
    """What other ranks than the first have found out stands in their logs: here it is said to who waits."""
    reports = oom_reports(folder)
    if reports and all(report["rank"] for report in reports):
        print(printable_lines(f"shardwise: {reports[0]['text']}"), file=sys.stderr, flush=True)


def ranks_here(settings: Settings) -> int:
    """Ranks of this machine: a GPU each, or 2 on CPUs."""
    if settings.device == "cpu":
        return settings.nproc_per_node or 2
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0 and settings.device == "cuda":
        raise ConfigurationError("device: cuda, but torch sees no GPU here; leave it out to run on the CPU")
    if num_gpus == 0:
        return settings.nproc_per_node or 2
    if settings.nproc_per_node is not None and settings.nproc_per_node > num_gpus:
        raise ConfigurationError(
            f"nproc_per_node: {settings.nproc_per_node}, but each rank needs a GPU and this machine has {num_gpus}; "
            f"ask for at most {num_gpus}, or for device cpu"
        )
    return settings.nproc_per_node or num_gpus


def _be_a_rank(settings: Settings, origin: Mapping[str, str], entry: str, variables: dict[str, str]) -> int:
    """Another launcher has started this rank. Its variables count before what we make of Slurm's."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    _refuse_other_worlds(settings, origin)
    if "SLURM_CPUS_PER_TASK" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", os.environ["SLURM_CPUS_PER_TASK"])
    _set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    signals.listen(has_launcher=False)
    from .rank import call

    return call(entry, settings.to_json())


def _refuse_other_worlds(settings: Settings, origin: Mapping[str, str]) -> None:
    """What was asked for is what runs: the launcher that made the ranks decides how many there are, and the rest."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ or not slurm.is_step(os.environ)
    launcher = "torchrun" if is_torchrun else "srun"
    found = os.environ.get("LOCAL_WORLD_SIZE")
    asked = settings.nproc_per_node
    if asked is not None and found is not None and int(found) != asked:
        raise ConfigurationError(
            f"nproc_per_node: {asked} ({origin.get('nproc_per_node', 'given')}), but {launcher} has started {found} "
            "ranks on this machine; say it there, and leave nproc_per_node out"
        )
    unsaid = Settings()
    for name in DECIDED:
        value, where = getattr(settings, name), origin.get(name, "default")
        # The default may be given too: a run's config.json says everything.
        if where != "default" and value != getattr(unsaid, name):
            raise ConfigurationError(
                f"{name}: {value} ({where}), but {launcher} has started the ranks, and decides that; say it there, "
                f"and leave {name} out"
            )


def _refuse_mpi() -> None:
    size = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if int(size) > 1:
        raise ConfigurationError(
            f"mpirun has started {size} processes (OMPI_COMM_WORLD_SIZE), and each would start ranks of its own: use "
            "srun, torchrun, or one shardwise train per machine with --nnodes and --rdzv-endpoint"
        )


def _with_slurm(settings: Settings, origin: Mapping[str, str]) -> Settings:
    """One srun task per node: how many they are, where they meet, and who waits for the others there."""
    nodes = slurm.num_nodes(os.environ)
    if not slurm.is_step(os.environ) or nodes == 1:
        return settings
    if origin.get("nnodes", "default") == "default":
        settings = replace(settings, nnodes=str(nodes))
    if settings.rdzv_endpoint is None and settings.nnodes != "1":
        host = slurm.first_host(slurm.node_list(os.environ))
        settings = replace(settings, rdzv_endpoint=f"{host}:{slurm.port(os.environ)}")
        if settings.node_rank is None:
            settings = replace(settings, node_rank=int(os.environ.get("SLURM_NODEID", "0")))
    return settings


def _check_meeting(settings: Settings, min_nodes: int, max_nodes: int) -> None:
    if settings.rdzv_backend not in BACKENDS:
        known = did_you_mean(settings.rdzv_backend, BACKENDS)
        raise ConfigurationError(f"rdzv_backend: unknown {settings.rdzv_backend!r}; {known}")
    if max_nodes == 1:
        return
    if settings.rdzv_endpoint is None:
        raise ConfigurationError(
            f"nnodes: {settings.nnodes}, but no place to meet: give every machine the same --rdzv-endpoint HOST:PORT, "
            "HOST being one of them"
        )
    if settings.output_dir is None:
        raise ConfigurationError(
            f"nnodes: {settings.nnodes}, but no output_dir, and each machine would make a run folder of its own: give "
            "all of them the same --output-dir, where all can write"
        )
    if settings.rdzv_backend == "static":
        if settings.node_rank is None or min_nodes != max_nodes:
            raise ConfigurationError(
                f"rdzv_backend: static, with nnodes {settings.nnodes} and node_rank {settings.node_rank}: it needs a "
                "fixed number of machines and the place of this one, --node-rank 0 and so on"
            )
        if not settings.rdzv_endpoint.rpartition(":")[2].isdecimal():
            raise ConfigurationError(f"rdzv_endpoint: {settings.rdzv_endpoint}, but static needs a port: HOST:PORT")


def _set_threads(num_ranks: int) -> None:
    """Ranks share the cores of their machine. Torch reads this when it is imported: before a rank is started."""
    limit = cpu_limit(cgroup_values("cpu.max", None))
    cores = min(len(os.sched_getaffinity(0)), limit or float("inf"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cores // num_ranks))))
