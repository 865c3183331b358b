"""The table of strategies: how each way of sharded training differs from the others.

Training state is parameters, gradients and optimizer state (with the master weights). A `Layout` says over which ranks
each of them is split, in which memory it is stored, with which codec it is sent, and how long gathered parameters stay
in memory. The engine reads these fields; no other file knows the name of a preset.

`whole` means every rank holds all of it, `node` that the ranks of a node share one copy among them (and
the nodes hold equal copies), `world` that all ranks together hold one copy.

A preset's name may be followed by other places, as in `zero3+optimizer=host:0.6+params=disk`: 0.6 is the fraction that
is offloaded, and the rest stays on the device. Codecs may follow, too: `hsdp+params_as=int8+grads_as=int4:feedback`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal, get_args

from ..base.errors import ConfigurationError, did_you_mean
from .wire.codec import AS_IS, parse

Split = Literal["whole", "node", "world"]
Until = Literal["forward", "backward", "always"]
Place = Literal["device", "host", "disk"]

SPLITS: tuple[Split, ...] = get_args(Split)
# State that may be offloaded.
MOVABLE = ("params", "grads", "optimizer", "activations")
# State that may be encoded for collectives.
ENCODABLE = ("params", "grads")


@dataclass(frozen=True, slots=True)
class Layout:
    """One row of the table. `gathered_until`: parameters are dropped after the unit's forward, its backward, or never.

    `*_on` is the memory that holds the state between its uses. `kept` is the fraction of an offloaded optimizer that
    stays on the device: some parameters of each unit, with their gradients and optimizer state. `activations_on` is
    the memory for what a unit's forward saves for its backward. `*_as` is the codec for collectives. It applies to
    matrices; the rest of a unit (norms, biases, embeddings) is sent unencoded.
    """

    params: Split = "whole"
    grads: Split = "whole"
    optimizer: Split = "whole"
    gathered_until: Until = "always"
    params_on: Place = "device"
    grads_on: Place = "device"
    optimizer_on: Place = "device"
    activations_on: Place = "device"
    kept: float = 0.0
    params_as: str = AS_IS
    grads_as: str = AS_IS

    def __post_init__(self) -> None:
        for field, known in (
            ("params", SPLITS),
            ("grads", SPLITS),
            ("optimizer", SPLITS),
            ("gathered_until", get_args(Until)),
            *((f"{what}_on", get_args(Place)) for what in MOVABLE),
        ):
            value = getattr(self, field)
            if value not in known:
                raise ConfigurationError(f"layout: {field}={value!r}; {did_you_mean(str(value), known)}")
        for what in ENCODABLE:
            # Different spellings of one codec become equal.
            object.__setattr__(self, f"{what}_as", str(parse(getattr(self, f"{what}_as"))))
        for problem in chain(self._wrong_splits(), self._wrong_places(), self._wrong_codecs()):
            raise ConfigurationError(f"layout: {problem}")

    def _wrong_splits(self) -> Iterator[str]:
        optimizer = f"optimizer={self.optimizer!r}"
        for what, split in (("params", self.params), ("grads", self.grads)):
            if SPLITS.index(split) > SPLITS.index(self.optimizer):
                needs = f"the step needs its {what} {self.optimizer!r}; split the optimizer at least as far"
                yield f"{what}={split!r} with {optimizer} saves nothing, because {needs}"
        if (self.params == "whole") != (self.gathered_until == "always"):
            both = f"params={self.params!r} with gathered_until={self.gathered_until!r}"
            yield f"{both} contradict each other: 'whole' and 'always' go together"

    def _wrong_places(self) -> Iterator[str]:
        params, optimizer = f"params_on={self.params_on!r}", f"optimizer_on={self.optimizer_on!r}"
        if self.params_on != "device" and self.gathered_until == "always":
            why = "parameters that are always gathered never leave the device; split them, or leave params_on='device'"
            yield f"{params} with gathered_until='always': {why}"
        if self.params_on != "device" and self.optimizer_on == "device":
            yield f"{params} with {optimizer}: masters are larger than parameters; move the optimizer first"
        if self.grads_on == "disk" or (self.grads_on == "host" and self.optimizer_on == "device"):
            grads = f"grads_on={self.grads_on!r} with {optimizer}"
            yield f"{grads}: gradients go to the host where the optimizer reads them there, and never to disk"
        if self.activations_on == "disk":
            yield "activations_on='disk': activations go to the host, and never to disk"
        if not 0 <= self.kept < 1 or (self.kept and self.optimizer_on == "device"):
            yield f"kept={self.kept} with {optimizer}: it is the part, 0 to 1, of an offloaded optimizer on the device"

    def _wrong_codecs(self) -> Iterator[str]:
        params, codec = f"params_as={self.params_as!r}", parse(self.params_as)
        if codec.kind == "int4":
            yield f"{params}: 16 values are too few for weights; use int8 or fp8"
        if codec.has_feedback:
            yield f"{params}: masters are exact and have no error; feedback is for gradients"
        if parse(self.grads_as).is_forward_only:
            yield f"grads_as={self.grads_as!r}: a forward has no gradients; forward is for parameters"
        if self.params_as != AS_IS and self.optimizer == "whole":
            never = "parameters that every rank updates are never sent; leave it, or split the optimizer"
            yield f"{params} with optimizer='whole': {never}"
        splits = f"params={self.params!r} and optimizer={self.optimizer!r}"
        fix = "or split parameters as far as the optimizer"
        if self.params_as != AS_IS and self.params_on != "device" and self.params != self.optimizer:
            why = "the copy that a node shares stays on the device if it is encoded; leave params_on='device'"
            yield f"{params} with params_on={self.params_on!r}, {splits}: {why}, {fix}"
        # An encoding for the forward only: parameters must be gathered twice, each time from the masters.
        in_both = str(replace(codec, is_forward_only=False))
        if codec.is_forward_only and self.gathered_until != "forward":
            why = f"the backward uses the forward's parameters; write {in_both!r}, or gathered_until='forward'"
            yield f"{params} with gathered_until={self.gathered_until!r}: {why}"
        if codec.is_forward_only and self.params != self.optimizer:
            why = f"the copy that a node shares stays encoded, and serves the backward too; write {in_both!r}"
            yield f"{params} with {splits}: {why}, {fix}"

    @property
    def is_exact(self) -> bool:
        """True if no collective is encoded."""
        return self.params_as == self.grads_as == AS_IS

    @property
    def exact(self) -> "Layout":
        return replace(self, params_as=AS_IS, grads_as=AS_IS)

    @property
    def places(self) -> set[Place]:
        return {self.params_on, self.grads_on, self.optimizer_on, self.activations_on}

    @property
    def uses_disk(self) -> bool:
        return "disk" in self.places

    @property
    def uses_host(self) -> bool:
        """True if state is offloaded to the host, or passes through it on the way to disk."""
        return self.places != {"device"}

    @property
    def on_device(self) -> "Layout":
        """The same layout with parameters, gradients and optimizer on the device (activations stay as they are)."""
        return replace(self, params_on="device", grads_on="device", optimizer_on="device", kept=0.0)

    @property
    def chain(self) -> tuple[str, ...]:
        """The mesh axes over which state is split, outermost first.

        If nothing is split over the node only, one split over the world is enough. Encoded gradients are the exception:
        they are summed inside the node first, so that fewer bytes go between nodes.
        """
        stops_at_node = "node" in (self.params, self.grads, self.optimizer)
        sums_at_node = self.grads_as != AS_IS and self.optimizer == "world"
        return ("node", "replicate") if stops_at_node or sums_at_node else ("world",)

    def depth(self, split: Split) -> int:
        """Number of axes of `chain` over which state with this split is split."""
        return {"whole": 0, "node": 1, "world": len(self.chain)}[split]

    @property
    def name(self) -> str:
        """The preset's name, followed by changed places and codecs; `layout_of` parses it."""
        names = {layout: name for name, layout in PRESETS.items()}
        unmoved, codecs = replace(self.on_device, activations_on="device"), self._codecs
        for changes, plain in (
            ([], self),
            (self.moves, unmoved),
            (codecs, self.exact),
            ([*self.moves, *codecs], unmoved.exact),
        ):
            if plain in names:
                return "+".join([names[plain], *changes])
        return "custom"

    @property
    def moves(self) -> list[str]:
        """Offloaded state, in the form that `moved` takes."""
        moved = {what: getattr(self, f"{what}_on") for what in MOVABLE if getattr(self, f"{what}_on") != "device"}
        part = {"optimizer": f":{round(1 - self.kept, 4):g}"} if self.kept else {}
        return [f"{what}={place}{part.get(what, '')}" for what, place in moved.items()]

    @property
    def _codecs(self) -> list[str]:
        codecs = {f"{what}_as": getattr(self, f"{what}_as") for what in ENCODABLE}
        return [f"{field}={codec}" for field, codec in codecs.items() if codec != AS_IS]

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        is_plain = {field.name: values[field.name] == field.default for field in fields(self)[4:]}
        answers = ", ".join(f"{name} {value}" for name, value in values.items() if not is_plain.get(name))
        return f"{self.name} ({answers})"


