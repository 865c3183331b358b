"""Modules as sizes: the modules with parameters, their adapters, and their division into units.

The rules are those of `core/schedule/units.py`, which works on the modules themselves: every block is a unit, or its
large parts are. An outer module that is large, or holds at least half a block, is a unit, too. The root has the rest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...base.dtypes import FP32, DType
from ...base.errors import ConfigurationError, did_you_mean
from ...core.schedule.model import ROOT, Param, Site, UnitSpec, least_outside, parts_of

WRAPPER = "base_model.model."  # peft's prefix of every name


@dataclass(frozen=True, slots=True)
class Part:
    """A module with parameters of its own: their attributes and sizes.

    `fan`: input and output width of a projection that can have adapters. `is_tied`: its weight is that of the first
    part of the model.
    """

    path: str
    params: tuple[tuple[str, tuple[int, ...]], ...]
    fan: tuple[int, int] | None = None
    is_embedding: bool = False
    is_tied: bool = False
    is_adapter: bool = False

    @property
    def num_elems(self) -> int:
        return sum(prod(size) for _, size in self.params)

    @property
    def num_own_elems(self) -> int:
        return self.num_elems - (prod(self.params[0][1]) if self.is_tied else 0)


def linear(path: str, fan_in: int, fan_out: int, bias: bool = False, is_tied: bool = False) -> Part:
    sizes = (("weight", (fan_out, fan_in)), ("bias", (fan_out,)))
    return Part(path, sizes if bias else sizes[:1], (fan_in, fan_out), is_tied=is_tied)


def conv(path: str, fan_in: int, fan_out: int, bias: bool) -> Part:
    """A projection of GPT-2, whose weight is transposed."""
    sizes = (("weight", (fan_in, fan_out)), ("bias", (fan_out,)))
    return Part(path, sizes if bias else sizes[:1], (fan_in, fan_out))


def vectors(path: str, width: int, bias: bool = False) -> Part:
    """A module with vectors of this width, such as a norm."""
    return Part(path, (("weight", (width,)), ("bias", (width,))) if bias else (("weight", (width,)),))


def embedding(path: str, num_rows: int, width: int) -> Part:
    return Part(path, (("weight", (num_rows, width)),), is_embedding=True)


@dataclass(frozen=True, slots=True)
class Parts:
    """A model. `block`: the parts of one block, with paths relative to it; `block_paths`: paths of all blocks."""

    before: tuple[Part, ...]
    block: tuple[Part, ...]
    block_paths: tuple[str, ...]
    after: tuple[Part, ...]

    @property
    def num_block_elems(self) -> int:
        return sum(part.num_elems for part in self.block)

    @property
    def num_elems(self) -> int:
        outside = sum(part.num_own_elems for part in (*self.before, *self.after))
        return outside + len(self.block_paths) * self.num_block_elems


def with_adapters(parts: Parts, r: int, targets: Sequence[str]) -> Parts:
    """Add adapters, like peft, to every projection whose path ends in one of the targets."""
    example = f"{parts.block_paths[0]}."
    paths = [part.path for part in (*parts.before, *parts.after) if part.fan]
    paths += [example + part.path for part in parts.block if part.fan]
    for target in targets:
        if not any(_ends_in(path, (target,)) for path in paths):
            leaves = {path.rpartition(".")[2] for path in paths}
            raise ConfigurationError(f"lora: no projection is called {target!r}; {did_you_mean(target, leaves)}")

    def adapted(part: Part, around: str = "") -> list[Part]:
        if part.fan is None or not _ends_in(around + part.path, targets):
            return [part]
        fan_in, fan_out = part.fan
        inward = Part(f"{part.path}.lora_A.default", (("weight", (r, fan_in)),), is_adapter=True)
        outward = Part(f"{part.path}.lora_B.default", (("weight", (fan_out, r)),), is_adapter=True)
        return [replace(part, path=f"{part.path}.base_layer"), inward, outward]

    def wrapped(group: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(replace(new, path=WRAPPER + new.path) for part in group for new in adapted(part))

    block = tuple(new for part in parts.block for new in adapted(part, example))
    paths = [WRAPPER + path for path in parts.block_paths]
    return Parts(wrapped(parts.before), block, tuple(paths), wrapped(parts.after))


def _ends_in(path: str, targets: Sequence[str]) -> bool:
    return any(path == target or path.endswith(f".{target}") for target in targets)


def units_from(parts: Parts, dtype: DType, *, splits_blocks: bool, trains_all: bool) -> list[UnitSpec]:
    """Divide a model into units; one unit unless `splits_blocks`. Adapters are always trained, in fp32."""
    tied = next((Site(part.path, "weight") for part in parts.after if part.is_tied), None)
    root: list[Param] = []
    root_is_embedding = tied is None
    least = least_outside(parts.num_block_elems) if splits_blocks else parts.num_elems + 1

    def outside(group: tuple[Part, ...]) -> list[UnitSpec]:
        nonlocal root_is_embedding
        found = []
        for part in group:
            params = _params(part, dtype, trains_all)
            if part.is_tied:
                params = params[1:]
            elif tied is not None and part is parts.before[0]:
                root.append(replace(params[0], sites=(*params[0].sites, tied)))
                params = params[1:]
            if params and part.num_elems >= least:
                found.append(UnitSpec(part.path, part.path, params, False, not part.is_embedding))
            elif params:
                root.extend(params)
                root_is_embedding = root_is_embedding and part.is_embedding
        return found

    first = outside(parts.before)
    blocks = _blocks(parts, dtype, trains_all)
    if not splits_blocks:
        root.extend(param for block in blocks for param in block.params)
        root_is_embedding, blocks = False, []
    units = [*first, *blocks, *outside(parts.after)]
    return [UnitSpec(ROOT, "", tuple(root), bool(units), not root_is_embedding), *units] if root else units


def _params(part: Part, dtype: DType, trains_all: bool) -> tuple[Param, ...]:
    trainable = trains_all or part.is_adapter
    own = FP32 if part.is_adapter else dtype
    return tuple(
        Param(f"{part.path}.{attribute}", size, own, trainable, (Site(part.path, attribute),), part.is_embedding)
        for attribute, size in part.params
    )


def _blocks(parts: Parts, dtype: DType, trains_all: bool) -> list[UnitSpec]:
    """Return the units of all blocks, which differ only in paths: one each, or one per large part and the rest."""
    units = ["", *large_parts(parts.block)]
    rows = [
        (part.path, attribute, size, FP32 if part.is_adapter else dtype, trains_all or part.is_adapter,
         max((unit for unit in units if not unit or _is_in(part.path, unit)), key=len))
        for part in parts.block
        for attribute, size in part.params
    ]  # fmt: skip
    found = []
    for path in parts.block_paths:
        owned: dict[str, list[Param]] = {unit: [] for unit in units}
        for inner, attribute, size, own, trainable, unit in rows:
            module = f"{path}.{inner}"
            owned[unit].append(Param(f"{module}.{attribute}", size, own, trainable, (Site(module, attribute),)))
        for unit, params in owned.items():
            name = f"{path}.{unit}" if unit else path
            if params:
                found.append(UnitSpec(name, name, tuple(params), not unit and len(units) > 1, True))
    return found


def large_parts(block: Sequence[Part]) -> list[str]:
    """Return the paths inside a block that become units if the block is too large."""

    def size(path: str) -> int:
        return sum(part.num_elems for part in block if _is_in(part.path, path))

    def children(path: str) -> Iterable[str]:
        names = [
            part.path.removeprefix(path).lstrip(".").partition(".")[0] for part in block if _is_in(part.path, path)
        ]
        return [f"{path}.{name}".lstrip(".") for name in dict.fromkeys(names) if name]

    return parts_of("", size, children)


def _is_in(path: str, unit: str) -> bool:
    return not unit or path == unit or path.startswith(f"{unit}.")
