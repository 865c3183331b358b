"""The schedule is a value: everything about it is checked here without a process group, a GPU or a model."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.dtypes import BF16, FP32, DType
from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import PRESETS, Layout, layout_of
from shardwise.core.schedule.flat import Flat
from shardwise.core.schedule.model import Param, Site
from shardwise.core.schedule.step_schedule import Schedule, UnitPlan, make_schedule
from shardwise.core.wire.ledger import add_up
from shardwise.planner.events import Event, step_events
from tests.support.strategies import STRATEGIES

FORWARDS = "zero3+params_as=int8:forward"
LAYOUTS = [layout_of(chosen) for chosen in STRATEGIES.values() if isinstance(chosen, (str, Layout))]
LAYOUTS += [layout_of(FORWARDS), layout_of("hsdp+params_as=e4m3:forward"), layout_of("zero3+params_as=int8")]
UNIT_ELEMS = 1024
UNIT_BYTES = 2 * UNIT_ELEMS  # gathered, in bf16


def unit(
    name: str,
    layout: str | Layout = "zero3",
    *,
    num_elems: int = UNIT_ELEMS,
    holds_units: bool = False,
    backward_reads: bool = True,
    trainable: bool = True,
    compute: DType = BF16,
) -> UnitPlan:
    """One matrix in a world of four, two nodes of two."""
    row = layout_of(layout)
    sizes = {"world": 4, "node": 2, "replicate": 2}
    shape = (num_elems,)
    flat = Flat(
        params=(Param(f"{name}.weight", shape, FP32, trainable, (Site(name, "weight"),)),),
        layout=row,
        axis_sizes=tuple(sizes[axis] for axis in row.chain),
        axis_indices=(0,) * len(row.chain),
        compute=compute,
        master=FP32,
        reduce=FP32,
        trainable=trainable,
    )
    return UnitPlan(name, row, (flat,), holds_units=holds_units, backward_reads=backward_reads)


def schedule_of(units: list[UnitPlan], budget_bytes: int | None = None) -> Schedule:
    return make_schedule(units, range(len(units)), budget_bytes)


def short(events: list[Event]) -> list[str]:
    """ "forward a" and so on; gathers of nothing (the copy is the master) are left out."""
    return [f"{event.verb} {event.unit}" for event in events if event.verb != "gather" or event.calls]


def told(events: list[Event]) -> list[str]:
    """The same, and what gathers carry."""
    carried = iter([f" as {event.calls[0].dtype}" for event in events if event.verb == "gather" and event.calls])
    return [f"{name}{next(carried)}" if name.startswith("gather") else name for name in short(events)]


def named(layout: str, names: str = "abcd", **options: bool) -> list[UnitPlan]:
    return [unit(name, layout, **options) for name in names]


# ---------------------------------------------------------------------------------------------------------
# the order of events, written out


def test_zero3_step() -> None:
    """Two slots: each gather runs behind the computation before it, and c and d stay from forward to backward."""
    assert short(step_events(schedule_of(named("zero3")), first_step=True)) == [
        "gather a",
        "gather b",
        "forward a",
        "gather c",
        "forward b",
        "gather d",
        "forward c",
        "forward d",
        "backward d",
        "reduce d",
        "gather b",
        "backward c",
        "reduce c",
        "gather a",
        "backward b",
        "reduce b",
        "backward a",
        "reduce a",
        "agree all",
        *(f"update {name}" for name in "dcba"),
    ]


def test_later_steps_begin_before_the_forward() -> None:
    """Prefetch crosses the step boundary: the first units are gathered as soon as the masters have changed."""
    schedule = schedule_of(named("zero3"))
    assert schedule.after_step == (0, 1)
    later = short(step_events(schedule))
    assert later[:3] == ["gather a", "gather b", "forward a"]
    assert later == short(step_events(schedule, first_step=True))


def test_later_micro_batches_find_the_first_units_in_place() -> None:
    events = short(step_events(schedule_of(named("zero3")), num_micro_batches=2))
    second = events[events.index("reduce a") + 1 :]
    assert second[:4] == ["forward a", "gather c", "forward b", "gather d"]


def test_what_is_encoded_for_forwards_alone_is_gathered_again_for_the_backward() -> None:
    """Of what lies in slots and of the root, too. What the backward leaves there serves the next micro-batch."""
    units = [unit("root", FORWARDS, holds_units=True), *named(FORWARDS)]
    events = told(step_events(schedule_of(units), num_micro_batches=2))
    gathers = [name for name in events if not name.startswith(("reduce", "agree", "update"))]
    assert gathers == [
        "gather root as int8:forward",
        "gather a as int8:forward",
        "forward root",
        "gather b as int8:forward",
        "forward a",
        "gather c as int8:forward",
        "forward b",
        "gather d as int8:forward",
        "forward c",
        "forward d",
        "gather root as bfloat16",
        "gather d as bfloat16",
        "gather c as bfloat16",
        "backward d",
        "gather b as bfloat16",
        "backward c",
        "gather a as bfloat16",
        "backward b",
        "backward a",
        "backward root",
        "forward root",
        "forward a",
        "gather c as int8:forward",
        "forward b",
        "gather d as int8:forward",
        "forward c",
        "forward d",
        "gather d as bfloat16",
        "gather c as bfloat16",
        "backward d",
        "gather b as bfloat16",
        "backward c",
        "gather a as bfloat16",
        "backward b",
        "backward a",
        "backward root",
    ]


def test_weights_that_no_backward_reads_are_encoded_alone() -> None:
    units = [unit("embed", FORWARDS, backward_reads=False), *named(FORWARDS)]
    gathers = [name for name in told(step_events(schedule_of(units))) if name.startswith("gather embed")]
    assert gathers == ["gather embed as int8:forward"]


def test_frozen_weights_stay_as_a_backward_gathered_them() -> None:
    units = [unit("root", FORWARDS, holds_units=True, trainable=False), *named(FORWARDS)]
    first, later = (told(step_events(schedule_of(units), first_step=is_first)) for is_first in (True, False))
    assert [name for name in first if "gather root" in name] == [
        "gather root as int8:forward",
        "gather root as bfloat16",
    ]
    assert not [name for name in later if "gather root" in name]


@pytest.mark.parametrize("layout", ["zero1", "zero2"])
def test_whole_parameters_are_gathered_lazily(layout: str) -> None:
    """Not in a pass after the update, but each just before its forward; never again until the next update."""
    events = step_events(schedule_of(named(layout)), num_micro_batches=3)
    assert Counter(short(events))["gather a"] == 1
    assert short(events)[:6] == ["gather a", "gather b", "forward a", "gather c", "forward b", "gather d"]
    assert [event.unit for event in events if event.verb == "gather"] == list("abcd")
    first_backward = short(events).index("backward d")
    assert not any(name.startswith("gather") for name in short(events)[first_backward:])


def test_ddp_in_one_dtype_moves_gradients_only() -> None:
    units = [unit(name, "ddp", compute=FP32) for name in "ab"]
    events = step_events(schedule_of(units), num_micro_batches=2)
    assert not any(event.calls for event in events if event.verb not in ("reduce", "agree"))
    calls = [[call.kind for call in event.calls] for event in events if event.verb == "reduce"]
    assert calls == [[], [], ["all_reduce"], ["all_reduce"]]  # once a step


def test_shard_grad_op_gathers_once_for_forward_and_backward() -> None:
    events = short(step_events(schedule_of(named("shard_grad_op")), num_micro_batches=2))
    gathers = [name for name in events if name.startswith("gather")]
    assert gathers == [f"gather {name}" for name in "abcd"] * 2


def test_the_second_copy_of_hpz_is_refreshed_once_a_step() -> None:
    events = step_events(schedule_of(named("hpz")), num_micro_batches=3)
    axes = Counter(call.axis for event in events if event.verb == "gather" for call in event.calls)
    assert axes["replicate"] == 4
    assert axes["node"] > 4 * 3


def test_a_root_that_holds_units_is_gathered_once_a_step() -> None:
    units = [unit("root", holds_units=True), *named("zero3")]
    schedule = schedule_of(units)
    assert schedule.slot_of == (None, 0, 1, 0, 1)
    assert Counter(short(step_events(schedule, num_micro_batches=2)))["gather root"] == 1


def test_weights_that_the_backward_does_not_read_are_not_gathered_for_it() -> None:
    units = [unit("embed", backward_reads=False), *named("zero3")]
    events = short(step_events(schedule_of(units)))
    assert Counter(events)["gather embed"] == 1
    assert "backward embed" in events
    assert "reduce embed" in events


def test_frozen_units_are_neither_reduced_nor_updated() -> None:
    units = [unit("a"), unit("b", trainable=False), unit("c")]
    events = short(step_events(schedule_of(units)))
    assert "reduce b" not in events
    assert "update b" not in events
    assert schedule_of(units).reduce_order == (2, 0)


def test_frozen_units_that_stay_whole_are_not_gathered_again() -> None:
    units = [unit("a", "shard_grad_op"), unit("b", "zero2", trainable=False)]
    assert "gather b" not in short(step_events(schedule_of(units)))


def test_ranks_agree_on_use_once_a_step() -> None:
    """A number for each parameter that is trained, and one for the optimizers' settings, once for all micro-batches."""
    units = [unit("a"), unit("b", trainable=False), unit("c")]
    agreements = [event for event in step_events(schedule_of(units), 3) if event.verb == "agree"]
    assert [[(call.dtype, call.num_bytes) for call in event.calls] for event in agreements] == [[("int32", 12)]]


