"""Any interval comes out of any pieces, in any dtype; not one byte is used that is not the one that was written."""

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.base.files import ALIGNMENT, OpenFile
from shardwise.base.intervals import Interval
from shardwise.checkpoint import opened as reader
from shardwise.checkpoint import tensor_files
from shardwise.checkpoint.index import Check, File, Piece, Stored
from shardwise.checkpoint.opened import Reader
from shardwise.checkpoint.tensor_files import lay_out, read_header, write_file
from tests.checkpoint.by_hand import read_whole, require_good, source_of
from tests.harness import num_open_files

BLOCK = 16384


@pytest.fixture(autouse=True, params=[0, 1 << 30], ids=["around the cache", "through the cache"])
def _small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(reader, "_DIRECT_BYTES", request.param)
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(reader, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(reader, "_UNSUMMED_BYTES", BLOCK)
    monkeypatch.setattr(reader, "_SHARED_BYTES", BLOCK // 4)


def write(folder: Path, rows: Sequence[Tensor]) -> tuple[list[File], Stored]:
    """One tensor, a row of it in each file, beside other things."""
    files, pieces, start = [], list[Piece](), 0
    for number, row in enumerate(rows):
        beside = torch.arange(1 + 700 * number).to(torch.int16)
        path = folder / f"file-{number}"
        files.append(write_file(path, lay_out([source_of("other", beside), source_of("row", row)])))
        (piece,) = read_header(path, number)["row"].pieces
        pieces.append(Piece(number, piece.offset, start, start + row.numel()))
        start += row.numel()
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}[rows[0].dtype]
    return files, Stored((start,), dtype, tuple(pieces))


lengths = st.lists(st.integers(1, 9000), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    lengths,
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_any_interval_of_any_pieces(
    lengths: list[int], data: st.DataObject, dtype: torch.dtype, into: torch.dtype, is_summed: bool
) -> None:
    values = torch.arange(sum(lengths)) % 251
    with TemporaryDirectory() as folder:
        files, stored = write(Path(folder), values.to(dtype).split(lengths))
        if not is_summed:
            files = [File(file.name, file.num_bytes) for file in files]
        with Reader(Path(folder), files) as opened:
            for _ in range(3):
                start = data.draw(st.integers(0, len(values)))
                row = torch.full((data.draw(st.integers(0, len(values) - start)),), -1, dtype=into)
                opened.read(stored, start, row)
                assert torch.equal(row, values[start : start + row.numel()].to(into))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)).map(sorted), max_size=12), st.data())
def test_plans_may_be_wrong(ends: list[list[int]], data: st.DataObject) -> None:
    """Reading ahead is a matter of time only: what was planned may come in another order, twice, or never."""
    values = torch.arange(20_000, dtype=torch.float32)
    intervals = [Interval(*each) for each in ends]
    with TemporaryDirectory() as folder:
        files, stored = write(Path(folder), values.split(7000))
        with Reader(Path(folder), files) as opened:
            opened.plan((stored, interval) for interval in intervals)
            for interval in data.draw(st.permutations(intervals)) + intervals[:3]:
                row = torch.empty(interval.num_elems)
                opened.read(stored, interval.start, row)
                assert torch.equal(row, values[interval.start : interval.stop])


