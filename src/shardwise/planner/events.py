"""A training step as the list of everything that happens in it: the engine's schedule, run without tensors.

The planner costs this list, and the tests compare it with the ledger of a real step, byte for byte. An event may move
bytes between ranks (`calls`), and between the memories of its own rank (`moves`): between device and host over PCIe,
and between host and disk. `traffic_of` adds up the bytes of a list.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Literal

from ..base.dtypes import INT32, dtype_of
from ..base.intervals import pieces
from ..core.layout import Place
from ..core.schedule.flat import Buffer, Flat, Hop, Pass
from ..core.schedule.state_bytes import LOST, Way
from ..core.schedule.step_schedule import Schedule, UnitPlan
from ..core.schedule.unit_status import FlatGather, UnitStatus, statuses_of
from ..core.wire.codec import Codec, encoded_bytes
from ..core.wire.ledger import SHARE_OF_BUFFER, Call, Traffic, add_up, describe_call

Verb = Literal["gather", "forward", "stow", "fetch", "backward", "reduce", "agree", "norm", "update"]

ALL = "all"  # instead of a unit's name, in events that concern all units


@dataclass(frozen=True, slots=True)
class Move:
    way: Way
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a step. `host_elems`: number of elements that the host updates. For encoded collectives, the device
    reads and writes `encode_bytes` in its own memory before the first of `calls`, and `decode_bytes` after it.
    `blocks`: the computation waits for a gather or reduction, as in other engines; ours never does."""

    verb: Verb
    unit: str
    calls: tuple[Call, ...] = ()
    moves: tuple[Move, ...] = ()
    host_elems: int = 0
    encode_bytes: int = 0
    decode_bytes: int = 0
    blocks: bool = False


# A verb, a unit, and the other arguments of the function that makes the event.
_Action = tuple[Verb, int, tuple[object, ...]]


def step_events(
    schedule: Schedule,
    num_micro_batches: int = 1,
    *,
    first_step: bool = False,
    clips: bool = False,
    num_moments: float = 2,
) -> list[Event]:
    """Return the events of a step. Unless it is the first, it begins with gathers that the last update has started."""
    statuses = statuses_of(schedule)
    actions: list[_Action] = []
    if not first_step:
        for _ in _micro_batches(schedule, statuses, num_micro_batches):
            pass
        for status in statuses:
            status.invalidate()
        actions.extend(_gathers(statuses, schedule.after_step, "forward"))
    actions.extend(_micro_batches(schedule, statuses, num_micro_batches))
    # Units that share their flats move the same bytes, which are computed once.
    known: dict[tuple[object, ...], Event] = {}
    events: list[Event] = []
    for verb, index, args in actions:
        unit = schedule.units[index]
        own, shared = (verb, index, args), (verb, id(unit.flats), args)
        if own not in known:
            if shared not in known:
                known[shared] = _MAKERS[verb](unit, *args) if verb in _MAKERS else Event(verb, unit.name)
            same = known[shared]
            coding = same.encode_bytes, same.decode_bytes
            known[own] = Event(verb, unit.name, same.calls, same.moves, same.host_elems, *coding)
        events.append(known[own])
    # The ranks exchange which parameters were used, one number each, and a hash of their optimizers' settings.
    num_params, num_ranks = sum(len(flat.params) for flat in schedule.trainable_flats), schedule.num_ranks
    call = describe_call("all_reduce", "world", num_ranks, num_params + 1, INT32)
    events.append(Event("agree", ALL, (call,) if num_ranks > 1 and num_params else ()))
    if clips:
        events.append(Event("norm", ALL, tuple(_norm_calls(schedule))))
    events.extend(update_event(schedule.units[unit], num_moments) for unit in schedule.reduce_order)
    return events


def _micro_batches(schedule: Schedule, statuses: list[UnitStatus], num_micro_batches: int) -> Iterator[_Action]:
    for index in range(num_micro_batches):
        for unit in schedule.order:
            yield from _gathers(statuses, schedule.before_forward[unit], "forward")
            yield "forward", unit, ()
        yield from _gathers(statuses, schedule.read_holders, "backward")
        for unit in reversed(schedule.order):
            yield from _gathers(statuses, schedule.before_backward[unit], "backward")
            yield "backward", unit, ()
            if schedule.units[unit].gives_back:
                statuses[unit].lose()
            if schedule.units[unit].trainable:
                yield "reduce", unit, (index == 0, index == num_micro_batches - 1)


