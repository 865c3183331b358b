"""The search for a strategy: every preset, mixed layouts, and state or activations that are offloaded.

A unit that is split but stays gathered costs memory and saves a gather, so the fastest plan keeps as many units
gathered as fit: bisection finds their number. If the user leaves settings open (activation checkpointing, micro-batch),
every preset gets those that suit it best. If nothing fits on the device alone, the search tries host and disk, and
keeps as much of the optimizer on the device as fits: whole parameters, the same fraction of every unit. This fraction
needs no host memory. So if host memory is short, too, some fraction may fit although neither 0 nor 1 does.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from math import inf
from operator import attrgetter

from ..base.errors import ConfigurationError
from ..base.text import plural
from ..core.layout import (
    ACTIVATION_OFFLOADS,
    ALWAYS_WHOLE,
    AUTO,
    ENGINE_HAS,
    MIXES,
    OFFLOADS,
    PRESETS,
    Layout,
    Strategy,
    changed,
    layout_of,
    layouts_for,
)
from ..core.schedule.flat import kept_params
from ..core.schedule.model import UnitSpec
from .assess import Assessment, Assessor
from .training import Checkpointing, Training

# Checkpointing costs time, so the search takes the first mode that fits.
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
# A tight plan is preferred only if it is this much faster than those with room: never, if the free memory is not known.
# If it was measured, the plan's error is small (see the log: a run of 92 ms was refused for one of 178).
TIGHT_GAIN = {True: 0.5, False: inf}
# A plan that leaves less than `GOOD_ROOM`, or whose layouts differ from unit to unit, is preferred only if it is this
# much faster than those that leave it, or that have one layout.
MIN_GAIN = 0.05
# So is a plan that needs host memory. If the host was not measured, its speed is an assumption, which was wrong by up
# to a factor of three, while recomputing activations instead costs a step at most 1.44x its time in published runs.
HOST_GAIN = {True: 0.05, False: 0.5}
# A plan this close to the fastest counts as equally fast; the simpler of the two is then preferred.
TIE = 0.01
MOST_SEQUENCES = 64  # maximum number of sequences per micro-batch in the search
# The trainings to try: one list for each batch, with one training for each checkpointing mode.
Choice = tuple[tuple[Training, ...], ...]


def choices(training: Training, modes: Sequence[Checkpointing], batches: Sequence[tuple[int, int]]) -> Choice:
    """Combine every batch (micro-batch size, micro-batches per step) with the list of modes."""
    return tuple(
        tuple(replace(training, micro_batch=size, num_micro_batches=num, checkpointing=mode) for mode in modes)
        for size, num in batches
    )


def batches_of(
    training: Training, global_batch: int | None, world_size: int, has_micro_batch: bool = False
) -> Sequence[tuple[int, int]]:
    """Return pairs (micro-batch size, micro-batches per step); several if only their product is given."""
    if global_batch is None:
        return [(training.micro_batch, training.num_micro_batches)]
    per_gpu, rest = divmod(global_batch, world_size)
    if rest or per_gpu < 1:
        raise ConfigurationError(
            f"a global batch of {global_batch} does not divide among {world_size} GPUs; give a multiple of {world_size}"
        )
    if has_micro_batch or training.num_micro_batches > 1:
        size = training.micro_batch
        num = training.num_micro_batches if training.num_micro_batches > 1 else per_gpu // size
        if size * num != per_gpu:
            raise ConfigurationError(
                f"a global batch of {global_batch} is {per_gpu} sequences a GPU, but {num} micro-batches of {size} do "
                "not make that; leave one of them out"
            )
        return [(size, num)]
    return [(size, per_gpu // size) for size in range(1, min(per_gpu, MOST_SEQUENCES) + 1) if per_gpu % size == 0]


def assess_best(assess: Assessor, name: str, layouts: Layout | Sequence[Layout], choice: Choice) -> Assessment:
    """Return the fastest plan that fits, else the one that needs least. The first mode with room is the fastest, and of
    the batches that leave as much room with one mode, the largest; batches are in ascending order."""
    fitting: dict[object, Assessment] = {}
    others: list[Assessment] = []
    before = first = 0  # bytes that the last mode needed with the batch before; the first mode that may have room
    for trainings in choice:
        # The last mode needs the least memory. If even that does not fit and grows with the batch, no later batch fits.
        if before and not fitting:
            least = assess(name, layouts, trainings[-1])
            if not least.fits and least.needed_bytes > before:
                break
        # A mode that has no room with a smaller batch has none with a larger one.
        for at, training in enumerate(trainings[first:], first):
            found = assess(name, layouts, training)
            if found.fits:
                fitting[training.checkpointing, found.is_tight, found.is_roomy] = found
            else:
                others.append(found)
            if has_room(found):
                first = at
                break
        if not found.fits and found.needed_bytes > before > 0:
            break
        before = found.needed_bytes
    best = next(iter(fitting.values())) if len(fitting) == 1 else fastest(fitting.values())
    return min(others, key=lambda found: found.needed_bytes) if best is None else best


def presets(assess: Assessor, choice: Choice, only_exact: bool = False, has_disk: bool = True) -> Iterator[Assessment]:
    known = _known(assess, choice)
    for name, layout in PRESETS.items():
        if name in known and (has_disk or not layout.uses_disk) and (layout.is_exact or not only_exact):
            yield assess_best(assess, name, layout, choice)


def mixtures(assess: Assessor, found: Mapping[str, Assessment], choice: Choice) -> Iterator[Assessment]:
    """For each pair of presets in `MIXES`, yield a mixture that fits and is faster than the first preset alone, which
    splits more, if the second does not fit for all units. `found`: the assessed presets."""
    is_one_node = assess.machine.cluster.num_nodes == 1
    for split, kept in MIXES:
        stops_at_node = "node" in PRESETS[split].chain + PRESETS[kept].chain
        base = found[split]
        if (stops_at_node and is_one_node) or not has_room(base):
            continue
        mixed = [
            most_kept(assess, split, kept, training)
            for training in same_batch(choice, base.training)
            if not has_room(assess(kept, PRESETS[kept], training))
        ]
        best = fastest(entry for entry in mixed if entry is not None)
        if best is not None and best.tokens_per_s > base.tokens_per_s:
            yield best


def same_batch(choice: Choice, training: Training) -> tuple[Training, ...]:
    """Return the trainings that differ from this one in checkpointing only."""
    return next(trainings for trainings in choice if training in trainings)


def has_room(entry: Assessment) -> bool:
    return entry.fits and not entry.is_tight


def most_kept(assess: Assessor, split: str, kept: str, training: Training) -> Assessment | None:
    """Keep as many leaf units gathered as fit, the last ones first: the backward needs them first. A plan that is roomy
    without them stays roomy."""
    candidates = [index for index, unit in enumerate(assess.subject.units) if not unit.holds_units][::-1]
    base = [PRESETS[split]] * len(assess.unit_names)

    def with_kept(num: int) -> Assessment:
        layouts = list(base)
        for index in candidates[:num]:
            layouts[index] = PRESETS[kept]
        return assess(f"{split}+{kept}", layouts, training)

    # Memory grows with the number of kept units.
    has_enough = attrgetter("is_roomy") if with_kept(0).is_roomy else has_room
    num = bisect_left(range(1, len(candidates)), True, key=lambda num: not has_enough(with_kept(num)))
    if num == 0:
        return None
    found = with_kept(num)
    num_kept = sum(layout == PRESETS[kept] for layout in found.layouts)
    return found.named(f"{split} + {kept} x {num_kept}")


def fastest(found: Iterable[Assessment], tie: float = TIE) -> Assessment | None:
    """Return the fastest plan that fits; among equals, the first. Plans with room, on the device, and with one layout
    are preferred."""
    fitting = [entry for entry in found if entry.fits]
    if not fitting:
        return None
    machine = fitting[0].machine
    preferences = (
        (TIGHT_GAIN[machine.free_bytes is not None], has_room),
        (HOST_GAIN[machine.cluster.host_is_measured], attrgetter("is_on_device")),
        (MIN_GAIN, attrgetter("is_roomy")),
        (MIN_GAIN, _is_uniform),
    )
    for gain, is_preferred in preferences:
        preferred = [entry for entry in fitting if is_preferred(entry)]
        if not preferred or len(preferred) == len(fitting):
            continue
        least = inf if gain == inf else max(entry.tokens_per_s for entry in preferred) * (1 + gain)
        fitting = [entry for entry in fitting if is_preferred(entry) or (least < inf and entry.tokens_per_s > least)]
    if len(fitting) == 1:  # its time is not needed
        return fitting[0]
    best = max(entry.tokens_per_s for entry in fitting)
    return next(entry for entry in fitting if entry.tokens_per_s >= best * (1 - tie))


def _is_uniform(entry: Assessment) -> bool:
    units = zip(entry.schedule.units, entry.layouts, strict=True)
    return len({layout for unit, layout in units if unit.name != ALWAYS_WHOLE}) == 1


def strategy_of(found: Assessment) -> Strategy:
    """Return the strategy of a plan, as a value for `sw.shard` and `--strategy`."""
    most = max(dict.fromkeys(found.layouts), key=found.layouts.count)
    others = {
        unit.name: layout.name
        for unit, layout in zip(found.schedule.units, found.layouts, strict=True)
        if layout != most
    }
    if others:
        return {**dict(_by_tens(others)), "*": most.name}
    return most.name if most.name != "custom" else most


def _known(assess: Assessor, choice: Choice) -> Sequence[str]:
    """Return the presets that the engine has. On one node, DeepSpeed leaves out half of ZeRO++ without a word."""
    engine = choice[0][0].engine
    has_nodes = engine != "deepspeed" or assess.machine.cluster.num_nodes > 1
    return [name for name in ENGINE_HAS.get(engine, tuple(PRESETS)) if has_nodes or PRESETS[name].is_exact]


def _by_tens(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Shorten blocks.12, ..., blocks.19 of one value to the pattern blocks.1[2-9]."""
    for (stem, value), group in groupby(names.items(), key=lambda item: (item[0][:-1], item[1])):
        ends = "".join(name[-1] for name, _ in group)
        if len(ends) > 1 and ends in "0123456789":
            yield f"{stem}[{ends[0]}-{ends[-1]}]", value
        else:
            yield from ((stem + end, value) for end in ends)


