"""Write any checkpoint as a folder that torch's distributed checkpoint (DCP) loads.

The folder holds what `torch.distributed.checkpoint.state_dict` expects: `model` and `optimizer`, tied weights under all
of their names, and the groups' settings. Each part of a tensor is read and written with torch.save when its turn comes;
torch's own writer would keep all tensors of a file in memory until the file is complete.
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
# torch requires these settings; the values are its defaults.
_HOW = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


def write_dcp(opened: Opened, path: Path, on_bytes: OnBytes = lambda num_bytes: None) -> None:
    """Write a checkpoint; at most one part of a tensor is in memory."""
    metadata = dcp.Metadata({}, planner_data={})
    with new_folder(path) as into, opened.reader() as reader:
        with ExitStack() as stack:
            files = _Files(into, stack)
            for keys, value in _entries(opened):
                key = ".".join(map(str, keys))
                metadata.planner_data[key] = keys
                if isinstance(value, Stored):
                    metadata.state_dict_metadata[key] = _write_tensor(files, key, value, reader, on_bytes)
                else:
                    metadata.state_dict_metadata[key] = _write_value(files, key, value)
        FileSystemWriter(into).finish(metadata, [files.results])


class _Files:
    """Files of a bounded size, one after the other, named as if each came from another rank."""

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
    """Yield the items of a state dict with the model and the optimizer, by their paths."""
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
            # torch's optimizers count steps in a tensor.
            is_count = key == "step" and isinstance(item, (int, float))
            yield ("optimizer", "state", name, key), torch.tensor(float(item)) if is_count else item  # type: ignore[arg-type]
    for number, group in enumerate(optimizer.groups):
        for key, value in {**_HOW, **group, "params": members.get(number, [])}.items():
            is_setting = isinstance(value, list) and key != "params"
            yield ("optimizer", "param_groups", number, key), tuple(value) if is_setting else value


def _write_tensor(
    files: _Files, key: str, stored: Stored, reader: Reader, on_bytes: OnBytes
) -> dcp.TensorStorageMetadata:
    """Write a tensor in parts of a bounded size, cut along the first dimension."""
    described = dcp.TensorStorageMetadata(dcp.TensorProperties(stored.torch_dtype), torch.Size(stored.shape), [])
    length = stored.shape[0] if stored.shape else 1
    row_elems = stored.num_elems // max(1, length)
    step = max(1, _PART_BYTES // (row_elems * stored.torch_dtype.itemsize)) if row_elems else max(1, length)
    for first in range(0, max(1, length), step):
        offsets = (first, *(0 for _ in stored.shape[1:])) if stored.shape else ()
        shape = (min(step, length - first), *stored.shape[1:]) if stored.shape else ()
        row = torch.empty(torch.Size(shape).numel(), dtype=stored.torch_dtype)
        reader.read(stored, first * row_elems, row)
        files.write(dcp.MetadataIndex(key, offsets, len(described.chunks)), row.view(shape))
        described.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
        on_bytes(row.nbytes)
    return described


def _write_value(files: _Files, key: str, value: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if isinstance(value, Tensor):
        files.write(dcp.MetadataIndex(key, (), 0), value)
        whole = dcp.ChunkStorageMetadata(torch.Size(()), value.shape)
        return dcp.TensorStorageMetadata(dcp.TensorProperties(value.dtype), value.shape, [whole])
    files.write(dcp.MetadataIndex(key), value)
    return dcp.BytesStorageMetadata()
