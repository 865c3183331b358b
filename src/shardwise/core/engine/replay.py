"""Where every captured step begins and ends: no gradients, the first units gathered, all others stale."""

from ...base.errors import StateError
from .runtime import Engine


class Replay:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gathers = engine.gathers
        engine.gathers.is_captured = True
        self._begins_with: tuple[object, ...] = ()
        self._held_at_first: list[bool] = []

    def begin(self) -> None:
        """What has been gathered besides, by an evaluation, counts as stale: a recording that relied on it would never
        gather it again. Nothing is gathered into memory that the step gives back and finds elsewhere the next time."""
        self._engine.begin_step()
        self._engine.abandon_backward()
        if any(state.gradient.stage != "empty" for state in self._engine.trainable_states):
            raise StateError("there are gradients already: a captured step begins and ends with none (zero_grad)")
        if self._gathers.occupancy.state() != self._begins_with:
            self._gathers.settle()
            self._gather_frozen_as_left()
            self._gathers.occupancy.masters_changed()
            self._gathers.start_first()
            self._gather_frozen_anew()
            self._engine.join_lanes()
            self._forget_what_is_left()
            self._begins_with = self._gathers.occupancy.state()
            self._held_at_first = self._held_at_first or list(self._gathers.occupancy.held)

    def end_recording(self) -> None:
        """The end of a captured step, which must be its beginning."""
        self._engine.join_lanes()
        self._forget_what_is_left()
        if self._gathers.occupancy.state() != self._begins_with:
            raise StateError(
                "this step does not end as it began, so it cannot be replayed: it must run the whole model, forward "
                "and backward, then optimizer.step() and zero_grad()"
            )

    def end(self) -> None:
        """Forwards before it can no longer lead to a backward; the first units hold the new weights."""
        gathers = self._gathers
        gathers.count_update(range(len(self._engine.units)))
        for unit in self._engine.units:
            if gathers.occupancy.is_ready(unit.index, "forward"):
                unit.stamp(gathers.versions[unit.index])

    def _gather_frozen_as_left(self) -> None:
        """What is frozen stays as the last backward gathered it, which may be more exact than a forward would."""
        schedule, occupancy = self._gathers.schedule, self._gathers.occupancy
        for index in schedule.after_step:
            unit = schedule.units[index]
            is_rounded = any(flat.rounds_forwards and not flat.trainable for flat in unit.flats)
            if is_rounded and unit.backward_reads and not occupancy.is_ready(index, "backward"):
                self._gathers.start(index, "backward", needed_now=False)

    def _gather_frozen_anew(self) -> None:
        """What is frozen lies where the recording found it, and is not gathered by it: unless weights were written."""
        occupancy = self._gathers.occupancy
        for index, was_held in enumerate(self._held_at_first):
            is_frozen = any(not flat.trainable for flat in self._gathers.schedule.units[index].flats)
            if was_held and is_frozen and not occupancy.held[index]:
                self._gathers.start(index, "forward", needed_now=False)

    def _forget_what_is_left(self) -> None:
        """Of units besides the first, in slots and in memory that is given back: the next to run will be others."""
        schedule = self._gathers.schedule
        for index, slot in enumerate(schedule.slot_of):
            self._gathers.drop(index)
            if slot is not None and index not in schedule.after_step:
                self._gathers.vacate(index)
