"""The launcher with real ranks and real signals. The ranks run entries of tests/support/launching.py."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.core import mesh
from shardwise.trainer import checks, cluster, rank_watcher, signals, start_status
from shardwise.trainer import launcher as launching
from shardwise.trainer.agent import most_severe
from shardwise.trainer.launcher import launch
from shardwise.trainer.rank import Note, write_note
from shardwise.trainer.rank_watcher import RankWatcher, WatchedRank, first_failure
from shardwise.trainer.settings import Settings, num_nodes
from shardwise.trainer.signals import Requests
from shardwise.trainer.start_status import StartStatus

DEADLINE_S = 120.0
OURS = re.compile(r"RANK|WORLD_SIZE|LOCAL_|MASTER_|GROUP_|ROLE_|TORCHELASTIC|SLURM_|OMPI_|OMP_NUM_THREADS")


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}


def environment(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not OURS.match(name)}, **more}


@contextmanager
def launcher(
    entry: str, folder: Path, *words: str, terminal: int | None = None, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """It may leave nothing among temporary files, however it ends."""
    command = [sys.executable, "-m", "tests.support.launching", entry, str(folder), *words]
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        command,
        text=True,
        stdin=terminal,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.PIPE if terminal is None else terminal,
        env=environment(TMPDIR=str(temporary), **variables),
        start_new_session=True,  # a group of its own, as a terminal makes for a command
        # Whoever started the tests may ignore it, which is inherited.
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509  it takes no lock
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL or not left_in(folder)


def left_in(folder: Path) -> list[str]:
    """Temporary files of its launchers. Torch makes a folder of its own when it is imported, and keeps it."""
    names = [path.name for path in (folder / "tmp").iterdir()]
    return [name for name in names if not name.startswith("torchinductor")]


def run(entry: str, folder: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    with launcher(entry, folder, *words, terminal=None, **variables) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err


def said(folder: Path, rank: int) -> str:
    """What a rank's entry has written down, as soon as it has."""
    file = folder / f"said-{rank}"
    end_s = time.monotonic() + DEADLINE_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end_s, f"rank {rank} said nothing; the folder holds {sorted(folder.rglob('*'))}"
        time.sleep(0.05)
    return file.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_open(port: int) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.create_connection(("localhost", port)).close()
        except OSError:
            assert time.monotonic() < end_s, f"nobody listens at port {port}"
            time.sleep(0.05)
        else:
            return


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    end_s = time.monotonic() + 20
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < end_s, f"of {pids}, some are still there"
        time.sleep(0.05)


