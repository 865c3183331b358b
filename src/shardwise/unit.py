"""A unit: parameters that travel together, and the life of their tensors.

Every other file uses these words and no others:

    master    what the optimizer updates. This rank's part at the optimizer's depth of the chain, in the
              master dtype. The only truth; everything else is made from it.
    rest      a copy in the compute dtype at the depth of the parameters, only where the optimizer is
              split further than they are (`Flat.rest_on`).
    whole     all of the flat in the compute dtype: what forward and backward read. It lies in a gather
              slot or in memory of its own. The module's parameters are views into it: nothing is copied
              in before a gather or out after it. Where the layout splits nothing and the dtypes agree,
              it is the master (`Flat.master_is_whole`).
    grads     the gradient at rest, at the depth of the gradients, in the reduce dtype.
    final     the part of `grads` at the optimizer's depth; once reduced, it is what the optimizer reads.
    away      what of all this is on the host or on disk (`away.py`), where the layout says so. A gradient that the
              host reads leaves the device once it is final, or after each micro-batch.

Outside forward and backward a unit is *resting*: its modules show `resting` parameters, views of this rank's
part of the master (one-dimensional where the master is split), so nobody ever reads memory that is stale,
freed or another unit's. While a unit computes they show the `compute` parameters. Both sets of objects are
made once and live as long as the unit, so hooks, compiled code and guards stay valid.

Autograd keeps aliases of the compute parameters between forward and backward, so a unit's `whole` must have
the same storage in both. It is written through tensors that share no version counter with the parameters; the
engine stamps those itself, with one version while the memory holds the weights and another while it does not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .away import MASTER, Away, HostMemory, Moves
from .errors import ConfigurationError, StateError
from .plan.flat import Flat, Hop
from .plan.schedule import NORM_ELEMS
from .shard import cuts, pieces
from .wire.collectives import (
    Channel,
    InFlight,
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

STARTERS = {
    "all_gather": start_all_gather,
    "reduce_scatter": start_reduce_scatter,
    "all_reduce": start_all_reduce,
}

Channels = dict[str, Channel]


# What tells about a tensor without reading it: attributes, and what memory tools ask.
_HARMLESS = {"__get__", "untyped_storage", "size", "numel", "dim", "element_size", "data_ptr", "is_floating_point"}
# The same for a parameter, which has hooks and gets gradients; and the one attribute that can be read from.
_TELLS = _HARMLESS | {"__set__", "requires_grad_", "register_hook"}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class Elsewhere(Tensor):
    """Stands for the gradient of a resting parameter, which lies in a flat shard: whoever touches it is told so."""

    why = (
        "gradients lie in flat shards, not in param.grad: clip with optimizer.clip_grad_norm(...), clear with "
        "optimizer.zero_grad()"
    )
    harmless = _HARMLESS

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in cls.harmless:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise StateError(cls.why)


class OnDisk(Elsewhere):
    """Stands for the master weights of a resting parameter, or for what its optimizer keeps."""

    why = (
        "this tensor rests on disk: read weights with sw.full_state_dict(model) or inside `with sw.whole(model):`, and "
        "optimizer state through a checkpoint"
    )
    harmless = _TELLS | {"detach"}

    @classmethod
    def like(cls, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=dtype).expand(tuple(shape)).as_subclass(cls)


class OnHost(Tensor):
    """A resting parameter that the host updates beside the computation: whoever reads it waits for that."""

    await_update: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA or func.__name__ not in _TELLS:
            for value in (*args, *(kwargs or {}).values()):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, OnHost):
                        tensor.await_update()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def parameter(cls, view: Tensor, trainable: bool) -> nn.Parameter:
        made: Any = view.as_subclass(cls).requires_grad_(trainable)
        made._is_param = True
        return made


def _refuse_gradient(name: str, grad: Tensor) -> None:
    raise StateError(
        f"parameter {name!r} was used outside the forward of the unit it belongs to, where its gradient would go "
        "nowhere; choose units= so that all its uses lie in one"
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """A gradient buffer, cut up."""

    params: tuple[Tensor, ...]
    paddings: tuple[Tensor, ...]


def _cut(buffer: Tensor, flat: Flat) -> _Places:
    parts = buffer.split_with_sizes(cuts(flat.intervals, flat.num_elems))
    params = tuple(part.view(param.shape) for part, param in zip(parts[1::2], flat.params, strict=True))
    return _Places(params, tuple(part for part in parts[::2] if part.numel()))


# A processor's pieces stay in its cache.
CACHED_ELEMS = 1 << 17


def sum_of_squares(row: Tensor) -> Tensor:
    """In fp64, so that it does not depend on how gradients are split. That takes a copy: it is made piece by piece, in
    one place, because malloc would take a new one for each."""
    pieces = row.split(CACHED_ELEMS if row.device.type == "cpu" else NORM_ELEMS)
    wide = torch.empty(pieces[0].numel(), dtype=torch.float64, device=row.device)
    norms = [torch.linalg.vector_norm(wide[: piece.numel()].copy_(piece)) for piece in pieces]
    return torch.stack(norms).square().sum()


class FlatState:
    """The tensors of one flat on this rank."""

    def __init__(self, flat: Flat, device: torch.device, unit_name: str, host: HostMemory) -> None:
        self.flat = flat
        self.unit_name = unit_name
        self._host = host
        self.away: Away | None = host.away_for(flat, unit_name)
        spans = flat.spans
        self.master = self._master_at_rest(device)
        self._draft: Tensor | None = None
        self.rest: Tensor | None = None if self.away is None else self.away.rest
        if flat.rest_on == "device":
            self.rest = torch.zeros(flat.num_rest, dtype=flat.compute.torch, device=device)
        self.whole: Tensor = (
            self.master if flat.master_is_whole else torch.empty(0, dtype=flat.compute.torch, device=device)
        )
        self.compute_params = [
            nn.Parameter(torch.empty(0, dtype=flat.compute.torch, device=device), requires_grad=flat.trainable)
            for _ in flat.params
        ]
        own = spans[flat.depth_of_master]
        # Which parameters this rank's part of the master touches, and where in it they lie.
        self.held = {piece.param: piece.in_flat.within(own) for piece in pieces(flat.intervals, own)}
        self.resting_params = [
            self._resting_param(self.held.get(index, slice(0, 0)), param.shape)
            for index, param in enumerate(flat.params)
        ]
        # On the device, or on the host if that is where they rest; then `final` is there, too.
        self.grads: Tensor | None = None
        self.final: Tensor = torch.empty(0, dtype=flat.reduce.torch, device=device)
        # Of a final gradient on its way to the host: the sum of its squares, and what it was clipped by since.
        self.square: Tensor | None = None
        self._unsquared: Tensor | None = None
        self.clipped_by: Tensor | None = None
        self.leaving: tuple[Tensor, Tensor] | None = None
        self._final_views: dict[int, Tensor] = {}
        self.grad_state: Literal["empty", "local", "final"] = "empty"
        self.used = [False] * len(flat.params)
        # During a backward: where each parameter's gradient belongs, and whether something lies there already.
        self.places: tuple[Tensor, ...] | None = None
        self.written: list[bool] = []
        # The places in each buffer that gradients are brought together in: a reduction slot, or (None) `grads`.
        self._places_in: dict[int | None, _Places] = {}
        self._open: _Places = _Places((), ())
        self._elsewhere = {
            index: torch.zeros((), dtype=flat.master.torch, device=self.master.device)
            .expand(self.resting_params[index].shape)
            .as_subclass(Elsewhere)
            for index in (self.held if flat.trainable else ())
        }
        self.hide_gradients()
        if flat.trainable:
            for param, spec in zip(self.resting_params, flat.params, strict=True):
                param.register_hook(partial(_refuse_gradient, spec.name))
        # Where this rank's part lies in the buffers of lesser depth.
        grads, rest = spans[min(flat.depth_of_grads, flat.depth_of_master)], spans[flat.depth_of_params]
        self._final_in_grads = own.within(grads)
        self._master_in_rest = own.within(rest)
        self._grads_in_whole = slice(grads.start, grads.stop)
        if flat.grads_on_host:
            assert self.away is not None
            assert self.away.grads is not None
            self.grads = self.away.grads
            self.final = self.grads[self._final_in_grads]
            self._final_views = self._views_of(self.final)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.compute_params[0].device

    def _master_at_rest(self, device: torch.device) -> Tensor:
        if self.away is None or self.away.rows is None:
            return torch.zeros(self.flat.num_master, dtype=self.flat.master.torch, device=device)
        if self.away.rows.on_disk:
            return OnDisk.like((self.flat.num_master,), self.flat.master.torch)
        # `.data` has a version counter of its own: updates by the host's thread are no changes from outside.
        return self.away.rows.tensors[MASTER].data

    def _resting_param(self, held: slice, shape: Sequence[int]) -> nn.Parameter:
        flat = self.flat
        if isinstance(self.master, OnDisk):
            own = shape if flat.depth_of_master == 0 else (held.stop - held.start,)
            return nn.Parameter(OnDisk.like(own, flat.master.torch), requires_grad=flat.trainable)
        view = self.master[held]
        view = view.view(shape) if flat.depth_of_master == 0 else view
        if flat.host_updates:
            return OnHost.parameter(view, flat.trainable)
        return nn.Parameter(view, requires_grad=flat.trainable)

    def read_master(self) -> Tensor:
        """All of it that is this rank's; a copy, if it rests on disk."""
        if self._draft is not None:
            return self._draft
        return self.away.rows.all_of(MASTER) if self.away is not None and self.away.rows is not None else self.master

    def master_part(self, where: slice) -> Tensor:
        """Elements of it: a view, or a copy if it rests on disk."""
        rows = None if self.away is None else self.away.rows
        return self.master[where] if rows is None else rows.part(MASTER, where)

    @contextmanager
    def writing(self) -> Iterator[Tensor]:
        """The master, to be changed from outside; what is made from it off the device follows in the end."""
        rows = None if self.away is None else self.away.rows
        self._draft = master = self.read_master()
        try:
            yield master
            if rows is not None and rows.on_disk:
                rows.set_part(MASTER, slice(0, rows.num_elems), master)
            self.publish()
        finally:
            self._draft = None

    def publish(self, moves: Moves | None = None) -> None:
        """The master was changed: let what is made from it off the device follow. What a step moves so is counted."""
        if self.away is not None:
            self.away.publish(self.read_master(), moves or Moves())

    def set_master(self, index: int, read: Callable[[Tensor], object]) -> None:
        """Fill this rank's part of one parameter, in place where that can be; `publish` once all are filled."""
        rows, held = None if self.away is None else self.away.rows, self.held[index]
        if rows is None or not rows.on_disk:
            read(self.master[held])
            return
        row = torch.empty(held.stop - held.start, dtype=rows.dtype)
        read(row)
        rows.set_part(MASTER, held, row)

    def hide_gradients(self) -> None:
        for index, elsewhere in self._elsewhere.items():
            self.resting_params[index].grad = elsewhere

    def misuse(self) -> str:
        """What was done to a resting parameter that would go unnoticed, in a sentence."""
        for index, elsewhere in self._elsewhere.items():
            param, name = self.resting_params[index], self.flat.params[index].name
            if not param.requires_grad:
                return (
                    f"parameter {name!r} was frozen after sw.shard, which took it for trained: freeze before sw.shard"
                )
            if param.grad is not elsewhere:
                return f"the gradient of {name!r} was set by hand, which does nothing: use optimizer.zero_grad()"
        return ""

    def bind(self, whole: Tensor) -> None:
        """Let the compute parameters be views into `whole`."""
        self.whole = whole
        own = self.flat.spans[self.flat.depth_of_master]
        self._own_part = whole[own.start : own.stop]
        for param, interval, spec in zip(self.compute_params, self.flat.intervals, self.flat.params, strict=True):
            # `.data` gives the view a version counter of its own: later gathers do not count as in-place changes.
            param.data = whole.data[interval.start : interval.stop].view(spec.shape)

    def part_of(self, index: int, value: Tensor) -> Tensor:
        """What this rank holds of a whole tensor that is shaped like a parameter, as a row."""
        flat = self.flat
        own = flat.spans[flat.depth_of_master]
        common = flat.intervals[index].overlap(own)
        return value.detach().reshape(-1)[common.within(flat.intervals[index])]

    def write(self, index: int, value: Tensor) -> None:
        """Inside `writing`, set the master of one parameter from its whole value: this rank keeps its own part."""
        assert self._draft is not None
        if index in self.held:
            self._draft[self.held[index]].copy_(self.part_of(index, value))

    def start_gather(self, is_stale: bool, staged: Tensor | None, channels: Channels) -> list[InFlight]:
        """Bring the master to `whole`. All hops but the last are finished here, in stream order.

        `staged` is what was read from disk for it.
        """
        flat = self.flat
        if flat.master_is_whole:
            return []
        refresh = flat.refresh_hops if is_stale else ()
        at_rest = self.whole[slice(flat.spans[flat.depth_of_params].start, flat.spans[flat.depth_of_params].stop)]
        if flat.rest_on is None or flat.rest_is_own:
            if flat.rest_on == "device" and is_stale:
                assert self.rest is not None
                self._copy(self.rest, self.updated)
            source = self.updated if self.rest is None else self.rest
            self._copy(self._own_part, source if staged is None else staged)
            return self._run(self.whole, 0, [*refresh, *flat.gather_hops], channels)
        if not is_stale:
            resting = self.rest if staged is None else staged
            assert resting is not None
            self._copy(at_rest, resting)
        elif flat.rest_on == "device":
            assert self.rest is not None
            self._copy(self.rest[self._master_in_rest], self.updated)
            self.run_hops(self.rest, flat.depth_of_params, refresh, channels)
            self._copy(at_rest, self.rest)
        else:
            self._copy(self._own_part, self.updated)
            self.run_hops(self.whole, 0, refresh, channels)
            self._rest_from(at_rest)
        return self._run(self.whole, 0, flat.gather_hops, channels)

    @property
    def updated(self) -> Tensor:
        """This rank's newest weights, in the compute dtype if they come from the host."""
        out = None if self.away is None else self.away.updated
        return self.master if out is None else out

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self.away is not None:
            is_host = [self._is_on_host(tensor) for tensor in (target, source)]
            if is_host == [False, True]:
                self._host.moves.add("to_device", target.numel() * source.element_size())
            elif is_host == [True, False]:
                self._host.moves.add("to_host", source.nbytes)

    def _is_on_host(self, tensor: Tensor) -> bool:
        return self._host.arena.owns(tensor)

    def _rest_from(self, at_rest: Tensor) -> None:
        """The copy off the device follows the gathered one: here the optimizer is split further than it."""
        assert self.away is not None
        if self.rest is not None:
            self._copy(self.rest, at_rest)
            return
        assert self.away.region is not None
        assert self._host.disk is not None
        values = at_rest.cpu()
        self._host.moves.add("to_host", values.nbytes)
        self._host.moves.add("write", values.nbytes)
        self._host.disk.put(self.away.region, values).wait()

    def _run(self, buffer: Tensor, depth: int, hops: Sequence[Hop], channels: Channels) -> list[InFlight]:
        """Queue `hops` on `buffer`, which holds the span at `depth`; each waits for the one before."""
        outer = self.flat.spans[depth]
        flights: list[InFlight] = []
        for hop in hops:
            for flight in flights:
                finish(flight)
            part = buffer if hop.depth == depth else buffer[self.flat.spans[hop.depth].within(outer)]
            flights = [STARTERS[hop.kind](channels[hop.axis], part, self.unit_name)]
        return flights

    def run_hops(self, buffer: Tensor, depth: int, hops: Sequence[Hop], channels: Channels) -> None:
        for flight in self._run(buffer, depth, hops, channels):
            finish(flight)

    def take_gradients(self) -> list[Tensor | None]:
        taken = [param.grad for param in self.compute_params]
        for param in self.compute_params:
            param.grad = None
        return taken

    def fetch_grads(self) -> None:
        """Make sure that there is memory for `grads`; what is in it means nothing yet."""
        num_elems = self.flat.num_grads
        if self.flat.grads_on_host:
            return
        if self.grads is None:
            self.grads = torch.empty(num_elems, dtype=self.flat.reduce.torch, device=self.device)
            self.final = self.grads[self._final_in_grads]
            self._final_views = self._views_of(self.final)
        elif self.grads.untyped_storage().nbytes() == 0:
            self.grads.untyped_storage().resize_(num_elems * self.flat.reduce.itemsize)

    def _views_of(self, final: Tensor) -> dict[int, Tensor]:
        return {index: final[held].view(self.resting_params[index].shape) for index, held in self.held.items()}

    def final_gradients(self) -> dict[int, Tensor]:
        """What the optimizer reads, by parameter, in the master's dtype."""
        final = self.final_at_hand
        if self.flat.reduce == self.flat.master and final is self.final:
            return self._final_views
        return self._views_of(final.to(self.master.dtype))

    @property
    def final_at_hand(self) -> Tensor:
        """The final gradient where the optimizer reads it."""
        if self.flat.host_updates and not self.flat.grads_on_host:
            assert self.away is not None
            assert self.away.grads is not None
            return self.away.grads
        return self.final

    def apply_clip(self) -> None:
        """Let a gradient that has arrived on the host, and that nobody reads now, be what it was clipped to."""
        if self.clipped_by is not None:
            self.final_at_hand.mul_(self.clipped_by.to(self.final_at_hand.device))
            self.square = self.clipped_by = None

    def give_back_grads(self) -> None:
        """Let the memory go. The tensor, and every view of it, stay and find the next memory by themselves."""
        if self.grads is not None and not self.flat.grads_on_host:
            self.grads.untyped_storage().resize_(0)

    def open(self, number: int | None, slot: Tensor | None, scale: "GradScale") -> None:
        """Say where the gradients of a backward go: where the collective reads them.

        That is `grads` itself where gradients rest whole, on top of what is there already, else `slot`, whose old
        contents mean nothing.
        """
        if self.grad_state == "final":
            self.apply_clip()
            self._make_local(scale)
        self.fetch_grads()
        self.square = self.clipped_by = None
        buffer = self.grads if slot is None else slot
        assert buffer is not None
        key = None if slot is None else number
        if key not in self._places_in:
            self._places_in[key] = _cut(buffer, self.flat)
        self._open = self._places_in[key]
        self.places = self._open.params
        adds = self.flat.depth_of_grads == 0 and self.grad_state == "local"
        if adds and self.flat.grads_on_host:
            assert self.grads is not None
            self._copy(buffer, self.grads)
        self.written = [adds] * len(self.places)

    def start_reduce(
        self, taken: Sequence[Tensor | None], slot: Tensor | None, sync: bool, channels: Channels, scale: "GradScale"
    ) -> "Reduction":
        """Add what autograd left on the compute parameters to what was written directly, and send it on its way.

        Only the first hop is started here. `taken` must be held until the fill has run.
        """
        flat = self.flat
        buffer = self.grads if slot is None else slot
        assert buffer is not None
        self._fill(taken, scale)
        self.places = None
        if (
            len(flat.reduce_hops) == 1
            and self.grad_state == "empty"
            and not flat.grads_on_host
            and channels[flat.reduce_hops[0].axis].num_ranks > 1
        ):
            # Nothing to add to: the sum goes straight to where it rests.
            channel = channels[flat.reduce_hops[0].axis]
            flight = start_reduce_scatter(channel, buffer, self.unit_name, out=self.grads)
            return Reduction(self, buffer, [flight], sync, is_at_rest=True)
        hops = flat.reduce_hops or (flat.sync_hops if sync else ())
        return Reduction(self, buffer, self._run(buffer, 0, hops[:1], channels), sync)

    def _fill(self, taken: Sequence[Tensor | None], scale: "GradScale") -> None:
        assert self.places is not None
        # Padding takes part in sums and norms: it must be zero, whatever another unit or an overflow left there.
        empty = list(self._open.paddings)
        copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, (grad, place) in enumerate(zip(taken, self.places, strict=True)):
            if grad is None:
                if not self.written[index]:
                    empty.append(place)
                continue
            if grad.layout != torch.strided:
                raise ConfigurationError(
                    f"parameter {self.flat.params[index].name!r} got a sparse gradient; shardwise reduces dense ones: "
                    "set sparse=False on its module"
                )
            self.used[index] = True
            targets, sources = added if self.written[index] else copied
            targets.append(place)
            sources.append(grad)
        if empty:
            torch._foreach_zero_(empty)
        if scale.before != 1.0:
            # Never in place on the sources: autograd may have given two parameters the same memory.
            for target, source in zip(*copied, strict=True):
                torch.mul(source, scale.before, out=target)
            for target, source in zip(*added, strict=True):
                target.add_(source, alpha=scale.before)
            return
        if copied[0]:
            torch._foreach_copy_(*copied)
        if added[0]:
            torch._foreach_add_(*added)

    def put(self, index: int, rows: Tensor, inputs: Tensor, scale: "GradScale") -> None:
        """Write the gradient of a linear layer's weight, rows' x inputs, into its open place: (n, out) and (n, in)."""
        assert self.places is not None
        place, beta = self.places[index], float(self.written[index])
        if place.dtype == rows.dtype:
            torch.addmm(place, rows.t(), inputs, beta=beta, alpha=scale.before, out=place)
        elif beta == 0.0 and scale.before == 1.0:
            # The product is summed in fp32 anyway: here it is never rounded to the compute dtype.
            torch.mm(rows.t(), inputs, out_dtype=place.dtype, out=place)
        else:
            torch.ops.aten.addmm.dtype_out(
                place, rows.t(), inputs, place.dtype, beta=beta, alpha=scale.before, out=place
            )
        self.written[index] = self.used[index] = True

    def sync(self, hops: Sequence[Hop], channels: Channels, scale: "GradScale") -> None:
        """Bring the partial sums in `grads` to the optimizer's depth, as the mean over all ranks."""
        assert self.grads is not None
        if self.flat.grads_on_host:
            fetched = torch.empty_like(self.grads, device=self.device)
            self._copy(fetched, self.grads)
            self.sync_in(fetched, hops, channels, scale)
            return
        self.run_hops(self.grads, self.flat.depth_of_grads, hops, channels)
        scale.apply(self.final)
        self._became_final(self.final)

    def sync_in(self, part: Tensor, hops: Sequence[Hop], channels: Channels, scale: "GradScale") -> None:
        """As `sync`, on partial sums that are on the device while `grads` are not."""
        self.run_hops(part, self.flat.depth_of_grads, hops, channels)
        final = part[self._final_in_grads]
        scale.apply(final)
        self._became_final(final)

    def _became_final(self, final: Tensor) -> None:
        self.grad_state = "final"
        if self.flat.host_updates:
            self.leaving = (self.final_at_hand, final)
            self._unsquared = final

    def leave(self) -> None:
        """Copy to the host what should go there by now."""
        if self.leaving is not None:
            self._copy(*self.leaving)
            self.leaving = None

    def take_square(self) -> None:
        """Of a gradient that is leaving, while its copy is under way."""
        if self._unsquared is not None:
            self.square = sum_of_squares(self._unsquared)
            self._unsquared = None

    def add_from_host(self, part: Tensor, scratch: Tensor) -> None:
        """Add what rests on the host of earlier micro-batches to a sum on the device."""
        assert self.grads is not None
        fetched = scratch[: self.grads.nbytes].view(self.grads.dtype)
        self._copy(fetched, self.grads)
        part.add_(fetched)

    def _make_local(self, scale: "GradScale") -> None:
        """Turn a finished gradient back into a partial sum, such that the next sync gives it again plus the new."""
        flat = self.flat
        assert self.grads is not None
        sizes = dict(zip(flat.layout.chain, flat.axis_sizes, strict=True))
        num_summed = prod(sizes[hop.axis] for hop in flat.sync_hops)
        num_copies = prod(sizes[hop.axis] for hop in flat.sync_hops if hop.kind == "all_reduce")
        self.fetch_grads()
        kept = self.final_at_hand.clone()
        self.grads.zero_()
        scale.undo(self.final.copy_(kept).mul_(1.0 / num_copies), num_summed)
        self.grad_state = "local"


