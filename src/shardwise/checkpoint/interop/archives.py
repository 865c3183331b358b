"""What torch.save writes, without torch.load: a zip archive of a pickle and of the bytes of its storages.

Nothing is compressed in it, so a storage is bytes at a place in the file, and no tensor is read here. The archive may
be a whole file or lie inside one, as in torch's distributed checkpoints. Its directory is read from the end.
"""

import struct
from typing import Any

from ...base.errors import CheckpointError
from . import known_names, pickles
from .known_names import STORAGE_DTYPES, Storage
from .records import Maker
from .sources import Source

_MAX_DIRECTORY_BYTES = 256 << 20
_END, _END64_PLACE, _END64, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\7", b"PK\6\6", b"PK\1\2", b"PK\3\4"
_LARGE = 0xFFFFFFFF


def load(source: Source, offset: int = 0, num_bytes: int | None = None) -> Any:
    """The value that torch.save wrote, with tensors as places in the file."""
    num_bytes = source.num_bytes - offset if num_bytes is None else num_bytes
    try:
        archive = _Archive(source, offset, num_bytes)
        return pickles.read(archive.content("data.pkl", pickles.MAX_PICKLE_BYTES), known_names.find, archive.storage)
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {source.path}: {error}") from error
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"cannot read {source.path}: what torch.save wrote there is damaged: {error}") from error


def is_archive(source: Source) -> bool:
    """Whether it begins as one; it may have been cut all the same."""
    return source.read(0, min(source.num_bytes, len(_LOCAL))) == _LOCAL


class _Archive:
    """The directory of an archive: where the header of each entry is, and how long its content."""

    def __init__(self, source: Source, offset: int, num_bytes: int) -> None:
        self._source, self._offset, self._num_bytes = source, offset, num_bytes
        entries = self._directory()
        name = next((name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")), None)
        if name is None:
            raise CheckpointError("it holds no data.pkl, so torch.save did not write it")
        prefix = name.removesuffix("data.pkl")
        self._entries = {name.removeprefix(prefix): entry for name, entry in entries.items()}
        if "byteorder" in self._entries and self.content("byteorder", 16) != b"little":
            raise CheckpointError("its numbers are big-endian, which is not read here")

    def content(self, name: str, at_most: int) -> bytes:
        offset, num_bytes = self._place(name)
        if num_bytes > at_most:
            raise CheckpointError(f"its {name} is {num_bytes} bytes long, of at most {at_most}")
        return self._source.read(offset, num_bytes)

    def storage(self, identity: Any) -> Storage:
        """What a pickle's word for a storage stands for: ("storage", its kind, its key, the device, elements)."""
        if type(identity) is not tuple or len(identity) < 5 or identity[0] != "storage":
            raise CheckpointError("a pickle asks for something that is no storage: it is not loaded")
        _, kind, key, _, num_elems = identity[:5]
        dtype = STORAGE_DTYPES.get(kind.name) if isinstance(kind, Maker) else None
        if dtype is None or type(num_elems) is not int:
            raise CheckpointError("a pickle asks for a storage of an unknown kind: it is not loaded")
        offset, num_bytes = self._place(f"data/{known_names.text(key)}")
        if num_elems < 0 or num_elems * dtype.itemsize > num_bytes:
            raise CheckpointError(f"storage {key!r} should be {num_elems} of {dtype}, and is {num_bytes} bytes long")
        return Storage(self._source.number, offset, num_bytes, dtype)

    def _read(self, offset: int, num_bytes: int) -> bytes:
        if not 0 <= offset <= offset + num_bytes <= self._num_bytes:
            raise ValueError(f"bytes {offset} to {offset + num_bytes} of an archive of {self._num_bytes}")
        return self._source.read(self._offset + offset, num_bytes)

    def _place(self, name: str) -> tuple[int, int]:
        if name not in self._entries:
            raise CheckpointError(f"it has no {name!r}")
        header, num_bytes = self._entries[name]
        signature, name_bytes, extra_bytes = struct.unpack("<4s22xHH", self._read(header, 30))
        if signature != _LOCAL:
            raise ValueError(f"no entry at byte {header}")
        offset = header + 30 + name_bytes + extra_bytes
        if offset + num_bytes > self._num_bytes:
            raise ValueError(f"{name} reaches to byte {offset + num_bytes} of {self._num_bytes}")
        return self._offset + offset, num_bytes

    def _directory(self) -> dict[str, tuple[int, int]]:
        tail_at = max(0, self._num_bytes - 8192)
        tail = self._read(tail_at, self._num_bytes - tail_at)
        if len(tail) < 22 or tail[-22:-18] != _END:
            raise CheckpointError(
                "it is no zip archive, as torch.save writes since torch 1.6, or it was truncated: load it with the "
                "library that wrote it, and save it again"
            )
        num_entries, num_bytes, offset = struct.unpack("<10xHII2x", tail[-22:])
        if tail[-42:-38] == _END64_PLACE:
            (place,) = struct.unpack("<8xQ4x", tail[-42:-22])
            signature, num_entries, num_bytes, offset = struct.unpack("<4s28xQQQ", self._read(place, 56))
            if signature != _END64:
                raise ValueError("no end of a directory where it should be")
        if num_bytes > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {num_bytes} bytes, of at most {_MAX_DIRECTORY_BYTES}")
        if offset >= tail_at and offset + num_bytes <= self._num_bytes:
            return dict(_entries(tail[offset - tail_at :][:num_bytes], num_entries))
        return dict(_entries(self._read(offset, num_bytes), num_entries))


def _entries(directory: bytes, num_entries: int) -> Any:
    at = 0
    for _ in range(num_entries):
        fields = struct.unpack_from("<4s4xHH8xIIHHH8xI", directory, at)
        signature, flags, method, packed, num_bytes, name_bytes, extra_bytes, comment_bytes, header = fields
        at += 46
        name = directory[at : at + name_bytes].decode()
        extra = directory[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes + comment_bytes
        if signature != _ENTRY:
            raise ValueError("a directory with something else in it")
        num_bytes, packed, header = _large(extra, num_bytes, packed, header)
        if method != 0 or flags & 1 or packed != num_bytes:
            raise CheckpointError(f"its {name!r} is compressed or encrypted, which torch.save never does")
        yield name, (header, num_bytes)


def _large(extra: bytes, *values: int) -> list[int]:
    """The sizes and the place of an entry, where 32 bits do not hold them."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, num_bytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + num_bytes]
        at += 4 + num_bytes
    numbers = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    return [next(numbers, value) if value == _LARGE else value for value in values]
