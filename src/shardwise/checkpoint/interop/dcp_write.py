"""Write any checkpoint as a folder that torch's distributed checkpoint (DCP) loads.

The folder holds what `torch.distributed.checkpoint.state_dict` expects: `model` and `optimizer`, tied weights under all
of their names, and the settings of the parameter groups. Parts of tensors are read, and written with torch.save, one
after the other. torch's own writer would keep all tensors of a file in memory until the file is complete.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from ..index import Stored
from ..opened import Opened, Reader
from ..tensor_files import OnBytes
from ..writer import MAX_FILE_BYTES, new_folder

_PART_BYTES = 64 << 20
# Settings that torch requires in a parameter group, with torch's default values.
_HOW = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


def write_dcp(opened: Opened, path: Path, on_bytes: OnBytes = lambda num_bytes: None) -> None:
    """Write a checkpoint. At most one part of a tensor is in memory at a time."""
    metadata = dcp.Metadata({}, planner_data={})
    with new_folder(path) as into, opened.reader() as reader:
        with ExitStack() as stack:
            files = _Files(into, stack)
            for keys, value in _entries(opened):
                key = ".".join(map(str, keys))
                metadata.planner_data[key] = keys
                if not isinstance(value, (Stored, Tensor)):
                    files.write(dcp.MetadataIndex(key), value)
                    metadata.state_dict_metadata[key] = dcp.BytesStorageMetadata()
                    continue
                dtype = value.dtype if isinstance(value, Tensor) else value.torch_dtype
                described = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(value.shape), [])
                metadata.state_dict_metadata[key] = described
                for offsets, part in [((), value)] if isinstance(value, Tensor) else _parts(value, reader):
                    files.write(dcp.MetadataIndex(key, offsets, len(described.chunks)), part)
                    described.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), part.shape))
                    on_bytes(part.nbytes)
        FileSystemWriter(into).finish(metadata, [files.results])


class _Files:
    """Writes values into files. A full file is followed by a new one, named as if another rank had written it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._file: IO[bytes] | None = None
        self._num = 0
        self.results: list[WriteResult] = []

    def write(self, index: dcp.MetadataIndex, value: Any) -> None:
        if self._file is None or self._file.tell() > MAX_FILE_BYTES:
            self._stack.close()
            self._file = self._stack.enter_context((self._folder / f"__{self._num}_0{DEFAULT_SUFFIX}").open("wb"))
            self._num += 1
        begin = self._file.tell()
        torch.save(value, self._file)
        num_bytes = self._file.tell() - begin
        self.results.append(WriteResult(index, num_bytes, _StorageInfo(Path(self._file.name).name, begin, num_bytes)))


def _entries(opened: Opened) -> Iterator[tuple[tuple[str | int, ...], Stored | Any]]:
    """Yield the values of a state dict with the model and the optimizer, each with its path of keys."""
    tensors = opened.index.tensors
    for name, saved in tensors.items():
        for own in (name, *(other for other in saved.tied if other not in tensors)):
            yield ("model", own), saved
    optimizer = opened.index.optimizer
    if optimizer is None:
        return
    members: dict[int | None, list[str]] = {}
    for name, saved in tensors.items():
        members.setdefault(saved.group, []).append(name)
        for key, item in saved.state.items():
            # torch's optimizers keep the step count as a tensor.
            is_count = key == "step" and isinstance(item, (int, float))
            yield ("optimizer", "state", name, key), torch.tensor(float(item)) if is_count else item  # type: ignore[arg-type]
    for number, group in enumerate(optimizer.groups):
        for key, value in {**_HOW, **group, "params": members.get(number, [])}.items():
            is_setting = isinstance(value, list) and key != "params"
            yield ("optimizer", "param_groups", number, key), tuple(value) if is_setting else value


def _parts(stored: Stored, reader: Reader) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Read a tensor in parts of a bounded size, cut along the first dimension. Yield each with its offsets."""
    length = stored.shape[0] if stored.shape else 1
    row_elems = stored.num_elems // max(1, length)
    step = max(1, _PART_BYTES // (row_elems * stored.torch_dtype.itemsize)) if row_elems else max(1, length)
    for first in range(0, max(1, length), step):
        shape = (min(step, length - first), *stored.shape[1:]) if stored.shape else ()
        part = torch.empty(shape, dtype=stored.torch_dtype)
        reader.read(stored, first * row_elems, part.view(-1))
        yield (first, *(0 for _ in stored.shape[1:])) if stored.shape else (), part
