"""Read folders of torch's distributed checkpoint (DCP): `.metadata`, and `.distcp` files with the tensors' parts.

The metadata is a pickle. For every tensor it has the shape, the rectangles (chunks) into which the tensor was cut, and
the place of each chunk: a file, and a range in it that is an archive of torch.save. This module reads the directories
of the archives, and no tensor. Accelerate writes two such folders, for the model and for the optimizer.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...base.errors import CheckpointError
from ..index import NAMES, Index, Piece, Stored, count, counts, in_order, shape_from, text
from . import archives, pickles
from .described import Described, add_optimizer, by_settings, describing, index_of, place, version_text
from .pickles import Record, Strided

METADATA = ".metadata"
MODEL_PART, OPTIMIZER_PART = "pytorch_model_fsdp_0", "optimizer_0"

_MODEL = ("model", "module", "state_dict", "model_state_dict")
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict")
_STEP = "step"  # many training loops save it next to model and optimizer
_MAX_VALUE_BYTES = 16 << 20
_MAX_DEPTH = 64


def read(folder: Path) -> Index:
    with describing(folder, str(folder / METADATA)) as found:
        return index_of(found, {"format": "torch DCP", "version": _add(found, "")})


def read_accelerate(folder: Path) -> Index:
    """Read the two folders of Accelerate; the optimizer's may be missing."""
    with describing(folder, str(folder)) as found:
        version = _add(found, f"{MODEL_PART}/")
        if (folder / OPTIMIZER_PART / METADATA).is_file():
            _add(found, f"{OPTIMIZER_PART}/")
        return index_of(found, {"format": "Accelerate, torch DCP", "version": version})


def _add(found: Described, inside: str) -> str:
    """Add everything that one `.metadata` describes to `found`; return the version that it names."""
    source = found.source(f"{inside}{METADATA}")
    content = source.read_all(pickles.MAX_PICKLE_BYTES)
    try:
        metadata = _Metadata(found, inside, pickles.read(content))
        optimizer = []
        splits = {key: _split(metadata.paths.get(key, (key,))) for key in metadata.entries}
        # If no key has a prefix such as `model`, tensors at the top level are the model's.
        is_flat = all(what != "model" for what, _ in splits.values())
        for key, (what, rest) in splits.items():
            if is_flat and what == "other" and len(rest) == 1:
                what = "model"
            if what == "model" and metadata.is_tensor(key):
                found.tensors[_name(rest)] = metadata.value(key)
            elif what == "other" and _name(rest) == _STEP and type(step := metadata.value(key)) is int:
                found.extra[_STEP] = step
            elif what == "optimizer":
                optimizer.append((rest, metadata.value(key)))
            else:
                found.leave_out(_name(rest[:1]))
        _add_optimizer(found, optimizer)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {error}") from error
    return metadata.version


class _Metadata:
    """A checked `.metadata`: `entries` by flat key, and `paths`, the nested keys in the state dict, if known."""

    def __init__(self, found: Described, inside: str, given: Any) -> None:
        self._found = found
        self.entries: dict[str, Record] = given.state["state_dict_metadata"]
        self.paths: dict[str, tuple[Any, ...]] = given.state.get("planner_data") or {}
        self.version = version_text(given.state.get("version"))
        # For each chunk of a tensor, and for each other value: the file, offset and length of its archive.
        self._places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
        for index, info in given.state["storage_data"].items():
            if info.get("transform_descriptors"):
                raise CheckpointError(f"{text(index.get('fqn'))!r} was compressed when it was saved: save it plainly")
            key = (text(index.state["fqn"]), counts(index.get("offset") or ()))
            file = inside + text(info.state["relative_path"])
            self._places[key] = (file, count(info.state["offset"]), count(info.state["length"]))

    def is_tensor(self, key: str) -> bool:
        return self.entries[key].name.endswith(".TensorStorageMetadata")

    def value(self, key: str) -> Any:
        """Return a tensor as `Stored`, without reading it; return any other value itself."""
        if not self.is_tensor(key):
            num_bytes = self._places[key, ()][2]
            if num_bytes > _MAX_VALUE_BYTES:
                raise CheckpointError(f"{key!r} takes {num_bytes} bytes and is no tensor; at most {_MAX_VALUE_BYTES}")
            return self._load(key, ())
        entry = self.entries[key].state
        dtype, shape = entry["properties"].state[0], shape_from(entry["size"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor without a dtype")
        pieces: list[Piece] = []
        for chunk in entry["chunks"]:
            offsets, lengths = counts(chunk.state["offsets"]), counts(chunk.state["sizes"])
            part = self._load(key, offsets)
            if not isinstance(part, Strided) or (part.dtype, part.shape) != (dtype, lengths):
                raise CheckpointError(f"{key!r} has no {dtype} {lengths} at {offsets} in its file")
            pieces += place(self._found.stored(part), offsets, shape, self._found.budget)
        return Stored(shape, NAMES[dtype], in_order(pieces))

    def _load(self, key: str, offsets: tuple[int, ...]) -> Any:
        file, offset, num_bytes = self._places[key, offsets]
        return archives.load(self._found.source(file), offset, num_bytes)


def _split(path: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return whether a path is in the "model", the "optimizer" or "other", and the part of the path below that."""
    for depth, word in enumerate(path[:-1][:2]):
        if word in _MODEL:
            return "model", path[depth + 1 :]
        if word in _OPTIMIZER:
            return "optimizer", path[depth + 1 :]
    return "other", path


def _name(keys: Sequence[Any]) -> str:
    if len(keys) > _MAX_DEPTH:
        raise ValueError(f"a path of {len(keys)} keys")
    return text(".".join(str(key) if type(key) is int else text(key) for key in keys))


def _add_optimizer(found: Described, values: Iterable[tuple[tuple[Any, ...], Any]]) -> None:
    """Add the values of an optimizer's state dict. It is nested, or flat with dotted keys, as torchtitan writes it."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for path, value in values:
        match path:
            case ("state", name, *keys) if keys:
                state.setdefault(_name([name]), {})[_name(keys)] = value
            case ("param_groups", int(number), str(key)):
                groups.setdefault(number, {})[key] = value
            case ("param_groups",):
                groups = dict(enumerate(value))
            case (str(flat),) if flat.startswith(("state.", "param_groups.")):
                kind, _, rest = flat.partition(".")
                name, _, key = rest.rpartition(".")
                (state if kind == "state" else settings).setdefault(name, {})[key] = value
            case _:
                found.leave_out(_name(path[:1]))
    if settings:
        add_optimizer(found, by_settings(found, settings), state)
    elif groups or state:
        add_optimizer(found, [groups[number] for number in sorted(groups)], state)
