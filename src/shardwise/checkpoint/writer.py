"""Tensors from anywhere into new safetensors files of a bounded size, in memory of a few blocks. No ranks.

What is written is told first, as `Source`s: which file a tensor goes into follows from the shapes alone. Each gives its
elements when its turn comes. A folder of files gets its name when the disk has all of it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, ConfigurationError, SaveError
from ..base.intervals import Interval
from .folder import partial_of, put_in_place, sync
from .index import File, Stored
from .reader import Reader
from .tensor_files import Entry, Layout, lay_out, write_file

MAX_FILE_BYTES = 5 * 10**9  # Hugging Face's measure
WEIGHTS_INDEX = "model.safetensors.index.json"
NOTE = "shardwise.json"  # in a folder that was exported: who wrote it, and from what

Tell = Callable[[int], None]  # so many more bytes were dealt with


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to be written. `rows` gives its elements in order; each row may be gone when the next is asked for."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The whole tensor, for those who compute with it."""
        whole = torch.empty(prod(self.shape), dtype=self.dtype)
        at = 0
        for row in self.rows():
            whole[at : at + row.numel()].copy_(row.reshape(-1))
            at += row.numel()
        return whole.view(self.shape)


def stored_source(name: str, reader: Reader, stored: Stored, dtype: torch.dtype | None = None) -> Source:
    """A tensor of a checkpoint, converted on its way if another dtype is given."""
    dtype = dtype or stored.torch_dtype
    return Source(name, dtype, stored.shape, partial(_stored_rows, name, reader, stored, dtype))


def _stored_rows(name: str, reader: Reader, stored: Stored, dtype: torch.dtype) -> Iterator[Tensor]:
    for row in reader.rows(stored, Interval(0, stored.num_elems)):
        yield converted(name, row, dtype)


def converted(name: str, row: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype; refused where finite numbers would become infinite."""
    found = row.to(dtype)
    if dtype is torch.float16 and row.dtype is not dtype and (found.isinf() & row.isfinite()).any():
        raise CheckpointError(
            f"{name!r} reaches to {float(row.abs().max()):g}, and fp16 to {torch.finfo(dtype).max:g}: use bf16 or fp32"
        )
    return found


def split(sources: Iterable[Source], max_bytes: int) -> list[list[Source]]:
    """In order, into files of at most `max_bytes` of tensors; a larger tensor has a file of its own."""
    files: list[list[Source]] = [[]]
    num_bytes = 0
    for source in sources:
        if files[-1] and num_bytes + source.num_bytes > max_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(source)
        num_bytes += source.num_bytes
    return files


def write_sources(path: Path, sources: Sequence[Source], tell: Tell, is_summed: bool = False) -> tuple[File, Layout]:
    """Write one file and wait until the disk has it. Checksums are for those who keep them."""
    # transformers looks for the word.
    layout = lay_out([Entry(s.name, s.dtype, s.shape, s.read) for s in sources], {"format": "pt"})
    by_name = {source.name: source for source in sources}
    return write_file(path, layout, lambda entry: _told_rows(by_name[entry.key], tell), is_summed), layout


def _told_rows(source: Source, tell: Tell) -> Iterator[Tensor]:
    num_bytes = 0
    for row in source.rows():
        if row.dtype != source.dtype:
            raise CheckpointError(f"{source.name!r} was announced as {source.dtype} and is {row.dtype}")
        yield row.detach()
        num_bytes += row.nbytes
        tell(row.nbytes)
    if num_bytes != source.num_bytes:
        raise CheckpointError(f"{source.name!r} was announced with {source.num_bytes} bytes and has {num_bytes}")


def write_weights(into: Path, sources: Sequence[Source], max_bytes: int, tell: Tell) -> None:
    """The weights of a Hugging Face folder: one file, or several and what is in which."""
    files = split(sources, max_bytes)
    names = file_names("model", len(files))
    for name, content in zip(names, files, strict=True):
        write_sources(into / name, content, tell)
    if len(files) > 1:
        weight_map = {source.name: name for name, content in zip(names, files, strict=True) for source in content}
        total = sum(source.num_bytes for source in sources)
        about = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (into / WEIGHTS_INDEX).write_text(json.dumps(about, indent=1))


def file_names(stem: str, num_files: int) -> list[str]:
    if num_files == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name, and replaces what has it, when everything is there."""
    partial_folder = partial_of(folder)
    try:
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        yield partial_folder
        for path in (*partial_folder.rglob("*"), partial_folder):
            path.chmod(0o755 if path.is_dir() else 0o644)  # for everybody to read
            sync(path)  # a folder that has its name is complete, also after the power went
        put_in_place(folder)
    except OSError as error:
        raise SaveError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def write_note(into: Path, about: Mapping[str, Any]) -> None:
    (into / NOTE).write_text(json.dumps(dict(about), indent=1))


def require_free(folder: Path, is_overwriting: bool, *sources: Path, replaces_own: bool = True) -> None:
    """That a folder may be written: not there, empty, exported by us, or given up; and nothing that is read is in it.

    Without `replaces_own`, also what we wrote has to be given up.
    """
    place = Path(os.path.realpath(folder))
    for source in sources:
        if place in (Path(os.path.realpath(source)), *Path(os.path.realpath(source)).parents):
            raise ConfigurationError(f"{folder} would be replaced, and {source} is read from it: name another folder")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file: name a folder to write to")
    is_given_up = is_overwriting or (replaces_own and (folder / NOTE).is_file())
    if any(folder.iterdir()) and not is_given_up:
        which = " that shardwise did not export" if replaces_own else ""
        raise ConfigurationError(f"{folder} holds files{which}: name another folder, or replace it with --overwrite")