PRESETS: dict[str, Layout] = {
    #                             params   grads    optimizer  gathered until
    "ddp": Layout("whole", "whole", "whole", "always"),
    "zero1": Layout("whole", "whole", "world", "always"),
    "zero2": Layout("whole", "world", "world", "always"),
    "shard_grad_op": Layout("world", "world", "world", "backward"),
    "zero3": Layout("world", "world", "world", "forward"),
    "hsdp": Layout("node", "node", "node", "forward"),
    "hybrid_shard_zero2": Layout("node", "node", "node", "backward"),
    "hfsdp": Layout("node", "node", "world", "forward"),
    "hpz": Layout("node", "world", "world", "forward"),
}
PRESETS |= {
    "zero2_offload": replace(PRESETS["zero2"], grads_on="host", optimizer_on="host"),
    "zero3_offload": replace(PRESETS["zero3"], params_on="host", grads_on="host", optimizer_on="host"),
    "zero3_nvme": replace(PRESETS["zero3"], params_on="disk", grads_on="host", optimizer_on="disk"),
    "zeropp": replace(PRESETS["hpz"], params_as="int8", grads_as="int4"),
}

ALIASES: dict[str, str] = {
    "no_shard": "ddp",
    "fsdp": "zero3",
    "full_shard": "zero3",
    "hybrid_shard": "hsdp",
    "mics": "hsdp",
    "zero++": "zeropp",
}

