"""Changes of a training that make it fit, or make it faster: for a whole plan, and for one strategy of it.

An alternative is the answer to the same question with a few settings changed, as `sw.plan` would give it. So its flags,
added to the command, show the same figures. Changes are tried in the order of what they cost: first those after which
the training is the same, then larger batches, more GPUs, other numbers, and training less than was asked for.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from ..base.dtypes import BF16
from ..base.errors import ConfigurationError
from ..core.layout import AUTO, MOST_SPLIT, OFFLOADS, PRESETS, Layout, Strategy, layout_of
from .assess import Assessment, Assessor, Subject
from .search import (
    MODES,
    Choice,
    assess_best,
    batches_of,
    choices,
    each_offloaded,
    fastest,
    has_room,
    strategy_of,
)
from .shapes.shape import StatesOnly
from .training import Checkpointing, Lora, Training

MOST_NODES = 1024  # maximum number of nodes that are tried
FLAGS = {  # of `shardwise plan`, by field of `Training`
    "checkpointing": "--checkpointing",
    "micro_batch": "--micro-batch",
    "num_micro_batches": "--accumulation",
    "reduce": "--reduce-dtype",
    "optimizer": "--optimizer",
}
ALL_FLAGS = {
    **FLAGS, "precision": "--precision", "lora": "--lora", "seq": "--seq", "nodes": "--nodes", "strategy": "--strategy",
}  # fmt: skip
NUM_ALTERNATIVES = 3
# An alternative is faster by this much than the plan, and than every alternative that costs less.
MIN_GAIN = 1.1
# The headline names one that is faster by this much. So much, too, must be gained by giving up fp32 masters.
MUCH_FASTER = 1.5
# Larger batches: by this much, up to the tokens of a step with which Llama 3 began (arXiv 2407.21783, section 3.4.1).
LARGER, MOST_TOKENS = {"micro_batch": 4, "num_micro_batches": 16}, 4 * 2**20
SHORTEST_SEQ = 512
MOST_TIMES = 20  # a change after which a step takes longer by more than this is no remedy
Kind = Literal["same", "batch", "nodes", "numbers", "less"]
SAME = "the same training"
SUMS, OTHER_NUMBERS = "gradients are summed in bf16", "not the same numbers as"


@dataclass(frozen=True, eq=False)
class Alternative:
    """A changed question, and its answer. `settings`: keywords of `sw.plan` (`nodes`: of `make_cluster`).
    `cost`: how the training differs."""

    kind: Kind
    settings: Mapping[str, Any]
    cost: str
    entry: Assessment

    @property
    def flags(self) -> str:
        """The flags that change the command line of the question."""
        values = {name: value.r if isinstance(value, Lora) else value for name, value in self.settings.items()}
        return " ".join(f"{ALL_FLAGS[name]} {value}" for name, value in values.items())

    @property
    def is_full(self) -> bool:
        """True if all weights are trained, on the same GPUs and with sequences of the same length."""
        return self.kind not in ("nodes", "less")

    def __repr__(self) -> str:
        return f"<{self.flags}: {self.entry.tokens_per_s:,.0f} tokens/s a GPU; {self.cost}>"


class Answer(Protocol):
    @property
    def recommended(self) -> Assessment | None: ...


@dataclass(frozen=True, kw_only=True)
class Question:
    """A plan to make. `subject_for`: the model under other settings. `has_shape`: all settings can be changed; a module
    has its own, and its activations take long to find. `modes`: of checkpointing, to choose from. `has_micro_batch`: it
    is given."""

    subject_for: Callable[[Training], Subject | StatesOnly]
    has_shape: bool
    assess: Assessor
    training: Training
    modes: tuple[Checkpointing, ...]
    strategy: Strategy | None
    global_batch: int | None
    has_micro_batch: bool
    answer: Callable[["Question"], Answer]

    @property
    def choice(self) -> Choice:
        world_size = self.assess.machine.cluster.world_size
        batches = batches_of(self.training, self.global_batch, world_size, self.has_micro_batch)
        return choices(self.training, self.modes, batches)

    def changed(self, settings: Mapping[str, Any]) -> "Question":
        """Return the question with other settings: fields of `Training`, the strategy, or the number of nodes."""
        sizes = {name: value for name, value in settings.items() if name not in ("strategy", "nodes", "checkpointing")}
        training, assess, machine = replace(self.training, **sizes), self.assess, self.assess.machine
        if "lora" in sizes or "seq" in sizes:
            subject = self.subject_for(training)
            assert isinstance(subject, Subject)
            assess = Assessor(subject, machine)
        if "nodes" in settings:
            assess = assess.on(replace(machine, cluster=replace(machine.cluster, num_nodes=settings["nodes"])))
        return replace(
            self,
            assess=assess,
            training=training,
            modes=MODES if "checkpointing" in settings else self.modes,
            strategy=settings.get("strategy", self.strategy),
            has_micro_batch=self.has_micro_batch or "micro_batch" in sizes,
        )


def alternatives(question: Question, entries: Sequence[Assessment], best: Assessment | None) -> tuple[Alternative, ...]:
    """Return the best change of each kind, those that cost least first. Each is faster than the plan and than those
    before it on the same GPUs. `entries`, `best`: the answer without a change."""
    most = 0.0 if best is None else best.tokens_per_s
    found: dict[Kind, Alternative] = {}
    for tried in _tried(question, entries, best):
        speed = tried.entry.tokens_per_s
        gain = MUCH_FASTER if "precision" in tried.settings else MIN_GAIN
        if tried.kind == "nodes" or (tried.kind == "less" and "less" in found):
            found.setdefault(tried.kind, tried)
        elif speed > gain * most:
            found[tried.kind] = tried
            most = speed
    chosen = list(found.values())
    while len(chosen) > NUM_ALTERNATIVES:
        slowest = [tried for tried in chosen if tried.kind not in ("same", "nodes")]
        chosen.remove(min(slowest, key=lambda tried: tried.entry.tokens_per_s))
    return tuple(chosen)


def much_faster(chosen: Sequence[Alternative], best: Assessment | None) -> Alternative | None:
    """Return the fastest alternative that trains all weights, if it is much faster than the plan."""
    full = [tried for tried in chosen if tried.is_full]
    found = max(full, key=lambda tried: tried.entry.tokens_per_s, default=None)
    now = 0.0 if best is None else best.tokens_per_s
    return found if found is not None and found.entry.tokens_per_s > MUCH_FASTER * now else None


def _tried(question: Question, entries: Sequence[Assessment], best: Assessment | None) -> Iterator[Alternative]:
    """Yield every change with which something fits with room, the cheapest first."""
    if best is not None and (tight := _tight(question, entries, best)) is not None:
        yield tight
    for kind, change, cost in _changes(question, best):
        try:
            asked = question.changed(change)
            entry = _best_with(asked, best if kind == "batch" else None)
        except ConfigurationError:  # such as a batch that does not divide among so many GPUs
            continue
        if entry is not None and has_room(entry):
            pinned = {} if asked.strategy is not None else {"strategy": strategy_of(entry)}
            yield Alternative(kind, {**change, **pinned}, cost.format(share=_percent_trained(asked.assess)), entry)


def _tight(question: Question, entries: Sequence[Assessment], best: Assessment) -> Alternative | None:
    """Return the fastest plan that leaves less room than it may be wrong by, if another one is recommended."""
    tight = [entry for entry in entries if entry.fits and entry.is_tight and entry.is_exact and entry is not best]
    tight = [entry for entry in tight if isinstance(strategy_of(entry), str)]
    if not tight:
        return None
    entry = max(tight, key=lambda entry: entry.tokens_per_s)
    settings: dict[str, Any] = {"checkpointing": entry.training.checkpointing} if question.has_shape else {}
    settings |= {} if question.global_batch is None else _batch_of(entry.training)
    settings["strategy"] = strategy_of(entry)
    return Alternative("same", settings, f"{SAME}, but tight: {room_words(entry)}", entry)


def room_words(entry: Assessment) -> str:
    """Say how much memory stays free and, if it is less, how much the plan may be wrong by."""
    room, error = (f"{size / 1e9:,.1f}" for size in (entry.room_bytes, entry.error_bytes))
    text = f"{room} of {entry.machine.memory_bytes / 1e9:,.1f} GB stay free"
    return f"{text}, and the plan may be wrong by {error} GB" if entry.is_tight else text


def _batch_of(training: Training) -> dict[str, Any]:
    return {name: getattr(training, name) for name in LARGER}


def _changes(question: Question, best: Assessment | None) -> Iterator[tuple[Kind, dict[str, Any], str]]:
    """Yield settings that may help, and what they cost, the cheapest first."""
    training, cluster, is_batch_free = question.training, question.assess.machine.cluster, question.global_batch is None
    is_open = not question.has_shape or len(question.modes) > 1
    is_here = best is not None and best.is_on_device
    base: dict[str, Any] = {} if is_open else {"checkpointing": AUTO}
    if question.strategy is not None and not str(question.strategy).startswith(AUTO):
        frozen = re.search(r"\+frozen_as=[\w:]+", str(question.strategy))
        yield "same", {**base, "strategy": AUTO + (frozen[0] if frozen else "")}, SAME
    if not is_open:
        yield "same", {**base}, SAME
    if question.has_shape and question.has_micro_batch and training.micro_batch > 1:
        yield "same", {**base, **_batch_of(with_single_sequences(training))}, SAME
    if is_batch_free and best is not None:
        tokens = training.num_tokens * training.num_micro_batches * cluster.world_size
        for field, most in LARGER.items():
            times = next((2**log for log in (4, 3, 2, 1) if 2**log <= most and 2**log * tokens <= MOST_TOKENS), 1)
            if times > 1 and (question.has_shape or field != "micro_batch"):
                yield "batch", {**base, field: times * getattr(training, field)}, f"{times}x as many tokens a step"
    nodes = cluster.num_nodes
    while best is None and 2 * nodes <= MOST_NODES:
        nodes *= 2
        yield "nodes", {**base, "nodes": nodes}, f"{nodes // cluster.num_nodes}x as many GPUs"
    if not is_batch_free:  # a search over all micro-batches takes long
        base |= _batch_of(question.choice[0][0] if best is None else best.training)
    is_adamw = training.optimizer == "adamw" and training.moments is None
    if can_reduce_in_bf16(training):
        yield "numbers", {**base, "reduce": "bf16"}, f"{SUMS}: {OTHER_NUMBERS} with fp32 sums"
    if is_adamw:
        yield "numbers", {**base, "optimizer": "adamw8bit"}, f"8-bit moments: {OTHER_NUMBERS} with AdamW"
    if can_reduce_in_bf16(training) and is_adamw:
        both = f"8-bit moments, and {SUMS}: {OTHER_NUMBERS} with AdamW"
        yield "numbers", {**base, "optimizer": "adamw8bit", "reduce": "bf16"}, both
    if not is_here and training.precision == "bf16":
        yield "numbers", {**base, "precision": "pure-bf16"}, "no fp32 masters: small updates are lost by rounding"
    if not is_here and training.lora is None and question.has_shape:
        yield "less", {**base, "lora": Lora()}, "LoRA: trains {share:.2g} % of the weights"
    seq = training.seq
    while best is None and question.has_shape and seq // 2 >= SHORTEST_SEQ:
        seq //= 2
        yield "less", {**base, "seq": seq}, f"sequences of {seq:,} tokens"


def _best_with(question: Question, before: Assessment | None) -> Assessment | None:
    """Return a fast plan. Without a given strategy, only a few are costed: a search would take too long. `before`: the
    plan with smaller batches. If it is offloaded, gradients that stay on the device are tried, too."""
    if question.strategy is not None:
        return question.answer(question).recommended
    assess, choice = question.assess, question.choice
    if before is not None and not before.is_on_device:
        layouts = {name: layout_of(name) for name in OFFLOADS if layout_of(name).grads_on == "device"}
        found = list(each_offloaded(assess, layouts, choice))
        if isinstance(strategy_of(before), str):
            found.append(assess_best(assess, before.name, before.layouts, choice))
        return fastest(found)
    names = [name for name, layout in PRESETS.items() if layout.is_exact and not layout.uses_host]
    smallest = choice[0][-1]
    if not has_room(assess(MOST_SPLIT, PRESETS[MOST_SPLIT], smallest)):
        return None
    # On several GPUs a layout that splits nothing updates all weights on each.
    is_alone = assess.machine.cluster.world_size == 1
    several = [name for name in names if is_alone or PRESETS[name].optimizer != "whole"]
    first = next(name for name in several if has_room(assess(name, PRESETS[name], smallest)))
    return fastest(assess_best(assess, name, PRESETS[name], choice) for name in dict.fromkeys((first, MOST_SPLIT)))


def _percent_trained(assess: Assessor) -> float:
    params = [param for unit in assess.subject.units for param in unit.params]
    return 100 * sum(param.num_elems for param in params if param.trainable) / sum(param.num_elems for param in params)


def flags_for(before: Training, after: Training, flags: Mapping[str, str] = FLAGS) -> str:
    """Return the flags that change one training into the other."""
    changed = [name for name in flags if getattr(before, name) != getattr(after, name)]
    return " ".join(f"{flags[name]} {getattr(after, name)}" for name in changed)


def nearest_change(
    assess: Assessor,
    entry: Assessment,
    flags: Mapping[str, str] = FLAGS,
    nodes: str = "--nodes",
    moving: Callable[[Layout], str] = lambda layout: f"--strategy {layout.name}",
) -> str:
    """Return the first change that makes the strategy fit, as command-line flags; empty if none does. `nodes`: the flag
    for the number of nodes. `moving`: returns the flag for a layout with more state on the host."""
    training = entry.training
    # Each of them needs less memory than the one before.
    smaller = _smaller_trainings(training)
    first = bisect_left(smaller, True, key=lambda each: _fitting(assess, entry.layouts, each) is not None)
    if first < len(smaller):
        return flags_for(training, smaller[first], flags)
    smallest = with_single_sequences(replace(training, checkpointing="full"))
    descriptions = ("the optimizer on the host", "optimizer and parameters on the host")
    is_movable = entry.is_on_device and len(set(entry.layouts)) == 1 and training.engine == "shardwise"
    for description, layout in zip(descriptions, on_host(entry.layouts[0]) if is_movable else (), strict=False):
        for candidate in dict.fromkeys((training, smallest)):
            if after := _fitting(assess, [layout] * len(entry.layouts), candidate):
                changed = f"{moving(layout)} {flags_for(training, candidate, flags)}".rstrip()
                saved = (entry.needed_bytes - after.needed_bytes) / 1e9
                times = entry.tokens_per_s / after.tokens_per_s
                if times > MOST_TIMES:
                    continue
                return f"{changed} ({description}: {saved:,.1f} GB less on each GPU, {times:.2f}x the time)"

    def fits_on(num_nodes: int) -> bool:
        machine = replace(assess.machine, cluster=replace(assess.machine.cluster, num_nodes=num_nodes))
        return _fitting(assess.on(machine), entry.layouts, smallest) is not None

    counts = [assess.machine.cluster.num_nodes * 2**log for log in range(1, 11)]
    counts = [num for num in counts if num <= MOST_NODES and entry.layouts[0].optimizer == "world"]
    first = bisect_left(counts, True, key=fits_on)
    return "" if first == len(counts) else f"{nodes} {counts[first]} {flags_for(training, smallest, flags)}".rstrip()


def on_host(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with gradients and optimizer on the host; then, if possible, with the parameters there too."""
    moved = replace(layout, grads_on="host", optimizer_on="host", kept=0.0)
    yield moved
    try:
        moved = replace(moved, params_on="host")
    except ConfigurationError:
        return
    yield moved