@dataclass(frozen=True, slots=True)
class GradScale:
    """The mean over ranks. It is taken by the wire, where that can; else while gradients are filled in, where that is
    one pass (the dtypes agree) or their sum could overflow; else after the sum, on the final part alone.

    Under loss scaling the scale is taken out at the same time, so a final gradient is never scaled.
    """

    before: float
    after: float
    wire_averages: bool
    loss_scale: Tensor | None

    @classmethod
    def mean(
        cls,
        num_ranks: int,
        compute: torch.dtype,
        reduce: torch.dtype,
        loss_scale: Tensor | None,
        wire_averages: bool,
    ) -> "GradScale":
        share = 1.0 / num_ranks
        if wire_averages:
            return cls(1.0, 1.0, True, loss_scale)
        if reduce in (compute, torch.float16):
            return cls(share, 1.0, False, loss_scale)
        return cls(1.0, share, False, loss_scale)

    def apply(self, final: Tensor) -> None:
        if self.after != 1.0:
            final.mul_(self.after)
        if self.loss_scale is not None:
            final.mul_(1.0 / self.loss_scale)

    def undo(self, final: Tensor, num_summed: int) -> None:
        """Such that a sync gives `final` again; `num_summed` ranks take part in its hops."""
        final.mul_(float(num_summed) if self.wire_averages else 1.0 / self.after)
        if self.loss_scale is not None:
            final.mul_(self.loss_scale.to(final.device))


