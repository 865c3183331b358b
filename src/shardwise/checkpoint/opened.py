"""Find a checkpoint, whichever library wrote it, and read elements out of its files as they were written.

If the index has checksums, a file is read in the blocks that they cover, and a block that has changed is an error.
Threads read and check blocks ahead of the one in use; a few blocks stay in memory, for neighbouring tensors.
"""

import mmap
import os
import re
import zlib
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import CheckpointError, DamageError
from ..base.files import ALIGNMENT, OpenFile, enable_direct_io, num_bytes_of, read_at
from ..base.intervals import Interval, round_up
from . import folder
from .folder import os_errors_as
from .index import Check, File, Index, Stored, cut, from_json, require_sound
from .interop import dcp, deepspeed, hugging_face
from .interop.described import Groups
from .tensor_files import BLOCK_BYTES

_LOOKED_FOR = (
    f"shardwise ({folder.MARKER}; {folder.CHECKPOINTS}/ of a run), torch DCP ({dcp.METADATA}), Accelerate "
    f"({dcp.MODEL_PART}), DeepSpeed ({deepspeed.LATEST}, *_model_states.pt), Hugging Face "
    f"({', '.join(hugging_face.NAMES)})"
)
# Files of one of our checkpoints. None of them is a checkpoint by itself.
_OWN_FILE = re.compile(rf"{re.escape(folder.INDEX)}|{folder.MARKER}|rank-\d+\.safetensors")
_MAX_OPEN = 64
_NUM_AHEAD, _NUM_IN_MEMORY = 4, 7  # blocks
# Block size in files without checksums: for large tensors, and for neighbouring small ones.
_UNSUMMED_BYTES, _SHARED_BYTES = 1 << 20, 1 << 16
# Minimum file size for O_DIRECT. Smaller files have small blocks; there the kernel's read-ahead reads more at once.
_DIRECT_BYTES = 1 << 30


_Block = tuple[int, Check]  # the number of a file, and some bytes of it