def label_of(entry: Assessment) -> str:
    """Describe the strategy in words: "ZeRO-3 with 17 % of the optimizer on the host"."""
    units = [(unit, layout) for unit, layout in zip(entry.schedule.units, entry.layouts, strict=True)]
    units = [(unit, layout) for unit, layout in units if unit.name != ALWAYS_WHOLE] or units
    leaves = [layout for unit, layout in units if not unit.holds_units]
    first, last = leaves[0], leaves[-1]
    num = leaves.count(first)
    holders = {layout for unit, layout in units if unit.holds_units}
    if not holders <= {first} or leaves != [first] * num + [last] * (len(leaves) - num):
        return entry.name
    if first == last:
        return _words(entry, first)
    if last.uses_disk:
        return f"{_words(entry, last)}, the first {entry.layouts.count(first)} units on the host"
    return f"{_words(entry, first)}, the last {plural(len(leaves) - num, 'unit')} as {_words(entry, last)}"


def _words(entry: Assessment, layout: Layout) -> str:
    base = replace(layout.on_device, activations_on="device")
    if base.name == "custom" or layout.codecs:
        return entry.name
    held: dict[str, list[str]] = {}
    percent = round(100 * (1 - entry.part_on_device))
    for what, words in (("optimizer", "the optimizer"), ("params", "the parameters"), ("activations", "activations")):
        part = f"{percent} % of " if what == "optimizer" and layout.kept else ""
        held.setdefault(getattr(layout, f"{what}_on"), []).append(part + words)
    moved = [f"{' and '.join(held[place])} {words}" for place, words in PLACES.items() if place in held]
    return re.sub(r"^zero(?=\d)", "ZeRO-", base.name) + (f" with {', and '.join(moved)}" if moved else "")