def test_gradients_are_reduced_in_reverse() -> None:
    schedule = make_schedule(named("zero3"), [2, 0, 1, 3], None)
    assert schedule.reduce_order == (3, 1, 0, 2)
    reduced = [event.unit for event in step_events(schedule) if event.verb == "reduce"]
    assert reduced == list("dbac")


def test_the_order_given_is_the_order_planned() -> None:
    schedule = make_schedule(named("zero3"), [2, 0, 1, 3], None)
    assert short(step_events(schedule))[:5] == ["gather c", "gather a", "forward c", "gather b", "forward a"]
    assert [schedule.slot_of[index] for index in (2, 0, 1, 3)] == [0, 1, 0, 1]


# ---------------------------------------------------------------------------------------------------------
# the byte budget


@pytest.mark.parametrize(("budget", "num_slots"), [(1, 1), (2, 2), (3, 3), (4, 4), (100, 4), (2.99, 2)])
def test_the_budget_is_the_number_of_slots(budget: float, num_slots: int) -> None:
    schedule = schedule_of(named("zero3"), int(budget * UNIT_BYTES))
    assert schedule.slot_bytes == (UNIT_BYTES,) * num_slots
    assert schedule.before_forward[0] == tuple(range(num_slots))
    assert schedule.before_backward[3] == tuple(reversed(range(4 - num_slots, 4)))
    assert schedule.after_step == tuple(range(num_slots))


