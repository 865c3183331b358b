"""The rendezvous store of a launcher for the ranks of one machine, which other machines cannot reach.

A store made by rank 0 would listen on every interface, whatever address it is given, and would end with rank 0.
"""

import socket
import sys
from collections.abc import Mapping

from torch._C._distributed_c10d import TCPStore

ADDRESS = "127.0.0.1"
INTERFACE = "lo" if sys.platform == "linux" else "lo0"


def store_at(address: str, port: int = 0) -> TCPStore:
    """Return a store of this process that listens at one address only. OSError: the address is foreign or in use.

    Port 0 means any free port. The store closes when the object is deleted.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=4096) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store closes it
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def rank_variables(store: TCPStore, given: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for ranks: they meet at this store, and communicate over the loopback interface.

    An interface that the user has named in `given` takes precedence.
    """
    return {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # so rank 0 starts no store of its own
        **interfaces(given),
    }


def interfaces(given: Mapping[str, str]) -> dict[str, str]:
    return {name: given.get(name) or INTERFACE for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