PLACES = {"host": "on the host", "disk": "on disk"}


def assess_named(assess: Assessor, strategy: Strategy, choice: Choice) -> Assessment:
    """Assess the strategy that the user named."""
    layouts = layouts_for(strategy, assess.unit_names)
    engine, known, units = choice[0][0].engine, _known(assess, choice), zip(assess.unit_names, layouts, strict=True)
    names = {layout.name for unit, layout in units if unit != ALWAYS_WHOLE}
    is_mixed = len(names) > 1 and engine in ("fsdp1", "deepspeed")
    if engine != "shardwise" and (is_mixed or not names <= set(known)):
        raise ConfigurationError(
            f"strategy {strategy!r} with engine {engine!r}, which has {', '.join(known)}, each for the whole model"
        )
    name = strategy if isinstance(strategy, str) else layouts[0].name if len(set(layouts)) == 1 else "mixed"
    return assess_best(assess, name, layouts, choice)


def changes_after_auto(strategy: Strategy | None) -> list[str] | None:
    """Return the changes that follow `auto+` (offload, codecs) and apply to every preset; None if the strategy is
    not `auto`."""
    if not isinstance(strategy, str):
        return None
    name, *moves = strategy.lower().split("+")
    return moves if name == AUTO else None


def tried_layouts(strategy: Strategy | None, unit_names: Sequence[str]) -> list[Layout]:
    """Return the layouts of a requested strategy: of each unit, or for `auto` the presets, changed as it says."""
    moves = changes_after_auto(strategy)
    if strategy is None or moves == []:
        return list(PRESETS.values())
    return changed_presets(moves) if moves else layouts_for(strategy, unit_names)


