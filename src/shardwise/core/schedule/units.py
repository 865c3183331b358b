"""Finding the units of a model: the sets of parameters that are gathered and reduced together.

A unit is a module with the parameters inside it that belong to no unit deeper in the tree; the root unit takes the
others. A parameter used in several units belongs to the nearest unit that contains all its uses.

The blocks that a model repeats are units. The large parts of a very large block (a layer of many experts) are units of
their own; the block keeps the rest, such as norms and a router. Large modules outside the blocks are units, too.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ...base.dtypes import dtype_of
from ...base.errors import ConfigurationError, did_you_mean
from ..layout import ALWAYS_WHOLE
from .model import ROOT, Param, Site, UnitSpec, least_outside, parts_of

# Parameters of at most this size, registered on the model itself, stay whole: the padding of shards would cost more.
SMALL_ELEMS = 4096

Units = str | int | Sequence["str | type[nn.Module]"]


def find_units(model: nn.Module, units: Units = "auto") -> list[UnitSpec]:
    """The units in the order of their modules, the root first. Units without parameters are left out."""
    params = _params(model)  # first: it refuses parameters whose elements cannot be counted
    modules, chosen = dict(model.named_modules()), set(_unit_paths(model, units))
    paths = ["", *(path for path in modules if path in chosen)]
    owned: dict[str, list[Param]] = {path: [] for path in paths}
    for param in params:
        around = [path for path in paths if all(_is_in(site.module, path) for site in param.sites)]
        owned[max(around, key=len)].append(param)
    found = []
    if any(owned[path] for path in paths[1:]):
        # Parameters that are registered on the model itself: a loss may use them.
        own = [param for param in owned[""] if all(not site.module for site in param.sites)]
        small = [param for param in own if param.num_elems <= SMALL_ELEMS]
        if small:
            owned[""] = [param for param in owned[""] if param not in small]
            found.append(UnitSpec(ALWAYS_WHOLE, "", tuple(small), holds_units=True, backward_reads=True))
    for path in paths:
        if owned[path]:
            owners = [modules[site.module] for param in owned[path] for site in param.sites]
            holds_units = any(other != path and _is_in(other, path) for other in paths if owned[other])
            backward_reads = not all(_is_plain_embedding(owner) for owner in owners)
            found.append(UnitSpec(path or ROOT, path, tuple(owned[path]), holds_units, backward_reads))
    return found


def _is_plain_embedding(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and list(module._parameters) == ["weight"]
        and not module._forward_pre_hooks
    )


def _params(model: nn.Module) -> list[Param]:
    sites: dict[nn.Parameter, list[Site]] = {}
    tables: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                sites.setdefault(param, []).append(Site(path, attribute))
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                    tables.add(param)
    return [
        Param(name, tuple(param.shape), dtype_of(param.dtype), param.requires_grad, tuple(places), param in tables)
        for param, places in sites.items()
        if _is_sharded(name := places[0].name, param)
    ]


def _is_sharded(name: str, param: nn.Parameter) -> bool:
    """True for dense floating point. Other tensors, such as integers, stay whole on every rank and must be frozen."""
    kind = type(param.data)
    is_plain = kind is Tensor and param.layout == torch.strided
    if isinstance(param, UninitializedParameter):
        problem = "of a lazy module has no shape yet: call the model once on a batch, then build the optimizer"
    elif any(base.__name__ == "DTensor" for base in kind.__mro__):
        problem = "is a DTensor, which another library has split already: give sw.shard the plain model"
    elif not param.requires_grad or (is_plain and param.is_floating_point()):
        return is_plain and param.is_floating_point()
    else:
        what = param.dtype if is_plain else kind.__name__
        problem = f"is trained and is {what}: only dense floating point can be; freeze it (requires_grad_(False))"
    raise ConfigurationError(f"parameter {name!r} {problem}")


def _is_in(path: str, unit: str) -> bool:
    """True if a module is the unit, or lies inside it."""
    return not unit or f"{path}.".startswith(f"{unit}.")


def _unit_paths(model: nn.Module, units: Any) -> list[str]:
    if units == "auto":
        blocks = find_blocks(model)
        return blocks + _large_parts(model, blocks) + _large_leftovers(model, blocks)
    if isinstance(units, int):
        if units < 1:
            raise ConfigurationError(f"units={units}: a size threshold must be at least 1 parameter")
        return _by_size(model, units)
    is_list = isinstance(units, Sequence) and not isinstance(units, str)
    if not is_list or not all(isinstance(each, (str, type)) for each in units):
        hint = did_you_mean(units, ["auto"]) if isinstance(units, str) else "as in ['LlamaDecoderLayer']"
        wanted = "give 'auto', a number of parameters, or a list of class names"
        raise ConfigurationError(f"units={units!r}: {wanted}; {hint}")
    return modules_of_class(model, units, "units")


def find_blocks(model: nn.Module) -> list[str]:
    """The paths of the blocks that a model repeats: the classes it declares, else the entries of its lists."""
    # Declared by a Hugging Face model, or by one that another library has wrapped.
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    named = [path for path, module in _callables(model) if type(module).__name__ in declared]
    return _outermost(named) or _repeated_blocks(model)


def modules_of_class(model: nn.Module, classes: Sequence[str | type[nn.Module]], option: str) -> list[str]:
    """The paths of modules of these classes; errors name the setting `option`."""
    names = {cls if isinstance(cls, str) else cls.__name__ for cls in classes}
    present = {type(module).__name__ for module in model.modules()}
    for name in sorted(names - present):
        raise ConfigurationError(f"{option}: the model has no module of class {name!r}; {did_you_mean(name, present)}")
    return [path for path, module in _callables(model) if type(module).__name__ in names]


def _callables(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules below the root that are called (containers are not) and hold parameters."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if path
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
        and any(True for _ in module.parameters())
    ]


def _repeated_blocks(model: nn.Module) -> list[str]:
    """The entries of lists and sequences in which one class comes at least twice."""
    repeated: set[str] = set()
    for path, module in model.named_modules():
        kinds = [type(child) for child in module] if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        if len(set(kinds)) < len(kinds):
            repeated.update(f"{path}.{name}" if path else name for name, _ in module.named_children())
    return _outermost([path for path, _ in _callables(model) if path in repeated])


def _large_parts(model: nn.Module, blocks: list[str]) -> list[str]:
    """The parts of blocks that are too large to be one unit."""
    modules = dict(model.named_modules())
    called = {path for path, _ in _callables(model)}

    def children(path: str) -> Iterator[str]:
        for name, _ in modules[path].named_children():
            child = f"{path}.{name}"
            if child in called:
                yield child
            elif child in modules:  # a list, whose entries are called one by one
                yield from children(child)

    return [part for path in blocks for part in parts_of(path, lambda path: _num_elems(modules[path]), children)]


def _large_leftovers(model: nn.Module, blocks: list[str]) -> list[str]:
    """Modules outside the blocks, such as embeddings and heads, with enough elements of their own to be units."""
    if not blocks:
        return []
    least = least_outside(max(_num_elems(model.get_submodule(path)) for path in blocks))
    return [
        path
        for path, module in _callables(model)
        if not any(_is_in(path, block) or _is_in(block, path) for block in blocks)
        and sum(param.numel() for param in module.parameters(recurse=False)) >= least
    ]


def _num_elems(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _by_size(model: nn.Module, threshold_elems: int) -> list[str]:
    """From the deepest modules up: a module is a unit if it has at least this many elements that are in no unit yet."""
    found: list[str] = []
    taken: set[nn.Parameter] = set()
    for path, module in sorted(_callables(model), key=lambda each: -each[0].count(".")):
        free = [param for param in module.parameters() if param not in taken]
        if sum(param.numel() for param in free) >= threshold_elems:
            found.append(path)
            taken.update(free)
    return found


def _outermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(path != other and _is_in(path, other) for other in paths)]