def _fitting(assess: Assessor, layouts: Sequence[Layout], training: Training) -> Assessment | None:
    """Return the assessment if it fits with room. None: it does not, or it cannot be made (no blocks to checkpoint)."""
    try:
        entry = assess(layouts[0].name, layouts, training)
    except ConfigurationError:
        return None
    return entry if has_room(entry) else None


def _smaller_trainings(training: Training) -> list[Training]:
    """Return trainings that need less and less memory: each includes the changes of those before it."""
    found = [training, replace(training, checkpointing="full")]
    found.append(with_single_sequences(found[-1]))
    if can_reduce_in_bf16(training):
        found.append(replace(found[-1], reduce="bf16"))
    if training.optimizer == "adamw" and training.engine != "deepspeed":  # which has no 8-bit moments
        found.append(with_adamw8bit(found[-1]))
    return list(dict.fromkeys(found))[1:]


def with_single_sequences(training: Training) -> Training:
    num = training.num_micro_batches * training.micro_batch
    return replace(training, micro_batch=1, num_micro_batches=num)


def can_reduce_in_bf16(training: Training) -> bool:
    return training.formats.reduce.itemsize == 4 and training.formats.compute == BF16


def with_adamw8bit(training: Training) -> Training:
    return replace(training, optimizer="adamw8bit", moments=None)
