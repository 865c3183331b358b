"""Whether a checkpoint is of this model: names, shapes and dtypes, with the list of all differences."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..core.engine.runtime import Engine
from ..core.schedule.model import Param as Spec
from .dtypes import NAMES
from .index import Index, Saved, Stored

_MOST_TOLD = 20


def require_same_model(
    engine: Engine, buffers: Mapping[str, Tensor], index: Index, allow_rounding: bool
) -> dict[str, str]:
    """Raises unless the model is the one that was saved; returns the saved name of each of its parameters."""
    specs = _specs(engine)
    names = {spec.name: _saved_name(spec, index) for spec, _ in specs}
    expected = {names[spec.name]: (tuple(spec.shape), dtype) for spec, dtype in specs}
    expected |= {name: (tuple(value.shape), value.dtype) for name, value in buffers.items()}
    known = set(expected) | {site.name for spec, _ in specs for site in spec.sites}
    found = [
        *_differences(expected, index),
        *(f"{name!r} is in it, not in the model" for name in index.tensors if name not in known),
    ]
    if found:
        raise CheckpointError(f"it is of another model ({_list(found)})")
    lossy = _rounded(((name, dtype) for name, (_, dtype) in expected.items()), index)
    if lossy and not allow_rounding:
        raise CheckpointError(
            f"weights would lose digits ({_list(lossy)}): choose a precision= whose master weights hold them, or load "
            "with allow_rounding=True"
        )
    return names


def rounded(engine: Engine, index: Index) -> list[str]:
    """The model's parameters that lose digits when they are loaded, in words."""
    return _rounded(((_saved_name(spec, index), dtype) for spec, dtype in _specs(engine)), index)


def _rounded(expected: Iterable[tuple[str, torch.dtype]], index: Index) -> list[str]:
    return [
        f"{name!r} is {index.tensors[name].stored.dtype} in it, {NAMES[dtype]} in the model"
        for name, dtype in expected
        if name in index.tensors and not holds(dtype, index.tensors[name].stored.torch_dtype)
    ]


def holds(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether it has all numbers that the other has. torch does not say so of floats of 8 bits: wider ones have."""
    if stored.is_floating_point and 1 in (stored.itemsize, dtype.itemsize):
        return stored == dtype or stored.itemsize < dtype.itemsize
    return torch.promote_types(stored, dtype) == dtype


def _specs(engine: Engine) -> list[tuple[Spec, torch.dtype]]:
    """Every parameter, with the dtype in which it rests."""
    return [(spec, state.master.dtype) for unit in engine.units for state in unit.states for spec in state.flat.params]


def _saved_name(spec: Spec, index: Index) -> str:
    """A tied parameter may have been saved under any of its names; where under several, one has the state."""
    found = [site.name for site in spec.sites if site.name in index.tensors]
    return max(found, key=lambda name: index.tensors[name].group is not None, default=spec.name)


def _differences(expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], index: Index) -> Iterator[str]:
    for name, (shape, dtype) in expected.items():
        if name not in index.tensors:
            other = next((other for other, saved in index.tensors.items() if name in saved.tied), None)
            yield f"{name!r} is in the model, not in it" + (f" but as {other!r}: tie them" if other else "")
            continue
        stored = index.tensors[name].stored
        if stored.shape != shape:
            yield f"{name!r} is {stored.shape} in it, {shape} in the model"
        elif stored.torch_dtype.is_floating_point != dtype.is_floating_point:
            yield f"{name!r} is {stored.dtype} in it, {NAMES[dtype]} in the model"


def _list(differences: list[str]) -> str:
    more = len(differences) - _MOST_TOLD
    text = "; ".join(differences[:_MOST_TOLD])
    count = f"{len(differences)} difference{'s' if len(differences) > 1 else ''}: "
    return count + text + (f"; and {more} more" if more > 0 else "")


def require_same_groups(held: Iterable[tuple[str, Saved, Tensor, int | None]], keep_groups: bool) -> None:
    """`held`: name, what was saved, this rank's part, and its group, of every parameter that this rank holds.

    With `keep_groups` the groups may differ, but nothing that its optimizer has kept may be lost.
    """
    found = []
    for name, saved, resting, group in held:
        # Others also count what is frozen among an optimizer's parameters.
        is_frozen = group is None and not saved.state and not resting.requires_grad
        if saved.group != group and not keep_groups and not is_frozen:
            found.append(
                f"parameter {name!r} is in group {saved.group} of its optimizer and in group {group} of this one"
            )
            continue
        if saved.state and group is None:
            found.append(f"parameter {name!r} was trained by its optimizer, and is in no group of this one")
            continue
        is_part = resting.numel() < saved.stored.num_elems
        for key, item in saved.state.items():
            if isinstance(item, Stored) and is_part and not saved.is_split(key) and item.num_elems > 1:
                raise CheckpointError(
                    f"the optimizer's {key!r} of parameter {name!r} is {item.shape} and was made for the whole "
                    "parameter: use a layout whose optimizer is 'whole'"
                )
    if found:
        raise CheckpointError(f"build the same groups, or load with keep_groups=True ({_list(found)})")