def test_without_a_budget_one_unit_is_gathered_ahead() -> None:
    assert schedule_of(named("zero3")).slot_bytes == (UNIT_BYTES,) * 2
    assert schedule_of([unit("a")]).slot_bytes == (UNIT_BYTES,)


def test_one_slot_means_no_prefetch() -> None:
    events = short(step_events(schedule_of(named("zero3"), UNIT_BYTES)))
    assert events[:4] == ["gather a", "forward a", "gather b", "forward b"]


def test_as_many_slots_as_units_gather_each_once() -> None:
    events = short(step_events(schedule_of(named("zero3"), 4 * UNIT_BYTES), num_micro_batches=3))
    assert sum(name.startswith("gather") for name in events) == 4


def test_a_budget_below_one_unit_is_refused() -> None:
    units = [unit("small"), unit("large", num_elems=4 * UNIT_ELEMS)]
    with pytest.raises(ConfigurationError, match=r"memory_budget=8191 .*'large' takes 8192"):
        schedule_of(units, 4 * UNIT_BYTES - 1)


def test_a_slot_is_as_large_as_the_largest_unit_in_it() -> None:
    sizes = [1, 4, 2, 1]
    units = [unit(name, num_elems=size * UNIT_ELEMS) for name, size in zip("abcd", sizes, strict=True)]
    assert schedule_of(units).slot_bytes == (2 * UNIT_BYTES, 4 * UNIT_BYTES)


# ---------------------------------------------------------------------------------------------------------
# any units, any layouts, any order


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_units = draw(st.integers(1, 9))
    units = [
        unit(
            f"unit {index}",
            draw(st.sampled_from(LAYOUTS)),
            num_elems=draw(st.integers(1, 4)) * UNIT_ELEMS,
            holds_units=index == 0 and draw(st.booleans()),
            trainable=draw(st.integers(0, 4)) > 0,
            backward_reads=draw(st.integers(0, 4)) > 0,
        )
        for index in range(num_units)
    ]
    order = draw(st.permutations(range(num_units)))
    slots = draw(st.none() | st.integers(4, 24))
    return make_schedule(units, order, None if slots is None else slots * UNIT_BYTES)


@given(schedules(), st.integers(1, 3))
def test_whoever_computes_is_gathered(schedule: Schedule, num_micro: int) -> None:
    """Replay two steps on a memory of our own: no unit ever computes on stale, dropped or foreign memory."""
    index_of = {plan.name: index for index, plan in enumerate(schedule.units)}
    in_slot: dict[int, int] = {}
    in_own: set[int] = set()

    def is_there(index: int) -> bool:
        slot = schedule.slot_of[index]
        return index in in_own if slot is None else in_slot.get(slot) == index

    def leave(index: int) -> None:
        in_own.discard(index)
        for slot in [slot for slot, holder in in_slot.items() if holder == index]:
            del in_slot[slot]

    for event in step_events(schedule, num_micro, first_step=True) + step_events(schedule, num_micro):
        if event.verb == "agree":
            continue
        index = index_of[event.unit]
        plan = schedule.units[index]
        if event.verb == "gather":
            slot = schedule.slot_of[index]
            if slot is None:
                in_own.add(index)
            else:
                in_slot[slot] = index
        elif event.verb == "forward" or (event.verb == "backward" and plan.backward_reads):
            assert is_there(index), f"{event.verb} {event.unit} is not gathered"
        if event.verb == "update" or (event.verb == "backward" and plan.layout.gathered_until == "backward"):
            leave(index)


