"""The gradient of a flat: its memory, the places where a backward writes it, its reduction, and its way to the host.

empty     nothing is there.
local     `grads` is a sum over micro-batches, and over the ranks of the axes down to its depth.
final     `final` is the mean over all ranks: what the optimizer reads.

final        -- open ------------> local      empty and local gradients stay what they are
empty, local -- start_reduction -> local      the collectives are in flight
local        -- finish_reduction > final      only after the last micro-batch
any          -- forget ----------> empty, or final with zeros
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ...base.errors import StateError
from ...base.intervals import cuts
from ..schedule.flat import Flat
from ..wire.collectives import Collective, HopChain, Work
from .carrier import Carrier, Channels

# A flat's memory in a reduction slot: for its gradient (`Flat.reduces_in_slot`), and for encoded rows.
Room = tuple[Tensor | None, Tensor | None]
# Pieces of this size stay in the cache of a CPU.
CACHED_ELEMS = 1 << 17


@dataclass(frozen=True, slots=True)
class GradScale:
    """Factors that turn the sum over ranks into the mean; `before` and `after` say when they are applied.

    If the communicator can average, it computes the mean. If not, gradients are scaled while they are copied into the
    buffer, if that costs no extra pass (equal dtypes) or their sum could overflow; otherwise the final part is scaled
    after the sum. The final part is also divided by the loss scale, so the optimizer never sees a loss scale.
    """

    before: float = 1.0
    after: float = 1.0
    wire_averages: bool = False
    loss_scale: Tensor | None = None

    def apply(self, final: Tensor) -> None:
        if self.after != 1.0:
            final.mul_(self.after)
        if self.loss_scale is not None:
            final.mul_(1.0 / self.loss_scale)


def sum_of_squares(row: Tensor) -> Tensor:
    """Sum squares in fp64, so that the result does not depend on how gradients are split. A GPU has a kernel for that.
    On a CPU, the copy in fp64 is made piece by piece in one buffer, because malloc would take a new one for each."""
    if row.device.type != "cpu" and row.numel():
        return torch._foreach_norm([row], 2, dtype=torch.float64)[0].square()
    pieces = row.split(CACHED_ELEMS)
    wide = torch.empty(pieces[0].numel(), dtype=torch.float64, device=row.device)
    norms = [torch.linalg.vector_norm(wide[: piece.numel()].copy_(piece)) for piece in pieces]
    return torch.stack(norms).square().sum()


class Gradient:
    """The gradient of one flat. `held` maps the parameters in the final part to their places in it. `on_host` is memory
    on the host for it, if the host runs the update. The engine sets `scale`."""

    def __init__(
        self, flat: Flat, device: torch.device, carrier: Carrier, held: Mapping[int, slice], on_host: Tensor | None
    ) -> None:
        self.flat = flat
        self.scale = GradScale()
        self.carrier = carrier
        self._device = device
        self._held = held
        self._on_host = on_host
        self.stage: Literal["empty", "local", "final"] = "empty"
        self.used = [False] * len(flat.params)
        # On the device, or on the host if gradients are offloaded (`Flat.grads_on_host`); then `final` is there, too.
        self.grads: Tensor | None = None
        self.final: Tensor = torch.empty(0, dtype=flat.reduce.torch, device=device)
        self._final_views: dict[int, Tensor] = {}
        # For a gradient that goes to the host: its sum of squares and a clipping factor that is not applied yet, if it
        # is final; and (target, source) of the copy that is due.
        self.square: Tensor | None = None
        self.clipped_by: Tensor | None = None
        self.leaving: tuple[Tensor, Tensor] | None = None
        # Takes a number of tokens and returns True if `put` may be called: the memory is open now, or the unit is late.
        # Set by the engine.
        self.ask_to_open: Callable[[int], bool] = lambda num_tokens: False
        # For a unit that is late: the arguments of `put`, and the versions of both tensors.
        self.late: list[tuple[int, Tensor, Tensor, tuple[int, int]]] = []
        # During a backward: memory for each parameter's gradient, and whether it holds a sum to add to; paddings; the
        # buffer that contains these; memory for encoded rows.
        self.places: tuple[Tensor, ...] | None = None
        self.written: list[bool] = []
        self._paddings: tuple[Tensor, ...] = ()
        self._buffer: Tensor | None = None
        self._rows: Tensor | None = None
        # Views of each buffer that a backward may write (key: number of a reduction slot, or None for `grads`): one
        # for each parameter, and those of the padding.
        self._places_in: dict[int | None, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        # The collectives of a reduction and the memory of its result, by the number of the slot, whether nothing is in
        # `grads` before, and whether this is the last micro-batch. They are prepared once: slots keep their tensors.
        self._slot: int | None = None
        self._chains: dict[tuple[int | None, bool, bool], tuple[HopChain, Tensor]] = {}
        # The collectives in flight, the memory that will hold the result, and whether the result is final.
        self._in_flight: tuple[HopChain, Tensor, bool] | None = None
        # Where this rank's part lies in the whole buffer, and `final` in `grads`.
        span = flat.spans[min(flat.depth_of_grads, flat.depth_of_master)]
        self._in_whole = slice(span.start, span.stop)
        self._final_in_grads = flat.spans[flat.depth_of_master].within(span)
        if flat.grads_on_host:
            self.fetch()

    # Memory.

    def fetch(self) -> Tensor:
        """Return `grads`, and allocate it if needed. New memory is not initialised."""
        num_elems, dtype, grads = self.flat.num_grads, self.flat.reduce, self.grads
        if grads is None:
            grads = self._on_host if self.flat.grads_on_host else None
            if grads is None:
                grads = torch.empty(num_elems, dtype=dtype.torch, device=self._device)
            self.grads, self.final = grads, grads[self._final_in_grads]
            self._final_views = self._views_of(self.final)
        elif not self.flat.grads_on_host and grads.untyped_storage().nbytes() == 0:
            grads.untyped_storage().resize_(num_elems * dtype.itemsize)
        return grads

    def give_back(self) -> None:
        """Release the memory of `grads`. The tensor and its views stay, and see the memory of the next `fetch`."""
        if self.grads is not None and not self.flat.grads_on_host:
            self.grads.untyped_storage().resize_(0)

    # A backward writes.

    def open(self, slot: int | None, room: Room) -> None:
        """Choose the memory that a backward writes its gradients to. The collectives then read it.

        It is `grads` itself if that holds whole gradients on the device: new ones are added to it. Otherwise it is the
        flat's room in a reduction slot, whose old contents are ignored."""
        if self.stage == "final":
            self.apply_clip()
            self._make_local()
        self.square = self.clipped_by = None
        self._slot, (in_slot, self._rows) = slot, room
        self._buffer = buffer = self.fetch() if in_slot is None else in_slot
        key = None if in_slot is None else slot
        if key not in self._places_in:
            parts = buffer.split_with_sizes(cuts(self.flat.intervals, self.flat.num_elems))
            places = [part.view(param.shape) for part, param in zip(parts[1::2], self.flat.params, strict=True)]
            self._places_in[key] = (tuple(places), tuple(part for part in parts[::2] if part.numel()))
        self.places, self._paddings = self._places_in[key]
        adds = self.flat.depth_of_grads == 0 and self.stage == "local"
        if adds and self.flat.grads_on_host:
            self.carrier.copy(buffer, self.fetch())
        self.written = [adds] * len(self.places)

    def put(self, index: int, rows: Tensor, inputs: Tensor) -> None:
        """Write the gradient of a linear layer's weight: `rows.T @ inputs`, with shapes (n, out) and (n, in). If the
        unit is late, `put_late` does it."""
        if self.places is None:
            self.late.append((index, rows, inputs, (rows._version, inputs._version)))
            return
        place, beta, alpha = self.places[index], float(self.written[index]), self.scale.before
        if place.dtype == rows.dtype:
            torch.addmm(place, rows.t(), inputs, beta=beta, alpha=alpha, out=place)
        elif beta == 0.0 and alpha == 1.0:
            # The matrix product accumulates in fp32; this way it is never rounded to the compute dtype.
            torch.mm(rows.t(), inputs, out_dtype=place.dtype, out=place)
        else:
            torch.ops.aten.addmm.dtype_out(place, rows.t(), inputs, place.dtype, beta=beta, alpha=alpha, out=place)
        self.written[index] = self.used[index] = True

    def put_late(self) -> None:
        """Write the gradients of a unit that is late, in the order of its backward."""
        with torch.no_grad():
            for index, rows, inputs, versions in self.late:
                if (rows._version, inputs._version) != versions:
                    name = self.flat.params[index].name
                    raise StateError(
                        f"the backward changed the input of {name!r}, or the gradient of its output, in place, and the "
                        "gradient of the weight is computed from both: do not change them in place"
                    )
                self.put(index, rows, inputs)
        self.late = []

    def drop_places(self) -> None:
        """Forget what a failed backward has written, and what it was about to write."""
        self.places, self.late = None, []

    def _close(self, taken: Sequence[Tensor | None]) -> None:
        """Write the gradients that autograd left on the compute parameters, or add them to those that `put` wrote."""
        assert self.places is not None
        # Padding takes part in sums and norms: it must be zero, whatever another unit or an overflow left there.
        empty = list(self._paddings)
        copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, (grad, place) in enumerate(zip(taken, self.places, strict=True)):
            if grad is None:
                if not self.written[index]:
                    empty.append(place)
                continue
            self.used[index] = True
            targets, sources = added if self.written[index] else copied
            targets.append(place)
            sources.append(grad)
        if empty:
            torch._foreach_zero_(empty)
        if self.scale.before != 1.0:
            # Never in place on the sources: autograd may have given two parameters the same memory.
            for target, source in zip(*copied, strict=True):
                torch.mul(source, self.scale.before, out=target)
            for target, source in zip(*added, strict=True):
                target.add_(source, alpha=self.scale.before)
        else:
            if copied[0]:
                torch._foreach_copy_(*copied)
            if added[0]:
                torch._foreach_add_(*added)
        self.places = None

    # From local to final, and back.

    def start_reduction(
        self, taken: Sequence[Tensor | None], is_sync: bool, channels: Channels, scratch: Callable[[int], Tensor]
    ) -> HopChain:
        """Write the gradients that autograd left (`taken`), and start the first hop of the reduction.

        `is_sync`: this is the last micro-batch. `scratch` gives memory for sums of earlier micro-batches that are
        copied back from the host. The caller keeps `taken` alive until it has been copied.
        """
        self._close(taken)
        key = (self._slot, self.stage == "empty", is_sync)
        if key not in self._chains:
            self._chains[key] = self._chain(*key[1:], channels, scratch)
        hop_chain, part = self._chains[key]
        self.stage = "local"
        hop_chain.run_to(hop_chain.first)
        self._in_flight = (hop_chain, part, is_sync)
        return hop_chain

    def _chain(
        self, is_first: bool, is_sync: bool, channels: Channels, scratch: Callable[[int], Tensor]
    ) -> tuple[HopChain, Tensor]:
        """Prepare the reduction of what a backward wrote. Also return the memory of the result."""
        flat, carrier, buffer, rows, hops = self.flat, self.carrier, self._buffer, self._rows, self.flat.reduce_hops
        assert buffer is not None
        assert self.grads is not None
        steps: list[Collective | Work] = []
        if hops:
            is_single = len(hops) == 1 and channels[hops[0].axis].num_ranks > 1
            # Nothing to add to: the collective writes the sum directly to `grads`.
            out = self.grads if is_first and is_single and not flat.grads_on_host else None
            steps += carrier.steps(buffer, 0, hops, channels, rows, out)
            if out is None:
                steps.append(partial(self._add_to_grads, buffer[self._in_whole], is_first, scratch))
        part = buffer[self._in_whole] if flat.grads_on_host else self.grads
        if is_sync:
            steps += carrier.steps(part, flat.depth_of_grads, flat.sync_hops, channels, rows)
        hop_chain = HopChain(steps)
        if hops and not isinstance(steps[0], Collective):
            hop_chain.first = 0  # `_add_to_grads` belongs to the finish, also where it comes first
        return hop_chain, part

    def _add_to_grads(self, part: Tensor, is_first: bool, scratch: Callable[[int], Tensor]) -> None:
        """Add `part`, summed over ranks, to earlier micro-batches. Sums on the host are copied to the device first."""
        assert self.grads is not None
        if self.flat.grads_on_host:
            if not is_first:
                fetched = scratch(self.grads.nbytes).view(self.grads.dtype)
                self.carrier.copy(fetched, self.grads)
                part.add_(fetched)
        elif is_first:
            self.grads.copy_(part)
        else:
            self.grads.add_(part)

    def finish_reduction(self) -> None:
        """Wait for the collectives. After the last micro-batch, the gradient is final."""
        assert self._in_flight is not None
        (hop_chain, part, is_sync), self._in_flight = self._in_flight, None
        hop_chain.run_to(hop_chain.end)
        if is_sync:
            self._become_final(part)
        elif self.flat.grads_on_host:
            self.leaving = (self.fetch(), part)

    def sync(self, channels: Channels) -> None:
        """Reduce the partial sums in `grads` to the optimizer's depth, as the mean over all ranks."""
        flat, part, num_bytes = self.flat, self.fetch(), self.flat.exchanged_bytes
        rows = torch.empty(num_bytes, dtype=torch.uint8, device=self._device) if num_bytes else None
        if flat.grads_on_host:
            part = torch.empty_like(part, device=self._device)
            self.carrier.copy(part, self.fetch())
        self.carrier.run(part, flat.depth_of_grads, flat.sync_hops, channels, rows)
        self._become_final(part)

    def _become_final(self, part: Tensor) -> None:
        """Make the gradient final. `part` has the sum: it is `grads`, or device memory if `grads` is on the host."""
        final = self.final if part is self.grads else part[self._final_in_grads]
        self.scale.apply(final)
        self.stage = "final"
        if self.flat.host_updates:
            self.leaving = (self.final_for_optimizer, final)

    def _make_local(self) -> None:
        """Turn a final gradient back into a partial sum, so that the next sync returns it plus the new gradients."""
        flat, grads, scale = self.flat, self.fetch(), self.scale
        sizes = dict(zip(flat.layout.chain, flat.axis_sizes, strict=True))
        num_summed = prod(sizes[hop.axis] for hop in flat.sync_hops)
        num_copies = prod(sizes[hop.axis] for hop in flat.sync_hops if hop.kind == "all_reduce")
        final = self.final_for_optimizer.clone()
        grads.zero_()
        self.final.copy_(final).mul_(1.0 / num_copies)
        self.final.mul_(float(num_summed) if scale.wire_averages else 1.0 / scale.after)
        if scale.loss_scale is not None:
            self.final.mul_(scale.loss_scale.to(self.final.device))
        self.stage = "local"

    def set_final(self, part: Tensor, used: Sequence[bool]) -> None:
        """Set the final gradient from outside. No update may be reading the old one."""
        self.fetch()
        self.final_for_optimizer.copy_(part)
        self.square = self.clipped_by = None
        self.used = list(used)
        self.stage = "final"

    # To the host.

    def leave(self) -> None:
        """Start the copy of the gradient to the host, if one is due; call `compute_sum_of_squares` next."""
        if self.leaving is not None:
            self.carrier.copy(*self.leaving)

    def compute_sum_of_squares(self) -> None:
        """Compute the sum of squares of a final gradient, while its copy to the host is in flight."""
        if self.leaving is not None and self.stage == "final":
            self.square = sum_of_squares(self.leaving[1])
        self.leaving = None

    def forget(self, zeros: bool, gives_back: bool) -> None:
        """Clear the gradient. With `zeros`, an existing gradient becomes zero: updates still change moments."""
        is_zero = zeros and self.stage != "empty"
        self.square = self.clipped_by = None
        if is_zero and self.grads is not None:
            self.fetch().zero_()
            self.final_for_optimizer.zero_()
        elif gives_back:
            self.give_back()
        self.stage = "final" if is_zero else "empty"
        self.used = self.used if is_zero else [False] * len(self.used)

    # The optimizer reads.

    @property
    def final_for_optimizer(self) -> Tensor:
        """The final gradient where the optimizer reads it."""
        return self.final if self._on_host is None or self.flat.grads_on_host else self._on_host

    def final_by_param(self) -> dict[int, Tensor]:
        """The gradients that the optimizer reads, in the master's dtype, each shaped like the resting parameter."""
        final = self.final_for_optimizer
        if self.flat.reduce == self.flat.master and final is self.final:
            return self._final_views
        return self._views_of(final.to(self.flat.master.torch))

    def _views_of(self, final: Tensor) -> dict[int, Tensor]:
        flat, rows = self.flat, {index: final[where] for index, where in self._held.items()}
        if flat.depth_of_master > 0:
            return rows
        return {index: row.view(flat.params[index].shape) for index, row in rows.items()}

    def apply_clip(self) -> None:
        """Multiply a gradient on the host by its clipping factor. No update may be reading it."""
        if self.clipped_by is not None:
            self.final_for_optimizer.mul_(self.clipped_by.to(self.final_for_optimizer.device))
            self.square = self.clipped_by = None
