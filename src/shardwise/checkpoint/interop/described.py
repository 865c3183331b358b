"""Build an index from another library's description of a model and its optimizer.

The reader of a format collects tensors by name, state by name, and the groups' settings. This module combines them, and
removes the prefixes that wrappers put in front of names. A tensor that is contiguous in its file is one piece. Any
other has one piece for each contiguous run of elements; the runs are counted before pieces are made, to limit memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

import torch

from ...base.errors import CheckpointError
from ..index import NAMES, File, Index, Kind, Optimizer, Piece, Plain, Saved, Stored, in_words, require_inside, text
from .archives import NumberedFile
from .pickles import Strided

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_REPLICA = "module."  # the prefix of DistributedDataParallel
_MAX_DEPTH, _MAX_LENGTH = 2, 64
_MAX_LISTED = 20
_MAX_OPEN = 64
# A checkpoint with this many runs takes 200 MB of memory, and minutes to read.
MAX_RUNS = 1 << 20
# Names of parameters, by group of an optimizer, in its order.
Groups = Sequence[Sequence[str]]


@dataclass(slots=True)
class Budget:
    """The number of contiguous runs that may still be added to a checkpoint."""

    num_left: int = MAX_RUNS


class Described:
    """The parts of a checkpoint, collected while reading. `group`: by parameter, the number of its optimizer group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = lru_cache(_MAX_OPEN)(self._open)
        self.files: dict[str, File] = {}  # numbered in the order of their first use
        self.tensors: dict[str, Stored] = {}
        self.state: dict[str, dict[str, Stored | Plain]] = {}
        self.groups: list[dict[str, Any]] = []
        self.group: dict[str, int] = {}
        self.kinds: dict[str, Kind] = {}
        self.tied: dict[str, tuple[str, ...]] = {}
        self.scaler: dict[str, float] | None = None
        self.extra: dict[str, Plain] = {}  # plain values next to model and optimizer, such as a step
        self.left_out: dict[str, None] = {}
        self.budget = Budget()

    def _open(self, name: str) -> NumberedFile:
        """Open a file. Its name comes from the checkpoint, so it is checked first."""
        require_inside(name)
        number = list(self.files).index(name) if name in self.files else len(self.files)
        source = NumberedFile(self.folder / name, number)
        self.files[name] = File(name, source.num_bytes)
        return source

    def leave_out(self, what: str) -> None:
        self.left_out[what] = None

    def stored(self, tensor: Any) -> Stored:
        if not isinstance(tensor, Strided):
            raise ValueError(f"a {type(tensor).__name__} where a tensor is expected")
        return stored_of(tensor, self.budget)

    def item(self, value: Any) -> Stored | Plain:
        """Check one item of a parameter's optimizer state, and describe it if it is a tensor."""
        if isinstance(value, Strided):
            return self.stored(value)
        if not isinstance(value, (Stored, Plain)):
            raise CheckpointError(f"an optimizer's state holds a {type(value).__name__}, no tensor and no number")
        return value


@contextmanager
def describing(folder: Path, what: str) -> Iterator[Described]:
    """Yield an empty description to fill. A value of an unexpected type becomes a CheckpointError about `what`."""
    found = Described(folder)
    try:
        yield found
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be understood: {in_words(error)}") from error
    finally:
        found.source.cache_clear()


def index_of(found: Described, origin: Mapping[str, str]) -> Index:
    """Combine the parts into an index. The caller must still check it."""
    if not found.tensors:
        raise CheckpointError("it holds no tensor of a model")
    is_replica = all(name.startswith(_REPLICA) for name in found.tensors)

    def plain(name: str) -> str:
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        return name.removeprefix(_REPLICA) if is_replica else name

    state = {plain(name): items for name, items in found.state.items()}
    group = {plain(name): number for name, number in found.group.items()}
    tensors: dict[str, Saved] = {}
    for given, stored in found.tensors.items():
        name = plain(given)
        if name in tensors:
            raise CheckpointError(f"two of its tensors are called {name!r}")
        is_in_optimizer = name in group or name in state
        kind: Kind = "parameter" if is_in_optimizer else found.kinds.get(given, "unknown")
        # A group may hold frozen parameters too. A parameter with state was trained; without state, we do not know.
        is_frozen = bool(found.groups) and kind == "parameter" and not is_in_optimizer
        is_trained = True if state.get(name) else False if is_frozen else None
        tied = tuple(plain(other) for other in found.tied.get(given, ()))
        own = (stored.shape, stored.dtype, stored.pieces)
        tensors[name] = Saved(*own, kind, is_trained, tied, group.get(name), state.get(name, {}))
    if lost := [name for name in {**state, **group} if name not in tensors]:
        raise CheckpointError(f"its optimizer has state of {lost[0]!r}, and its model has no such parameter")
    optimizer = Optimizer("", tuple(found.groups), found.scaler) if found.groups else None
    words = {**origin, **({"left out": "; ".join(list(found.left_out)[:_MAX_LISTED])} if found.left_out else {})}
    return Index(tuple(found.files.values()), tensors, optimizer, dict(found.extra), words)