def _gathers(statuses: list[UnitStatus], units: Iterable[int], pass_: Pass) -> Iterator[_Action]:
    for unit in units:
        status = statuses[unit]
        if not status.is_ready(pass_):
            yield "gather", unit, (tuple(status.start_gather(pass_)),)
            status.finish_gather()


def _norm_calls(schedule: Schedule) -> Iterator[Call]:
    """The all-reduces of a gradient norm: one number for each set of axes that masters are split over."""
    splits = {
        tuple(zip(flat.layout.chain, flat.axis_sizes, strict=True))[: flat.depth_of_master]
        for flat in schedule.trainable_flats
    }
    for axis, size in chain.from_iterable(sorted(splits)):
        if size > 1:
            yield describe_call("all_reduce", axis, size, 1, dtype_of("float64"))


def gather_event(unit: UnitPlan, todo: Iterable[FlatGather]) -> Event:
    calls: list[Call] = []
    moves: Counter[Way] = Counter()
    encode_bytes = decode_bytes = 0
    for at, is_stale, is_encoded in todo:
        flat = unit.flats[at]
        for hop, num_ranks, num_elems in flat.moving(flat.master_hops if is_stale else flat.gather_hops):
            if flat.stored_codec is not None:
                calls.append(describe_call(hop.kind, hop.axis, num_ranks, num_elems, flat.moved))
            elif is_encoded:  # one encoded row for each rank's master, in all hops
                num_bytes = num_elems // flat.num_master * flat.row_bytes
                calls.append(Call(hop.kind, hop.axis, str(flat.params_codec), num_bytes, num_ranks))
            else:
                calls.append(describe_call(hop.kind, hop.axis, num_ranks, num_elems, flat.compute))
        _add_copies(moves, flat, is_stale)
        if flat.stored_codec is not None:
            decode_bytes += flat.num_elems + flat.whole_bytes
        elif is_encoded:
            # This rank's row is encoded from its master in the compute dtype. If the copy at rest is encoded, too,
            # rows are copied from it or, after an update, to it.
            if flat.copy_is_encoded:
                encode_bytes += 2 * flat.rest_bytes
            if is_stale or not flat.copy_is_encoded:
                encode_bytes += flat.num_master * flat.compute.itemsize + flat.row_bytes
            decode_bytes += flat.gathered_row_bytes + flat.num_elems * flat.compute.itemsize
    return Event("gather", unit.name, tuple(calls), _moves(moves), 0, encode_bytes, decode_bytes)


def _add_copies(moves: Counter[Way], flat: Flat, is_stale: bool) -> None:
    """Add the bytes that the copies of a gather move between the memories of this rank."""
    route = flat.route(is_stale)
    for target, source in (*route.before, *route.after):
        num_elems = flat.num_master if target in ("own", "own_in_rest") else flat.num_rest
        to, place = _place_of(flat, target), _place_of(flat, source)
        ways: dict[Way, bool] = {
            "read": place == "disk",
            "to_device": place != "device" and to == "device",
            "to_host": place == "device" and to != "device",
            "write": to == "disk",
        }
        moves.update({way: num_elems * flat.moved.itemsize for way, is_used in ways.items() if is_used})


def _place_of(flat: Flat, buffer: Buffer) -> Place:
    if buffer in ("own", "at_rest"):
        return "device"
    if buffer in ("staged", "disk"):
        return "disk"
    if buffer == "updated":
        return "device" if flat.master_on == "device" else "host"
    return flat.rest_on or "device"


def reduce_event(unit: UnitPlan, is_first: bool, is_last: bool) -> Event:
    """The reduction of a unit. Gradients on the host are copied to the device first, where the new ones are added."""
    calls: list[Call] = []
    moves: Counter[Way] = Counter()
    encode_bytes = decode_bytes = 0
    for flat in unit.flats:
        if flat.trainable:
            hops = flat.reduce_hops + (flat.sync_hops if is_last else ())
            if flat.grads_codec is None:
                moving = flat.moving(hops)
                calls.extend(describe_call(hop.kind, hop.axis, size, num, flat.reduce) for hop, size, num in moving)
            else:
                encoded, (first, *others) = _encoded_reduction(flat, flat.grads_codec, hops)
                calls.extend(encoded)
                encode_bytes += first
                decode_bytes += sum(others)
            if flat.grads_on_host and not is_first:
                moves["to_device"] += flat.num_grads * flat.reduce.itemsize
            if flat.host_updates and is_last:
                moves["to_host"] += flat.num_master * flat.reduce.itemsize
            elif flat.grads_on_host:
                moves["to_host"] += flat.num_grads * flat.reduce.itemsize
    return Event("reduce", unit.name, tuple(calls), _moves(moves), 0, encode_bytes, decode_bytes)


