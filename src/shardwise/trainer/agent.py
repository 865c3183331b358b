"""Torch's elastic agent, in this process: it starts the ranks, and starts them again after a crash.

What it does well is kept (the rendezvous of machines, restarts, the store that ranks meet at). What it says and how it
treats signals is not: see `watch`.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..base.errors import WireError
from ..base.processes import temporary_folder
from .failure_cause import first_failure
from .rank import Task, run_task
from .rank_watcher import Watch

# From the least to the gravest; what is not here is as grave as a crash.
GRAVITY = (0, 130, 143, 2, 3, 4, 5, 1)


@dataclass(frozen=True, slots=True)
class Machines:
    """Who takes part, and where they meet: at a backend of `rendezvous`, or at one of torch's."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    backend: str
    endpoint: str = ""
    run_id: str = field(default_factory=lambda: uuid4().hex)
    configs: dict[str, Any] = field(default_factory=dict)


def run_agent(machines: Machines, max_restarts: int, task: Task, host: str, timeout_s: float) -> int:
    """Start the ranks of this machine; the gravest of their exit codes, or 1 and the cause of their failure.

    A rank may take `timeout_s` longer than the first to end.
    """

    def on_start(folder: Path, num_starts: int) -> None:
        if num_starts > 1:
            crashed = any(ending.code is None for ending in watch.endings.values()) or any(
                seen.status for seen in watch.ranks.values()
            )
            why = first_failure(watch.ranks, watch.endings, {}, host) if crashed else "other machines joined or left"
            say(f"{why}\nstarting again, from the last checkpoint")
        watch.look_in(folder)

    stop_agent = SignalException("the ranks are to be killed", signal.SIGKILL)
    with temporary_folder() as folder, Watch(say, stop_agent, timeout_s, folder) as watch:
        config = LaunchConfig(
            min_nodes=machines.min_nodes,
            max_nodes=machines.max_nodes,
            nproc_per_node=machines.nproc_per_node,
            logs_specs=_Notes(folder, on_start),
            run_id=machines.run_id,
            rdzv_backend=machines.backend,
            rdzv_endpoint=machines.endpoint,
            rdzv_configs=dict(machines.configs),
            max_restarts=max_restarts,
            monitor_interval=0.1,
            start_method="spawn",
            signals_to_handle="SIGQUIT",
        )
        _quieten()
        try:
            codes = elastic_launch(config, run_task)(task)
        except SignalException as ended:
            return watch.code or 128 + ended.sigval
        except ChildFailedError as failed:
            if watch.code is not None:
                return watch.code
            # A rank that has refused to go on is the cause: the others failed because it left.
            if watch.refusal is not None:
                return watch.refusal
            reported = {f.local_rank: (rank, f.exitcode) for rank, f in failed.failures.items()}
            say(first_failure(watch.ranks, watch.endings, reported, host))
            if machines.max_nodes > 1:
                say("this is the first failure on this machine; another machine may have failed before it")
            return 1
        except RendezvousError as error:
            raise WireError(
                f"no meeting with the other machines at {machines.endpoint} (id {machines.run_id}): {error}; every "
                "machine needs the same --rdzv-endpoint, --rdzv-id, --nnodes and --output-dir, and a way to that port"
            ) from error
    return gravest(codes.values())


def gravest(codes: Iterable[int]) -> int:
    return max(codes, key=lambda code: GRAVITY.index(code) if code in GRAVITY else len(GRAVITY), default=0)


def say(text: str) -> None:
    """To whoever still reads: a run is not to end because its terminal, or what it was piped into, is gone."""
    with contextlib.suppress(OSError):
        print(f"shardwise: {text}", file=sys.stderr, flush=True)


class _Notes(LogsSpecs):
    """The agent's question where ranks write to, asked before each start. They see to that themselves (see `rank`):

    the agent would open a file twice, for either stream, and empty it at every start.
    """

    def __init__(self, folder: Path, on_start: Callable[[Path, int], None]) -> None:
        super().__init__()
        self._folder = folder
        self._on_start = on_start
        self._num_starts = 0

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._num_starts += 1
        folder = self._folder / f"start-{self._num_starts}"
        folder.mkdir()
        self._on_start(folder, self._num_starts)
        errors = {local_rank: str(folder / f"error-{local_rank}.json") for local_rank in envs}
        for local_rank, file in errors.items():
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = file
            # The agent counts crashes only; machines that join are a new start as well.
            envs[local_rank]["TORCHELASTIC_RESTART_COUNT"] = str(self._num_starts - 1)
        terminal = dict.fromkeys(envs, "")
        return LogsDest(terminal, dict(terminal), {}, {}, errors, os.devnull, os.devnull)


def _quieten() -> None:
    """What the agent logs is about processes and tables; the cause of a failure is said by `first_failure`."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
        logger.propagate = False