class Reader:
    """Reads tensors from the files of a checkpoint. A file whose length differs from the index is an error.

    `is_shared`: other processes on this machine read the same bytes, so the page cache is used.
    """

    def __init__(self, folder: Path, files: Sequence[File], is_shared: bool = False) -> None:
        self._folder = folder
        self._files = files
        self._is_shared = is_shared
        self._opened = lru_cache(_MAX_OPEN)(self._open)
        # For each block, its memory and the result of its read. The most recently used block is last.
        self._reads: OrderedDict[_Block, tuple[mmap.mmap, Future[Tensor]]] = OrderedDict()
        self._planned: Iterator[_Block] = iter(())
        self._ahead: deque[_Block] = deque()  # planned blocks whose read has started
        self._threads = ThreadPoolExecutor(_NUM_AHEAD, "shardwise-read")

    def plan(self, wanted: Iterable[tuple[Stored, Interval]]) -> None:
        """Announce the next reads, in order: threads begin to read ahead. Other reads are still allowed."""
        self._planned = (block for stored, interval in wanted for block, _ in self._spans(stored, interval))
        self._ahead.clear()
        self._read_ahead()

    def read(self, stored: Stored, start: int, into: Tensor) -> None:
        """Fill the row `into` with elements of a tensor, from its element `start` on; dtypes are converted."""
        at = 0
        for values in self.rows(stored, Interval(start, start + into.numel())):
            into[at : at + values.numel()].copy_(values)
            at += values.numel()

    def rows(self, stored: Stored, wanted: Interval) -> Iterator[Tensor]:
        """Yield elements of a tensor in order, at most a block at a time; each row is valid until the next one."""
        if not self._ahead:
            self.plan([(stored, wanted)])
        dtype = stored.torch_dtype
        for block, inside in self._spans(stored, wanted):
            content = self._content(block)[inside]
            if content.numel() % dtype.itemsize:
                raise DamageError(f"{self._path(block[0])}: a checksum ends inside an element")
            is_aligned = content.data_ptr() % dtype.itemsize == content.storage_offset() % dtype.itemsize == 0
            yield (content if is_aligned else content.clone()).view(dtype)

    def require_length(self, number: int) -> None:
        """Require that a file is there and has its length, without opening it."""
        with os_errors_as(DamageError, f"cannot read {self._path(number)}"):
            self._compare_length(number, num_bytes_of(self._path(number)))

    def block_at(self, number: int, offset: int, end: int) -> Check:
        """Return the block of a file in which the bytes from `offset` to `end` begin."""
        file = self._files[number]
        if file.checks:
            return file.checks[bisect_right(file.checks, offset, key=lambda check: check.offset) - 1]
        # Without checksums, small neighbouring tensors share a block.
        begin = offset // _SHARED_BYTES * _SHARED_BYTES
        stop = min(begin + _SHARED_BYTES, file.num_bytes)
        return Check(begin, stop - begin, 0) if end <= stop else Check(offset, min(end - offset, _UNSUMMED_BYTES), 0)

    def _spans(self, stored: Stored, wanted: Interval) -> Iterator[tuple[_Block, slice]]:
        """Yield the blocks of an interval, and the wanted bytes of each."""
        size = stored.torch_dtype.itemsize
        for number, offset, start, stop in cut(stored, wanted):
            end = offset + (stop - start) * size
            while offset < end:
                block = self.block_at(number, offset, end)
                stop = min(end, block.offset + block.num_bytes)
                yield (number, block), slice(offset - block.offset, stop - block.offset)
                offset = stop

    def _content(self, block: _Block) -> Tensor:
        """Return a block's bytes, valid until the next call, and start to read the next planned blocks."""
        if block in self._ahead:
            while self._ahead.popleft() != block:
                pass
        read = self._begin(block)
        self._read_ahead(block)
        return read.result()

    def _read_ahead(self, *in_use: _Block) -> None:
        while len(self._ahead) < _NUM_AHEAD and (planned := next(self._planned, None)) is not None:
            if planned not in self._ahead and planned not in in_use:
                with suppress(DamageError):  # it is raised again when this block is needed
                    self._begin(planned, *in_use)
                    self._ahead.append(planned)

    def _begin(self, block: _Block, *in_use: _Block) -> Future[Tensor]:
        """Start to read a block, unless it is in memory. Use new memory, or that of the least recently used block."""
        number, about = block
        if block in self._reads:
            self._reads.move_to_end(block)
            return self._reads[block][1]
        if about.num_bytes > BLOCK_BYTES:
            raise DamageError(f"{self._path(number)}: a checksum over {about.num_bytes} bytes; at most {BLOCK_BYTES}")
        file = self._opened(number)
        if len(self._reads) < _NUM_IN_MEMORY:
            # Whole pages, as O_DIRECT requires; the first one is the page in which the block begins.
            memory = mmap.mmap(-1, BLOCK_BYTES + 2 * ALIGNMENT)
        else:
            oldest = next(key for key in self._reads if key not in self._ahead and key not in in_use)
            memory, last = self._reads.pop(oldest)
            wait([last])
        read = self._threads.submit(_read, file, about, bool(self._files[number].checks), memory)
        self._reads[block] = memory, read
        return read

    def _open(self, number: int) -> OpenFile:
        with os_errors_as(DamageError, f"cannot read {self._path(number)}"):
            file = OpenFile(self._path(number))
        self._compare_length(number, file.num_bytes)
        if not self._is_shared and file.num_bytes >= _DIRECT_BYTES:
            enable_direct_io(file.descriptor)
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return file

    def _compare_length(self, number: int, num_bytes: int) -> None:
        written = self._files[number].num_bytes
        if num_bytes != written:
            raise DamageError(f"{self._path(number)} is {num_bytes} bytes long, and was written with {written}")

    def _path(self, number: int) -> Path:
        return self._folder / self._files[number].name

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()
        # The caches and this object refer to each other: its files and memory would stay until a garbage collection.
        self._opened.cache_clear()
        self._reads.clear()