@pytest.mark.slow
def test_ranks_get_their_settings_and_their_places(tmp_path: Path) -> None:
    code, out, err = run("tell", tmp_path, 'sample_prompt="costs $$5 or ${local_rank}"')
    assert (code, out, err) == (0, "rank 0 was here\n", "")
    assert "rank 1 was here" in (tmp_path / "logs" / "rank-00001.log").read_text()
    for rank in (0, 1):
        seen = json.loads(said(tmp_path, rank))
        assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == (str(rank), "2", "2")
        assert seen["settings"]["sample_prompt"] == "costs $$5 or ${local_rank}"
        assert int(seen["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_the_gravest_ending_is_the_exit_code() -> None:
    assert most_severe([0, 143, 4, 130]) == 4
    assert most_severe([0, 77]) == 77
    assert most_severe([]) == 0


def test_the_first_failure_is_told_once(tmp_path: Path) -> None:
    """Its victim is gone at the same time, and the agent may see it first."""
    code, _, err = run("break_then_follow", tmp_path)
    assert code == 1
    assert re.search(r"(?m)^shardwise: rank 1 on \S+ failed:\n\nTraceback", err)
    assert err.count("ValueError: the true cause") == 1
    assert str(tmp_path / "logs" / "rank-00001.log") in err
    assert "connection closed" not in err
    assert "tests/support/launching.py" in err
    assert "train/rank.py" not in err, "the frames that called the entry are the same for every failure"
    assert "ValueError: the true cause" in (tmp_path / "logs" / "rank-00001.log").read_text()


@pytest.mark.slow
def test_a_crash_is_started_again(tmp_path: Path) -> None:
    code, _, err = run("crash_once", tmp_path, "max_restarts=1")
    assert code == 0
    assert said(tmp_path, 1) == "1"
    assert "ValueError: only the first time" in err
    assert "starting again, from the last checkpoint" in err
    assert (tmp_path / "logs" / "rank-00001.log").read_text().count("--- rank 1") == 2


@pytest.mark.slow
def test_a_rank_that_is_killed_takes_the_others_with_it(tmp_path: Path) -> None:
    code, _, err = run("be_killed", tmp_path)
    assert code == 1
    assert "rank 1" in err
    assert "SIGKILL, as the kernel does when memory runs out" in err
    assert "the last that was heard of it" in err


@pytest.mark.slow
def test_a_refusal_on_one_rank_ends_all(tmp_path: Path) -> None:
    code, _, err = run("refuse_alone", tmp_path, "max_restarts=1")
    assert code == 2
    assert "refused" in err


def test_sigterm_ends_with_a_save(tmp_path: Path) -> None:
    with launcher("stop_when_asked", tmp_path) as process:
        for rank in (0, 1):
            said(tmp_path, rank)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143
        assert "SIGTERM: stopping after this step" in process.stderr.read()  # type: ignore[union-attr]
    assert [said(tmp_path, rank) for rank in (0, 1)] == ["saved", "saved"]


@pytest.mark.slow
@pytest.mark.parametrize("is_passed_on", [False, True], ids=["to the leader alone", "to all, as a shell does"])
def test_a_terminal_that_goes_away_ends_with_a_save(is_passed_on: bool, tmp_path: Path) -> None:
    """Everything that is said from then on is an error for whoever says it."""
    mine, theirs = os.openpty()
    with launcher("talk_until_asked", tmp_path, terminal=theirs) as process:
        os.close(theirs)
        for rank in (0, 1):
            said(tmp_path, rank)
        os.close(mine)
        if is_passed_on:
            os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(DEADLINE_S) == 143
    assert [said(tmp_path, rank) for rank in (0, 1)] == ["saved", "saved"]


def test_a_moving_status_gives_way_to_the_output_of_the_ranks(tmp_path: Path) -> None:
    """On a real terminal the launcher's line is gone, and the cursor is back, before rank 0 prints."""
    mine, theirs = os.openpty()
    shown = b""
    with launcher("tell", tmp_path, terminal=theirs, TERM="xterm") as process:
        os.close(theirs)
        with suppress(OSError):  # the other end is closed
            while piece := os.read(mine, 1 << 16):
                shown += piece
        assert process.wait(DEADLINE_S) == 0
    os.close(mine)
    before, output, after = shown.decode().partition("rank 0 was here\r\n")
    assert output
    assert before.count("starting 2 ranks") > 1, "it moves"
    assert before.rindex("\x1b[2K") > max(map(before.rindex, ("starting 2 ranks", "loading torch")))
    assert before.rindex("\x1b[?25h") > before.rindex("\x1b[?25l")
    assert "starting" not in after


def test_without_a_terminal_a_long_wait_is_a_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_status, "PLAIN_S", 0.05)
    with StartStatus() as status:
        status.show("building the model")
        time.sleep(0.3)
        status.say("a message")
    with StartStatus(is_shown=False) as hidden:
        hidden.show("nothing")
        time.sleep(0.1)
    seen = capsys.readouterr()
    assert seen.out == "a message\n"
    lines = seen.err.splitlines()
    assert 1 <= len(lines) <= 6
    assert set(lines) == {"shardwise: still building the model (0 s)"}


def test_the_watch_goes_on_whatever_happens_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []

    def say(text: str) -> None:
        complaints.append(text)
        if "stopping" in text:
            raise OSError("nobody listens")

    # As reliable as a folder across a network.
    outcomes = iter([OSError("stale"), OSError("stale"), ValueError("half a note")])

    def unreliable(folder: Path) -> Iterator[Note]:
        error = next(outcomes, None)
        if error is not None:
            raise error
        return found(folder)

    found = rank_watcher.read_notes
    monkeypatch.setattr(rank_watcher, "read_notes", unreliable)
    rank = subprocess.Popen(["sleep", "60"])
    write_note(tmp_path, Note(0, 0, rank.pid, ""))
    with RankWatcher(say, AssertionError("not here"), timeout_s=60.0, folder=tmp_path) as watch:
        watch.watch(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)
        assert rank.wait(DEADLINE_S) == -signal.SIGUSR1, "it was asked to stop"
    assert complaints[0] == "SIGTERM: stopping after this step, with a checkpoint"
    told = [re.sub(r".*ranks: |; it tries again", "", text) for text in complaints[1:]]
    assert told == ["OSError('nobody listens')", "OSError('stale')", "ValueError('half a note')"], "each once"


@pytest.mark.slow
def test_ctrl_c_of_a_terminal_counts_once_and_also_while_ranks_start(tmp_path: Path) -> None:
    """It goes to every process of the group, whether it can hear it yet or not."""
    with launcher("stop_when_asked", tmp_path) as process:
        end_s = time.monotonic() + DEADLINE_S
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 3:  # two ranks, and what tracks their semaphores
            assert time.monotonic() < end_s
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        err = process.stderr.read()  # type: ignore[union-attr]
    assert [said(tmp_path, rank) for rank in (0, 1)] == ["saved", "saved"]
    assert err.count("\n") == 1
    assert "Ctrl-C again ends it at once" in err


def test_ctrl_c_before_there_are_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "look_ahead", interrupted)
    assert launch(Settings(output_dir=str(tmp_path), device="cpu"), {}) == 130


