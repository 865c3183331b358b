"""One flat buffer of a unit as a pure value: the parameters in it, and every hop that gathers or reduces it.

Parameters of one unit with the same dtypes, trainability and optimizer share a flat. Each axis of the layout's chain
splits it further; `spans[d]` is the part that this rank holds after d splits. Parameters, gradients and optimizer are
each split down to a depth of the chain, so every layout is three numbers (P, G, O):

    gather   master at depth O -> copy at rest at depth P -> whole at depth 0
    reduce   whole at depth 0 -> gradient at depth G, each micro-batch -> depth O, once a step

Over the axes after O, which do not split the optimizer, an all-reduce sums gradients once a step. Frozen parameters
have no optimizer: their master is at depth P. The words are explained in `unit/__init__.py`.

Encoded parameters have a flat of their own: matrices are encoded, the rest of a unit is exact. While they are sent, the
parts of the ranks are rows of bytes (`wire/collectives.py`), and so is a copy at rest made of several masters.

Frozen matrices may be stored encoded (`frozen_as`). The elements of their flat are the encoded bytes: these are split,
offloaded and gathered like any other weights, and then decoded, one parameter after the other.

Parameters, gradients and optimizer also have a place each. If the optimizer is not on the device, the host updates: it
reads the gradient in host memory, and writes the new weights there in the compute dtype.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from ...base.dtypes import BF16, FP16, FP32, UINT8, DType
from ...base.intervals import BLOCK_ELEMS, nested_shards, place
from ..layout import Layout, Place
from ..precision import Precision
from ..wire.codec import AS_IS, Codec, encoded_bytes, parse
from ..wire.ledger import Kind
from .model import Param, UnitSpec, matches

# The pass that parameters are gathered for.
Pass = Literal["forward", "backward"]
# Memory that a gather copies from or to. In `whole`: this rank's part (`own`) and the part that the copy at rest
# covers (`at_rest`; rows of it, if the copy is encoded). Elsewhere: this rank's newest weights (`updated`), the copy at
# rest (`rest`), this rank's part of that (`own_in_rest`), what was read from disk (`staged`), and the disk itself.
Buffer = Literal["updated", "rest", "own_in_rest", "staged", "own", "at_rest", "disk"]


@dataclass(frozen=True, slots=True)
class Hop:
    """One collective over `axis`, in place on the part of the flat that a rank holds at `depth`."""

    kind: Kind
    axis: str
    depth: int


class Copy(NamedTuple):
    target: Buffer
    source: Buffer


class Route(NamedTuple):
    """The copies of a gather on this rank: `before` its first hop, and `after` the hops that refresh the copy at rest,
    which run in the buffer `refreshed`. The engine makes these copies, and the prediction counts their bytes."""

    before: tuple[Copy, ...]
    refreshed: Literal["whole", "rest"] = "whole"
    after: tuple[Copy, ...] = ()


@dataclass(unsafe_hash=True)
class Flat:
    """One flat of a unit. Everything else follows from these fields; none of it ever changes."""

    params: tuple[Param, ...]
    layout: Layout
    axis_sizes: tuple[int, ...]
    axis_indices: tuple[int, ...]
    compute: DType
    master: DType
    reduce: DType
    trainable: bool

    def __post_init__(self) -> None:
        layout, sizes = self.layout, self.axis_sizes
        self.optimizer = self.params[0].optimizer  # the number of the optimizer that updates it
        self.num_ranks = prod(sizes)  # all: the axes of a chain make up the world
        self.depth_of_params, self.depth_of_grads = layout.depth(layout.params), layout.depth(layout.grads)
        self.depth_of_master = depth = layout.depth(layout.optimizer) if self.trainable else self.depth_of_params
        # The codec in which weights are stored, and the dtype in which they are moved: bytes, if there is a codec.
        self.stored_codec = parse(layout.frozen_as) if self.master == UINT8 else None
        self.moved = self.compute if self.stored_codec is None else UINT8
        # The codecs of gathers and reductions; None if nothing is encoded or nothing is sent.
        self.params_codec = self._codec(layout.params_as, prod(sizes[:depth]) > 1)
        self.grads_codec = self._codec(layout.grads_as, self.trainable and self.num_ranks > 1)
        # Parameters are encoded for a forward, and exact for a backward.
        self.rounds_forwards = self.params_codec is not None and self.params_codec.is_forward_only
        self._place_params()
        self.refresh_hops = self._hops("all_gather", reversed(range(self.depth_of_params, depth)))
        self.gather_hops = self._hops("all_gather", reversed(range(self.depth_of_params)))
        # From the master to the whole, also for reading weights in full precision.
        self.master_hops = self.refresh_hops + self.gather_hops
        self.reduce_hops = self._hops("reduce_scatter", range(self.depth_of_grads))
        sums = tuple(Hop("all_reduce", axis, depth) for axis in layout.chain[depth:])
        self.sync_hops = self._hops("reduce_scatter", range(self.depth_of_grads, depth)) + sums
        self._choose_places()
        self._count_bytes()

    def _codec(self, name: str, is_sent: bool) -> Codec | None:
        is_encoded = name != AS_IS and is_sent and any(param.num_elems for param in self.params)
        return parse(name) if is_encoded else None

    def _hops(self, kind: Kind, depths: Iterable[int]) -> tuple[Hop, ...]:
        return tuple(Hop(kind, self.layout.chain[depth], depth) for depth in depths)

    def _place_params(self) -> None:
        depth, codecs = self.depth_of_master, (self.params_codec, self.grads_codec)
        block = max([BLOCK_ELEMS, *(codec.block for codec in codecs if codec is not None)])
        # In an encoded all-reduce each rank of the axis sums a part, so the flat must be divisible by all axes.
        num_shards = prod(self.axis_sizes[:depth]) if self.grads_codec is None else self.num_ranks
        # The parameters as the master and checkpoints have them.
        self.stored_params = tuple(map(self._as_stored, self.params))
        sizes = [param.num_elems for param in self.stored_params]
        self.intervals, self.num_elems = place(sizes, num_shards, block)
        # The same for weights as the model reads them.
        self.whole_intervals, self.num_whole = self.intervals, self.num_elems
        if self.stored_codec is not None:
            self.whole_intervals, self.num_whole = place([param.num_elems for param in self.params], 1)
        self.spans = nested_shards(self.num_elems, self.axis_sizes[:depth], self.axis_indices[:depth])
        # Elements on this rank.
        self.num_master = self.spans[depth].num_elems
        self.num_rest = self.spans[self.depth_of_params].num_elems
        self.num_grads = self.spans[min(self.depth_of_grads, depth)].num_elems

    def _choose_places(self) -> None:
        layout, place = self.layout, self.layout.params_on
        self.master_on: Place = layout.optimizer_on if self.trainable else place
        # The host runs the update, with its state on the host or on disk.
        self.host_updates = self.trainable and self.master_on != "device"
        # Gradients are on the host between micro-batches, too; otherwise they leave the device when final.
        self.grads_on_host = self.host_updates and layout.grads_on == "host"
        # Gradients are reduced in a slot: their own memory holds only a part of them, or is not on the device.
        self.reduces_in_slot = self.trainable and (self.depth_of_grads > 0 or self.grads_on_host)
        # The master is the compute copy: same dtype, same place, nothing to gather.
        is_compute = self.master == self.moved
        is_whole = self.depth_of_master == 0 and is_compute and self.master_on == "device"
        self.master_is_whole = is_whole and self.stored_codec is None
        # The place of the copy at rest, which is `params_on`, or None. There is one if the master is split further, is
        # in another place, lies on disk among the moments, or is off the device and not in the compute dtype.
        is_other = self.depth_of_params < self.depth_of_master or self.master_on != place
        needs_compute_copy = (place == "disk" and self.trainable) or (place != "device" and not is_compute)
        has_rest = (is_other or needs_compute_copy) and layout.gathered_until != "always"
        self.rest_on: Place | None = place if has_rest else None
        # The copy at rest has exactly the elements that this rank updates.
        self.rest_is_own = self.rest_on is not None and self.depth_of_params == self.depth_of_master
        # The copy at rest stays encoded, as it arrived.
        self.copy_is_encoded = self.params_codec is not None and self.rest_on == "device" and not self.rest_is_own
        # Updated weights have memory of their own on the host, unless they are written to the copy at rest, or are the
        # master itself.
        is_written = (self.master_on == "host" and is_compute) or (self.rest_is_own and self.rest_on != "device")
        self.has_out = self.host_updates and not is_written
        # Updated weights are in the compute dtype on the host.
        self.updates_copy = self.has_out or (self.rest_on == "host" and self.rest_is_own)
        # Its update may run ahead of the step. Not with parameters on disk: the backward itself keeps the disk busy.
        writes_to_disk = self.rest_on == "disk" and self.rest_is_own
        self.may_update_ahead = self.host_updates and not writes_to_disk
        # Weights are read from disk, through staging memory. Updated weights that stay on the host need no disk.
        is_read = self.rest_on is None and self.master_on == "disk" and not self.has_out
        self.is_staged = self.rest_on == "disk" or is_read

    def _count_bytes(self) -> None:
        # Parameters on their way from disk to the device.
        self.staged_bytes = self.num_rest * self.moved.itemsize if self.is_staged else 0
        # Sizes of one rank's encoded master, of all rows of a gather in flight, and of a copy at rest on the device.
        self.row_bytes = 0 if self.params_codec is None else encoded_bytes(self.params_codec, self.num_master)
        self.gathered_row_bytes = self.num_elems // self.num_master * self.row_bytes if self.row_bytes else 0
        # Stored bytes are gathered where encoded rows are; if this rank has them all, they are decoded where they are.
        if self.stored_codec is not None and (self.num_master < self.num_elems or self.master_on != "device"):
            self.gathered_row_bytes = self.num_elems
        self.whole_bytes = self.num_whole * self.compute.itemsize
        self.rest_bytes = self.num_rest * self.moved.itemsize
        if self.copy_is_encoded:
            self.rest_bytes = self.num_rest // self.num_master * self.row_bytes
        # The whole gradient in a reduction slot.
        self.reduced_bytes = self.num_elems * self.reduce.itemsize if self.reduces_in_slot else 0
        # The bytes of a reduction's rows, sent and received, in its largest hop; and the number of elements, over all
        # hops, whose encoding error is saved for feedback.
        self.exchanged_bytes = self.num_lost = 0
        codec = self.grads_codec
        if codec is not None:
            moving = [(ranks, elems) for _, ranks, elems in self.moving(self.reduce_hops + self.sync_hops)]
            self.exchanged_bytes = max(2 * ranks * encoded_bytes(codec, elems // ranks) for ranks, elems in moving)
            self.num_lost = sum(elems for _, elems in moving) if codec.has_feedback else 0

    def _as_stored(self, param: Param) -> Param:
        """The same parameter, or its encoded bytes, under a name that says how they are encoded."""
        codec = self.stored_codec
        if codec is None:
            return param
        sites = tuple(replace(site, attribute=f"{site.attribute}.{codec}") for site in param.sites)
        shape = (encoded_bytes(codec, param.num_elems),)
        return replace(param, name=f"{param.name}.{codec}", shape=shape, dtype=UINT8, sites=sites)

    def is_encoded_for(self, pass_: Pass) -> bool:
        """True if a gather needs memory for encoded bytes."""
        if self.stored_codec is not None:
            return self.gathered_row_bytes > 0
        return self.params_codec is not None and (pass_ == "forward" or not self.rounds_forwards)

    @cached_property
    def _routes(self) -> tuple[Route, Route]:
        newest: Buffer = "staged" if self.is_staged else "updated" if self.rest_on is None else "rest"
        if self.rest_on is None or self.rest_is_own:
            bring = Copy("own", newest)
            refresh = (Copy("rest", "updated"),) if self.rest_on == "device" else ()
            return Route((bring,)), Route((*refresh, bring))
        fresh = Route((Copy("at_rest", newest),))
        if self.rest_on == "device" and not self.copy_is_encoded:
            return fresh, Route((Copy("own_in_rest", "updated"),), "rest", (Copy("at_rest", "rest"),))
        after = Copy("disk" if self.rest_on == "disk" else "rest", "at_rest")
        return fresh, Route((Copy("own", "updated"),), after=(after,))

    def route(self, is_stale: bool) -> Route:
        """Copies of a gather; `is_stale`: the master is newer than the copy at rest."""
        return self._routes[is_stale]

    def moving(self, hops: Iterable[Hop]) -> Iterator[tuple[Hop, int, int]]:
        """Yield the hops that move data, each with its numbers of ranks and elements."""
        sizes = dict(zip(self.layout.chain, self.axis_sizes, strict=True))
        for hop in hops:
            num_elems = self.spans[hop.depth].num_elems
            if sizes[hop.axis] > 1 and num_elems:
                yield hop, sizes[hop.axis], num_elems


def flats_of(
    unit: UnitSpec, layout: Layout, precision: Precision, axes: dict[str, tuple[int, int]], keep_fp32: Sequence[str]
) -> tuple[Flat, ...]:
    """Sort a unit's parameters into flats. `axes` maps an axis to its size and this rank's index."""
    groups: dict[tuple[DType, DType, DType, bool, Layout, int], list[Param]] = {}
    is_quantized = {
        param.name: layout.frozen_as != AS_IS
        and is_quantizable(param)
        and not matches(param.sites[0].module, keep_fp32)
        for param in unit.params
    }
    if any(is_quantized.values()):
        layout = layout.dropping
    on_device = kept_params(unit.params, layout.kept)
    for param in unit.params:
        kept = matches(param.sites[0].module, keep_fp32)
        compute = FP32 if kept else precision.compute
        master = (FP32 if kept else precision.master) if param.trainable else param.dtype
        own = layout.on_device if param.name in on_device else layout
        own = own if is_encodable(param) and not kept and not is_quantized[param.name] else own.exact
        master = UINT8 if is_quantized[param.name] else master
        # Original dtypes have flats of their own, too: whole weights are returned in them, each flat in one piece.
        groups.setdefault((compute, master, param.dtype, param.trainable, own, param.optimizer), []).append(param)
    flats = []
    for (compute, master, _, trainable, own, _), params in groups.items():
        sizes, indices = zip(*(axes[axis] for axis in own.chain), strict=True)
        flats.append(Flat(tuple(params), own, sizes, indices, compute, master, precision.reduce, trainable))
    return tuple(flats)


def is_encodable(param: Param) -> bool:
    """True for matrices, except embedding tables, whose errors reach everything. Norms and biases are small."""
    return len(param.shape) > 1 and not param.is_table


def is_quantizable(param: Param) -> bool:
    """True for frozen matrices of repeated blocks, whose modules lie in a numbered list. Heads, tables and adapters are
    not."""
    is_matrix = len(param.shape) == 2 and param.num_elems > 0 and param.dtype in (FP32, BF16, FP16)
    return (
        is_matrix
        and not (param.trainable or param.is_table)
        and all(site.attribute == "weight" and is_in_block(site.module.split(".")) for site in param.sites)
    )


def is_in_block(words: Sequence[str]) -> bool:
    """True for the parts of a module's name in a repeated block, without adapters."""
    of_adapters = [word for word in words if word.startswith(("lora_", "modules_to_save"))]
    return any(word.isdecimal() for word in words) and not of_adapters


def kept_params(params: Sequence[Param], part: float) -> set[str]:
    """Names of the largest trained parameters that together have at most this part of all trained elements."""
    trained = [param for param in params if param.trainable]
    room = part * sum(param.num_elems for param in trained)
    kept: set[str] = set()
    for param in sorted(trained, key=lambda param: -param.num_elems) if room else ():
        if param.num_elems <= room:
            kept.add(param.name)
            room -= param.num_elems
    return kept