@dataclass(slots=True)
class Reduction:
    """A gradient on its way in `buffer`."""

    state: FlatState
    buffer: Tensor
    flights: list[InFlight]
    is_sync: bool
    is_at_rest: bool = False

    def finish(self, channels: Channels, scale: GradScale, scratch: Callable[[int], Tensor]) -> None:
        state, flat = self.state, self.state.flat
        assert state.grads is not None
        for flight in self.flights:
            finish(flight)
        if flat.grads_on_host:
            self._finish_on_host(channels, scale, scratch)
            return
        sync_hops = flat.sync_hops
        if self.is_at_rest:
            pass
        elif flat.depth_of_grads > 0:
            state.run_hops(self.buffer, 0, flat.reduce_hops[1:], channels)
            part = self.buffer[state._grads_in_whole]
            if state.grad_state == "local":
                state.grads.add_(part)
            else:
                state.grads.copy_(part)
        else:
            # Whole gradients: the first hop of the sync was the reduction itself.
            sync_hops = sync_hops[1:]
        state.grad_state = "local"
        if self.is_sync:
            state.sync(sync_hops, channels, scale)

    def _finish_on_host(self, channels: Channels, scale: GradScale, scratch: Callable[[int], Tensor]) -> None:
        """The sum is made in the slot; `scratch` is for what comes back from the host."""
        state, flat = self.state, self.state.flat
        assert state.grads is not None
        part, sync_hops = self.buffer, flat.sync_hops[1:]
        if flat.depth_of_grads > 0:
            state.run_hops(self.buffer, 0, flat.reduce_hops[1:], channels)
            part, sync_hops = self.buffer[state._grads_in_whole], flat.sync_hops
            if state.grad_state == "local":
                state.add_from_host(part, scratch(state.grads.nbytes))
        state.grad_state = "local"
        state.leaving = (state.grads, part)
        if self.is_sync:
            state.sync_in(part, sync_hops, channels, scale)


