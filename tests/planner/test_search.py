"""Which strategy: memory that is there is filled, what is recommended is never slower than a preset that fits."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import PRESETS, layouts_for
from shardwise.planner.assess import Assessment, Assessor, Machine
from shardwise.planner.planning import Plan, _why, plan_for
from shardwise.planner.search import (
    HOST_GAIN,
    MIN_GAIN,
    MIXES,
    TIE,
    assess_best,
    changed_presets,
    choices,
    fastest,
    has_room,
    strategy_of,
)
from shardwise.planner.shapes.shape import StatesOnly
from shardwise.planner.states import states_of
from shardwise.planner.subject import subject_of
from shardwise.planner.training import Training
from tests.planner.planning import GB, MANY, assessed, assessor, choice_of, machine


def searched(on: Machine, training: Training | None = None, **settings: Any) -> Plan:
    training = training or Training()
    return plan_for(Assessor(subject_of(MANY, training), on), training, choice_of(training), has_disk=True, **settings)


def room_for(strategy: str, nodes: int = 1) -> int:
    """What it needs of a GPU, at most."""
    found = assessed(strategy, machine(nodes=nodes, free_bytes=10**13), MANY)
    return found.reserved.high + found.machine.context_bytes


def between(split: str, kept: str, nodes: int = 1) -> Machine:
    """A machine on which the one fits, and the other does not."""
    low, high = room_for(split, nodes), room_for(kept, nodes)
    assert low < high
    return machine(nodes=nodes, free_bytes=(low + high) // 2)


@pytest.mark.quick("1-6000000000", "1-20000000000", "2-9000000000", "2-40000000000")
@pytest.mark.parametrize("free_bytes", [6 * GB, 9 * GB, 12 * GB, 20 * GB, 40 * GB])
@pytest.mark.parametrize("nodes", [1, 2])
def test_nothing_that_fits_is_faster_than_what_is_recommended(free_bytes: int, nodes: int) -> None:
    found = searched(machine(nodes=nodes, free_bytes=free_bytes))
    best = found.recommended
    fitting = [entry for entry in found.found if has_room(entry) and entry.is_exact]
    if best is None:
        assert not any(entry.fits for entry in found.found)
        return
    assert best.fits
    for entry in fitting:
        is_simpler = (best.is_roomy and not entry.is_roomy) or (entry in mixed(found) and best not in mixed(found))
        gain = MIN_GAIN if is_simpler else 0.0
        gain = max(gain, HOST_GAIN[False]) if best.is_on_device and not entry.is_on_device else gain
        assert best.tokens_per_s * (1 + gain) >= entry.tokens_per_s * (1 - TIE)


def mixed(found: Plan) -> list[Assessment]:
    return [entry for entry in found.found if len(set(entry.layouts)) > 1]


def test_memory_that_is_left_keeps_units_gathered() -> None:
    found = searched(between("zero3", "shard_grad_op"))
    entry = next(entry for entry in mixed(found) if entry.name.startswith("zero3 + shard_grad_op"))
    zero3 = next(entry for entry in found.found if entry.name == "zero3")
    assert has_room(entry)
    assert entry.moved.by_call.wire_bytes < zero3.moved.by_call.wire_bytes
    assert entry.timing.step_s < zero3.timing.step_s


def test_one_unit_more_would_not_fit() -> None:
    on = between("zero3", "shard_grad_op")
    found = searched(on)
    entry = next(entry for entry in mixed(found) if entry.name.startswith("zero3 + shard_grad_op"))
    last_split = max(index for index, layout in enumerate(entry.layouts) if layout == PRESETS["zero3"])
    more = list(entry.layouts)
    more[last_split] = PRESETS["shard_grad_op"]
    assert entry.is_roomy
    assert not found.assess(entry.name, more, entry.training).is_roomy


@pytest.mark.parametrize("pair", MIXES, ids="+".join)
def test_mixtures_are_told_as_mappings_that_mean_the_same(pair: tuple[str, str]) -> None:
    """What `sw.shard` would be given makes the layouts that were planned."""
    assess = assessor(machine(nodes=2, free_bytes=10**12), shape=MANY)
    num = len(assess.unit_names)
    for num_kept in (1, 5, num // 2, num - 2):
        layouts = [PRESETS[pair[0]]] * (num - num_kept) + [PRESETS[pair[1]]] * num_kept
        entry = assess("mixed", layouts, Training())
        assert layouts_for(strategy_of(entry), assess.unit_names) == layouts


def test_every_strategy_of_a_plan_can_be_asked_for_again() -> None:
    found = searched(between("zero3", "zero2", nodes=2))
    names = found.assess.unit_names
    assert len(mixed(found)) > 1
    for entry in found.found:
        assert tuple(layouts_for(strategy_of(entry), names)) == entry.layouts


def test_no_search_no_mixtures() -> None:
    found = searched(between("zero3", "zero2"), search=False)
    assert [entry.name for entry in found.found] == [*PRESETS]


def test_the_least_checkpointing_that_fits_is_taken() -> None:
    training = Training(micro_batch=4)
    needed = {
        mode: assessed("zero3", machine(free_bytes=10**12), MANY, micro_batch=4, checkpointing=mode).safe_bytes
        for mode in ("none", "selective", "full")
    }
    for mode, num_bytes in needed.items():
        assess = assessor(machine(free_bytes=num_bytes), shape=MANY)
        layouts = [PRESETS["zero3"]] * len(assess.unit_names)
        best = assess_best(assess, "zero3", layouts, choices(training, ("none", "selective", "full"), [(4, 1)]))
        assert best.training.checkpointing == mode


def test_a_larger_micro_batch_is_taken_where_it_is_faster() -> None:
    training = Training()
    assess = assessor(machine(free_bytes=10**12), shape=MANY)
    layouts = [PRESETS["zero3"]] * len(assess.unit_names)
    best = assess_best(assess, "zero3", layouts, choices(training, ("none",), [(1, 8), (2, 4), (4, 2), (8, 1)]))
    assert best.training.micro_batch == 8


def test_where_nothing_fits_the_one_that_needs_least_is_told() -> None:
    found = searched(machine(free_bytes=GB))
    assert found.recommended is None
    assert found.why.startswith("nothing fits: ")
    assert "nothing fits: zero3_offload needs" in found.why


def test_of_two_that_are_as_fast_the_simpler_one() -> None:
    entries = [assessed(name, machine(gpus=1)) for name in ("ddp", "zero1", "zero3")]
    assert fastest(entries) is entries[0]
    assert fastest([]) is None


# ---------------------------------------------------------------------------------------------------------
# what rounds


def slow_network() -> Machine:
    return machine(nodes=8, network="ethernet-10")


def test_what_rounds_is_shown_and_not_recommended() -> None:
    found = searched(slow_network(), search=False)
    by_name = {entry.name: entry for entry in found.found}
    assert found.recommended is not None
    assert found.recommended.is_exact
    assert by_name["zeropp"].fits
    assert by_name["zeropp"].tokens_per_s > by_name["hpz"].tokens_per_s
    assert max(found.found, key=lambda entry: entry.tokens_per_s) is by_name["zeropp"]
    assert found.why.startswith("the fastest that fits and is exact, ")


def test_what_was_asked_for_is_recommended_though_it_rounds() -> None:
    found = searched(slow_network(), strategy="zero3+params_as=int8+grads_as=int4")
    assert found.recommended is found.found[0]
    assert not found.recommended.is_exact
    assert found.why.startswith("it fits, ")  # nothing was compared
    assert searched(machine(), strategy="zero2_offload").why.startswith("it fits, ")


def test_what_is_exact_alone() -> None:
    found = searched(slow_network(), only_exact=True, search=False)
    assert [entry.name for entry in found.found] == [name for name, layout in PRESETS.items() if layout.is_exact]


def test_where_only_something_that_rounds_fits_it_is_named() -> None:
    assess, exact = assessor(machine(free_bytes=GB)), assessed("zero3", machine(free_bytes=GB))
    assert _why(assess, [exact], None).startswith("nothing fits: zero3 needs")
    told = _why(assess, [exact, assessed("zeropp")], None)
    assert told.startswith("nothing exact fits: zero3 needs")
    assert told.endswith(". zeropp would fit, and rounds what is sent: ask for it")


def test_what_rounds_and_does_not_fit_has_a_remedy() -> None:
    """Its copy at rest stays on the device."""
    found = searched(machine(nodes=2, free_bytes=4 * GB), search=False)
    assert not next(entry for entry in found.found if entry.name == "zeropp").fits
    assert found.refusals["zeropp"].startswith("--")


@pytest.mark.parametrize("codec", ["int8", "int8:forward"])
def test_auto_with_a_codec_is_planned(codec: str) -> None:
    found = searched(slow_network(), strategy=f"auto+params_as={codec}", search=False)
    names = [entry.name for entry in found.found]
    assert names == [layout.name for layout in changed_presets([f"params_as={codec}"])]
    assert f"zero3+params_as={codec}" in names
    assert not any(entry.is_exact for entry in found.found)
    best = found.recommended
    assert best is not None
    assert best.tokens_per_s >= (1 - TIE) * max(entry.tokens_per_s for entry in found.found if entry.fits)
    assert found.why.startswith(f"the fastest that fits with params_as={codec}, ")
    assert searched(slow_network(), strategy="Auto", search=False).why == searched(slow_network(), search=False).why


def test_auto_with_a_codec_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="16 values are too few for weights"):
        searched(machine(), strategy="auto+params_as=int4")
    with pytest.raises(ConfigurationError, match=r"'zero1\+params_as=int8' with engine 'fsdp2', which has zero3, "):
        searched(machine(), Training(engine="fsdp2"), strategy="auto+params_as=int8")
    with pytest.raises(ConfigurationError, match=r"'auto\+params_as=int8' chooses for the whole model"):
        searched(machine(), strategy={"*": "auto+params_as=int8"})


def test_auto_with_a_codec_of_a_model_known_by_its_size() -> None:
    rows = states_of(StatesOnly(7 * 10**9), machine(nodes=2), Training(), "auto+params_as=int8:forward").rows
    assert [row.name for row in rows] == ["zero3+params_as=int8:forward", "hsdp+params_as=int8:forward"]
    both, once, exact = (
        states_of(StatesOnly(7 * 10**9), machine(nodes=2), Training(), name).rows[0].moved.inter_node
        for name in ("zero3+params_as=int8", rows[0].name, "zero3")
    )
    assert exact - once == pytest.approx(once - both)  # one of two gathers


def test_auto_with_a_codec_changes_every_preset_that_it_can() -> None:
    both = changed_presets(["params_as=int8", "grads_as=int4:feedback"])
    assert {(layout.params_as, layout.grads_as) for layout in both} == {("int8", "int4:feedback")}
    names = [layout.name.partition("+")[0] for layout in both]
    assert "ddp" not in names  # its parameters are never sent
    assert {"zero1", "zero3", "hsdp", "hpz"} <= set(names)
    assert all(layout.is_exact for layout in changed_presets(["optimizer=host"]))
    with pytest.raises(ConfigurationError, match="16 values are too few for weights"):
        changed_presets(["params_as=int4"])
