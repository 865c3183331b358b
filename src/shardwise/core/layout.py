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
from typing import Any, Literal, get_args

from ..base.errors import ConfigurationError, did_you_mean
from .wire.codec import AS_IS, FROZEN_KINDS, parse

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
    matrices; the rest of a unit (norms, biases, embeddings) is sent unencoded. `frozen_as` is the codec in which frozen
    matrices of blocks are stored, offloaded and sent; they are decoded when their unit is gathered, and dropped after
    its forward also where everything else is always gathered.
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
    frozen_as: str = AS_IS

    def __post_init__(self) -> None:
        known_values = dict.fromkeys(("params", "grads", "optimizer"), SPLITS)
        known_values |= {"gathered_until": get_args(Until)} | {f"{what}_on": get_args(Place) for what in MOVABLE}
        for field, known in known_values.items():
            value = getattr(self, field)
            if value not in known:
                raise ConfigurationError(f"layout: {field}={value!r}; {did_you_mean(str(value), known)}")
        for what in (*ENCODABLE, "frozen"):
            # Different spellings of one codec become equal.
            object.__setattr__(self, f"{what}_as", str(parse(getattr(self, f"{what}_as"))))
        for fields_, reason in self._contradictions():
            values = " with ".join(f"{field}={getattr(self, field)!r}" for field in fields_.split())
            raise ConfigurationError(f"layout: {values}: {reason}")

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield fields whose values contradict each other, with the reason and what to write instead."""
        for what in ("params", "grads"):
            if SPLITS.index(getattr(self, what)) > SPLITS.index(self.optimizer):
                yield f"{what} optimizer", f"the step needs all {what} of its part; split the optimizer at least as far"
        drops_decoded = self.gathered_until == "forward" and self.frozen_as != AS_IS
        if (self.params == "whole") != (self.gathered_until == "always") and not drops_decoded:
            yield "params gathered_until", "'whole' and 'always' go together"
        if self.params_on != "device" and self.gathered_until == "always":
            yield "params_on gathered_until", "parameters that are always gathered stay on the device; split them"
        if self.params_on != "device" and self.optimizer_on == "device":
            yield "params_on optimizer_on", "masters are larger than parameters; move the optimizer first"
        if self.grads_on == "disk" or (self.grads_on == "host" and self.optimizer_on == "device"):
            yield "grads_on optimizer_on", "gradients go to the host where the optimizer reads them, never to disk"
        if self.activations_on == "disk":
            yield "activations_on", "activations go to the host, never to disk"
        if not 0 <= self.kept < 1 or (self.kept and self.optimizer_on == "device"):
            yield "kept optimizer_on", "it is the part, 0 to 1, of an offloaded optimizer that stays on the device"
        for what in ENCODABLE:
            if parse(getattr(self, f"{what}_as")).kind == "nf4":
                yield f"{what}_as", "16 values are too few for what is trained; nf4 is for frozen weights (frozen_as)"
        frozen = parse(self.frozen_as)
        if self.frozen_as != AS_IS and frozen.kind not in FROZEN_KINDS:
            yield "frozen_as", f"frozen weights are stored as {', '.join(FROZEN_KINDS)}, or unchanged (as_is)"
        if frozen.is_stochastic or frozen.has_feedback or frozen.is_forward_only:
            yield "frozen_as", "frozen weights are rounded once, to nearest; write the format alone, as in int8"
        codec, is_encoded = parse(self.params_as), self.params_as != AS_IS
        if codec.kind == "int4":
            yield "params_as", "16 values are too few for weights; use int8 or fp8"
        if codec.has_feedback:
            yield "params_as", "masters are exact and have no error; feedback is for gradients"
        if parse(self.grads_as).is_forward_only:
            yield "grads_as", "a forward has no gradients; forward is for parameters"
        if is_encoded and self.optimizer == "whole":
            yield "params_as optimizer", "parameters that every rank updates are never sent; split the optimizer"
        fix = "or split parameters as far as the optimizer"
        if is_encoded and self.params_on != "device" and self.params != self.optimizer:
            why = "the copy that a node shares stays on the device if it is encoded; leave params_on='device'"
            yield "params_as params_on params optimizer", f"{why}, {fix}"
        # An encoding for the forward only: parameters must be gathered twice, each time from the masters.
        in_both = str(replace(codec, is_forward_only=False))
        if codec.is_forward_only and self.gathered_until != "forward":
            why = "the backward uses the forward's parameters"
            yield "params_as gathered_until", f"{why}; write {in_both!r}, or gathered_until='forward'"
        if codec.is_forward_only and self.params != self.optimizer:
            why = "the copy that a node shares stays encoded, and serves the backward too"
            yield "params_as params optimizer", f"{why}; write {in_both!r}, {fix}"

    @property
    def is_exact(self) -> bool:
        """True if no collective is encoded."""
        return self.params_as == self.grads_as == AS_IS

    @property
    def exact(self) -> "Layout":
        return replace(self, params_as=AS_IS, grads_as=AS_IS)

    @property
    def dropping(self) -> "Layout":
        """The same layout for a unit with encoded frozen weights: nothing decoded is always there."""
        return replace(self, gathered_until="forward") if self.gathered_until == "always" else self

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
        """Number of axes of `chain` that this split uses."""
        return {"whole": 0, "node": 1, "world": len(self.chain)}[split]

    @property
    def name(self) -> str:
        """The preset's name, followed by changed places and codecs; `layout_of` parses it."""
        names = {layout: name for name, layout in PRESETS.items()}
        own = replace(self, frozen_as=AS_IS)
        unmoved = replace(own.on_device, activations_on="device")
        plain = next((layout for layout in (own, unmoved, own.exact, unmoved.exact) if layout in names), None)
        if plain is None:
            return "custom"
        frozen = [] if self.frozen_as == AS_IS else [f"frozen_as={self.frozen_as}"]
        changes = [*([] if plain.moves else self.moves), *([] if plain.codecs else self.codecs), *frozen]
        return "+".join([names[plain], *changes])

    @property
    def moves(self) -> list[str]:
        """Offloaded state, in the form that `changed` takes."""
        moved = {what: getattr(self, f"{what}_on") for what in MOVABLE if getattr(self, f"{what}_on") != "device"}
        part = {"optimizer": f":{round(1 - self.kept, 4):g}"} if self.kept else {}
        return [f"{what}={place}{part.get(what, '')}" for what, place in moved.items()]

    @property
    def codecs(self) -> list[str]:
        """Encoded state, in the form that `changed` takes."""
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