@pytest.mark.slow
def test_ctrl_c_while_waiting_for_another_machine(tmp_path: Path) -> None:
    port = free_port()
    words = ("nproc_per_node=1", 'nnodes="2"', f'rdzv_endpoint="localhost:{port}"')
    with launcher("add_up", tmp_path, *words) as process:
        wait_until_open(port)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        assert "SIGINT before any rank ran" in process.stderr.read()  # type: ignore[union-attr]


@pytest.mark.slow
def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    with launcher("never_stop", tmp_path, "max_restarts=3") as process:
        pids = [int(said(tmp_path, rank)) for rank in (0, 1)]
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        began_s = time.monotonic()
        assert process.wait(DEADLINE_S) == 130
        assert time.monotonic() - began_s < 10
    wait_until_gone(pids)


@pytest.mark.slow
def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    with launcher("never_stop", tmp_path, "nproc_per_node=1") as process:
        pid = int(said(tmp_path, 0))
        process.kill()
        wait_until_gone([pid])


@pytest.mark.slow
def test_what_to_go_on_from_is_the_first_rank_s_to_choose(tmp_path: Path) -> None:
    assert run("tell", tmp_path, 'resume_from_checkpoint="auto"', "nproc_per_node=1")[0] == 0
    assert json.loads(said(tmp_path, 0))["settings"]["resume_from_checkpoint"] == "auto"


def test_a_folder_of_another_run_is_refused_before_there_are_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run("tell", tmp_path)
    assert code == 2
    assert "holds another run" in err


