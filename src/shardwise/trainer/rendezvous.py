"""Where launchers and their ranks meet: on the loopback if there is one machine, else by signed messages.

Torch's rendezvous of several machines keeps a pickle in a store that everybody on the network can write to: whoever
does executes code in the launchers. Here the pickle is signed with a key that lies in the run folder, which the
machines share and other users cannot read. What is not signed with it is not unpickled.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import time
from pathlib import Path

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ..base.errors import ConfigurationError
from ..core.wire import loopback

ALONE, SIGNED = "alone", "signed"
KEY = "rendezvous.key"
KEY_CHARS = 64
KEY_S = 30.0  # another machine may be about to write it
SIGNATURE_BYTES = 32


def shared_key(folder: Path) -> Path:
    """The file with the key of this run. The first machine that comes by makes it."""
    file = folder / KEY
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as made:
            made.write(secrets.token_hex(KEY_CHARS // 2))
    except FileExistsError:
        end_s = time.monotonic() + KEY_S
        while len(file.read_bytes()) != KEY_CHARS:
            if time.monotonic() > end_s:
                raise ConfigurationError(
                    f"{file} is no key: {KEY_CHARS} characters are expected, {len(file.read_bytes())} are there; "
                    "remove it while no machine of this run is up"
                ) from None
            time.sleep(0.1)
    return file


def random_id(key: Path) -> str:
    """The same on every machine that has the key, which it does not tell."""
    return hashlib.sha256(key.read_bytes()).hexdigest()[:16]


class _Alone(RendezvousHandler):
    """One machine: it makes a store for its ranks, and a new one for each start, without addresses of those before."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id

    def get_backend(self) -> str:
        return ALONE

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = loopback.store_at(loopback.ADDRESS)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(store.host, store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class _Signed(RendezvousBackend):
    """Another backend, of which nothing is taken that was written without the key."""

    def __init__(self, inner: RendezvousBackend, key: Path) -> None:
        self._inner = inner
        self._file = key
        self._key = key.read_bytes()

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
            raise RendezvousStateError(
                f"what is written there is not signed with {self._file}: a machine has another folder under that "
                "name, or somebody else writes to that port"
            )
        return state


def _signed(params: RendezvousParameters) -> RendezvousHandler:
    backend, store = _listening_at_its_address(params) or create_backend(params)
    return create_handler(store, _Signed(backend, Path(params.config["key"])), params)


def _listening_at_its_address(params: RendezvousParameters) -> tuple[RendezvousBackend, Store] | None:
    """Where the endpoint is an address of this machine, the store listens there only.

    None for a name, which may stand for other addresses here than elsewhere; and for another machine, which has it.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=29400)
    try:
        ipaddress.ip_address(host)
        if params.get_as_bool("is_host") is False:
            return None
        store = loopback.store_at(host, port)
    except (ValueError, OSError):
        return None
    return C10dRendezvousBackend(store, params.run_id), store


rendezvous_handler_registry.register(ALONE, _Alone)
rendezvous_handler_registry.register(SIGNED, _signed)
