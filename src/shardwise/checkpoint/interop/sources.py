"""The open files of another library's checkpoint, while it is being read."""

import os
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import torch

from ...base.errors import CheckpointError
from ...base.regular_file import open_regular
from ..folder import os_errors_as
from ..index import File, Stored

_MAX_OPEN = 64


class Source:
    """A file that is read at offsets. `number` is its number in the checkpoint's list of files."""

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path, self.number = path, number
        with os_errors_as(CheckpointError, f"cannot read {path}"):
            self._file = open_regular(path)
            self.num_bytes = os.fstat(self._file).st_size

    def read(self, offset: int, num_bytes: int) -> bytes:
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise CheckpointError(f"{self.path} is {self.num_bytes} bytes long, not {offset + num_bytes}")
        with os_errors_as(CheckpointError, f"cannot read {self.path}"):
            content = os.pread(self._file, num_bytes, offset)
        if len(content) != num_bytes:
            raise CheckpointError(f"{self.path} ends at byte {offset + len(content)}: it was truncated")
        return content

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Sources:
    """The files of a folder, numbered in the order of their first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers: dict[str, int] = {}
        self._files: dict[str, File] = {}
        self._open: OrderedDict[str, Source] = OrderedDict()

    def source(self, name: str) -> Source:
        """Open a file by its name, which is not trusted."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise CheckpointError(f"a file {name!r} is named, which is not inside {self.folder}")
        source = Source(self.folder / name, self._numbers.setdefault(name, len(self._numbers)))
        self._files[name] = File(name, source.num_bytes)
        if len(self._open) == _MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        self._open[name] = source
        return source

    def number(self, stored: Stored) -> float | int | bool:
        """Return the value of a tensor with one element."""
        piece = stored.pieces[0]
        content = self.source(list(self._files)[piece.file]).read(piece.offset, stored.num_bytes)
        value: float | int | bool = torch.frombuffer(bytearray(content), dtype=stored.torch_dtype).item()
        return value

    @property
    def files(self) -> tuple[File, ...]:
        return tuple(self._files.values())

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            self._open.popitem()[1].close()
