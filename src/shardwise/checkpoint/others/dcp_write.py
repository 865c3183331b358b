"""Any checkpoint as a folder that torch's distributed checkpoint (DCP) loads: the model, and its optimizer by name.

torch's own writer writes it, from a plan of ours: keys and shapes are told first, and every part is read when its turn
comes. What `torch.distributed.checkpoint.state_dict` asks for is there: `model` and `optimizer`, tied weights under all
of their names, and the groups' settings.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ..index import Optimizer, Plain, Stored
from ..opened import Opened
from ..reader import Reader
from ..write import MAX_FILE_BYTES, Tell, new_folder

_PART_BYTES = 64 << 20
# torch asks for these, and has these where nothing is said.
_HOW = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}

_Keys = tuple[str | int, ...]


def write_dcp(opened: Opened, path: Path, tell: Tell = lambda num_bytes: None) -> None:
    """Memory: one part of a tensor, and what torch makes of it on its way."""
    with new_folder(path) as into, opened.reader() as reader:
        content = _Content(opened, reader, tell)
        # One file for each plan, as if so many ranks were saving.
        plans, metadata = create_default_global_save_plan(content.plans())
        writer = FileSystemWriter(into)
        writer.set_up_storage_writer(True)
        plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
        results = [writer.write_data(plan, content).wait() for plan in plans]
        writer.finish(replace(metadata, planner_data=content.paths), results)


@dataclass(frozen=True, slots=True)
class _Item:
    """Something to be written: a part of a tensor, or a value that torch.save takes."""

    item: WriteItem
    num_bytes: int
    read: Callable[[], Tensor | io.BytesIO]


class _Content(DefaultSavePlanner):
    """What is to be written, and where it is in a state dict. For the writer it is the planner that it asks."""

    def __init__(self, opened: Opened, reader: Reader, tell: Tell) -> None:
        super().__init__()
        self._tell = tell
        self.paths: dict[str, _Keys] = {}
        self._items: dict[MetadataIndex, _Item] = {}
        for path, value in _entries(opened):
            key = ".".join(map(str, path))
            self.paths[key] = path
            parts = _parts(key, value, reader) if isinstance(value, Stored) else [_value(key, value)]
            self._items |= {part.item.index: part for part in parts}

    def plans(self) -> list[SavePlan]:
        """In order, of at most so many bytes of tensors each."""
        plans, num_bytes = [SavePlan([])], 0
        for part in self._items.values():
            if num_bytes + part.num_bytes > MAX_FILE_BYTES and plans[-1].items:
                plans.append(SavePlan([]))
                num_bytes = 0
            plans[-1].items.append(part.item)
            num_bytes += part.num_bytes
        return plans

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        part = self._items[write_item.index]
        self._tell(part.num_bytes)
        return part.read()


def _entries(opened: Opened) -> Iterator[tuple[_Keys, Stored | Any]]:
    """What a state dict with the model and the optimizer would hold, by its path."""
    tensors = opened.index.tensors
    for name, saved in tensors.items():
        for own in (name, *(other for other in saved.tied if other not in tensors)):
            yield ("model", own), saved.stored
    optimizer = opened.index.optimizer
    if optimizer is None:
        return
    for name, saved in tensors.items():
        for key, item in saved.state.items():
            yield ("optimizer", "state", name, key), _state_value(key, item)
    for number, settings in enumerate(_groups(optimizer)):
        members = [name for name, saved in tensors.items() if saved.group == number]
        for key, value in {**settings, "params": members}.items():
            yield ("optimizer", "param_groups", number, key), value


def _groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    for group in optimizer.groups:
        yield {key: tuple(value) if isinstance(value, list) else value for key, value in {**_HOW, **group}.items()}


def _state_value(key: str, item: Stored | Plain) -> Stored | Tensor | Plain:
    # Where torch counts steps it does so in a tensor.
    return torch.tensor(float(item)) if key == "step" and isinstance(item, (int, float)) else item


def _parts(key: str, stored: Stored, reader: Reader) -> Iterator[_Item]:
    """A tensor in parts of a bounded size, cut along its first dimension."""
    length = stored.shape[0] if stored.shape else 1
    row_elems = stored.num_elems // length if length else 0
    step = max(1, _PART_BYTES // max(1, row_elems * stored.torch_dtype.itemsize))
    for first in range(0, length, step) if length else (0,):
        shape = (min(step, length - first), *stored.shape[1:]) if stored.shape else ()
        offsets = (first, *(0 for _ in stored.shape[1:])) if stored.shape else ()
        read = partial(_read, reader, stored, first * row_elems, shape)
        yield _tensor_item(key, stored.torch_dtype, stored.shape, offsets, shape, read)


def _read(reader: Reader, stored: Stored, start: int, shape: tuple[int, ...]) -> Tensor:
    row = torch.empty(prod(shape), dtype=stored.torch_dtype)
    reader.read(stored, start, row)
    return row.view(shape)


def _value(key: str, value: Any) -> _Item:
    if isinstance(value, Tensor):
        return _tensor_item(key, value.dtype, (), (), (), lambda: value)
    return _Item(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), 0, partial(_pickled, value))


def _pickled(value: Any) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    return content


def _tensor_item(
    key: str,
    dtype: torch.dtype,
    whole: tuple[int, ...],
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
    read: Callable[[], Tensor],
) -> _Item:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(whole))
    item = WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)
    return _Item(item, prod(shape) * dtype.itemsize, read)
