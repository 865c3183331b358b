"""Folders that cannot be used, disks that are full, short or wrong, and a process that is killed: one clear error that
is not forgotten, never other bytes than were written, and nothing left behind."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import NoRoomError, PlaceError, StoreError
from shardwise.core.native.checked_io import CHECK_BYTES
from shardwise.core.offload.disk import Disk, Region
from tests.core.offload.conftest import Mount
from tests.core.offload.test_disk import free, row
from tests.harness import num_open_files

# ---------------------------------------------------------------------------------------------------------
# before anything ran


def test_a_folder_is_never_made(tmp_path: Path) -> None:
    for place in (tmp_path / "no" / "folder", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(PlaceError, match=f"{place} is not a folder, .* make it, or name another") as caught:
            Disk(place, 1 << 20)
        assert caught.value.exit_code == 2
    assert not (tmp_path / "no").exists()


def test_a_folder_that_cannot_be_written(mount: Mount) -> None:
    place = mount("tmpfs", "size=4m,ro")
    with pytest.raises(
        PlaceError, match=f"{place}: no file of 1048576 bytes can be made there, .*Read-only file system"
    ):
        Disk(place, 1 << 20)


@pytest.mark.parametrize("tells", [True, False], ids=["seen at once", "found out"])
def test_too_little_room_is_told_before_anything_ran(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    place = mount("tmpfs", "size=4m")
    files = num_open_files()
    if not tells:
        real = os.statvfs(place)
        much = os.statvfs_result((*real[:2], 1 << 30, 1 << 30, 1 << 30, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _: much)
    free_bytes = 4 << 20 if tells else 1 << 42
    said = rf"{place}: 8388608 bytes are needed .* and {free_bytes} are free there.*: make room"
    with pytest.raises(NoRoomError, match=said) as caught:
        Disk(place, 8 << 20)
    monkeypatch.undo()
    assert caught.value.exit_code == 3
    assert (free(place), list(place.iterdir()), num_open_files()) == (4 << 20, [], files)
    Disk(place, 4 << 20).close()


def test_ranks_of_one_folder_do_not_take_each_others_room(mount: Mount) -> None:
    place = mount("tmpfs", "size=8m")
    first = Disk(place, 5 << 20)
    with pytest.raises(NoRoomError, match=f"5242880 bytes are needed .* and {3 << 20} are free"):
        Disk(place, 5 << 20)
    first.close()
    Disk(place, 5 << 20).close()


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(NoRoomError, match=r"2097152 bytes are needed .*File too large"):
            Disk(tmp_path, 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---------------------------------------------------------------------------------------------------------
# file systems that lack something


def without_nameless_files(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(refusal, os.strerror(refusal))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EISDIR])
def test_no_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    without_nameless_files(monkeypatch, refusal)
    disk = Disk(tmp_path, 4 << 20)
    assert list(tmp_path.iterdir()) == []
    goes_and_comes(disk)


def test_no_o_direct_no_reservations_and_no_telling_of_room(mount: Mount) -> None:
    """A ramfs has none of them."""
    place = mount("ramfs")
    disk = Disk(place, 4 << 20)
    assert not disk.is_direct
    assert list(place.iterdir()) == []
    goes_and_comes(disk)


def test_memory_is_a_file_system_too() -> None:
    goes_and_comes(Disk(Path("/dev/shm"), 4 << 20))


@pytest.mark.parametrize("function", ["pwrite", "preadv"])
def test_o_direct_that_is_refused_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    disk, real = Disk(tmp_path, 4 << 20), getattr(os, function)

    def refusing(file: int, what: Any, offset: int) -> int:
        if disk.is_direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return int(real(file, what, offset))

    monkeypatch.setattr(os, function, refusing)
    assert disk.is_direct
    goes_and_comes(disk)


def test_little_by_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than was asked for, as a signal does it."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, view, offset: write(file, view[:65536], offset))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: read(file, [views[0][:65536]], offset))
    goes_and_comes(Disk(tmp_path, 4 << 20))


def goes_and_comes(disk: Disk) -> None:
    region = disk.region((3 << 20) + 77, "layers.0")
    source, into = row(region.num_bytes), row(region.num_bytes, seed=1)
    disk.put(region, source).wait()
    disk.fetch(region, into).wait()
    assert torch.equal(source, into)
    disk.close()


# ---------------------------------------------------------------------------------------------------------
# in the middle of a run

SIZE = 6 * CHECK_BYTES + 4000


def filled(place: Path, library: CDLL | None = None) -> tuple[Disk, Region, Tensor]:
    disk = Disk(place, 16 << 20, library)
    region = disk.region(SIZE, "the optimizer's state of unit 'layers.3'")
    source = row(SIZE)
    disk.put(region, source).wait()
    return disk, region, source


def path_of(disk: Disk) -> Path:
    """The file has no name, but its process can reach it."""
    (found,) = (
        path
        for path in Path("/proc/self/fd").iterdir()
        if os.path.lexists(path) and str(path.readlink()).startswith(f"{disk.folder}/")
    )
    return found


def is_told_from_now_on(disk: Disk, region: Region, start: Callable[[], Any], said: str) -> None:
    """By whoever waits first, and then by every call."""
    said = rf"{re.escape(str(disk.folder))}: bytes \d+ to \d+ of the optimizer's state of unit 'layers.3' {said}"
    with pytest.raises(StoreError, match=said) as caught:
        start().wait()
    told = str(caught.value)
    assert "resume from the last checkpoint, which is as it was" in told
    assert caught.value.exit_code == 1
    other = disk.region(1000, "something else")
    for again in (
        lambda: disk.put(other, row(1000)),
        lambda: disk.put(region, row(1000)),
        lambda: disk.fetch(region, row(1000)),
    ):
        with pytest.raises(StoreError) as caught:
            again()
        assert str(caught.value) == told
    disk.close()


@pytest.mark.parametrize("at", [0, 4095, 3 * CHECK_BYTES + 5, SIZE - 1])
def test_a_single_other_bit_is_seen(tmp_path: Path, at: int, library: CDLL | None) -> None:
    disk, region, source = filled(tmp_path, library)
    with path_of(disk).open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(bytes([int(source[at]) ^ 16]))
    block = at // CHECK_BYTES * CHECK_BYTES
    said = (
        f"could not be read: the disk returned other bytes than were written, "
        f"in bytes {block} to {min(block + CHECK_BYTES, SIZE)}. .*replace the disk"
    )
    is_told_from_now_on(disk, region, lambda: disk.fetch(region, row(SIZE)), said)


@pytest.mark.parametrize("is_put", [False, True])
def test_a_part_of_a_broken_block_is_neither_read_nor_kept(tmp_path: Path, is_put: bool, library: CDLL | None) -> None:
    """Writing a part of it would otherwise make a good checksum of bad bytes."""
    disk, region, _ = filled(tmp_path, library)
    with path_of(disk).open("r+b", buffering=0) as file:
        file.write(bytes(4096))
    start = disk.put if is_put else disk.fetch
    said = "could not be .*: the disk returned other bytes than were written"
    is_told_from_now_on(disk, region, lambda: start(region, row(10), 500), said)


def test_a_write_that_was_lost_is_seen(tmp_path: Path, library: CDLL | None) -> None:
    disk, region, _ = filled(tmp_path, library)
    before = path_of(disk).read_bytes()
    disk.put(region, row(SIZE, seed=1)).wait()
    path_of(disk).write_bytes(before)
    is_told_from_now_on(disk, region, lambda: disk.fetch(region, row(SIZE)), "could not be read: .* other bytes")


def test_other_blocks_can_be_read_until_it_is_seen(tmp_path: Path) -> None:
    disk, region, source = filled(tmp_path)
    with path_of(disk).open("r+b", buffering=0) as file:
        file.write(bytes(4096))
    into = row(1000)
    disk.fetch(region, into, at=CHECK_BYTES).wait()
    assert torch.equal(into, source[CHECK_BYTES : CHECK_BYTES + 1000])
    disk.close()


def test_a_file_that_became_short(tmp_path: Path, library: CDLL | None) -> None:
    disk, region, _ = filled(tmp_path, library)
    os.truncate(path_of(disk), 2 * CHECK_BYTES + 5000)
    said = "could not be read: the file ends .* bytes before them: it was cut short"
    is_told_from_now_on(disk, region, lambda: disk.fetch(region, row(SIZE)), said)


def test_a_disk_that_is_full_all_the_same(mount: Mount, library: CDLL | None) -> None:
    """Its room is reserved; somebody took it away."""
    disk, region, _ = filled(mount("tmpfs", "size=20m"), library)
    os.truncate(path_of(disk), 0)
    os.truncate(path_of(disk), 16 << 20)
    with (disk.folder / "filler").open("wb") as file:
        file.write(bytes(free(disk.folder)))
    said = "could not be written: No space left on device.*: make room there, or name a folder on another disk"
    is_told_from_now_on(disk, region, lambda: disk.put(region, row(SIZE)), said)


def test_a_limit_that_is_met_on_the_way(tmp_path: Path, library: CDLL | None) -> None:
    disk, region, source = filled(tmp_path, library)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        said = "could not be written: File too large.*ulimit -f"
        is_told_from_now_on(disk, region, lambda: disk.put(region, source), said)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_promised_more_than_it_has(mount: Mount, library: CDLL | None) -> None:
    """Thin provisioning: a file system in an image, which lies on less than it thinks."""
    thin = mount("tmpfs", "size=6m")
    image = thin / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-E", "nodiscard", "-O", "^has_journal", str(image)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be made: {error}")
    disk = Disk(mount("ext4", "loop", image), 16 << 20, library)
    region = disk.region(15 << 20, "the optimizer's state of unit 'layers.3'")
    said = "could not be written: (Input/output error|No space left on device)"
    is_told_from_now_on(disk, region, lambda: disk.put(region, row(15 << 20)), said)


@pytest.mark.parametrize("function", ["pwrite", "preadv"])
def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    disk, region, source = filled(tmp_path)

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, function, failing)
    start = disk.put if function == "pwrite" else disk.fetch
    said = f"could not be {'written' if function == 'pwrite' else 'read'}: Input/output error.*: replace the disk"
    is_told_from_now_on(disk, region, lambda: start(region, source), said)


def test_what_is_under_way_ends_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `wait` nobody reads or writes the tensor any more, also where it failed."""
    disk = Disk(tmp_path, 64 << 20)
    region = disk.region(64 << 20, "layers.0")
    real, num_under_way = os.pwrite, 0

    def slow(file: int, view: memoryview, offset: int) -> int:
        nonlocal num_under_way
        if offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        num_under_way += 1
        time.sleep(0.2)
        num = real(file, view, offset)
        num_under_way -= 1
        return num

    monkeypatch.setattr(os, "pwrite", slow)
    with pytest.raises(StoreError, match="Input/output error"):
        disk.put(region, row(64 << 20)).wait()
    assert num_under_way == 0
    disk.close()