def changed_presets(moves: Sequence[str]) -> list[Layout]:
    """Apply these changes to the presets without offload or codecs of their own, if the layout allows them."""
    found: list[Layout] = []
    refused: list[ConfigurationError] = []
    for layout in PRESETS.values():
        if layout.on_device == layout == layout.exact:
            try:
                found.append(changed(layout, moves))
            except ConfigurationError as error:
                refused.append(error)
    if not found:
        raise refused[-1]
    return found


def offloads(
    assess: Assessor, found: Sequence[Assessment], choice: Choice, has_disk: bool = True
) -> Iterator[Assessment]:
    """Yield offloaded plans that are better than all of `found`, or that fit if none of those does."""
    best = fastest(found)
    for entry in _offloaded(assess, found, choice, has_disk):
        if best is None or fastest([best, entry]) is entry:
            best = entry
            yield entry


def _offloaded(assess: Assessor, found: Sequence[Assessment], choice: Choice, has_disk: bool) -> Iterator[Assessment]:
    layouts = {name: layout_of(name) for name in OFFLOADS}
    layouts = {name: layout for name, layout in layouts.items() if has_disk or not layout.uses_disk}
    tried: list[Assessment] = []
    if not any(has_room(entry) and entry.is_on_device for entry in found):
        tried += each_offloaded(assess, layouts, choice)
    tried += _with_offloaded_activations(assess, found, choice)
    yield from tried
    if not any(map(has_room, (*found, *tried))):
        moved = [replace(layout, activations_on="host") for layout in layouts.values()]
        yield from each_offloaded(assess, {layout.name: layout for layout in moved}, choice)