def _encoded_reduction(flat: Flat, codec: Codec, hops: Iterable[Hop]) -> tuple[list[Call], list[int]]:
    """Return the collectives of a reduction, and the bytes that its encodings and decodings read and write.

    In every hop, each rank receives the rows that it sums; then the rows of the sums are gathered, if all ranks need
    them. With feedback, the last error is added before the first encoding, and the new error is computed. This reads
    or writes the rows once more, the gradient three times, and the error six times.
    """
    calls: list[Call] = []
    coded: list[int] = []
    for hop, num_ranks, num_elems in flat.moving(hops):
        part, whole = num_elems // num_ranks * flat.reduce.itemsize, num_elems * flat.reduce.itemsize
        row = encoded_bytes(codec, num_elems // num_ranks)
        rows = num_ranks * row
        lost = 3 * whole + 6 * LOST.itemsize * num_elems + rows if codec.has_feedback else 0
        calls.append(Call("reduce_scatter", hop.axis, str(codec), rows, num_ranks))
        coded += [whole + rows + lost, rows + part]
        if hop.kind == "all_reduce":
            calls.append(Call("all_gather", hop.axis, str(codec), rows, num_ranks))
            coded += [part + row, rows + whole]
    return calls, coded or [0]


_MAKERS: dict[Verb, Callable[..., Event]] = {"gather": gather_event, "reduce": reduce_event}


def update_event(unit: UnitPlan, num_moments: float) -> Event:
    host_elems = 0
    moves: Counter[Way] = Counter()
    for flat in unit.flats:
        # A shard that holds nothing but padding is not updated.
        if flat.host_updates and any(pieces(flat.intervals, flat.spans[flat.depth_of_master])):
            host_elems += flat.num_master
            if flat.master_on == "disk":
                num_bytes = round(flat.num_master * flat.master.itemsize * (1 + num_moments))
                moves.update({"read": num_bytes, "write": num_bytes})
            if flat.rest_on == "disk" and flat.rest_is_own:
                moves["write"] += flat.num_master * flat.compute.itemsize
    return Event("update", unit.name, (), _moves(moves), host_elems)


def _moves(moves: Counter[Way]) -> tuple[Move, ...]:
    return tuple(Move(way, num_bytes) for way, num_bytes in moves.items())


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes that one rank moves in a step: its collectives by axis, as the ledger counts them; of these, inside and
    between nodes; and the moves between its memories.

    Bytes between nodes are those that have to cross a node's border: every element that the node lacks comes in once,
    and its ranks share the work. A ring through all ranks may carry more across the border; predicted seconds
    (`cost/step_time.py`) are those of the ring."""

    by_call: Traffic
    intra_node: float
    inter_node: float
    to_device: int
    to_host: int
    read: int
    write: int

    def continued(self, fewer: "StepTraffic", num: int) -> "StepTraffic":
        """Add `num` micro-batches. Each one adds the difference between this and `fewer`, which has one less."""

        def more(value: Any, last: Any, name: str) -> Any:
            one, other = getattr(value, name), getattr(last, name)
            return one + num * (one - other)

        rows = tuple(
            replace(row, **{name: more(row, last, name) for name in ("num_calls", "wire_bytes")})
            for row, last in zip(self.by_call.rows, fewer.by_call.rows, strict=True)
        )
        names = [entry.name for entry in fields(self) if entry.name != "by_call"]
        return StepTraffic(Traffic(rows), **{name: more(self, fewer, name) for name in names})

    @property
    def pcie(self) -> int:
        return self.to_device + self.to_host

    @property
    def disk(self) -> int:
        return self.read + self.write


def traffic_of(events: Sequence[Event], num_nodes: int, node_size: int) -> StepTraffic:
    calls = [call for event in events for call in event.calls]
    inter = sum(crossing_bytes(call, num_nodes, node_size) for call in calls)
    moved: dict[Way, int] = {"to_device": 0, "to_host": 0, "read": 0, "write": 0}
    for event in events:
        for move in event.moves:
            moved[move.way] += move.num_bytes
    by_call = add_up(calls)
    return StepTraffic(by_call, by_call.wire_bytes - inter, inter, **moved)


def crossing_bytes(call: Call, num_nodes: int, node_size: int) -> float:
    """Bytes of a collective that one rank has to take across its node's border."""
    if call.axis == "node" or num_nodes == 1:
        return 0.0
    if call.axis == "replicate":
        return call.wire_bytes
    return SHARE_OF_BUFFER[call.kind] * call.num_bytes * (num_nodes - 1) / num_nodes / node_size
