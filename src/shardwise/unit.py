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

Outside forward and backward a unit is *resting*: its modules show `resting` parameters, views of this rank's
part of the master (one-dimensional where the master is split), so nobody ever reads memory that is stale,
freed or another unit's. While a unit computes they show the `compute` parameters. Both sets of objects are
made once and live as long as the unit, so hooks, compiled code and guards stay valid.

Autograd keeps aliases of the compute parameters between forward and backward, so a unit's `whole` must have
the same storage in both. It is written through tensors that share no version counter with the parameters; the
engine stamps those itself, with one version while the memory holds the weights and another while it does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .errors import ConfigurationError, StateError
from .plan.flat import Flat, Hop
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


class Elsewhere(Tensor):
    """Stands for the gradient of a resting parameter, which lies in a flat shard: whoever touches it is told so."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise StateError(
            "gradients lie in flat shards, not in param.grad: clip with optimizer.clip_grad_norm(...), clear with "
            "optimizer.zero_grad()"
        )


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


class FlatState:
    """The tensors of one flat on this rank."""

    def __init__(self, flat: Flat, device: torch.device, unit_name: str) -> None:
        self.flat = flat
        self.unit_name = unit_name
        spans = flat.spans
        self.master = torch.zeros(spans[flat.depth_of_master].num_elems, dtype=flat.master.torch, device=device)
        self.rest: Tensor | None = None
        if flat.rest_on is not None:
            self.rest = torch.zeros(spans[flat.depth_of_params].num_elems, dtype=flat.compute.torch, device=device)
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
            nn.Parameter(
                self._resting_view(self.held.get(index, slice(0, 0)), param.shape),
                requires_grad=flat.trainable,
            )
            for index, param in enumerate(flat.params)
        ]
        self.grads: Tensor | None = None
        self.final: Tensor = torch.empty(0, dtype=flat.reduce.torch, device=device)
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
            index: torch.zeros((), dtype=flat.master.torch, device=device)
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

    def _resting_view(self, held: slice, shape: Sequence[int]) -> Tensor:
        view = self.master[held]
        return view.view(shape) if self.flat.depth_of_master == 0 else view

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
        """Set the master of one parameter from its whole value: this rank keeps its own part."""
        if index in self.held:
            self.master[self.held[index]].copy_(self.part_of(index, value))

    def start_gather(self, is_stale: bool, channels: Channels) -> list[InFlight]:
        """Bring the master to `whole`. All hops but the last are finished here, in stream order."""
        flat = self.flat
        refresh, gather = flat.refresh_hops if is_stale else (), flat.gather_hops
        if flat.master_is_whole:
            return []
        if self.rest is None:
            self._own_part.copy_(self.master)
            return self._run(self.whole, 0, [*refresh, *gather], channels)
        if refresh:
            self.rest[self._master_in_rest].copy_(self.master)
            self.run_hops(self.rest, flat.depth_of_params, refresh, channels)
        at_rest = flat.spans[flat.depth_of_params]
        self.whole[at_rest.start : at_rest.stop].copy_(self.rest)
        return self._run(self.whole, 0, gather, channels)

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
        num_elems = self.flat.spans[self.flat.depth_of_grads].num_elems
        if self.grads is None:
            self.grads = torch.empty(num_elems, dtype=self.flat.reduce.torch, device=self.master.device)
            self.final = self.grads[self._final_in_grads]
            self._final_views = self._views_of(self.final)
        elif self.grads.untyped_storage().nbytes() == 0:
            self.grads.untyped_storage().resize_(num_elems * self.flat.reduce.itemsize)

    def _views_of(self, final: Tensor) -> dict[int, Tensor]:
        return {index: final[held].view(self.resting_params[index].shape) for index, held in self.held.items()}

    def final_gradients(self) -> dict[int, Tensor]:
        """What the optimizer reads, by parameter, in the master's dtype."""
        if self.flat.reduce == self.flat.master:
            return self._final_views
        return self._views_of(self.final.to(self.master.dtype))

    def give_back_grads(self) -> None:
        """Let the memory go. The tensor, and every view of it, stay and find the next memory by themselves."""
        if self.grads is not None:
            self.grads.untyped_storage().resize_(0)

    def open(self, number: int | None, slot: Tensor | None, scale: "GradScale") -> None:
        """Say where the gradients of a backward go: where the collective reads them.

        That is `grads` itself where gradients rest whole, on top of what is there already, else `slot`, whose old
        contents mean nothing.
        """
        if self.grad_state == "final":
            self._make_local(scale)
        self.fetch_grads()
        buffer = self.grads if slot is None else slot
        assert buffer is not None
        key = None if slot is None else number
        if key not in self._places_in:
            self._places_in[key] = _cut(buffer, self.flat)
        self._open = self._places_in[key]
        self.places = self._open.params
        self.written = [slot is None and self.grad_state == "local"] * len(self.places)

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
        self.run_hops(self.grads, self.flat.depth_of_grads, hops, channels)
        scale.apply(self.final)
        self.grad_state = "final"

    def _make_local(self, scale: "GradScale") -> None:
        """Turn a finished gradient back into a partial sum, such that the next sync gives it again plus the new."""
        flat = self.flat
        assert self.grads is not None
        sizes = dict(zip(flat.layout.chain, flat.axis_sizes, strict=True))
        num_summed = prod(sizes[hop.axis] for hop in flat.sync_hops)
        num_copies = prod(sizes[hop.axis] for hop in flat.sync_hops if hop.kind == "all_reduce")
        kept = self.final.clone()
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
            final.mul_(self.loss_scale)


@dataclass(slots=True)
class Reduction:
    """A gradient on its way in `buffer`."""

    state: FlatState
    buffer: Tensor
    flights: list[InFlight]
    is_sync: bool
    is_at_rest: bool = False

    def finish(self, channels: Channels, scale: GradScale) -> None:
        state, flat = self.state, self.state.flat
        assert state.grads is not None
        for flight in self.flights:
            finish(flight)
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