@given(schedules(), st.integers(1, 3))
def test_no_backward_reads_what_was_rounded_for_a_forward_alone(schedule: Schedule, num_micro: int) -> None:
    is_rounded: dict[str, bool] = {}
    reads = {plan.name for plan in schedule.units if plan.backward_reads}
    for event in step_events(schedule, num_micro, first_step=True) + step_events(schedule, num_micro):
        if event.verb == "gather" and event.calls:
            is_rounded[event.unit] = event.calls[0].dtype.endswith(":forward")
        if event.verb == "backward" and event.unit in reads:
            assert not is_rounded.get(event.unit), event.unit


@given(schedules(), st.integers(1, 3))
def test_every_unit_runs_once_each_way(schedule: Schedule, num_micro: int) -> None:
    events = step_events(schedule, num_micro)
    names = [schedule.units[index].name for index in schedule.order]
    for verb, expected in (("forward", names), ("backward", names[::-1])):
        assert [event.unit for event in events if event.verb == verb] == expected * num_micro
    trainable = [schedule.units[index].name for index in schedule.reduce_order]
    assert [event.unit for event in events if event.verb == "reduce"] == trainable * num_micro
    assert Counter(event.unit for event in events if event.verb == "update") == Counter(trainable)


@given(schedules())
def test_slots_fit_the_units_and_the_budget(schedule: Schedule) -> None:
    for index, slot in enumerate(schedule.slot_of):
        plan = schedule.units[index]
        if slot is None:
            assert plan.holds_units or plan.layout.gathered_until != "forward"
        else:
            assert plan.gathered_bytes <= schedule.slot_bytes[slot]
    ring = [index for index in schedule.order if schedule.slot_of[index] is not None]
    in_turn = [0] * len(schedule.slot_bytes)
    for position, index in enumerate(ring):
        slot = position % len(in_turn)
        in_turn[slot] = max(in_turn[slot], schedule.units[index].gathered_bytes)
    for position, (near, far) in enumerate(pairwise(ring)):
        if len(schedule.slot_bytes) > 1 and schedule.slot_of[near] == schedule.slot_of[far]:
            # Only the first two units of a ring share a slot, and only to save memory.
            assert position == 0
            assert not schedule.units[near].backward_reads
            assert far not in schedule.before_forward[near]
            assert sum(schedule.slot_bytes) < sum(in_turn)


def test_an_embedding_and_a_head_share_a_slot() -> None:
    units = [
        unit("embed", num_elems=4 * UNIT_ELEMS, backward_reads=False),
        *(unit(f"block {index}") for index in range(4)),
        unit("head", num_elems=4 * UNIT_ELEMS),
    ]
    schedule = schedule_of(units)
    assert schedule.slot_of == (0, 0, 1, 0, 1, 0)
    assert schedule.slot_bytes == (4 * UNIT_BYTES, UNIT_BYTES)
    gathers = Counter(event.unit for event in step_events(schedule) if event.verb == "gather")
    in_turn = schedule_of([*units[:2], *units[1:]])  # one block more: no two neighbours have to share
    assert in_turn.slot_of == (0, 1, 0, 1, 0, 1, 0)
    # The same number of gathers: the last two units of the forward are still there for the backward.
    assert gathers == {"embed": 1, "block 0": 2, "block 1": 2, "block 2": 2, "block 3": 1, "head": 1}


@given(st.lists(st.integers(1, 8), min_size=1, max_size=9), st.integers(8, 80))
def test_slots_never_exceed_the_budget(sizes: list[int], budget: int) -> None:
    units = [unit(f"unit {index}", num_elems=size * UNIT_ELEMS) for index, size in enumerate(sizes)]
    assert sum(schedule_of(units, budget * UNIT_BYTES).slot_bytes) <= budget * UNIT_BYTES


@given(schedules())
def test_accumulation_costs_zero1_and_ddp_nothing(schedule: Schedule) -> None:
    whole = [
        unit(plan.name, layout, num_elems=plan.flats[0].num_elems, trainable=plan.trainable)
        for plan in schedule.units
        for layout in [PRESETS["ddp"] if len(plan.name) % 2 else PRESETS["zero1"]]
    ]
    one, three = (
        add_up(call for event in step_events(schedule_of(whole), num_micro) for call in event.calls)
        for num_micro in (1, 3)
    )
    assert one == three