# Presets that other engines have, too, as far as the planner knows them.
ENGINE_HAS: dict[str, tuple[str, ...]] = {
    "fsdp1": ("ddp", "zero3", "shard_grad_op", "hsdp", "hybrid_shard_zero2"),
    "fsdp2": ("zero3", "shard_grad_op", "hsdp", "hybrid_shard_zero2"),
    "deepspeed": ("ddp", "zero1", "zero2", "zero3", "hpz", "zero2_offload", "zero3_offload", "zeropp"),
}

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
ACTIVATION_OFFLOADS: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")

Strategy = str | Layout | Mapping[str, "str | Layout"]


def quantized(strategy: Strategy, codec: str | None) -> Strategy:
    """The strategy with frozen matrices stored in this format; None: as they are."""
    if codec is None:
        return strategy
    if isinstance(strategy, Mapping):
        return {pattern: _with_frozen(layout, codec) for pattern, layout in strategy.items()}
    return _with_frozen(strategy, codec)


def _with_frozen(layout: str | Layout, codec: str) -> str | Layout:
    return f"{layout}+frozen_as={codec}" if isinstance(layout, str) else replace(layout, frozen_as=codec)


def layout_of(strategy: str | Layout) -> Layout:
    """Return the layout for a preset's name or alias (hyphens and capitals allowed) with the changes after it."""
    if isinstance(strategy, Layout):
        return strategy
    if not isinstance(strategy, str):
        raise ConfigurationError(
            f"a strategy is a preset's name, a Layout or a mapping of units to them, not {type(strategy).__name__} "
            f"{strategy!r}"
        )
    # An alias may end in plus signs itself: `zero++`.
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
        known = [f"{name}_as" for name in (*ENCODABLE, "frozen")] if is_codec else MOVABLE
        problem = ""
        if what not in known:
            problem = f"{what!r} {'is not sent' if is_codec else 'cannot be moved'}; {did_you_mean(what, known)}"
        elif field in new and not (what == "frozen_as" and new[field] == value):
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


def layouts_for(strategy: Strategy, names: Sequence[str]) -> list[Layout]:
    """Return the layout of each unit: one for all, or that of the first pattern in a mapping that matches its name."""
    by_pattern = strategy if isinstance(strategy, Mapping) else {"*": strategy}
    rows = {pattern: layout_of(value) for pattern, value in by_pattern.items()}
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
