"""Worlds of worker processes: `launch` starts one per rank, each told its job as JSON, and returns what
rank 0 answers.

A worker is the same module run with `--worker JOB`; it calls `answer(value)` once. Every call of `launch`
starts fresh processes, so no contender inherits another's allocator, caches or hooks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_ANSWER = "SHARDWISE_BENCH_ANSWER"


def launch(module: str, job: dict[str, Any], world_size: int = 1, threads: int = 1, deadline_s: float = 300) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        workers = []
        for rank, log in enumerate(logs):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "LOCAL_SIZE": str(world_size),  # DeepSpeed's name for it
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
                "DS_ACCELERATOR": "cpu",
                _ANSWER: str(file),
            }
            arguments = [sys.executable, "-m", module, "--worker", json.dumps(job)]
            with log.open("w") as sink:
                workers.append(subprocess.Popen(arguments, env=environment, stdout=sink, stderr=subprocess.STDOUT))
        failed = _wait(workers, deadline_s)
        if failed is not None or not file.exists():
            rank = failed or 0
            raise RuntimeError(f"{module} {job}: rank {rank} failed\n{logs[rank].read_text()[-4000:]}")
        return json.loads(file.read_text())


def answer(value: Any) -> None:
    Path(os.environ[_ANSWER]).write_text(json.dumps(value))


def _wait(workers: list[subprocess.Popen[bytes]], deadline_s: float) -> int | None:
    """The first rank that failed or outlived the deadline, the others stopped; None when all went well."""
    end = time.monotonic() + deadline_s
    try:
        while time.monotonic() < end:
            codes = [worker.poll() for worker in workers]
            bad = [rank for rank, code in enumerate(codes) if code]
            if bad:
                return bad[0]
            if all(code == 0 for code in codes):
                return None
            time.sleep(0.05)
        return next(rank for rank, worker in enumerate(workers) if worker.poll() is None)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