def each_offloaded(assess: Assessor, layouts: Mapping[str, Layout], choice: Choice) -> Iterator[Assessment]:
    """Yield the fastest plan of each layout, with as much of the optimizer on the device as fits. A disk is
    considered only if host memory is too small."""
    parts = _parts(assess.subject.units)
    fits_host = False
    for name, layout in layouts.items():
        if layout.uses_disk and fits_host:
            return
        without = assess_best(assess, name, layout, choice)
        saves_nothing = layout.grads_on == "device" and without.training.num_micro_batches == 1
        if saves_nothing or without.needed_bytes > without.machine.memory_bytes:
            continue
        found = [_most_kept(assess, name, layout, parts, training) for training in same_batch(choice, without.training)]
        best = fastest(entry for entry in found if entry is not None)
        if best is not None:
            fits_host |= has_room(best)
            yield best
            if layout.uses_disk:
                yield _least_on_disk(assess, best)


def _least_on_disk(assess: Assessor, entry: Assessment) -> Assessment:
    """Move as many units from disk to the host as fit, in the order in which their weights are needed."""

    def with_host(num: int) -> Assessment:
        layouts = list(entry.layouts)
        for index, layout in enumerate(layouts[:num]):
            params_on = "host" if layout.params_on == "disk" else layout.params_on
            layouts[index] = replace(layout, params_on=params_on, optimizer_on="host")
        return assess(f"{entry.name} + {num} units on the host", layouts, entry.training)

    num = bisect_left(range(len(entry.layouts)), True, key=lambda num: not with_host(num).fits)
    return with_host(num - 1) if num > 1 else entry


def _parts(units: Sequence[UnitSpec]) -> list[float]:
    """Return fractions of the optimizer to keep on the device: the smallest one for each choice of parameters."""
    kinds = {tuple((param.shape, param.trainable) for param in unit.params): unit for unit in units}
    found: dict[tuple[frozenset[str], ...], float] = {}
    for percent in range(100):
        part = percent / 100
        found.setdefault(tuple(frozenset(kept_params(unit.params, part)) for unit in kinds.values()), part)
    return list(found.values())


def _most_kept(
    assess: Assessor, name: str, layout: Layout, parts: Sequence[float], training: Training
) -> Assessment | None:
    @cache
    def with_kept(part: float) -> Assessment:
        kept = replace(layout, kept=part)
        # The value for `--strategy`, shortened to a preset's name and the differences from it.
        short = f"{name}+optimizer={layout.optimizer_on}:{round(1 - part, 4):g}"
        return assess(short if part and name in PRESETS else kept.name, kept, training)

    for bytes_of in (attrgetter("safe_bytes"), attrgetter("needed_bytes")):
        index = bisect_right(parts, assess.machine.memory_bytes, key=lambda part: bytes_of(with_kept(part)))
        # If host memory is too small, the second pass accepts a tight plan: more state stays on the device.
        if index and with_kept(parts[index - 1]).fits:
            return with_kept(parts[index - 1])
    return None


def _with_offloaded_activations(assess: Assessor, found: Sequence[Assessment], choice: Choice) -> Iterator[Assessment]:
    """Offload activations only, where the plan without that needs checkpointing or has no room."""
    is_one_node = assess.machine.cluster.num_nodes == 1
    by_name = {entry.name: entry for entry in found}
    for name in ACTIVATION_OFFLOADS:
        layout, base = replace(PRESETS[name], activations_on="host"), by_name[name]
        trainings = same_batch(choice, base.training)
        is_easy = has_room(base) and base.training == trainings[0]
        if is_easy or (is_one_node and "node" in layout.chain):
            continue
        entries = [assess(layout.name, layout, training) for training in trainings[::-1]]
        # The mode that needs the least memory is the first entry.
        best = fastest(entries) if entries[0].fits else None
        if best is not None and (not has_room(base) or best.tokens_per_s > base.tokens_per_s * (1 + TIE)):
            yield best