# Presets that torch's FSDP2 has, too.
FSDP2_HAS = ("zero3", "shard_grad_op", "hsdp", "hybrid_shard_zero2")

AUTO = "auto"
# The preset that splits the most: others are compared with it.
MOST_SPLIT = "zero3"
# Pairs of presets that are mixed to fill memory: as many units as fit use the second, the others the first.
MIXES: tuple[tuple[str, str], ...] = (
    ("zero3", "zero2"),
    ("zero3", "shard_grad_op"),
    ("zero3", "zero1"),
    ("zero3", "hybrid_shard_zero2"),
    ("zero3", "hpz"),
    ("hsdp", "hybrid_shard_zero2"),
    ("hpz", "zero2"),
    ("zero2", "zero1"),
    ("zero1", "ddp"),
)

# Strategies to try if nothing fits on the device alone, each with as much of the optimizer on the device as fits.
# Gradients that stay on the device save copies from the second micro-batch on.
OFFLOADS: tuple[str, ...] = (
    "zero2_offload",
    "zero2+optimizer=host",
    "zero3+grads=host+optimizer=host",
    "zero3+optimizer=host",
    "zero3_offload",
    "zero3+params=host+grads=host+optimizer=disk",
    "zero3_nvme",
)
# Presets whose activations may go to the host, where memory is short or checkpointing would be needed.
STOWS: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")

Strategy = str | Layout | Mapping[str, "str | Layout"]