class Unit:
    """The flats of one module and the places where its parameters are registered."""

    def __init__(
        self, index: int, name: str, module: nn.Module, states: list[FlatState], modules: dict[str, nn.Module]
    ):
        self.index = index
        self.name = name
        self.module = module
        self.states = states
        self.trainable_states = [state for state in states if state.flat.trainable]
        # Whether some of its modules put their gradients into open places themselves.
        self.writes_directly = False
        self._compute_params = tuple(param for state in states for param in state.compute_params)
        self._show_compute: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._show_resting: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        for state in states:
            for spec, compute, resting in zip(
                state.flat.params, state.compute_params, state.resting_params, strict=True
            ):
                for site in spec.sites:
                    registered = modules[site.module]._parameters
                    self._show_compute.append((registered, site.attribute, compute))
                    self._show_resting.append((registered, site.attribute, resting))

    def show_compute(self) -> None:
        for registered, attribute, param in self._show_compute:
            registered[attribute] = param

    def show_resting(self) -> None:
        for registered, attribute, param in self._show_resting:
            registered[attribute] = param

    def stamp(self, version: int) -> None:
        """Set the version of the compute parameters; autograd refuses to use those of another version than it saved.

        So a backward that comes to a unit whose memory has another unit's weights, or newer ones, cannot go wrong.
        """
        torch._C._autograd._unsafe_set_version_counter(self._compute_params, (version,) * len(self._compute_params))

    def was_written(self, version: int) -> bool:
        """Whether a forward changed its own compute parameters where the change would be lost."""
        changed = [state for state in self.states for param in state.compute_params if param._version != version]
        return bool([state for state in changed if not state.flat.master_is_whole])

    def is_registered_in(self, registered: set[int]) -> bool:
        """Whether one of the modules with these parameter dicts holds a parameter of this unit."""
        return any(id(entry[0]) in registered for entry in self._show_compute)

    def show(self, instead: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Register other parameters in the place of resting ones."""
        for registered, attribute, resting in self._show_resting:
            if resting in instead:
                registered[attribute] = instead[resting]

    def registered(self) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
        """What the modules show at present, each beside the resting parameter of that place."""
        for registered, attribute, resting in self._show_resting:
            yield resting, registered.get(attribute)
