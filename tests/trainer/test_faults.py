"""Faults of a run with real processes: ranks that hang, launchers that are killed, and strangers at their ports."""

import base64
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from shardwise.base.errors import ConfigurationError
from shardwise.base.processes import temporary_folder
from shardwise.trainer import run as run_module
from shardwise.trainer.agent import shared_key
from shardwise.trainer.run import run_rank
from shardwise.trainer.run_state import Run
from tests.harness import Pool
from tests.support.running import settings_for
from tests.trainer.test_launch import (
    DEADLINE_S,
    free_port,
    launcher,
    left_in,
    run,
    said,
    wait_until_gone,
    wait_until_open,
)


class Bomb:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._file),)


def plant(host: str, port: int, run_id: str, file: Path) -> None:
    """As torch's rendezvous keeps its state."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    store.set(f"torch.rendezvous.{run_id}", base64.b64encode(pickle.dumps(Bomb(file))).decode())


@pytest.mark.slow
def test_a_run_of_one_machine_is_out_of_reach_and_reads_no_pickle(tmp_path: Path) -> None:
    with launcher("meet", tmp_path) as process:
        ranks = [json.loads(said(tmp_path, rank)) for rank in (0, 1)]
        bomb = tmp_path / "bomb"
        pids = [process.pid, *(pid for pid, *_ in ranks)]
        listening = {
            end.laddr.ip for pid in pids for end in psutil.Process(pid).net_connections() if end.status == "LISTEN"
        }
        assert listening == {"127.0.0.1"}
        _, host, port, run_id = ranks[0]
        assert run_id != "shardwise", "a guess"
        for name in ("shardwise", run_id):
            plant(host, port, name, bomb)
        time.sleep(0.5)  # a launcher looks ten times a second
        for rank in (0, 1):
            (tmp_path / f"go-{rank}").touch()
        assert process.wait(DEADLINE_S) == 0
        assert not bomb.exists()


def test_several_machines_read_nothing_that_is_not_signed(tmp_path: Path) -> None:
    port, bomb = free_port(), tmp_path / "bomb"
    words = ("nproc_per_node=1", 'nnodes="2"', f'rdzv_endpoint="127.0.0.1:{port}"')
    with launcher("add_up", tmp_path, *words) as process:
        wait_until_open(port)
        listening = {end.laddr.ip for end in psutil.Process(process.pid).net_connections() if end.status == "LISTEN"}
        assert listening == {"127.0.0.1"}, "the address that was given, and no other"
        key = shared_key(tmp_path / "logs")
        assert key.stat().st_mode & 0o777 == 0o600
        plant("127.0.0.1", port, hashlib.sha256(key.read_bytes()).hexdigest()[:16], bomb)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, out
    assert f"not signed with {key}" in err
    assert "Traceback" not in err
    assert not bomb.exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True], ids=["hung", "stopped"])
def test_a_rank_that_does_not_end_after_the_others(tmp_path: Path, is_stopped: bool) -> None:
    """The training is over."""
    with launcher("end_late", tmp_path, f"timeout={300 if is_stopped else 1}") as process:
        pid = int(said(tmp_path, 1))
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "rank 0 has ended, but not all others" in err
    if is_stopped:
        assert f"rank 1, process {pid}, is stopped (kill -CONT {pid} would let it continue)" in err
    else:
        assert f"rank 1, process {pid}, is at " in err
        assert "in end_late: time.sleep(600)" in err
        assert "--timeout" in err
    wait_until_gone([pid])


@pytest.mark.slow
def test_a_rank_that_does_not_join_is_named_with_its_place(tmp_path: Path) -> None:
    code, _, err = run("come_late", tmp_path)
    assert code == 1
    assert "rank 0 could not join the process group of 2 ranks within 3 s: rank 1 has not come" in err
    assert "in come_late: time.sleep(600)" in err


@pytest.mark.slow
def test_what_a_killed_launcher_leaves_the_next_run_removes(tmp_path: Path) -> None:
    with launcher("never_stop", tmp_path) as process:
        pids = [int(said(tmp_path, rank)) for rank in (0, 1)]
        os.killpg(process.pid, signal.SIGKILL)
        wait_until_gone([process.pid, *pids])
        assert left_in(tmp_path)
        for rank in (0, 1):
            (tmp_path / f"said-{rank}").unlink()
    assert run("tell", tmp_path)[0] == 0
    assert not left_in(tmp_path)


def test_folders_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "shardwise-tmp-elsewhere-abc").mkdir()
    with temporary_folder(tmp_path) as living:
        (living / "file").touch()
        abandoned = living.with_name(f"{living.name}x")
        (abandoned / "deep").mkdir(parents=True)
        link = living.with_name(f"{living.name}y")
        link.symlink_to(living)
        with temporary_folder(tmp_path) as other:
            assert other != living
            assert not abandoned.exists()
            assert (living / "file").exists()
        assert not other.exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {"shardwise-tmp-elsewhere-abc", link.name}


def come_and_go(place: str, num_times: int) -> None:
    for _ in range(num_times):
        with temporary_folder(place) as folder:
            assert folder.is_dir()


def test_folders_of_those_that_start_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=come_and_go, args=(str(tmp_path), 300)) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert [other.exitcode for other in others] == [0, 0, 0, 0]


def moved_under(settings: str) -> int:
    """The run folder is moved away while the second step is done."""
    show, folder = Run.show, Path(str(json.loads(settings)["output_dir"]))

    def showing(run: Run, step: int) -> None:
        if step == 2 and run.is_first:
            folder.rename(folder.with_name("moved"))
        show(run, step)

    Run.show = showing  # type: ignore[method-assign]
    try:
        return run_rank(settings)
    finally:
        Run.show = show  # type: ignore[method-assign]


def test_a_run_folder_that_is_moved_is_one_sentence(
    run_ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    (error,) = run_ranks.errors(1, moved_under, settings_for(folder).to_json())
    assert error is not None
    assert error.startswith(f"SaveError: cannot write {folder}/"), error
    assert (
        f"{folder} was moved or removed under the run: move it back, then continue with --output-dir {folder}" in error
    )
    monkeypatch.setattr(run_module, "has_launcher", lambda: True)
    with pytest.raises(ConfigurationError, match="moved or removed"):
        run_module._chosen(settings_for(folder), num_restarts=1)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["hang_in_data", "stop_in_a_step"])
def test_a_run_with_a_rank_that_hangs_ends_and_says_where(tmp_path: Path, entry: str) -> None:
    run_settings = json.loads(settings_for(tmp_path).to_json())
    words = [f"{name}={json.dumps(run_settings[name])}" for name in ("seq_length", "global_batch_size", "shape")]
    code, _, err = run(entry, tmp_path, *words, "max_steps=50", "sample_tokens=0", "export=false")
    assert code == 1
    assert re.search(r"^rank 1 (does nothing|is stopped), and rank 0 waits for it:$", err, re.MULTILINE)
    assert "Traceback" not in err
    assert ("time.sleep(600)" if entry == "hang_in_data" else "kill -CONT") in err
    assert "rank 0 waits in " in err or "rank 0 wants to continue with" in err


BENCH = """
import sys
from shardwise.bench.case import Case
from shardwise.bench.launch import launch
from tests.bench.cases import smoke
launch(smoke("zero3", steps=100000), 600.0)
"""


@pytest.mark.slow
def test_ranks_of_a_bench_end_with_it(tmp_path: Path) -> None:
    bench = subprocess.Popen([sys.executable, "-c", BENCH], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        end_s = time.monotonic() + DEADLINE_S
        while not (ranks := psutil.Process(bench.pid).children()) or len(ranks) < 2:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        pids = [rank.pid for rank in ranks]
    finally:
        bench.kill()
        bench.wait()
    end_s = time.monotonic() + DEADLINE_S
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end_s, "a rank has outlived its bench"
        time.sleep(0.1)
