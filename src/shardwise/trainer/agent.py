"""Torch's elastic agent, in this process: it starts the ranks, and starts them again after a crash.

Torch's agent provides the rendezvous of machines, the restarts and the store at which ranks meet. Its messages and its
signal handling are replaced (see `rank_watcher`), and so is its rendezvous. On one machine, the store listens on the
loopback interface only. For several machines, torch keeps a pickle in a store that anyone on the network can write to,
and a pickle can execute code in the launchers. Here the pickle is signed with a key in the run folder, which the
machines share and other users cannot read; a pickle without that signature is not loaded.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import Store
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..base.errors import ConfigurationError, WireError
from ..base.processes import temporary_folder
from ..base.text import plural
from . import loopback
from .rank import Task, run_task
from .rank_watcher import RankWatcher, first_failure
from .settings import Settings, num_nodes
from .start_status import MARK, StartStatus

ALONE, SIGNED = "alone", "signed"
RENDEZVOUS_TIMEOUT_S = 600  # machines of one job may be started minutes apart
# Exit codes (docs/training.md) from the least to the most serious; any other code is a crash, the most serious.
SEVERITY = (0, 130, 143, 2, 3, 4, 5, 1)
KEY = "rendezvous.key"
KEY_CHARS = 64
KEY_S = 30.0  # time limit for another machine to write the key
SIGNATURE_BYTES = 32


def run_agent(settings: Settings, num_ranks_here: int, task: Task, status: StartStatus) -> int:
    """Run the ranks of this machine. Return the most serious of their exit codes, or print the failure and return 1."""
    host = socket.gethostname()
    min_nodes, max_nodes = num_nodes(settings.nnodes)

    meeting: dict[str, Any] = {"rdzv_backend": ALONE, "run_id": uuid4().hex}
    if max_nodes > 1:
        meeting = _meeting(settings, Path(task.logs))
    stop_agent = SignalException("the ranks are to be killed", signal.SIGKILL)
    with temporary_folder() as folder, RankWatcher(say, stop_agent, settings.timeout, folder) as watcher:
        config = LaunchConfig(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            nproc_per_node=num_ranks_here,
            logs_specs=_Starts(folder, watcher, host, status),
            max_restarts=settings.max_restarts,
            monitor_interval=0.1,
            start_method="spawn",
            signals_to_handle="SIGQUIT",
            **meeting,
        )
        # Silence the agent's log, which is about processes. `first_failure` says why a run failed.
        for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
            logging.getLogger(name).addHandler(logging.NullHandler())
            logging.getLogger(name).propagate = False
        try:
            codes = elastic_launch(config, run_task)(task)
        except SignalException as ended:
            return watcher.code or 128 + ended.sigval
        except ChildFailedError as failed:
            # If a rank has refused to run, this is the cause: the others failed because it ended.
            code = watcher.refusal if watcher.code is None else watcher.code
            if code is not None:
                return code
            reported = {f.local_rank: (rank, f.exitcode) for rank, f in failed.failures.items()}
            say(first_failure([*watcher.ranks.values()], reported, host))
            if max_nodes > 1:
                say("this is the first failure on this machine; another machine may have failed before it")
            return 1
        except rendezvous.RendezvousError as error:
            raise WireError(
                f"no meeting with the other machines at {config.rdzv_endpoint} (id {config.run_id}): {error}; every "
                "machine needs the same --rdzv-endpoint, --rdzv-id, --nnodes and --output-dir, and a way to that port"
            ) from error
    return most_severe(codes.values())


def most_severe(codes: Iterable[int]) -> int:
    return max(codes, key=lambda code: SEVERITY.index(code) if code in SEVERITY else len(SEVERITY), default=0)


def say(text: str) -> None:
    """Print a message. A run must not end because its terminal, or the pipe that it writes to, is gone."""
    with contextlib.suppress(OSError):
        print(f"shardwise: {text}", file=sys.stderr, flush=True)


class _Starts(LogsSpecs):
    """Prepares each start of the ranks: the agent calls `reify` before it, to ask where the ranks write their output.

    Ranks open their logs themselves (see `rank`): the agent would open and truncate a file twice, once per stream.
    """

    def __init__(self, folder: Path, watcher: RankWatcher, host: str, status: StartStatus) -> None:
        super().__init__()
        self._folder, self._watcher, self._host, self._num_starts = folder, watcher, host, 0
        self._status, watcher.leave_terminal = status, status.stop

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._num_starts += 1
        folder = self._folder / f"start-{self._num_starts}"
        folder.mkdir()
        if self._num_starts > 1:
            ranks = [*self._watcher.ranks.values()]
            has_failed = any(rank.note.has_raised or rank.status for rank in ranks)
            why = first_failure(ranks, {}, self._host) if has_failed else "other machines joined or left"
            say(f"{why}\nstarting again, from the last checkpoint")
        (folder / MARK).touch()
        self._status.show(f"starting {plural(len(envs), 'rank')}")
        self._watcher.watch(folder)
        errors = {local_rank: str(folder / f"error-{local_rank}.json") for local_rank in envs}
        for local_rank, file in errors.items():
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = file
            # The agent's own count has only crashes. This one also has restarts because machines joined or left.
            envs[local_rank]["TORCHELASTIC_RESTART_COUNT"] = str(self._num_starts - 1)
        terminal = dict.fromkeys(envs, "")
        return LogsDest(terminal, dict(terminal), {}, {}, errors, os.devnull, os.devnull)


def _meeting(settings: Settings, logs: Path) -> dict[str, Any]:
    """Return the arguments by which several machines find each other."""
    key = shared_key(logs)
    configs: dict[str, Any] = {
        "read_timeout": RENDEZVOUS_TIMEOUT_S,
        "join_timeout": RENDEZVOUS_TIMEOUT_S,
        "key": str(key),
    }
    if settings.rdzv_backend == "static":
        configs["rank"] = settings.node_rank
    elif settings.node_rank is not None:
        configs["is_host"] = settings.node_rank == 0
    return {
        "rdzv_backend": SIGNED if settings.rdzv_backend == "c10d" else settings.rdzv_backend,
        "rdzv_endpoint": settings.rdzv_endpoint or "",
        # The default is a hash of the key: the same on every machine, and it does not reveal the key.
        "run_id": settings.rdzv_id or hashlib.sha256(key.read_bytes()).hexdigest()[:16],
        "rdzv_configs": configs,
    }


def shared_key(folder: Path) -> Path:
    """Return the file with the key of this run. The first machine writes it."""
    file = folder / KEY
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as made:
            made.write(secrets.token_hex(KEY_CHARS // 2))
    except FileExistsError:
        end_s = time.monotonic() + KEY_S
        while (num_chars := len(file.read_bytes())) != KEY_CHARS:
            if time.monotonic() > end_s:
                wrong = f"{file} is no key: {KEY_CHARS} characters are expected, {num_chars} are there"
                raise ConfigurationError(f"{wrong}; remove it while no machine of this run is up") from None
            time.sleep(0.1)
    return file


class _Alone(StaticTCPRendezvous):
    """The rendezvous of one machine. Each start of the ranks gets a new store, without addresses of earlier ranks."""

    def __init__(self, params: rendezvous.RendezvousParameters) -> None:
        super().__init__(loopback.ADDRESS, 0, 0, 1, params.run_id, RENDEZVOUS_TIMEOUT_S)

    def get_backend(self) -> str:
        return ALONE

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        store = loopback.store_at(loopback.ADDRESS)
        return rendezvous.RendezvousInfo(store, 0, 1, rendezvous.RendezvousStoreInfo(store.host, store.port))


class _Signed(RendezvousBackend):
    """Wraps another backend: puts a signature in front of every state, and refuses a state without a valid one."""

    def __init__(self, inner: RendezvousBackend, key: Path) -> None:
        self._inner, self._file, self._key = inner, key, key.read_bytes()

    @property
    def name(self) -> str:
        return SIGNED

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._inner.get_state()
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._inner.set_state(self._sign(state) + state, token)
        return None if found is None else (self._verified(found[0]), found[1], found[2])

    def _sign(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _verified(self, signed: bytes) -> bytes:
        signature, state = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(state)):
            raise rendezvous.RendezvousStateError(
                f"a state is not signed with {self._file}: that folder differs between machines, or others use the port"
            )
        return state


def _signed(params: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
    """Make the handler of `SIGNED`. If the endpoint is an IP address of this machine, the store listens only there."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=29400)
    store: Store
    backend: RendezvousBackend
    try:
        if params.get_as_bool("is_host") is False:
            raise ValueError("the store is on another machine")
        ipaddress.ip_address(host)  # ValueError for a host name: it may resolve to another address here
        store = loopback.store_at(host, port)
        backend = C10dRendezvousBackend(store, params.run_id)
    except (ValueError, OSError):
        backend, store = create_backend(params)
    return create_handler(store, _Signed(backend, Path(params.config["key"])), params)


rendezvous.rendezvous_handler_registry.register(ALONE, _Alone)
rendezvous.rendezvous_handler_registry.register(SIGNED, _signed)