def _read(file: OpenFile, block: Check, is_summed: bool, memory: mmap.mmap) -> Tensor:
    begin, end = block.offset // ALIGNMENT * ALIGNMENT, block.offset + block.num_bytes
    with memoryview(memory) as view:
        with os_errors_as(DamageError, f"cannot read {file.path}"):
            num = read_at(file.descriptor, view[: round_up(end - begin, ALIGNMENT)], begin)
        if begin + num < end:
            raise DamageError(f"{file.path} ends at byte {begin + num}: it was truncated")
        if is_summed and zlib.crc32(view[block.offset - begin : end - begin]) != block.crc32:
            raise DamageError(f"{file.path} is damaged: bytes {block.offset} to {end} are not those that were written")
    return torch.frombuffer(memory, dtype=torch.uint8)[block.offset - begin : end - begin]


@dataclass(frozen=True, slots=True)
class Opened:
    folder: Path
    index: Index

    def reader(self, is_shared: bool = False) -> Reader:
        """Return a reader of its files. `is_shared`: other processes on this machine read the same bytes."""
        return Reader(self.folder, self.index.files, is_shared)


def open_checkpoint(path: Path, groups: Groups = ()) -> Opened:
    """Open any checkpoint, ours or another library's. Tensors are not read.

    In a run folder, open the newest complete checkpoint; in a checkpoint folder of Hugging Face's Trainer or of
    Accelerate, ours in it. `groups`: parameter names by group, for optimizer state that has numbers as keys. Raise
    CheckpointError, with the path, if there is no checkpoint or it cannot be understood.
    """
    with folder.os_errors_as(CheckpointError, f"cannot read {path}"):
        path, text = folder.newest_in(path), None
        if folder.find(path) is not None or (path / folder.INDEX).is_file() or not path.exists():
            path, text = folder.read_index(path)
        try:
            if text is not None:
                return Opened(path, from_json(text))
            opened = _open_others(path, groups)
            require_sound(opened.index)
            return opened
        except CheckpointError as error:
            if str(error).startswith((f"cannot read {path}", f"{path} ")):  # the message has the path already
                raise
            raise type(error)(f"cannot read {path}: {error}") from error


def _open_others(path: Path, groups: Groups) -> Opened:
    if path.is_file():
        if _OWN_FILE.fullmatch(path.name) and (path.parent / folder.INDEX).is_file():
            raise CheckpointError(f"{path} is one file of a checkpoint: give the folder, {path.parent}")
        return Opened(path.parent, hugging_face.read_file(path))
    if not path.is_dir():
        raise CheckpointError("it is neither a file nor a folder")
    if (path / dcp.METADATA).is_file():
        return Opened(path, dcp.read(path))
    if (path / dcp.MODEL_PART / dcp.METADATA).is_file():
        return Opened(path, dcp.read_accelerate(path))
    if (place := deepspeed.folder_of(path)) is not None:
        return Opened(place, deepspeed.read(place))
    if (name := hugging_face.file_of(path)) is not None:
        return Opened(path, hugging_face.read(path, name, groups))
    saved = [place for root in path.glob(f"*/{folder.CHECKPOINTS}") if (place := folder.latest(root)) is not None]
    if saved:
        newest = max(saved, key=lambda place: place.stat().st_mtime).parent.parent
        raise CheckpointError(f"{path} holds runs, and is none itself: name one, the newest is {newest}")
    raise CheckpointError(f"it holds no checkpoint of {_LOOKED_FOR}")


def has_all_files(path: Path) -> bool:
    """Return whether a checkpoint can be opened and its files have their lengths; the files are not read."""
    try:
        opened = open_checkpoint(path)
        with opened.reader() as reader:
            for number in range(len(opened.index.files)):
                reader.require_length(number)
    except CheckpointError:
        return False
    return True