def test_what_comes_next_is_read_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is another tensor's."""
    begun, real = list[int](), reader.ThreadPoolExecutor.submit

    def submit(threads: ThreadPoolExecutor, read: Any, file: OpenFile, block: Check, *rest: object) -> Future[Tensor]:
        begun.append(block.offset // BLOCK)
        return real(threads, read, file, block, *rest)

    monkeypatch.setattr(reader.ThreadPoolExecutor, "submit", submit)
    files, stored = write(tmp_path, [torch.rand(10 * BLOCK // 4)])
    (whole,) = stored.pieces
    size = BLOCK // 4
    tensors = [Stored((size,), "F32", (Piece(0, whole.offset + 4 * at, 0, size),)) for at in range(0, 8 * size, size)]
    with Reader(tmp_path, files) as opened:
        opened.plan((tensor, Interval(0, size)) for tensor in tensors)
        for number, tensor in enumerate(tensors[:4]):
            opened.read(tensor, 0, torch.empty(size))
            assert max(begun) >= number + reader._NUM_AHEAD
    assert begun == sorted(set(begun)), "each once, in their order"


def test_what_is_read_ahead_is_told_when_its_turn_comes(tmp_path: Path) -> None:
    values = torch.arange(3000, dtype=torch.float32)
    files, stored = write(tmp_path, values.split(1000))
    (tmp_path / "file-1").unlink()
    row = torch.empty(1000)
    with Reader(tmp_path, files) as opened:
        opened.plan([(stored, Interval(0, 3000))])
        for start in (0, 2000):
            opened.read(stored, start, row)
            assert torch.equal(row, values[start : start + 1000])
        with pytest.raises(CheckpointError, match="file-1"):
            opened.read(stored, 1000, row)


def test_no_more_is_read_than_is_wanted(tmp_path: Path) -> None:
    """At most the blocks that the interval touches; without checksums, the pages of what is read at once."""
    files, stored = write(tmp_path, [torch.rand(50_000)])
    without = [File(file.name, file.num_bytes) for file in files]
    for listed, most in ((files, 4 * 10_000 + 2 * BLOCK), (without, 4 * 10_000 + 3 * 2 * ALIGNMENT)):
        with Reader(tmp_path, listed) as opened:
            opened.read(stored, 0, torch.empty(1))  # opens the file
            before = num_read()
            opened.read(stored, 20_000, torch.empty(10_000))
            assert num_read() - before <= most


def num_read() -> int:
    """Bytes that this process has asked files for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar:"))


def test_a_block_is_read_once_for_what_lies_beside_each_other(tmp_path: Path) -> None:
    files, stored = write(tmp_path, [torch.rand(1000)])
    with Reader(tmp_path, files) as opened:
        opened.read(stored, 0, torch.empty(1))
        before = num_read()
        for start in range(0, 100, 10):
            opened.read(stored, start, torch.empty(10))
        assert num_read() - before <= 500


def test_a_changed_byte_is_found_where_it_is_read(tmp_path: Path) -> None:
    values = torch.arange(20_000, dtype=torch.float32)
    files, stored = write(tmp_path, [values])
    path = tmp_path / files[0].name
    content = bytearray(path.read_bytes())
    content[3 * BLOCK + 17] ^= 1
    path.write_bytes(content)
    with Reader(tmp_path, files) as opened:
        words = rf"file-0 is damaged: bytes {3 * BLOCK} to {4 * BLOCK} are not those that were written"
        with pytest.raises(CheckpointError, match=words):
            require_good(opened, 0)
        # What lies elsewhere is good, and is read; the damaged block never is, however often it is asked for.
        row = torch.empty(500)
        opened.read(stored, 0, row)
        assert torch.equal(row, values[:500])
        for _ in range(2):
            with pytest.raises(CheckpointError, match="is damaged"):
                opened.read(stored, 3 * BLOCK // 4, row)
        opened.read(stored, 0, row)
        assert torch.equal(row, values[:500])


def test_files_of_another_length_are_not_read(tmp_path: Path) -> None:
    files, stored = write(tmp_path, [torch.rand(1000)])
    os.truncate(tmp_path / "file-0", files[0].num_bytes - 4)
    with Reader(tmp_path, files) as opened:
        for call in (lambda: opened.require_length(0), lambda: opened.read(stored, 0, torch.empty(1))):
            with pytest.raises(CheckpointError, match=rf"is {files[0].num_bytes - 4} bytes long, and was written with"):
                call()
    (tmp_path / "file-0").unlink()
    with Reader(tmp_path, files) as opened:
        for call in (lambda: opened.require_length(0), lambda: require_good(opened, 0)):
            with pytest.raises(CheckpointError, match=r"cannot read .*file-0: No such file"):
                call()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    files, stored = write(tmp_path, [torch.rand(20_000)])
    for listed in (files, [File(file.name, file.num_bytes) for file in files]):
        with Reader(tmp_path, listed) as opened:
            content = (tmp_path / "file-0").read_bytes()
            opened.read(stored, 0, torch.empty(1))
            os.truncate(tmp_path / "file-0", 40_000)
            with pytest.raises(CheckpointError, match="ends at byte 40000: it was truncated"):
                opened.read(stored, 0, torch.empty(20_000))
            (tmp_path / "file-0").write_bytes(content)


def test_checksums_that_are_nobodys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * BLOCK))
    stored = Stored((BLOCK // 4,), "F32", (Piece(0, 0, 0, BLOCK // 4),))
    for checks, words in (
        ((Check(0, 3 * BLOCK, 0),), f"a checksum over {3 * BLOCK} bytes; at most {BLOCK}"),
        (
            tuple(Check(at, 6, zlib.crc32(bytes(6))) for at in range(0, 3 * BLOCK, 6)),
            "a checksum ends inside an element",
        ),
    ):
        with (
            Reader(tmp_path, [File("file", 3 * BLOCK, checks)]) as opened,
            pytest.raises(CheckpointError, match=words),
        ):
            opened.read(stored, 0, torch.empty(BLOCK // 4))


def test_pieces_at_odd_places_are_read(tmp_path: Path) -> None:
    """Others do not align their tensors."""
    values = torch.arange(3000, dtype=torch.int64)
    (tmp_path / "file").write_bytes(b"abc" + values.numpy().tobytes())
    stored = Stored((3000,), "I64", (Piece(0, 3, 0, 3000),))
    with Reader(tmp_path, [File("file", 3 + 24_000)]) as opened:
        assert torch.equal(read_whole(opened, stored), values)


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_OPEN", 5)
    values = torch.arange(2400, dtype=torch.float32)
    files, stored = write(tmp_path, values.split(200))
    before = num_open_files()
    with Reader(tmp_path, files) as opened:
        for _ in range(2):
            assert torch.equal(read_whole(opened, stored), values)
            assert num_open_files() <= before + 5
    assert num_open_files() == before


def test_whole_tensors_have_their_shape(tmp_path: Path) -> None:
    files, stored = write(tmp_path, [torch.arange(6.0), torch.arange(6.0, 12.0)])
    with Reader(tmp_path, files) as opened:
        assert torch.equal(read_whole(opened, Stored((3, 4), "F32", stored.pieces)), torch.arange(12.0).view(3, 4))
        assert read_whole(opened, Stored((0, 4), "F32", ())).shape == (0, 4)
