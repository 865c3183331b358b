"""`shardwise doctor` on this machine, and its judgement of others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.base.processes import cpu_limit, memory_limit
from shardwise.doctor import Finding, disk, machine, size, software
from shardwise.doctor.machine import Interface

TOPICS = ("software", "devices", "limits", "network", "disk")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_it_looks_at_everything_and_leaves_nothing(tmp_path: Path) -> None:
    seen = run("--json", "--folder", str(tmp_path / "not" / "there"))
    findings = [Finding(**finding) for finding in json.loads(seen.stdout)]
    assert seen.returncode == 0, seen.stdout
    assert list(dict.fromkeys(finding.topic for finding in findings)) == list(TOPICS)
    assert all(finding.meaning for finding in findings)
    assert all(finding.fix for finding in findings if finding.grade != "ok")
    names = {finding.name for finding in findings}
    assert {"python", "torch", "memory", "cores", "/dev/shm", "open files", "gloo", "write"} <= names
    assert {"host updates", "locked memory", "free", "around the cache"} <= names
    assert list(tmp_path.iterdir()) == []


def test_what_will_not_work_is_exit_code_1() -> None:
    seen = run("--folder", "/proc")
    assert seen.returncode == 1
    assert "X write" in seen.stdout
    assert "-> give --output-dir a folder that can be written" in seen.stdout
    assert seen.stdout.splitlines()[-1].startswith("1 marked X")
    assert max(len(line) for line in seen.stdout.splitlines()) <= 100


def test_limits_of_a_container(tmp_path: Path) -> None:
    """Version 2: the tightest of the groups above counts."""
    group = tmp_path / "pods" / "mine"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("8589934592\n")
    (group / "cpu.max").write_text("150000 100000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/pods/mine\n")
    assert memory_limit(1 << 40, tmp_path, membership) == 8 << 30
    assert memory_limit(1 << 30, tmp_path, membership) is None, "more than there is limits nothing"
    assert cpu_limit(tmp_path, membership) == 1.5
    (group / "cpu.max").write_text("max 100000\n")
    assert cpu_limit(tmp_path, membership) is None
    assert memory_limit(1 << 40, tmp_path, tmp_path / "nothing") is None


def test_limits_of_an_old_container(tmp_path: Path) -> None:
    """Version 1, seen from inside: the path is the host's, the limit is at the root."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1073741824\n")
    membership = tmp_path / "membership"
    membership.write_text("9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n")
    assert memory_limit(1 << 40, tmp_path, membership) == 1 << 30


def test_the_interface_that_each_backend_takes() -> None:
    found = [
        Interface("lo", "127.0.0.1", 0),
        Interface("docker0", "172.17.0.1", 0),
        Interface("eth0", "10.0.0.5", 25000),
        Interface("ib0", "10.1.0.5", 200000),
    ]
    assert machine.nccl_takes(found) == "ib0"
    assert machine.nccl_takes(found[:3]) == "eth0"
    assert machine.nccl_takes(found[:2]) == "docker0"
    assert machine.nccl_takes([]) is None
    assert machine.gloo_takes(found, "10.0.0.5") == "eth0"
    assert machine.gloo_takes(found, None) == "lo"
    assert machine.lookup("localhost") == "127.0.0.1"
    assert machine.lookup("no.such.host.invalid") is None


def test_a_backend_is_told_what_to_take() -> None:
    finding = machine._taken("gloo", "GLOO_SOCKET_IFNAME", {"GLOO_SOCKET_IFNAME": "eth1"}, "lo")
    assert (finding.value, finding.grade) == ("eth1", "ok")
    assert machine._taken("gloo", "GLOO_SOCKET_IFNAME", {}, None).grade == "broken"


def test_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software._at_least("torch", "2.9.1+cu128", (2, 11), "").grade == "broken"
    assert software._at_least("torch", "2.11.0+cu130", (2, 11), "").grade == "ok"
    assert software._at_least("python", "3.12.1", (3, 11), "").grade == "ok"
    monkeypatch.setattr(software, "NEEDED", ("no-such-package",))
    assert {each.name: each.grade for each in software.look()}["no-such-package"] == "broken"


def test_a_driver_that_torch_cannot_use(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert machine.driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert machine.driver_version(file) == "580.65.06"
    found = machine._without_gpus("580.65.06")
    assert found.grade == "broken"
    assert "580.65.06" in found.meaning
    assert machine._without_gpus(None).grade == "ok"


def test_a_disk_is_really_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_BYTES", 32 << 20)
    written, read = disk.speeds(tmp_path)
    assert 1e5 < written < 1e12
    assert 1e5 < read < 1e12
    assert list(tmp_path.iterdir()) == []


def test_sizes() -> None:
    assert [size(n) for n in (0, 65536, 3 << 30, 5 << 40)] == ["0 B", "64 KiB", "3 GiB", "5.0 TiB"]


def test_a_compiler_is_looked_for_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    found = machine._host_updates(tmp_path)
    assert (found.value, found.grade) == (f"in C (/usr/bin/gcc), compiled when first needed, into {tmp_path}", "ok")
    (tmp_path / "host-1.so").touch()
    assert machine._host_updates(tmp_path).value == f"in C (/usr/bin/gcc), compiled in {tmp_path}"
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    found = machine._host_updates(tmp_path)
    assert found.grade == "worse"
    assert "install a C compiler (cc, gcc, clang)" in found.fix


def test_the_way_around_the_cache_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for goes, grade in ((True, "ok"), (False, "worse")):
        monkeypatch.setattr(disk, "goes_direct", lambda _, goes=goes: goes)
        found = next(finding for finding in disk.look(tmp_path) if finding.name == "around the cache")
        assert found.grade == grade
    monkeypatch.undo()
    assert isinstance(disk.goes_direct(tmp_path), bool)
    assert list(tmp_path.iterdir()) == []