def test_a_bug_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, region, source = filled(tmp_path)

    def wrong(*_: Any) -> int:
        raise ZeroDivisionError("somebody's mistake")

    monkeypatch.setattr(os, "preadv", wrong)
    with pytest.raises(StoreError, match="somebody's mistake"):
        disk.fetch(region, source).wait()
    disk.close()


# ---------------------------------------------------------------------------------------------------------
# a process that is killed


@pytest.mark.quick("True")
@pytest.mark.parametrize("has_nameless_files", [True, False])
def test_a_killed_process_leaves_nothing(mount: Mount, has_nameless_files: bool) -> None:
    place = mount("tmpfs", "size=64m")
    before = free(place)
    program = f"""
    import itertools, os, sys, torch
    from pathlib import Path
    from shardwise.core.offload.disk import Disk
    if not {has_nameless_files}:
        real = os.open
        def refusing(path, flags, *rest, **more):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "not supported")
            return real(path, flags, *rest, **more)
        os.open = refusing
    disk = Disk(Path({str(place)!r}), 48 << 20)
    region = disk.region(48 << 20, "layers.0")
    row = torch.ones(48 << 20, dtype=torch.uint8)
    for number in itertools.count():
        disk.put(region, row).wait()
        if number == 0:
            print("writing", flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        assert before - free(place) == 48 << 20
        assert list(place.iterdir()) == []
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert free(place) == before
    assert list(place.iterdir()) == []
