"""Whether a checkpoint is of this model: names, shapes and dtypes, with the list of all differences."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..engine.runtime import Engine
from ..errors import CheckpointError
from ..plan.model import Param as Spec
from .index import Index, Saved, Stored

_MOST_TOLD = 20


def require_same_model(
    engine: Engine, buffers: Mapping[str, Tensor], index: Index, allow_rounding: bool
) -> dict[str, str]:
    """Raises unless the model is the one that was saved; returns the saved name of each of its parameters."""
    specs = {
        spec.name: (spec, state.flat.master)
        for unit in engine.units
        for state in unit.states
        for spec in state.flat.params
    }
    names = {name: _saved_name(spec, index) for name, (spec, _) in specs.items()}
    expected = {names[name]: (tuple(spec.shape), dtype) for name, (spec, dtype) in specs.items()}
    expected |= {name: (tuple(value.shape), value.dtype) for name, value in buffers.items()}
    known = set(expected) | {site.name for spec, _ in specs.values() for site in spec.sites}
    found = [
        *_differences(expected, index),
        *(f"{name!r} is in it, not in the model" for name in index.tensors if name not in known),
    ]
    if found:
        raise CheckpointError(f"it is of another model ({_list(found)})")
    lossy = [
        f"{name!r} is {index.tensors[name].stored.dtype} in it, {dtype} in the model"
        for name, (_, dtype) in expected.items()
        if not allow_rounding and _loses(index.tensors[name].stored.torch_dtype, dtype)
    ]
    if lossy:
        raise CheckpointError(
            f"weights would lose digits ({_list(lossy)}): choose a precision= whose master weights hold them, or load "
            "with allow_rounding=True"
        )
    return names


def _saved_name(spec: Spec, index: Index) -> str:
    """A tied parameter may have been saved under any of its names."""
    return next((site.name for site in spec.sites if site.name in index.tensors), spec.name)


def _differences(expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], index: Index) -> Iterator[str]:
    for name, (shape, dtype) in expected.items():
        if name not in index.tensors:
            yield f"{name!r} is in the model, not in it"
            continue
        stored = index.tensors[name].stored
        if stored.shape != shape:
            yield f"{name!r} is {stored.shape} in it, {shape} in the model"
        elif stored.torch_dtype.is_floating_point != dtype.is_floating_point:
            yield f"{name!r} is {stored.dtype} in it, {dtype} in the model"


def _loses(saved: torch.dtype, own: torch.dtype) -> bool:
    return torch.promote_types(saved, own) != own


def _list(differences: list[str]) -> str:
    more = len(differences) - _MOST_TOLD
    text = "; ".join(differences[:_MOST_TOLD])
    count = f"{len(differences)} difference{'s' if len(differences) > 1 else ''}: "
    return count + text + (f"; and {more} more" if more > 0 else "")


def require_same_groups(held: Iterable[tuple[str, Saved, Tensor, int | None]]) -> None:
    """`held`: name, what was saved, this rank's part, and its group, of every parameter that this rank holds."""
    found = []
    for name, saved, resting, group in held:
        if saved.group != group:
            found.append(
                f"parameter {name!r} is in group {saved.group} of its optimizer and in group {group} of this one"
            )
            continue
        is_part = resting.numel() < saved.stored.num_elems
        for key, item in saved.state.items():
            if isinstance(item, Stored) and is_part and not saved.is_split(key) and item.num_elems > 1:
                raise CheckpointError(
                    f"the optimizer's {key!r} of parameter {name!r} is {item.shape} and was made for the whole "
                    "parameter: use a layout whose optimizer is 'whole'"
                )
    if found:
        raise CheckpointError(f"build the same groups ({_list(found)})")
