"""The order of a step as a pure value: no process group, no GPU, no tensors.

A `Schedule` says, before and after each unit's forward and backward, which gathers to start. Whether a gather has
anything to do depends on what memory holds at that moment: `unit_status.UnitStatus`, one record per unit, knows that.
The engine executes both on real buffers; the planner's `step_events` executes both without buffers, and so predicts
every collective of a step exactly.

Units that are dropped after their forward share a small ring of persistent slots: the k-th of them uses slot k modulo
the ring size. A dropped unit stays readable until another one takes its slot, so the last units of the forward need no
gather in the backward. Units that stay gathered for longer, and units that contain other units, have their own memory.

Parameters may be encoded for forwards only. A backward cannot use these: it gathers the exact weights again. The next
forward can use what a backward has gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ...base.errors import ConfigurationError
from ...base.intervals import BLOCK_ELEMS
from ..layout import Layout
from ..wire.codec import AS_IS
from .flat import Flat

# Flats of one unit share a slot; each starts at a multiple of this.
ALIGN_BYTES = 2 * BLOCK_ELEMS
# Reduction slots: one is reduced while the next is written. Gradients that stay whole on the device need none.
NUM_REDUCTIONS = 2
# The first units of a backward, when most activations are alive, may be late (`UnitPlan.is_late`): weight gradients are
# computed at the end of the unit's backward, in the slot of the unit before, which is reduced by then.
NUM_LATE = 5
# A smaller slot is not worth waiting for.
MIN_LATE_BYTES = 64 << 20
# The number of gathers of encoded parameters in flight at a time.
NUM_ROW_SLOTS = 2
# The number of units that have gradients on the device at once if these are offloaded: written, reduced, copied. The
# first of them has its gradients in a slot only.
NUM_OFFLOADED_GRADS = 3
# Gradients of a unit that autograd allocated are copied into the slot during the next unit's backward, and released
# after it. For the first units, if gradients are larger than this, the computation waits for the copy.
MAX_HELD_BYTES = 32 << 20
# The optimizer updates masters in parts of at least PART_ELEMS: for fewer elements the launch of the update takes
# longer than the update.
PART_ELEMS = 32 << 20


@dataclass(unsafe_hash=True)
class UnitPlan:
    """A unit in the schedule. It never changes."""

    name: str
    layout: Layout
    flats: tuple[Flat, ...]
    holds_units: bool
    backward_reads: bool

    def __post_init__(self) -> None:
        flats = self.flats
        # The unit has gathered memory of its own, from its forward to the end of its backward.
        # Not that of the layout, if frozen weights are decoded for each use.
        self.gathered_until = flats[0].layout.gathered_until
        self.gives_back = self.gathered_until == "backward"
        self.trainable = any(flat.trainable for flat in flats)
        # Bytes of gradients as autograd makes them: in the compute dtype.
        self.trained_bytes = sum(flat.num_elems * flat.compute.itemsize for flat in flats if flat.trainable)
        split = [flat for flat in flats if not flat.master_is_whole]
        self.gathered_bytes = sum(aligned(flat.whole_bytes) for flat in split)
        self.gathered_row_bytes = sum(aligned(flat.gathered_row_bytes) for flat in flats)
        # Bytes in a reduction slot: for gradients that are split or offloaded, and for encoded rows.
        self.reduced_bytes = sum(aligned(flat.reduced_bytes) + aligned(flat.exchanged_bytes) for flat in flats)
        # Bytes per token that the gradients of linear layers are computed from: inputs, and gradients of outputs.
        trained = [(param, flat) for flat in flats if flat.trainable for param in flat.params if len(param.shape) == 2]
        self.late_bytes = sum(sum(param.shape) * flat.compute.itemsize for param, flat in trained)

    def is_late(self, num_tokens: int) -> bool:
        """True if a slot takes more memory than a quarter of what its gradients are computed from: less than that is
        held longer when memory is at its peak. The rest is alive anyway, or comes later."""
        return self.reduced_bytes >= MIN_LATE_BYTES and num_tokens * self.late_bytes <= 4 * self.reduced_bytes


@dataclass(unsafe_hash=True)
class Schedule:
    """The schedule of a step. Units are named by index. `order` is that of the forward. `slot_of` has each unit's slot,
    or None for its own memory. `before_*` and `after_step` are the units whose gathers start then."""

    units: tuple[UnitPlan, ...]
    order: tuple[int, ...]
    slot_of: tuple[int | None, ...]
    slot_bytes: tuple[int, ...]
    before_forward: tuple[tuple[int, ...], ...]
    before_backward: tuple[tuple[int, ...], ...]
    after_step: tuple[int, ...]

    def __post_init__(self) -> None:
        units, order = self.units, self.order
        self.num_ranks = units[0].flats[0].num_ranks
        self.position_of = {unit: position for position, unit in enumerate(order)}
        self.trainable_flats = [flat for unit in units for flat in unit.flats if flat.trainable]
        # Units that contain no other unit: they run one after the other.
        self.leaves = tuple(at for at in order if not units[at].holds_units)
        # Units that hold others and whose weights the backward reads. Their backward begins before the others'.
        self.read_holders = tuple(at for at in order if units[at].holds_units and units[at].backward_reads)
        # Gradients are reduced in this order on every rank, whatever order they become ready in.
        self.reduce_order = tuple(at for at in reversed(order) if units[at].trainable)
        # Memory for gradient sums of earlier micro-batches, which are copied back from the host one flat at a time.
        returning = [flat for flat in self.trainable_flats if flat.grads_on_host and flat.depth_of_grads > 0]
        self.scratch_bytes = max((flat.num_grads * flat.reduce.itemsize for flat in returning), default=0)
        # A slot for the encoded rows of a gather in flight, and one for a reduction.
        self.row_slot_bytes = max(unit.gathered_row_bytes for unit in units)
        self.reduction_slot_bytes = max(unit.reduced_bytes for unit in units)
        self._slot_sizes = [units[at].reduced_bytes for at in self.reduce_order if units[at].reduced_bytes]

    def reduction_bytes(self, keeps_slots: bool) -> int:
        """The largest memory of the reduction slots. With `keeps_slots` (on a CPU) each fits the largest unit; without,
        each has the size of the unit that uses it."""
        sizes = self._slot_sizes
        if keeps_slots:
            return min(NUM_REDUCTIONS, len(sizes)) * self.reduction_slot_bytes
        return max((sum(sizes[at : at + NUM_REDUCTIONS]) for at in range(len(sizes))), default=0)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def require_frozen(units: Sequence[UnitPlan]) -> None:
    """Refuse a format for frozen weights where none is used."""
    frozen_as = {unit.layout.frozen_as for unit in units} - {AS_IS}
    if frozen_as and not any(flat.stored_codec for unit in units for flat in unit.flats):
        fix = "freeze them (requires_grad_(False), LoRA), or leave it out"
        raise ConfigurationError(f"frozen_as={min(frozen_as)!r}, and no matrix of a repeated block is frozen: {fix}")


def make_schedule(units: Sequence[UnitPlan], order: Sequence[int], budget_bytes: int | None) -> Schedule:
    """Make a schedule. `budget_bytes` limits the ring of gather slots; without it one unit is prefetched."""
    ring = [unit for unit in order if units[unit].gathered_until == "forward" and not units[unit].holds_units]
    num_slots = _ring_size([units[unit] for unit in ring], budget_bytes)
    slots, slot_bytes = _slots_in_turn([units[unit] for unit in ring], num_slots)
    slot_of: list[int | None] = [None] * len(units)
    for unit, slot in zip(ring, slots, strict=True):
        slot_of[unit] = slot
    before_forward: list[tuple[int, ...]] = [()] * len(units)
    before_backward: list[tuple[int, ...]] = [()] * len(units)
    for position, index in enumerate(order):
        ahead = _ahead(units, order[position + 1 :], num_slots - 1)
        # The second unit of the ring may have the slot of the first, and is not prefetched then.
        free = (other for other in ahead if slot_of[other] is None or slot_of[other] != slot_of[index])
        before_forward[index] = (index, *free)
        # The backward of a unit that holds others begins before theirs: that is too early to prefetch other units.
        others = () if units[index].holds_units else _ahead(units, order[:position][::-1], num_slots - 1)
        before_backward[index] = tuple(other for other in (index, *others) if units[other].backward_reads)
    return Schedule(
        tuple(units),
        tuple(order),
        tuple(slot_of),
        tuple(slot_bytes),
        tuple(before_forward),
        tuple(before_backward),
        before_forward[order[0]],
    )


def _slots_in_turn(ring: Sequence[UnitPlan], num_slots: int) -> tuple[list[int], list[int]]:
    """Return the slot of every unit in the ring, and the sizes of the slots.

    Two slots are used in turn. An embedding and a head are larger than blocks. If they would enlarge both slots, the
    embedding shares the slot of the first block: its backward gathers nothing, and its forward is short.
    """
    slots = [position % num_slots for position in range(len(ring))]
    found = slots, _slot_bytes(ring, slots)
    if num_slots == 2 and len(ring) > 2 and not ring[0].backward_reads:
        slots = [0, *slots[:-1]]
        found = min(found, (slots, _slot_bytes(ring, slots)), key=lambda each: sum(each[1]))
    return found


def _slot_bytes(ring: Sequence[UnitPlan], slots: Sequence[int]) -> list[int]:
    sizes = [0] * len(set(slots))
    for unit, slot in zip(ring, slots, strict=True):
        sizes[slot] = max(sizes[slot], unit.gathered_bytes)
    return sizes


def _ahead(units: Sequence[UnitPlan], following: Sequence[int], num_leaves: int) -> tuple[int, ...]:
    """The next units, until `num_leaves` of them hold no other unit: only those take slots."""
    found = []
    for unit in following:
        if num_leaves == 0:
            break
        found.append(unit)
        num_leaves -= not units[unit].holds_units
    return tuple(found)


def _ring_size(ring: Sequence[UnitPlan], budget_bytes: int | None) -> int:
    if budget_bytes is None or not ring:
        return 2
    largest = max(ring, key=attrgetter("gathered_bytes"))
    needed = largest.gathered_bytes
    if budget_bytes < needed:
        raise ConfigurationError(
            f"memory_budget={budget_bytes} bytes is less than one gathered unit needs: {largest.name!r} takes "
            f"{needed} bytes; raise the budget or cut the model into smaller units"
        )
    return max(1, min(len(ring), budget_bytes // max(needed, 1)))