def add_model(found: Described, values: Any) -> None:
    """Add the tensors of a state dict."""
    if not isinstance(values, dict):
        raise CheckpointError("its model is no mapping of names to tensors")
    for name, value in values.items():
        if isinstance(value, Strided) and isinstance(name, str):
            found.tensors[text(name)] = found.stored(value)
        elif value is not None:
            found.leave_out(f"{text(name)}, which is no tensor")


def add_optimizer(found: Described, groups: Any, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Add an optimizer's state dict. If the keys of its state are numbers, its groups must list the names."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError("the groups of its optimizer are no list of settings")
    names: dict[str, str] = {}
    group_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        members = group.get("params", [])
        for member, name in zip(members, group.get("param_names", members), strict=True):
            names[_member(member)] = _member(name)
            group_of[_member(name)] = number
    if any(name.isdecimal() for name in names.values()) or any(_member(key) not in names for key in state):
        found.leave_out("the optimizer, whose state has no names: save it with torch's get_optimizer_state_dict")
        return
    found.group |= group_of
    found.groups += [settings_of(found, group) for group in groups]
    for key, items in state.items():
        found.state[names[_member(key)]] = {text(what): found.item(value) for what, value in items.items()}


def _member(name: Any) -> str:
    return str(name) if type(name) is int else text(name)


def settings_of(found: Described, group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        try:
            settings[text(key)] = _plain(found, value)
        except ValueError:
            found.leave_out(f"the optimizer's setting {text(key)!r}, which is no plain value")
    return settings


def _plain(found: Described, value: Any, depth: int = 0) -> Any:
    """Return a value that JSON can hold; a tensor with one element becomes a number. Raise ValueError for others."""
    if isinstance(value, Strided):
        value = found.stored(value)
    if isinstance(value, Stored) and value.num_elems == 1:
        piece = value.pieces[0]
        content = found.source(list(found.files)[piece.file]).read(piece.offset, value.num_bytes)
        return torch.frombuffer(bytearray(content), dtype=value.torch_dtype).item()
    if isinstance(value, Plain):
        return value
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH and len(value) <= _MAX_LENGTH:
        return [_plain(found, part, depth + 1) for part in value]
    raise ValueError(f"a {type(value).__name__}")


def by_settings(found: Described, settings: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Group the parameters whose settings are equal, in the order in which they come."""
    groups: list[dict[str, Any]] = []
    for name, given in settings.items():
        own = settings_of(found, given)
        group = next((group for group in groups if {**group, "params": None} == {**own, "params": None}), None)
        if group is None:
            group = {**own, "params": []}
            groups.append(group)
        group["params"].append(name)
    return groups


def version_text(value: Any) -> str:
    """Return a version or a count for display."""
    return str(value)[:_MAX_LENGTH] if type(value) in (int, str) else "unknown"


def stored_of(tensor: Strided, budget: Budget) -> Stored:
    """Locate the elements of a tensor, in row-major order."""
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"a tensor of {tensor.dtype}, which is not known here")
    run, places = _runs(tensor.shape, tensor.stride, budget) if prod(tensor.shape) else (0, ())
    pieces = (
        Piece(tensor.file, tensor.offset + place * tensor.dtype.itemsize, number * run, (number + 1) * run)
        for number, place in enumerate(places)
    )
    return Stored(tensor.shape, NAMES[tensor.dtype], tuple(pieces))


def _runs(shape: tuple[int, ...], stride: Sequence[int], budget: Budget, cuts: int = 0) -> tuple[int, Iterable[int]]:
    """Return the length of contiguous runs, and where each begins, in row-major order. `cuts`: more runs to count."""
    dims = [(length, step) for length, step in zip(shape, stride, strict=True) if length != 1]
    run = 1
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    num_runs = prod(shape) // run + cuts
    if num_runs > budget.num_left:
        what = f"a tensor of shape {shape} and strides {tuple(stride)} lies in {num_runs} places of its file"
        raise CheckpointError(f"{what}, of {budget.num_left} that are left: save it contiguous")
    budget.num_left -= num_runs
    steps = [step for _, step in dims]
    return run, (sum(map(mul, index, steps)) for index in product(*(range(length) for length, _ in dims)))


def place(chunk: Stored, offsets: tuple[int, ...], shape: tuple[int, ...], budget: Budget) -> list[Piece]:
    """Return a chunk's pieces, renumbered for the whole tensor of this `shape`, in which it starts at `offsets`."""
    if len(chunk.shape) != len(shape) or any(
        at + length > whole for at, length, whole in zip(offsets, chunk.shape, shape, strict=True)
    ):
        raise CheckpointError(f"a part of shape {chunk.shape} at {offsets} does not lie in a tensor of shape {shape}")
    if chunk.num_elems == 0:
        return []
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = sum(map(mul, offsets, steps))
    run, places = _runs(chunk.shape, steps, budget, len(chunk.pieces))
    size, pieces = chunk.torch_dtype.itemsize, iter(chunk.pieces)
    piece, made = next(pieces), []
    for number, start in enumerate(places):
        at, end = number * run, (number + 1) * run
        while at < end:
            while piece.stop <= at:
                piece = next(pieces)
            stop = min(end, piece.stop)
            first = begin + start + at - number * run
            made.append(Piece(piece.file, piece.offset + (at - piece.start) * size, first, first + stop - at))
            at = stop
    return made
