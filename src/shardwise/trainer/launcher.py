"""Starts the ranks of a run, on one machine or on many, and turns their exit codes into one.

Under torchrun, or srun with a task per rank, this process is a rank already. Otherwise it becomes a launcher: torch's
elastic agent runs in it and starts the ranks of this machine. The launchers of several machines connect to
--rdzv-endpoint; under srun with a task per node, the endpoint is derived from Slurm's variables.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from ..base.errors import ConfigurationError, MemoryExceededError, printable_lines
from ..base.processes import cpu_limit
from . import cluster, signals
from .run_folder import LOGS, choose, next_steps, oom_reports, run_folder, writing_to
from .settings import Settings, num_nodes
from .start_status import StartStatus

ENTRY = "shardwise.trainer.run:run_rank"
# Settings of this launcher. They are refused if torchrun or srun has started the ranks.
LAUNCH_SETTINGS = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "max_restarts", "nproc_per_node")


def launch(settings: Settings, origin: Mapping[str, str], entry: str = ENTRY) -> int:
    """Run the training, as a launcher or as a rank, and return the exit code. `origin`: the source of each setting.

    Each rank runs `entry`, a MODULE:FUNCTION.
    """
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _run_as_rank(settings, origin, entry, {})
        if cluster.is_rank(os.environ):
            return _run_as_rank(settings, origin, entry, cluster.rank_variables(os.environ))
        return _start_ranks(settings, origin, entry)
    except KeyboardInterrupt:  # before ranks were started, or a second Ctrl-C in a rank
        return signals.INTERRUPTED


def _start_ranks(settings: Settings, origin: Mapping[str, str], entry: str) -> int:
    if int(size := os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        raise ConfigurationError(
            f"mpirun has started {size} processes (OMPI_COMM_WORLD_SIZE), and each would start ranks of its own: use "
            "srun, torchrun, or one shardwise train per machine with --nnodes and --rdzv-endpoint"
        )
    settings = _with_slurm(settings, origin)
    min_nodes, max_nodes = num_nodes(settings.nnodes)
    _check_rendezvous(settings, min_nodes, max_nodes)
    num_ranks = ranks_here(settings)
    # On a single machine, choose the folder here and refuse a wrong one early. With several machines there is no check:
    # others may have created the folder already. At each start, rank 0 chooses the checkpoint to resume from.
    folder = run_folder(choose(settings) if max_nodes == 1 else settings).expanduser()
    settings = replace(settings, output_dir=str(folder))
    logs = folder.absolute() / LOGS
    with StartStatus() as status:
        status.show("checking the settings and the data")
        from .checks import look_ahead  # imports torch; in a rank, the number of threads must be set before that

        look_ahead(settings, num_ranks * min_nodes, status.say)
        with writing_to(folder):
            logs.mkdir(parents=True, exist_ok=True)
        code = run_ranks(num_ranks, entry, settings.to_json(), logs, status, settings)
    if code == MemoryExceededError.exit_code:
        reports = oom_reports(folder)
        # Rank 0 has printed its own report; other ranks' are only in their logs, so print one if rank 0 has none.
        if reports and all(report["rank"] for report in reports):
            print(printable_lines(f"shardwise: {reports[0]['text']}"), file=sys.stderr, flush=True)
    if sys.stdout.isatty() and (steps := next_steps(folder, code)):
        print("\n".join(["", *(f"  {name:<10} {command}" for name, command in steps.items())]), flush=True)
    return code


def run_ranks(
    num_ranks: int, entry: str, text: str, logs: Path, status: StartStatus, settings: Settings | None = None
) -> int:
    """Run `entry`, which takes a text, on ranks of this machine, and return the exit code. `settings`: how to meet."""
    settings = settings or Settings()
    _set_threads(num_ranks)
    # Otherwise restarted ranks use the store of the crashed ranks, and read outdated addresses in it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Torch's messages about broken connections follow every failure and are never its cause.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from . import loopback
    from .agent import run_agent
    from .rank import Task

    if num_nodes(settings.nnodes)[1] == 1:
        os.environ.update(loopback.interfaces(os.environ))
    else:
        status.show(f"waiting for the other machines at {settings.rdzv_endpoint}")
    return run_agent(settings, num_ranks, Task(entry, text, str(logs), os.getpid()), status)


def ranks_here(settings: Settings) -> int:
    """Return the number of ranks on this machine: nproc_per_node, else one per GPU, else 2 on the CPU."""
    if settings.device == "cpu":
        return settings.nproc_per_node or 2
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0 and settings.device == "cuda":
        raise ConfigurationError("device: cuda, but torch sees no GPU here; leave it out to run on the CPU")
    if num_gpus and settings.nproc_per_node is not None and settings.nproc_per_node > num_gpus:
        raise ConfigurationError(
            f"nproc_per_node: {settings.nproc_per_node}, but this machine has {num_gpus} GPUs; use fewer, or device cpu"
        )
    return settings.nproc_per_node or num_gpus or 2


def _run_as_rank(settings: Settings, origin: Mapping[str, str], entry: str, variables: dict[str, str]) -> int:
    """Run as a rank that another launcher has started. `variables` are set where that launcher has not set them."""
    if "SLURM_CPUS_PER_TASK" in os.environ:
        variables["OMP_NUM_THREADS"] = os.environ["SLURM_CPUS_PER_TASK"]
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ or not cluster.is_step(os.environ)
    launcher = "torchrun" if is_torchrun else "srun"
    started = os.environ.get("LOCAL_WORLD_SIZE")
    defaults = asdict(Settings()) | {"nproc_per_node": settings.nproc_per_node if started is None else int(started)}
    for name in LAUNCH_SETTINGS:  # only our own launcher can apply them, so refuse them instead of ignoring them
        # Without an origin, a number of ranks was given in Python; other settings have a default.
        value, where = getattr(settings, name), origin.get(name, "given" if name == "nproc_per_node" else "default")
        # A value equal to the default is accepted: the config.json of a run contains all settings.
        if where != "default" and value is not None and value != defaults[name]:
            ranks = f"{started} ranks on this machine" if name == "nproc_per_node" else "the ranks"
            raise ConfigurationError(
                f"{name}: {value} ({where}), but {launcher} has started {ranks}: say it there, and leave {name} out"
            )
    _set_threads(int(started or "1"))
    signals.listen(has_launcher=False)
    from .rank import call

    return call(entry, settings.to_json())


def _with_slurm(settings: Settings, origin: Mapping[str, str]) -> Settings:
    """If srun runs one task per node, read number of nodes, endpoint and node rank from Slurm's variables."""
    nodes = cluster.num_nodes(os.environ)
    if not cluster.is_step(os.environ) or nodes == 1:
        return settings
    if origin.get("nnodes", "default") == "default":
        settings = replace(settings, nnodes=str(nodes))
    if settings.rdzv_endpoint is None and settings.nnodes != "1":
        host = cluster.first_host(os.environ)
        settings = replace(settings, rdzv_endpoint=f"{host}:{cluster.port(os.environ)}")
        if settings.node_rank is None:
            settings = replace(settings, node_rank=int(os.environ.get("SLURM_NODEID", "0")))
    return settings


