"""Communication between ranks: backends, interfaces, and the interface that each backend takes."""

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from . import Finding

TOPIC = "network"
INFINIBAND = Path("/sys/class/infiniband")
LOOKUP_S = 2.0
# NCCL takes the first interface of these, then any other one, then the first of those, in this order.
NCCL_FIRST, NCCL_LAST = ("ib",), ("docker", "virbr", "lo")


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str
    speed_mbit: int  # 0: unknown


def look(variables: Mapping[str, str], num_gpus: int) -> Iterator[Finding]:
    yield _gloo()
    if num_gpus:
        yield _nccl()
    found = interfaces()
    for interface in found:
        speed = f", {interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit else ""
        yield Finding(TOPIC, interface.name, f"{interface.address}{speed}", "an interface that is up")
    host = socket.gethostname()
    address = lookup(host)
    yield _name(host, address)
    yield _taken("gloo", "GLOO_SOCKET_IFNAME", variables, gloo_takes(found, address))
    if num_gpus:
        yield _taken("NCCL", "NCCL_SOCKET_IFNAME", variables, nccl_takes(found))
        adapters = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
        meaning = "NCCL's way between machines" if adapters else "between machines NCCL uses the interface above"
        yield Finding(TOPIC, "InfiniBand", ", ".join(adapters) or "none", meaning)


def interfaces() -> list[Interface]:
    stats = psutil.net_if_stats()
    return [
        Interface(name, address.address, stats[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in stats and stats[name].isup
    ]


def lookup(host: str) -> str | None:
    """The IPv4 address of a host; None if there is none, or if the name service takes too long."""
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(socket.gethostbyname(host))
        except OSError:
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LOOKUP_S)
    return answers[0] if answers else None


def gloo_takes(found: Sequence[Interface], address: str | None) -> str | None:
    """The interface of this machine's name, else the loopback."""
    named = next((interface.name for interface in found if interface.address == address), None)
    return named or next((interface.name for interface in found if interface.address.startswith("127.")), None)


def nccl_takes(found: Sequence[Interface]) -> str | None:
    def place(interface: Interface) -> int:
        if interface.name.startswith(NCCL_FIRST):
            return 0
        left = [index for index, prefix in enumerate(NCCL_LAST) if interface.name.startswith(prefix)]
        return 2 + left[0] if left else 1

    return min(found, key=place).name if found else None


def _gloo() -> Finding:
    if dist.is_available() and dist.is_gloo_available():
        return Finding(TOPIC, "gloo", "available", "collectives of CPU ranks")
    return Finding(TOPIC, "gloo", "missing", "CPU ranks cannot communicate", "broken", "install a torch with gloo")


def _nccl() -> Finding:
    if dist.is_available() and dist.is_nccl_available():
        number = ".".join(str(part) for part in torch.cuda.nccl.version())
        return Finding(TOPIC, "NCCL", number, "collectives of GPU ranks")
    return Finding(TOPIC, "NCCL", "missing", "GPU ranks cannot communicate", "broken", "install a torch with NCCL")


def _name(host: str, address: str | None) -> Finding:
    meaning = "other machines get this name at the rendezvous"
    if address is None or address.startswith("127."):
        fix = "for more than one machine: give it its address in /etc/hosts or DNS; one machine does without"
        return Finding(TOPIC, "host name", f"{host}, {address or 'not found'}", meaning, "worse", fix)
    return Finding(TOPIC, "host name", f"{host}, {address}", meaning)


def _taken(backend: str, variable: str, variables: Mapping[str, str], guess: str | None) -> Finding:
    name = f"{backend} takes"
    if variable in variables:
        return Finding(TOPIC, name, variables[variable], f"{variable} is set")
    if guess is None:
        return Finding(TOPIC, name, "nothing", "no interface is up", "broken", "bring one up, if only the loopback")
    return Finding(TOPIC, name, guess, f"set {variable} to have it take another")
