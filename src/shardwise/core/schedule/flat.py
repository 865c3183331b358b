"""One flat buffer of a unit as a pure value: the parameters in it, and every hop that gathers or reduces it.

Parameters of one unit with the same dtypes, trainability and optimizer share a flat. The layout's chain of axes splits
it again and again; `spans[d]` is the part that this rank holds after d splits. Parameters, gradients and optimizer are
each split down to a depth of the chain, so every layout is three numbers (P, G, O):

    gather   master at depth O -> copy at rest at depth P -> whole at depth 0
    reduce   whole at depth 0 -> gradient at depth G, each micro-batch -> depth O, once a step

Over the axes behind O, which do not split the optimizer, an all-reduce sums gradients once a step. Frozen parameters
have no optimizer: their master is at depth P. The words are explained in `unit/__init__.py`.

Encoded parameters have a flat of their own: matrices are encoded, the rest of a unit is exact. While they are sent, the
parts of the ranks are rows of bytes (`wire/collectives.py`), and so is a copy at rest made of several masters.

Parameters, gradients and optimizer also have a place each. If the optimizer is not on the device, the host updates: it
reads the gradient in host memory, and writes the new weights there in the compute dtype.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from ...base.dtypes import FP32, DType
from ...base.intervals import BLOCK_ELEMS, Interval, nested_shards, place
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


@dataclass(frozen=True)
class Flat:
    params: tuple[Param, ...]
    layout: Layout
    axis_sizes: tuple[int, ...]
    axis_indices: tuple[int, ...]
    compute: DType
    master: DType
    reduce: DType
    trainable: bool

    @property
    def optimizer(self) -> int:
        """The number of the optimizer that updates it."""
        return self.params[0].optimizer

    @property
    def num_ranks(self) -> int:
        """All ranks: the axes of a chain make up the world."""
        return prod(self.axis_sizes)

    @cached_property
    def depth_of_params(self) -> int:
        return self.layout.depth(self.layout.params)

    @cached_property
    def depth_of_grads(self) -> int:
        return self.layout.depth(self.layout.grads)

    @cached_property
    def depth_of_master(self) -> int:
        return self.layout.depth(self.layout.optimizer) if self.trainable else self.depth_of_params

    @cached_property
    def params_codec(self) -> Codec | None:
        """The codec of gathers; None if parameters are not encoded or not sent."""
        return self._codec(self.layout.params_as, prod(self.axis_sizes[: self.depth_of_master]) > 1)

    @cached_property
    def rounds_forwards(self) -> bool:
        """Parameters are encoded for a forward, and exact for a backward."""
        return self.params_codec is not None and self.params_codec.is_forward_only

    def is_encoded_for(self, pass_: Pass) -> bool:
        return self.params_codec is not None and (pass_ == "forward" or not self.rounds_forwards)

    @cached_property
    def grads_codec(self) -> Codec | None:
        return self._codec(self.layout.grads_as, self.trainable and self.num_ranks > 1)

    def _codec(self, name: str, is_sent: bool) -> Codec | None:
        is_encoded = name != AS_IS and is_sent and any(param.num_elems for param in self.params)
        return parse(name) if is_encoded else None

    @cached_property
    def _placed(self) -> tuple[tuple[Interval, ...], int]:
        sizes = [param.num_elems for param in self.params]
        codecs = [codec for codec in (self.params_codec, self.grads_codec) if codec is not None]
        # An encoded all-reduce is computed by all ranks, each its part: so the flat is divided by all axes.
        depth = self.depth_of_master if self.grads_codec is None else len(self.axis_sizes)
        return place(sizes, prod(self.axis_sizes[:depth]), max([BLOCK_ELEMS, *(codec.block for codec in codecs)]))

    @property
    def intervals(self) -> tuple[Interval, ...]:
        return self._placed[0]

    @property
    def num_elems(self) -> int:
        return self._placed[1]

    @cached_property
    def spans(self) -> tuple[Interval, ...]:
        depth = self.depth_of_master
        return nested_shards(self.num_elems, self.axis_sizes[:depth], self.axis_indices[:depth])

    @cached_property
    def master_on(self) -> Place:
        return self.layout.optimizer_on if self.trainable else self.layout.params_on

    @cached_property
    def host_updates(self) -> bool:
        """The host runs the update, with its state on the host or on disk."""
        return self.trainable and self.master_on != "device"

    @cached_property
    def grads_on_host(self) -> bool:
        """Gradients are on the host between micro-batches, too; otherwise they leave the device when final."""
        return self.host_updates and self.layout.grads_on == "host"

    @cached_property
    def reduces_in_slot(self) -> bool:
        """Gradients are reduced in a slot: their own memory holds only a part of them, or is not on the device."""
        return self.trainable and (self.depth_of_grads > 0 or self.grads_on_host)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of its whole gradient in a reduction slot."""
        return self.num_elems * self.reduce.itemsize if self.reduces_in_slot else 0

    @cached_property
    def master_is_whole(self) -> bool:
        """The master is the compute copy: same dtype, same place, nothing to gather."""
        return self.depth_of_master == 0 and self.master == self.compute and self.master_on == "device"

    @cached_property
    def rest_on(self) -> Place | None:
        """The place of the copy at rest, which is `params_on`, or None. There is one if the master is split further, is
        in another place, lies on disk among the moments, or is off the device in another dtype than is computed in."""
        place = self.layout.params_on
        is_other = self.depth_of_params < self.depth_of_master or self.master_on != place
        is_larger = place != "device" and self.master != self.compute
        is_among_moments = place == "disk" and self.trainable
        return place if self.depth_of_params and (is_other or is_larger or is_among_moments) else None

    @cached_property
    def rest_is_own(self) -> bool:
        """The copy at rest has exactly the elements that this rank updates."""
        return self.rest_on is not None and self.depth_of_params == self.depth_of_master

    @cached_property
    def has_out(self) -> bool:
        """Updated weights have memory of their own on the host, unless they are written to the copy at rest, or are the
        master itself."""
        is_master = self.master_on == "host" and self.master == self.compute
        is_rest = self.rest_is_own and self.rest_on != "device"
        return self.host_updates and not is_master and not is_rest

    @cached_property
    def is_staged(self) -> bool:
        """Weights are read from disk, through staging memory. Updated weights that stay on the host need no disk."""
        return self.rest_on == "disk" or (self.rest_on is None and self.master_on == "disk" and not self.has_out)

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

    @property
    def copy_is_encoded(self) -> bool:
        """The copy at rest stays encoded, as it arrived."""
        return self.params_codec is not None and self.rest_on == "device" and not self.rest_is_own

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a rank's master, encoded."""
        return 0 if self.params_codec is None else encoded_bytes(self.params_codec, self.num_master)

    @property
    def rest_bytes(self) -> int:
        """Bytes of a copy at rest on the device."""
        if self.copy_is_encoded:
            return self.num_rest // self.num_master * self.row_bytes
        return self.num_rest * self.compute.itemsize

    @cached_property
    def gathered_row_bytes(self) -> int:
        """Bytes of the rows of a gather in flight."""
        return self.num_elems // self.num_master * self.row_bytes if self.row_bytes else 0

    @cached_property
    def exchanged_bytes(self) -> int:
        """Bytes of the rows of a reduction in flight: sent and received, in the largest of its hops."""
        codec = self.grads_codec
        if codec is None:
            return 0
        moving = self.moving(self.reduce_hops + self.sync_hops)
        return max(2 * num_ranks * encoded_bytes(codec, num_elems // num_ranks) for _, num_ranks, num_elems in moving)

    @property
    def num_lost(self) -> int:
        """Elements, over all hops, whose encoding error is saved for feedback."""
        if self.grads_codec is None or not self.grads_codec.has_feedback:
            return 0
        return sum(num_elems for _, _, num_elems in self.moving(self.reduce_hops + self.sync_hops))

    @property
    def num_master(self) -> int:
        """Elements of the master on this rank."""
        return self.spans[self.depth_of_master].num_elems

    @property
    def num_rest(self) -> int:
        return self.spans[self.depth_of_params].num_elems

    @property
    def num_grads(self) -> int:
        return self.spans[self.depth_of_grads].num_elems

    @cached_property
    def refresh_hops(self) -> tuple[Hop, ...]:
        return self._hops("all_gather", reversed(range(self.depth_of_params, self.depth_of_master)))

    @cached_property
    def gather_hops(self) -> tuple[Hop, ...]:
        return self._hops("all_gather", reversed(range(self.depth_of_params)))

    @property
    def master_hops(self) -> tuple[Hop, ...]:
        """The hops from the master to the whole, also for reading weights in full precision."""
        return self.refresh_hops + self.gather_hops

    @cached_property
    def reduce_hops(self) -> tuple[Hop, ...]:
        return self._hops("reduce_scatter", range(self.depth_of_grads))

    @cached_property
    def sync_hops(self) -> tuple[Hop, ...]:
        rest = self.layout.chain[self.depth_of_master :]
        sums = tuple(Hop("all_reduce", axis, self.depth_of_master) for axis in rest)
        return self._hops("reduce_scatter", range(self.depth_of_grads, self.depth_of_master)) + sums

    def _hops(self, kind: Kind, depths: Iterable[int]) -> tuple[Hop, ...]:
        return tuple(Hop(kind, self.layout.chain[depth], depth) for depth in depths)

    def moving(self, hops: Iterable[Hop]) -> Iterator[tuple[Hop, int, int]]:
        """The hops that move something, with the ranks and the elements of each."""
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
    on_device = kept_params(unit.params, layout.kept)
    for param in unit.params:
        kept = matches(param.sites[0].module, keep_fp32)
        compute = FP32 if kept else precision.compute
        master = (FP32 if kept else precision.master) if param.trainable else param.dtype
        own = layout.on_device if param.name in on_device else layout
        own = own if is_encodable(param) and not kept else own.exact
        # Original dtypes get flats of their own, too, so that whole weights are returned in theirs in one piece.
        groups.setdefault((compute, master, param.dtype, param.trainable, own, param.optimizer), []).append(param)
    flats = []
    for (compute, master, _, trainable, own, _), params in groups.items():
        sizes, indices = zip(*(axes[axis] for axis in own.chain), strict=True)
        flats.append(Flat(tuple(params), own, sizes, indices, compute, master, precision.reduce, trainable))
    return tuple(flats)


def is_encodable(param: Param) -> bool:
    """Matrices may be encoded. Norms and biases are few, and errors in embedding tables reach everything."""
    return len(param.shape) > 1 and not param.is_table


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