def _check_rendezvous(settings: Settings, min_nodes: int, max_nodes: int) -> None:
    if max_nodes == 1:
        return
    endpoint, node_rank = settings.rdzv_endpoint, settings.node_rank
    if endpoint is None or settings.output_dir is None:
        raise ConfigurationError(
            f"nnodes: {settings.nnodes}, but rdzv_endpoint {endpoint} and output_dir {settings.output_dir}: give every "
            "machine the same --rdzv-endpoint HOST:PORT, HOST being one of them, and the same --output-dir, where all "
            "can write"
        )
    has_port = endpoint.rpartition(":")[2].isdecimal()
    if settings.rdzv_backend == "static" and (node_rank is None or min_nodes != max_nodes or not has_port):
        raise ConfigurationError(
            f"rdzv_backend: static, nnodes {settings.nnodes}, node_rank {node_rank}, rdzv_endpoint {endpoint}: it "
            "needs a fixed number of machines, the place of this one (--node-rank 0 and so on), and a port: HOST:PORT"
        )


def _set_threads(num_ranks: int) -> None:
    """Divide the machine's cores among its ranks. Torch reads OMP_NUM_THREADS when it is imported."""
    cores = min(len(os.sched_getaffinity(0)), cpu_limit() or float("inf"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cores // num_ranks))))
