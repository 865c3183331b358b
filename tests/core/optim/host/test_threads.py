"""Updates leave the GIL to others, and stay on the processors they were given."""

import threading
import time
from pathlib import Path

import torch

from shardwise.core.native.adamw import AdamSettings, AdamUpdate, adamw
from shardwise.core.native.cores import cores_for

SETTINGS = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, maximize=False, fused=True, step=1)
TASKS = Path("/proc/self/task")


def allowed_processors(task: Path) -> str:
    """Of a thread, which may be gone by now."""
    try:
        lines = (task / "status").read_text().splitlines()
    except OSError:
        return ""
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))


def test_threads_are_pinned_and_the_interpreter_goes_on_meanwhile() -> None:
    cores = cores_for(0, 1)[:2] * 2  # at least two threads, whatever the machine has
    master, exp_avg, exp_avg_sq, grad = (torch.ones(1 << 21) for _ in range(4))
    is_enough = threading.Event()

    def update() -> None:
        while not is_enough.is_set():
            adamw(AdamUpdate(master, exp_avg, exp_avg_sq, grad, None, SETTINGS, 1.0), cores)

    before = {task.name for task in TASKS.iterdir()}
    updating = threading.Thread(target=update)
    updating.start()
    before.add(str(updating.native_id))
    expected, seen = {str(processor) for processor in cores}, set[str]()
    until = time.monotonic() + 8
    while not expected <= seen and time.monotonic() < until:
        seen |= {allowed_processors(task) for task in TASKS.iterdir() if task.name not in before} - {""}
    is_enough.set()
    updating.join()
    assert expected <= seen  # and for an instant, before it is pinned, what the process may use


def test_updates_of_several_threads_at_once_do_not_meet() -> None:
    """As the pipeline has them: one unit's update beside another's."""
    cores = cores_for(0, 1)
    grads = [torch.randn(300_000) for _ in range(4)]
    states = [[torch.ones(300_000), torch.zeros(300_000), torch.zeros(300_000)] for _ in range(4)]
    expected = [[tensor.clone() for tensor in state] for state in states]

    def update(state: list[torch.Tensor], grad: torch.Tensor) -> None:
        adamw(AdamUpdate(state[0], state[1], state[2], grad, None, SETTINGS, 1.0), cores)

    threads = [threading.Thread(target=update, args=pair) for pair in zip(states, grads, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for state, grad, other in zip(states, grads, expected, strict=True):
        update(other, grad)
        assert all(one.equal(another) for one, another in zip(state, other, strict=True))
