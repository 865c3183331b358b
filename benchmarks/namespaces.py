"""Nodes on one machine: network namespaces whose NICs are as slow as asked for, and ranks started in them.

Every node is a namespace with a NIC of its own, a veth whose both ends are limited with `tc`; all are on one bridge,
which is in a namespace of its own too. Ranks of one node reach each other over its loopback, whatever address they use,
and are not slowed down: the kernel routes its own addresses there. Needs root, `ip` and `tc`; what was made is gone
afterwards, also after errors and signals (all but SIGKILL: `ip netns del` what `ip netns` then still lists).
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NIC = "nic"
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@dataclass(frozen=True)
class Node:
    """Where ranks are started: the words before a command, the interface that gloo is to use, and its address."""

    prefix: list[str]
    interface: str
    address: str


LOCAL = Node([], "lo", "127.0.0.1")


def can_make_namespaces() -> bool:
    """Found out by making some: root in a container may not be allowed to."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "tc")):
        return False
    try:
        with namespaces(1, 100):
            return True
    except RuntimeError:
        return False


def end_on_signals() -> None:
    """As an exception, so that namespaces are taken down and workers ended."""
    for number in ENDING:
        signal.signal(number, lambda number, _: sys.exit(128 + number))


@contextmanager
def namespaces(num_nodes: int, mbit_per_s: int) -> Iterator[list[Node]]:
    """Nodes on a bridge, gone afterwards whatever happened."""
    hub, *names = [f"shardwise-{os.getpid()}-{place}" for place in ("hub", *range(num_nodes))]
    # Bursts of a millisecond, or of half a large packet: with less, 1 Gbit/s in both directions at once is not reached.
    burst = max(32_000, mbit_per_s * 1_000_000 // 8 // 1000)
    limit = f"tbf rate {mbit_per_s}mbit burst {burst} latency 400ms"
    nodes = [Node(["ip", "netns", "exec", name], NIC, f"10.77.0.{index + 1}") for index, name in enumerate(names)]
    try:
        for name in (hub, *names):
            run(f"ip netns add {name}")
            run(f"ip -n {name} link set lo up")
        run(f"ip -n {hub} link add bridge type bridge")
        run(f"ip -n {hub} link set bridge up")
        for index, (name, node) in enumerate(zip(names, nodes, strict=True)):
            run(f"ip link add {NIC} netns {name} type veth peer name port{index} netns {hub}")
            run(f"ip -n {hub} link set port{index} master bridge up")
            run(f"ip -n {name} addr add {node.address}/24 dev {NIC}")
            run(f"ip -n {name} link set {NIC} up")
            # Not BBR, which slows down on purpose every few seconds to look at the queue.
            run(f"ip -n {name} route replace 10.77.0.0/24 dev {NIC} congctl cubic")
            run(f"tc -n {name} qdisc add dev {NIC} root {limit}")
            run(f"tc -n {hub} qdisc add dev port{index} root {limit}")
        yield nodes
    finally:
        # A second signal must not end this half-way.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(command: str) -> None:
    done = subprocess.run(shlex.split(command), check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def sent_bytes(interface: str) -> int:
    """Out of an interface of the namespace that this process is in, by the kernel's count."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{interface}:"))
    return int(line.partition(":")[2].split()[8])


@dataclass(frozen=True)
class Rank:
    """A worker to be started: where, and what is set besides this process's environment."""

    node: Node
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


def run_ranks(ranks: Sequence[Rank], deadline_s: float) -> None:
    """All of them are stopped when one fails or time is up, which is an error with the words of the first that did."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in ranks:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": rank.node.interface, **rank.environment}
            with rank.log.open("w") as log:
                workers.append(
                    subprocess.Popen([*rank.node.prefix, *rank.command], env=environment, stdout=log, stderr=log)
                )
        end_s = time.monotonic() + deadline_s
        while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
            if time.monotonic() > end_s:
                break
            time.sleep(0.05)
        codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
    if any(code != 0 for code in codes):
        first = next((rank for rank, code in zip(ranks, codes, strict=True) if code), ranks[0])
        raise RuntimeError(f"exit codes by rank {codes} (None: out of time)\n{first.log.read_text()}")
