"""What was put is what is fetched: any bytes, from any memory, in the order in which it was asked for."""

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.base.errors import StoreError
from shardwise.base.files import ALIGNMENT
from shardwise.core.native.checked_io import CHECK_BYTES
from shardwise.core.offload import disk as disk_file
from shardwise.core.offload.arena import Arena
from shardwise.core.offload.disk import Disk, Pending
from shardwise.core.schedule.state_bytes import padded_bytes
from tests.core.offload.conftest import Mount
from tests.harness import num_open_files

KEEP = [HealthCheck.function_scoped_fixture]


def row(num_bytes: int, shift: int = 0, seed: int = 0) -> Tensor:
    """Random bytes at an address that is `shift` behind a whole page."""
    piece = Arena(num_bytes + 2 * ALIGNMENT, pin=False).take(num_bytes + shift, torch.uint8, "a row")[shift:]
    return piece.random_(0, 256, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["around the cache", "through the cache"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "through the cache":
        monkeypatch.setattr(disk_file, "enable_direct_io", lambda _: None)
    return str(request.param)


@dataclass(frozen=True)
class Ask:
    is_put: bool
    region: int
    at: int
    num_bytes: int
    shift: int
    waits: bool


SIZES = (50_001, 8 * ALIGNMENT)
ASKS = st.builds(
    Ask,
    st.booleans(),
    st.integers(0, 1),
    st.one_of(st.integers(0, 40_000), st.integers(0, 4).map(lambda n: 8192 * n)),
    st.one_of(st.integers(0, 50_001), st.integers(0, 6).map(lambda n: 8192 * n)),
    st.sampled_from([0, 0, 8, 1]),
    st.booleans(),
)


@pytest.mark.quick("around the cache-c", "through the cache-python")
@settings(deadline=None, max_examples=60, suppress_health_check=KEEP)
@given(st.lists(ASKS, max_size=25))
def test_any_requests_in_any_order(
    tmp_path: Path, small_blocks: int, way: str, library: CDLL | None, asks: list[Ask]
) -> None:
    disk = Disk(tmp_path, padded_bytes(SIZES), library)
    assert disk.is_direct == (way == "around the cache")
    regions = [disk.region(size, f"region {number}") for number, size in enumerate(SIZES)]
    contents, written = [bytearray(size) for size in SIZES], [bytearray(size) for size in SIZES]
    fetched: list[tuple[Tensor, bytes, Pending]] = []
    for number, ask in enumerate(asks):
        at = min(ask.at, SIZES[ask.region])
        stop = min(at + ask.num_bytes, SIZES[ask.region])
        tensor = row(stop - at, ask.shift, seed=number)
        if ask.is_put:
            pending = disk.put(regions[ask.region], tensor, at)
            contents[ask.region][at:stop] = bytes(tensor.tolist())
            written[ask.region][at:stop] = b"\1" * (stop - at)
        elif not all(written[ask.region][at:stop]):
            if not any(written[ask.region]):
                with pytest.raises(StoreError, match=f"region {ask.region} was not written yet"):
                    disk.fetch(regions[ask.region], tensor, at)
            continue
        else:
            pending = disk.fetch(regions[ask.region], tensor, at)
            fetched.append((tensor, bytes(contents[ask.region][at:stop]), pending))
        if ask.waits:
            pending.wait()
            assert pending.is_done
    for tensor, expected, pending in fetched:
        pending.wait()
        assert bytes(tensor.tolist()) == expected
    disk.close()


@pytest.mark.parametrize("shift", [0, 4])
def test_large_rows_of_real_blocks(tmp_path: Path, shift: int, library: CDLL | None) -> None:
    num_bytes = 20 * CHECK_BYTES + 12_346
    disk = Disk(tmp_path, padded_bytes([100, num_bytes]), library)
    disk.region(100, "something before it")
    region = disk.region(num_bytes, "layers.0")
    source, into = row(num_bytes, shift), row(num_bytes, 0, seed=1)
    disk.put(region, source).wait()
    disk.fetch(region, into).wait()
    assert torch.equal(source, into)
    part = torch.empty(3_000_000, dtype=torch.bfloat16)
    disk.fetch(region, part, at=777_778).wait()
    assert torch.equal(part.view(torch.uint8), source[777_778 : 777_778 + part.nbytes])
    disk.close()


def test_many_threads_at_once(tmp_path: Path, small_blocks: int, library: CDLL | None) -> None:
    """Some on regions of their own, and all on one, each on its part: their blocks are the same ones."""
    num_threads, num_bytes = 8, 40_003
    disk = Disk(tmp_path, padded_bytes([num_bytes] * (num_threads + 1)), library)
    own = [disk.region(num_bytes, f"region {number}") for number in range(num_threads)]
    shared = disk.region(num_bytes, "everybody's")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        some = random.Random(number)
        lines = [row(num_bytes, seed=number), row(num_bytes, 0)]
        first = number * (num_bytes // num_threads)
        try:
            for _ in range(25):
                lines[0].random_(0, 256)
                disk.put(own[number], lines[0])
                part = lines[0][first : first + some.randrange(1, num_bytes // num_threads)]
                disk.put(shared, part, first)
                again = torch.empty_like(part)
                pending = disk.fetch(shared, again, first)
                disk.fetch(own[number], lines[1]).wait()
                pending.wait()
                assert torch.equal(*lines)
                assert torch.equal(part, again)
        except BaseException as error:  # noqa: BLE001  told by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    disk.close()


def test_bytes_that_are_put_again_are_the_last_ones(tmp_path: Path, small_blocks: int) -> None:
    """Without waiting in between, for any of it."""
    disk = Disk(tmp_path, 100_000)
    region = disk.region(100_000, "layers.0")
    rows = [row(100_000, seed=seed) for seed in range(30)]
    seen = [torch.empty(100_000, dtype=torch.uint8) for _ in rows]
    pending = [
        start(region, tensor)
        for tensors in zip(rows, seen, strict=True)
        for start, tensor in zip((disk.put, disk.fetch), tensors, strict=True)
    ]
    for each in pending:
        each.wait()
    assert all(torch.equal(source, into) for source, into in zip(rows, seen, strict=True))
    disk.close()


# ---------------------------------------------------------------------------------------------------------
# refusals


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 2 * ALIGNMENT)
    region = disk.region(5000, "moments of layers.0")
    with pytest.raises(StoreError, match=r"moments of layers.1 needs 1 bytes, and 0 of the 8192 reserved in"):
        disk.region(1, "moments of layers.1")
    with pytest.raises(StoreError, match=r"bytes 4000 to 5001 are not all in moments of layers.0, which has 5000"):
        disk.put(region, row(1001), 4000)
    with pytest.raises(StoreError, match=r"bytes -1 to 0 are not all in moments of layers.0"):
        disk.fetch(region, row(1), -1)
    with pytest.raises(StoreError, match=r"moments of layers.0: only contiguous tensors .* strides \(2,\)"):
        disk.put(region, row(100)[::2])
    with pytest.raises(StoreError, match="on meta"):
        disk.fetch(region, torch.empty(5, device="meta"))
    with pytest.raises(StoreError, match=r"moments of layers.0 was not written yet"):
        disk.fetch(region, row(5000))
    disk.put(region, row(5000)).wait()  # none of it did harm
    disk.close()


def test_nothing_is_a_size_too(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 0)
    region = disk.region(0, "nothing")
    pending = disk.put(region, torch.empty(0))
    assert pending.is_done
    pending.wait()
    disk.fetch(region, torch.empty(0)).wait()
    disk.close()


# ---------------------------------------------------------------------------------------------------------
# room, and its end


def test_room_is_taken_at_once_and_given_back(mount: Mount) -> None:
    place = mount("tmpfs", "size=16m")
    before = free(place)
    disk = Disk(place, 8 << 20)
    assert list(place.iterdir()) == []
    assert before - free(place) == disk.reserved_bytes == 8 << 20
    disk.put(disk.region(8 << 20, "layers.0"), row(8 << 20)).wait()
    assert before - free(place) == 8 << 20
    disk.close()
    disk.close()
    assert free(place) == before


def free(place: Path) -> int:
    seen = os.statvfs(place)
    return seen.f_bavail * seen.f_frsize


def test_nothing_stays_open_and_no_thread_stays(tmp_path: Path) -> None:
    gc.collect()
    files, threads = num_open_files(), threading.active_count()
    for ends in ("closed", "forgotten"):
        disk = Disk(tmp_path, 1 << 20)
        region = disk.region(1 << 20, "layers.0")
        disk.put(region, row(1 << 20)).wait()
        assert num_open_files() == files + 1
        assert threading.active_count() > threads
        if ends == "closed":
            disk.close()
        del disk
        gc.collect()
        assert (num_open_files(), threading.active_count()) == (files, threads), ends


def test_a_closed_disk_says_so(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 64 << 20)
    region = disk.region(64 << 20, "layers.0")
    source = row(64 << 20)
    under_way = [disk.put(region, source) for _ in range(5)]
    disk.close()
    with pytest.raises(StoreError, match=f"{tmp_path}: the disk was closed"):
        disk.put(region, source)
    with pytest.raises(StoreError, match="the disk was closed"):  # dropped, and not called done
        under_way[-1].wait()


def test_tensors_are_let_go(tmp_path: Path) -> None:
    """Memory that was asked for once is not kept by threads that wait for more."""
    disk = Disk(tmp_path, 1 << 20)
    region = disk.region(1 << 20, "layers.0")
    sources = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(4)]
    alive = len(sources)

    class Told(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    held: list[Any] = [source.as_subclass(Told) for source in sources]
    for each in held:
        disk.put(region, each).wait()
    disk.fetch(region, sources[0]).wait()
    del each, held
    gc.collect()
    assert alive == 0
    disk.close()


ENDINGS = {
    "by itself": "",
    "with an error": "raise SystemExit(3)",
    "in a thread that is left": """
        def later():
            threading.main_thread().join()
            disk.fetch(region, row).wait()
            assert row.sum() == row.numel()
            print("read afterwards")
        threading.Thread(target=later).start()
    """,
}


@pytest.mark.quick("with an error")
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_while_requests_are_under_way(tmp_path: Path, ending: str) -> None:
    program = f"""
    import threading, torch
    from pathlib import Path
    from shardwise.core.offload.disk import Disk
    disk = Disk(Path({str(tmp_path)!r}), 64 << 20)
    region = disk.region(64 << 20, "layers.0")
    row = torch.ones(16 << 20)
    for _ in range(9):
        disk.put(region, row)
    """
    code = textwrap.dedent(program) + textwrap.dedent(ENDINGS[ending])
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (seen.returncode, seen.stderr) == (3 if "error" in ending else 0, "")
    assert ("read afterwards" in seen.stdout) == ("thread" in ending)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_that_of_the_windows(tmp_path: Path) -> None:
    """A file that is much larger than what streams through it, from memory that O_DIRECT cannot use as well."""
    program = f"""
    import resource, torch
    from pathlib import Path
    from shardwise.core.offload.disk import Disk
    disk = Disk(Path({str(tmp_path)!r}), 512 << 20)
    regions = [disk.region(16 << 20, str(number)) for number in range(32)]
    windows = [torch.ones((16 << 20) + 1, dtype=torch.uint8)[1:] for _ in range(2)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for start in (disk.put, disk.fetch):
        pending = []
        for number, region in enumerate(regions):
            if number >= 2:
                pending[number - 2].wait()
            pending.append(start(region, windows[number % 2]))
        for each in pending:
            each.wait()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    code = textwrap.dedent(program)
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(seen.stdout) < 24 << 10  # in kB: sixteen blocks, and stacks of threads