def layout_of(strategy: str | Layout) -> Layout:
    """Return the layout of a preset's name or alias (hyphens and capitals allowed), with the changes written behind."""
    if isinstance(strategy, Layout):
        return strategy
    if not isinstance(strategy, str):
        raise ConfigurationError(
            f"a strategy is a preset's name or a Layout, not {type(strategy).__name__} {strategy!r}"
        )
    # An alias may end in plus signs itself.
    name, *moves = re.split(r"\+(?=[^+=]*=)", strategy.lower())
    name = name.replace("-", "_")
    name = ALIASES.get(name, name)
    if name == AUTO:
        raise ConfigurationError(f"strategy {strategy!r} chooses for the whole model: no entry of a mapping can")
    if name not in PRESETS:
        raise ConfigurationError(f"unknown strategy {strategy!r}; {did_you_mean(name, {*PRESETS, *ALIASES, AUTO})}")
    return changed(PRESETS[name], moves)


def changed(layout: Layout, changes: Iterable[str]) -> Layout:
    """The layout with changed places (`what=place`, for the optimizer also `optimizer=place:part`) and codecs
    (`params_as=codec`)."""
    new: dict[str, Any] = {}
    for change in changes:
        what, _, value = change.partition("=")
        is_codec = what.endswith("_as")
        field = what if is_codec else f"{what}_on"
        known = [f"{name}_as" for name in ENCODABLE] if is_codec else MOVABLE
        problem = ""
        if what not in known:
            problem = f"{what!r} {'is not sent' if is_codec else 'cannot be moved'}; {did_you_mean(what, known)}"
        elif field in new:
            problem = f"{what} is {'' if is_codec else 'moved to '}{new[field]!r} already"
        elif not is_codec:
            value, _, part = value.partition(":")
            if value not in get_args(Place):
                problem = f"{value!r} is no place; {did_you_mean(value, get_args(Place))}"
            elif part and (what != "optimizer" or not 0 < _number(part) <= 1):
                problem = "a part, above 0 and at most 1, goes with the optimizer alone, as in optimizer=host:0.6"
            elif part:
                new["kept"] = round(1 - _number(part), 6)
        if problem:
            raise ConfigurationError(f"{'wire' if is_codec else 'offload'} {change!r}: {problem}")
        new[field] = value
    return replace(layout, **new)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


# The unit of a model's own small parameters (a temperature, a logit scale): whole under every strategy, so that a loss
# outside the model may use them.
ALWAYS_WHOLE = "root.whole"


def layout_of_unit(name: str, layout: Layout) -> Layout:
    return Layout() if name == ALWAYS_WHOLE else layout


def layouts_for(strategy: Strategy, names: Sequence[str]) -> list[Layout]:
    """The layout of each unit: the same for all, or that of the first pattern in a mapping that matches its name."""
    if isinstance(strategy, (str, Layout)):
        strategy = {"*": strategy}
    if not isinstance(strategy, Mapping):
        raise ConfigurationError(
            f"a strategy is a preset's name, a Layout or a mapping from unit patterns to them, not "
            f"{type(strategy).__name__} {strategy!r}"
        )
    rows = {pattern: layout_of(value) for pattern, value in strategy.items()}
    unit_names = [name for name in names if name != ALWAYS_WHOLE]
    matching = {name: [pattern for pattern in rows if fnmatchcase(name, pattern)] for name in unit_names}
    for pattern in rows:
        users = [patterns for patterns in matching.values() if pattern in patterns]
        if not users and (unit_names or pattern != "*"):
            raise ConfigurationError(f"strategy: {pattern!r} matches no unit; {did_you_mean(pattern, unit_names)}")
        if pattern != "*" and all(patterns[0] != pattern for patterns in users):
            why = "patterns before it match all of its units; the first that matches counts, so put it earlier"
            raise ConfigurationError(f"strategy: {pattern!r} decides nothing, because {why}")
    for name, patterns in matching.items():
        if not patterns:
            given = f"patterns: {', '.join(rows)}"
            raise ConfigurationError(f"strategy: no pattern matches unit {name!r} ({given}); end the mapping with '*'")
    return [Layout() if name == ALWAYS_WHOLE else rows[matching[name][0]] for name in names]
