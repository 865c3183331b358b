"""The files of another library's checkpoint, and the archives of torch.save in them, read without torch.load.

An archive is a zip file with a pickle and the bytes of the storages that it refers to. Nothing is compressed, so a
storage is a range of bytes in the file. This module finds the ranges, and reads no tensor. The archive may be a whole
file, or a part of one, as in torch's distributed checkpoints.
"""

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

from ...base.errors import CheckpointError
from ...base.files import OpenFile
from ..folder import os_errors_as
from ..index import text
from . import pickles
from .pickles import STORAGE_DTYPES, Maker, Storage

_MAX_DIRECTORY_BYTES = 64 << 20
LOCAL, _END, _END_BYTES = b"PK\3\4", b"PK\5\6", 22


class NumberedFile(OpenFile):
    """A file that is read at offsets. `number` is its number in the checkpoint's list of files."""

    def __init__(self, path: Path, number: int = 0) -> None:
        self.number = number
        with os_errors_as(CheckpointError, f"cannot read {path}"):
            super().__init__(path)

    def read(self, offset: int, num_bytes: int) -> bytes:
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise CheckpointError(f"{self.path} is {self.num_bytes} bytes long, not {offset + num_bytes}")
        with os_errors_as(CheckpointError, f"cannot read {self.path}"):
            content = os.pread(self.descriptor, num_bytes, offset)
        if len(content) != num_bytes:
            raise CheckpointError(f"{self.path} ends at byte {offset + len(content)}: it was truncated")
        return content

    def read_all(self, max_bytes: int) -> bytes:
        if self.num_bytes > max_bytes:
            raise CheckpointError(f"{self.path} is {self.num_bytes} bytes long, of at most {max_bytes}")
        return self.read(0, self.num_bytes)


def load(source: NumberedFile, offset: int = 0, num_bytes: int | None = None) -> Any:
    """Return the value that torch.save wrote. In place of tensors it has their positions in the file."""
    try:
        archive = _Archive(source, offset, source.num_bytes - offset if num_bytes is None else num_bytes)
        return pickles.read(archive.content("data.pkl", pickles.MAX_PICKLE_BYTES), archive.storage)
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {source.path}: {error}") from error
    except (struct.error, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"cannot read {source.path}: the archive of torch.save is damaged: {error}") from error


class _Archive:
    """The entries of an archive by name, without the name of the folder that torch.save puts in front.

    It is also a file object (`read`, `seek`, `tell`), from which `zipfile` reads the directory of the archive.
    """

    def __init__(self, source: NumberedFile, offset: int, num_bytes: int) -> None:
        self._source, self._offset, self._num_bytes, self._position = source, offset, num_bytes, 0
        self.seek(-_END_BYTES, io.SEEK_END)
        try:
            if not self.read().startswith(_END):
                raise zipfile.BadZipFile("no directory at its end")
            with zipfile.ZipFile(self) as archive:  # type: ignore[call-overload]
                entries = {entry.filename: entry for entry in archive.infolist()}
        except zipfile.BadZipFile as error:
            what = "it is no zip archive, as torch.save writes since torch 1.6, or it was truncated"
            raise CheckpointError(f"{what}: load it with the library that wrote it, and save it again") from error
        name = next((name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")), None)
        if name is None:
            raise CheckpointError("it holds no data.pkl, so torch.save did not write it")
        prefix = name.removesuffix("data.pkl")
        self._entries = {name.removeprefix(prefix): entry for name, entry in entries.items()}
        if "byteorder" in self._entries and self.content("byteorder", 16) != b"little":
            raise CheckpointError("its numbers are big-endian, which is not supported")

    def read(self, num_bytes: int = -1) -> bytes:
        left = max(0, self._num_bytes - self._position)
        num_bytes = left if num_bytes < 0 else min(num_bytes, left)
        if num_bytes > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {num_bytes} bytes, and at most {_MAX_DIRECTORY_BYTES} are read")
        content = self._source.read(self._offset + self._position, num_bytes)
        self._position += num_bytes
        return content

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> None:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, base + offset)

    def tell(self) -> int:
        return self._position

    def content(self, name: str, max_bytes: int) -> bytes:
        offset, num_bytes = self._place(name)
        if num_bytes > max_bytes:
            raise CheckpointError(f"its {name} has {num_bytes} bytes, and at most {max_bytes} are read")
        return self._source.read(offset, num_bytes)

    def storage(self, identity: Any) -> Storage:
        """Find the storage of a persistent id: ("storage", its class, its key, the device, its number of elements)."""
        if type(identity) is not tuple or len(identity) < 5 or identity[0] != "storage":
            raise CheckpointError("a pickle asks for something that is no storage: it is not loaded")
        _, kind, key, _, num_elems = identity[:5]
        dtype = STORAGE_DTYPES.get(kind.name) if isinstance(kind, Maker) else None
        if dtype is None or type(num_elems) is not int:
            raise CheckpointError("a pickle asks for a storage of an unknown kind: it is not loaded")
        offset, num_bytes = self._place(f"data/{text(key)}")
        if num_elems < 0 or num_elems * dtype.itemsize > num_bytes:
            raise CheckpointError(f"storage {key!r} should be {num_elems} of {dtype}, and is {num_bytes} bytes long")
        return Storage(self._source.number, offset, num_bytes, dtype)

    def _place(self, name: str) -> tuple[int, int]:
        """Return the offset in the file at which the content of an entry begins, and its length."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"it has no {name!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise CheckpointError(f"its {name!r} is compressed or encrypted, which torch.save never does")
        if not 0 <= entry.header_offset <= self._num_bytes - 30:
            raise ValueError(f"no entry at byte {entry.header_offset}")
        header = self._source.read(self._offset + entry.header_offset, 30)
        signature, name_bytes, extra_bytes = struct.unpack("<4s22xHH", header)
        if signature != LOCAL:
            raise ValueError(f"no entry at byte {entry.header_offset}")
        offset = entry.header_offset + len(header) + name_bytes + extra_bytes
        if offset + entry.file_size > self._num_bytes:
            raise ValueError(f"{name} reaches to byte {offset + entry.file_size} of {self._num_bytes}")
        return self._offset + offset, entry.file_size