@pytest.mark.slow
def test_two_machines_meet(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # one of them may have run before the other joined
    words = ("nproc_per_node=1", 'nnodes="2"', f'rdzv_endpoint="localhost:{free_port()}"')
    with launcher("add_up", tmp_path, *words) as one, launcher("add_up", tmp_path, *words) as other:
        for process in (one, other):
            out, err = process.communicate(timeout=DEADLINE_S)
            assert (process.returncode, out, err) == (0, "", "")
    assert [said(tmp_path, rank) for rank in (0, 1)] == ["3", "3"]


def test_a_task_of_srun_is_a_rank(tmp_path: Path) -> None:
    slurm_variables = {
        "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77",
        "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "16", "SLURM_CPUS_PER_TASK": "12",
    }  # fmt: skip
    # What it says anyway may be said: a run's config.json says everything.
    assert run("tell", tmp_path, 'nnodes="1"', "max_restarts=0", **slurm_variables)[0] == 0
    seen = json.loads(said(tmp_path, 9))
    assert [seen[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["9", "16", "1", "8"]
    assert seen["MASTER_ADDR"] == "gpu07"
    assert seen["MASTER_PORT"] == str(cluster.port(slurm_variables))
    assert seen["OMP_NUM_THREADS"] == "12"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-006,9],cpu1", "gpu003"),
        ("login", "login"),
        ("a,b", "a"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("n[5,7-8]-ib", "n5-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert cluster.first_host({"SLURM_NODELIST": nodes}) == first


def test_slurm_in_other_roles() -> None:
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_NNODES": "2"}
    assert not cluster.is_rank(batch_script), "its 16 tasks are for an srun that it does not call"
    assert not cluster.is_rank({**batch_script, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"})
    assert cluster.is_rank({**batch_script, "SLURM_STEP_ID": "0"})
    bound = {
        "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4",
        "SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_NODELIST": "a", "CUDA_VISIBLE_DEVICES": "3",
    }  # fmt: skip
    assert cluster.rank_variables(bound)["LOCAL_RANK"] == "0", "the one GPU that the task sees is number 0"
    uneven = [
        cluster.rank_variables({**bound, "SLURM_TASKS_PER_NODE": "8(x2),7,1(x3)", "SLURM_NODEID": str(node)})
        for node in range(6)
    ]
    assert [variables["LOCAL_WORLD_SIZE"] for variables in uneven] == ["8", "8", "7", "1", "1", "1"]


@pytest.mark.parametrize("text", ["0", "", "two", "3:2", "1:", ":2", "-1", "1:2:3"])
def test_numbers_of_machines_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="nnodes"):
        num_nodes(text)


@pytest.mark.parametrize(
    ("given", "variables", "words"),
    [
        ({"nnodes": "2"}, {}, ["nnodes: 2", "--rdzv-endpoint"]),
        ({"nnodes": "2", "rdzv_endpoint": "a:1", "output_dir": None}, {}, ["output_dir"]),
        ({"nnodes": "2", "rdzv_endpoint": "a:1", "rdzv_backend": "static"}, {}, ["static", "node_rank None"]),
        ({"nnodes": "2", "rdzv_endpoint": "a", "rdzv_backend": "static", "node_rank": 0}, {}, ["port"]),
        ({"output_dir": "/proc/runs/x"}, {}, ["/proc/runs/x", "cannot be written"]),
        ({"device": "cuda"}, {"CUDA_VISIBLE_DEVICES": ""}, ["cuda", "no GPU"]),
        ({"nproc_per_node": 4}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, ["4", "2 ranks"]),
        ({"max_restarts": 2}, {"RANK": "0", "WORLD_SIZE": "2"}, ["max_restarts: 2 (flag)", "torchrun"]),
        ({"rdzv_endpoint": "a:1"}, {"RANK": "0", "WORLD_SIZE": "2"}, ["rdzv_endpoint: a:1", "torchrun"]),
        ({"nnodes": "2"}, {**SRUN, "SLURM_NODELIST": "a"}, ["nnodes: 2 (flag)", "srun"]),
        ({}, {"OMPI_COMM_WORLD_SIZE": "4"}, ["mpirun", "4 processes"]),
    ],
)
def test_what_cannot_be_launched_is_refused(
    given: dict[str, object],
    variables: dict[str, str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(os.environ):
        if OURS.match(name):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checks, "look_ahead", lambda *_: None)
    settings = Settings(**{"output_dir": str(tmp_path), "device": "cpu", **given})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as refused:
        launch(settings, dict.fromkeys(given, "flag"))
    assert all(word in str(refused.value) for word in words), refused.value


def test_slurm_says_where_launchers_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = {
        "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "2", "SLURM_JOB_ID": "5",
        "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "n[1-3]",
    }  # fmt: skip
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    found = launching._with_slurm(Settings(output_dir=str(tmp_path)), {"nnodes": "default"})
    assert (found.nnodes, found.rdzv_endpoint, found.node_rank) == ("3", "n1:15042", 1)
    told = Settings(output_dir=str(tmp_path), nnodes="1")
    assert launching._with_slurm(told, {"nnodes": "flag --nnodes"}) == told


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "8"}, None),  # salloc
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a batch script
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
        (SRUN, "SLURM_NTASKS is 4"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS is 2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
    ],
)
def test_a_world_of_one_is_refused_to_one_of_several_tasks(
    variables: dict[str, str], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    if refused is None:
        mesh._refuse_other_launchers()
        return
    with pytest.raises(ConfigurationError, match=refused):
        mesh._refuse_other_launchers()


def watched(
    rank: int, gone_s: float | None = 10.2, status: int | None = 1, ended_s: float | None = None, error: str = ""
) -> WatchedRank:
    note = Note(rank, rank, 100 + rank, "", ended_s=ended_s, error=error)
    return WatchedRank(note, gone_s=gone_s, status=status)


def test_the_cause_among_several_failures() -> None:
    boom, first = watched(0, ended_s=10.0, error="Boom"), watched(1, ended_s=9.99, error="First")
    assert "First" in first_failure([boom, first], {0: (0, 1)}, "here")
    killed = watched(1, gone_s=10.1, status=-9)
    assert "rank 1 on here was ended by SIGKILL" in first_failure([boom, killed], {0: (0, 1)}, "here")
    late = watched(1, gone_s=15.0, status=-11)
    assert "Boom" in first_failure([boom, late], {0: (0, 1)}, "here")
    assert "rank 7 on here ended with exit code 3" in first_failure([], {1: (7, 3)}, "here")


def test_what_one_rank_told_to_all_is_its_own_failure() -> None:
    ranks = [watched(1 - rank, ended_s=9.9 + rank / 10, error="rank 0: cannot write x\n") for rank in (0, 1)]
    assert first_failure(ranks, {}, "here") == "rank 0 on here failed:\n\ncannot write x\n"
    elsewhere = watched(1, ended_s=9.9, error="rank 7: cannot write x\n")
    assert first_failure([elsewhere], {}, "here") == "rank 7 on another machine failed:\n\ncannot write x\n"


def test_files_ask_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_received", signals._Received())
    monkeypatch.setattr(signals, "CHECK_FILES_S", 0.0)
    requests, other = Requests(tmp_path), Requests(None)
    assert requests.read() == (None, False)
    (tmp_path / "SAVE").touch()
    assert other.read() == (None, False)
    assert requests.read() == (None, True)
    assert not (tmp_path / "SAVE").exists()
    assert requests.read() == (None, False)
    (tmp_path / "STOP").touch()
    assert requests.read() == (130, False)
    assert requests.read() == (130, False)
    assert not (tmp_path / "STOP").exists()
