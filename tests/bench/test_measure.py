"""Workers: what they write down, what they say when they fail, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import ConfigurationError
from shardwise.bench.case import SHAPES
from shardwise.bench.launch import environment, launch
from shardwise.bench.measure import count_calls, failure, host_memory
from tests.bench.cases import smoke


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_run_that_takes_too_long_is_ended() -> None:
    seen = launch(smoke("plain"), timeout_s=0.5)
    assert (seen.status, seen.error) == ("failed", "still running after 0.5 s")
    assert not any(
        "shardwise.bench.measure" in Path(f"/proc/{child}/cmdline").read_text() for child in children_of(os.getpid())
    )


@pytest.mark.slow
def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    case = smoke("shardwise:zero3_nvme", shape=SHAPES["blocks-smoke"], world_size=1, node_size=1)
    seen = launch(replace(case, disk_path=str(tmp_path)), timeout_s=60)
    assert (seen.status, seen.error) == ("ok", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_trace_lies_beside_what_it_says(tmp_path: Path) -> None:
    seen = launch(
        smoke("shardwise:zero2+optimizer=host:0.6", world_size=1, node_size=1, trace=str(tmp_path)), timeout_s=60
    )
    assert (seen.status, seen.error) == ("ok", "")
    names = ["overlap.txt", "trace.json.gz"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"shardwise-zero2-optimizer-host-0.6-smoke-16-fp32.{name}" for name in names
    ]
    overlap = seen.answers[0]["overlap"]
    assert 0 < overlap["busy_s"]["compute"] <= overlap["step_s"]
    assert seen.answers[0]["memory"]["host_gb"] > 0.1


def test_failures_in_words() -> None:
    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert failure(oom) == {"status": "oom", "error": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    assert failure(RuntimeError("NCCL: out of memory"))["status"] == "oom"
    assert failure(ModuleNotFoundError("No module", name="deepspeed"))["error"].startswith("deepspeed is not installed")
    assert failure(ConfigurationError("no"))["status"] == "refused"
    assert failure(ValueError("first\nsecond")) == {"status": "failed", "error": "ValueError: first"}


def test_the_environment_describes_the_world_that_is_played() -> None:
    played = environment(smoke("fsdp2", world_size=16, node_size=8, fabric="2x8"), 0, 29500)
    assert (played["WORLD_SIZE"], played["LOCAL_WORLD_SIZE"], played["RANK"]) == ("16", "8", "0")
    alone = environment(smoke("compute", world_size=16, node_size=8, fabric="2x8"), 0, 29500)
    assert (alone["WORLD_SIZE"], alone["LOCAL_WORLD_SIZE"]) == ("1", "1")


def test_who_works_on_the_host_has_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(**changes: object) -> str:
        return environment(smoke("fsdp2+offload", **changes), 0, 29500)["OMP_NUM_THREADS"]

    assert threads() == "1", "ranks that play GPUs"
    assert threads(device="cuda", world_size=2) == "8"
    assert threads(device="cuda", world_size=8, fabric="8") == "16"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(device="cuda") == "3"


def test_the_peak_of_the_host_is_seen() -> None:
    before = host_memory()["host_gb"]
    torch.ones(int(0.5e9) // 4)
    assert host_memory()["host_gb"] > before
    assert host_memory()["host_gb"] > 0.5


def test_calls_are_counted_by_function() -> None:
    def inner() -> None:
        pass

    def outer() -> None:
        for _ in range(5):
            inner()

    calls = count_calls(outer)
    assert calls["bench/test_measure.py:test_calls_are_counted_by_function.<locals>.inner"] == 5
    assert calls["bench/test_measure.py:test_calls_are_counted_by_function.<locals>.outer"] == 1


def test_calls_in_the_backward_are_counted() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    calls = count_calls(y.sum().backward)
    assert calls["bench/test_measure.py:hook"] == 1


def hook(grad: torch.Tensor) -> None:
    pass


@pytest.mark.quick("2-130")
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_the_workers(how: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "shardwise", "bench", "--shape", "50m", "--steps", "1000", "--json"]
    # Whoever started the tests may ignore interruptions, which is inherited.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    bench = subprocess.Popen(command, **pipes, preexec_fn=heed)  # noqa: PLW1509  it takes no lock
    workers: list[int] = []
    while not workers and bench.poll() is None:
        time.sleep(0.05)
        workers = children_of(bench.pid)
    time.sleep(0.5)  # a child is there before whoever starts it knows
    os.kill(bench.pid, how)
    out, _ = bench.communicate(timeout=30)
    assert bench.returncode == code
    assert not out
    assert workers
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
