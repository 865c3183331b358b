"""Modules with parameters of a transformer: their names, what they own, their adapters and units."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...base.errors import ConfigurationError, did_you_mean
from ...core.schedule.model import parts_of
from ..training import Lora

WRAPPER = "base_model.model."  # peft's prefix of every name


@dataclass(frozen=True, slots=True)
class Part:
    """A module that owns parameters. `params`: the attribute and the size of each.

    `fan`: input and output width of a projection that can have adapters. `is_tied`: its weight is that of the first
    part of the model, the embedding.
    """

    path: str
    params: tuple[tuple[str, tuple[int, ...]], ...]
    fan: tuple[int, int] | None = None
    is_embedding: bool = False
    is_tied: bool = False
    is_adapter: bool = False
    is_copy: bool = False  # trained instead of a module that is frozen beside it

    @property
    def num_elems(self) -> int:
        return sum(prod(size) for _, size in self.params)


def linear(
    path: str, fan_in: int, fan_out: int, bias: bool = False, is_tied: bool = False, is_conv: bool = False
) -> Part:
    """A projection; `is_conv`: one of GPT-2's, whose weight is transposed."""
    weight = ("weight", (fan_in, fan_out) if is_conv else (fan_out, fan_in))
    return Part(path, (weight, ("bias", (fan_out,))) if bias else (weight,), (fan_in, fan_out), is_tied=is_tied)


def vectors(path: str, width: int, bias: bool = False) -> Part:
    """A module with vectors of this width, such as a norm."""
    return Part(path, (("weight", (width,)), ("bias", (width,))) if bias else (("weight", (width,)),))


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of a model. `blocks`: path and parts of each block, with relative paths; equal blocks share them."""

    before: tuple[Part, ...]
    blocks: tuple[tuple[str, "Block"], ...]
    after: tuple[Part, ...]

    @property
    def num_elems(self) -> int:
        outside = sum(part.num_elems for part in (*self.before, *self.after))
        outside -= sum(prod(part.params[0][1]) for part in self.after if part.is_tied)
        return outside + sum(block.num_elems for _, block in self.blocks)


class Block(tuple[Part, ...]):
    """The parts of a block."""

    @cached_property
    def num_elems(self) -> int:
        return sum(part.num_elems for part in self)

    @cached_property
    def units(self) -> list[str]:
        """Paths of its units: "" for the block, and parts of a block that is too large to be one unit."""
        return ["", *_large_parts(self)]

    @cached_property
    def owners(self) -> list[str]:
        """The unit of each part."""
        return [max((unit for unit in self.units if _is_in(part.path, unit)), key=len) for part in self]


def other(num_elems: int) -> Iterator[Part]:
    if num_elems:
        yield vectors("other", num_elems)


def with_adapters(parts: Parts, lora: Lora, targets: Sequence[str], copied: Sequence[str]) -> Parts:
    """Add adapters, like peft, to every projection whose path ends in one of the targets, and copies of the modules
    whose path ends in the letters of one of `copied`."""
    example = f"{parts.blocks[0][0]}."
    paths = [part.path for part in (*parts.before, *parts.after) if part.fan]
    kinds = {id(block): block for _, block in parts.blocks}
    paths += [example + part.path for block in kinds.values() for part in block if part.fan]
    for target in targets:
        if not any(_ends_in(path, (target,)) for path in paths):
            leaves = {path.rpartition(".")[2] for path in paths}
            raise ConfigurationError(f"lora: no projection is called {target!r}; {did_you_mean(target, leaves)}")
    every = [part.path for part in (*parts.before, *parts.after)]
    every += [example + part.path for block in kinds.values() for part in block]
    for name in copied:
        if not any(path.endswith(name) for path in every):
            leaves = {path.rpartition(".")[2] for path in every}
            raise ConfigurationError(
                f"lora.modules_to_save: no module is called {name!r}; {did_you_mean(name, leaves)}"
            )

    def adapted(part: Part, around: str = "") -> list[Part]:
        if (around + part.path).endswith(tuple(copied)):
            copy = replace(part, path=f"{part.path}.modules_to_save.default", is_copy=True)
            return [replace(part, path=f"{part.path}.original_module"), copy]
        if part.fan is None or not _ends_in(around + part.path, targets):
            return [part]
        fan_in, fan_out = part.fan
        sizes: dict[str, tuple[int, ...]] = {"lora_A": (lora.r, fan_in), "lora_B": (fan_out, lora.r)}
        sizes |= {"lora_magnitude_vector": (fan_out,)} if lora.dora else {}
        added = [Part(f"{part.path}.{k}.default", (("weight", size),), is_adapter=True) for k, size in sizes.items()]
        return [replace(part, path=f"{part.path}.base_layer"), *added]

    def wrapped(group: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(replace(new, path=WRAPPER + new.path) for part in group for new in adapted(part))

    made = {key: Block(new for part in block for new in adapted(part, example)) for key, block in kinds.items()}
    blocks = tuple((WRAPPER + path, made[id(block)]) for path, block in parts.blocks)
    return Parts(wrapped(parts.before), blocks, wrapped(parts.after))


def _ends_in(path: str, targets: Sequence[str]) -> bool:
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _large_parts(block: Sequence[Part]) -> list[str]:
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
