"""Which of a plan's state to keep on the device, where all of it does not fit: parts of the optimizer, and activations.

The host updates more slowly than the device, so as much of the optimizer as fits stays. It is whole parameters, the
same part of every unit; memory grows with the part, and the largest is found by halving. What stays does not burden the
host: where that is short, too, a part may fit though nothing and everything would not. Activations are a last resort,
unless their copies take less time than computing them again.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..core.layout import OFFLOADS, PRESETS, STOWS, Layout, layout_of
from ..core.schedule.flat import kept_params
from ..core.schedule.model import FoundUnit
from .assess import Assessment, Assessor
from .search import TIE, Choice, assess_best, fastest, has_room, same_batch
from .training import Training


def offloads(
    assess: Assessor, found: Sequence[Assessment], choice: Choice, has_disk: bool = True
) -> Iterator[Assessment]:
    """What is better than all of `found`, which are exact as these, or fits where none of it does."""
    best = fastest(found)
    for entry in _tried(assess, found, choice, has_disk):
        if best is None or fastest([best, entry]) is entry:
            best = entry
            yield entry


def _tried(assess: Assessor, found: Sequence[Assessment], choice: Choice, has_disk: bool) -> Iterator[Assessment]:
    fits_here = any(has_room(entry) and entry.is_on_device for entry in found)
    layouts = {name: layout_of(name) for name in OFFLOADS}
    layouts = {name: layout for name, layout in layouts.items() if has_disk or not layout.uses_disk}
    tried: list[Assessment] = []
    if not fits_here:
        tried += _each(assess, layouts, choice)
        yield from tried
    stowed = list(_stowed(assess, found, choice))
    yield from stowed
    if not any(map(has_room, (*found, *tried, *stowed))):
        moved = [replace(layout, activations_on="host") for layout in layouts.values()]
        yield from _each(assess, {layout.name: layout for layout in moved}, choice)


def _each(assess: Assessor, layouts: Mapping[str, Layout], choice: Choice) -> Iterator[Assessment]:
    """Of each layout, with as much of the optimizer on the device as fits, the fastest that there is. A disk is looked
    at where the host is short."""
    parts = _parts(assess.subject.units)
    fits_host = False
    for name, layout in layouts.items():
        if layout.uses_disk and fits_host:
            return
        without = assess_best(assess, name, [layout] * len(assess.unit_names), choice)
        is_in_vain = layout.grads_on == "device" and without.training.num_micro_batches == 1
        if is_in_vain or _beyond_memory(without) > 0:
            continue
        found = [_most_kept(assess, name, layout, parts, training) for training in same_batch(choice, without.training)]
        best = fastest(entry for entry in found if entry is not None)
        if best is not None:
            fits_host |= has_room(best)
            yield best
            if layout.uses_disk:
                yield _least_on_disk(assess, best)


def _least_on_disk(assess: Assessor, entry: Assessment) -> Assessment:
    """Of what is on disk, as many units as fit on the host, those first whose weights are needed first."""

    def with_host(num: int) -> Assessment:
        layouts = [on_host(layout) if index < num else layout for index, layout in enumerate(entry.layouts)]
        return assess(f"{entry.name} + {num} units on the host", layouts, entry.training)

    num = bisect_left(range(len(entry.layouts)), True, key=lambda num: not with_host(num).fits)
    return with_host(num - 1) if num > 1 else entry


def on_host(layout: Layout) -> Layout:
    """The same without a disk."""
    params_on = "host" if layout.params_on == "disk" else layout.params_on
    return replace(layout, params_on=params_on, optimizer_on="host")


def _parts(units: Sequence[FoundUnit]) -> list[float]:
    """Those that differ in what stays on the device, the smallest of all that are the same."""
    kinds = {tuple((param.shape, param.trainable) for param in unit.params): unit for unit in units}
    found: dict[tuple[frozenset[str], ...], float] = {}
    for percent in range(100):
        part = percent / 100
        found.setdefault(tuple(frozenset(kept_params(unit.params, part)) for unit in kinds.values()), part)
    return list(found.values())


def _most_kept(
    assess: Assessor, name: str, layout: Layout, parts: Sequence[float], training: Training
) -> Assessment | None:
    known: dict[float, Assessment] = {}

    def with_kept(part: float) -> Assessment:
        if part not in known:
            kept = replace(layout, kept=part)
            known[part] = assess(_name(name, kept), [kept] * len(assess.unit_names), training)
        return known[part]

    for beyond in (_beyond_room, _beyond_memory):
        index = bisect_right(parts, 0, key=lambda part: beyond(with_kept(part)))
        # Where the host is short, a little less room on the device may help.
        if index and with_kept(parts[index - 1]).fits:
            return with_kept(parts[index - 1])
    return None


def _beyond_room(entry: Assessment) -> int:
    return entry.high_bytes - entry.machine.memory_bytes


def _beyond_memory(entry: Assessment) -> int:
    return entry.needed_bytes - entry.machine.memory_bytes


def _name(name: str, layout: Layout) -> str:
    """What `--strategy` takes: short, where a preset says the rest."""
    if not layout.kept or name not in PRESETS:
        return layout.name
    return f"{name}+optimizer={layout.optimizer_on}:{round(1 - layout.kept, 4):g}"


def _stowed(assess: Assessor, found: Sequence[Assessment], choice: Choice) -> Iterator[Assessment]:
    """Activations on the host and all else on the device, where the same without fits only with more checkpointing."""
    is_one_node = assess.machine.cluster.num_nodes == 1
    by_name = {entry.name: entry for entry in found}
    for name in STOWS:
        layout = replace(PRESETS[name], activations_on="host")
        base = by_name[name]
        trainings = same_batch(choice, base.training)
        is_easy = has_room(base) and base.training == trainings[0]
        if is_easy or (is_one_node and "node" in layout.chain):
            continue
        entries = [assess(layout.name, [layout] * len(assess.unit_names), training) for training in trainings[::-1]]
        # The last mode needs least.
        best = fastest(entries) if entries[0].fits else None
        if best is not None and (not has_room(base) or best.tokens_per_s > base.tokens_per_s * (1 + TIE)):
            yield best
