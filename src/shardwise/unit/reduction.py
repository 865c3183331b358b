"""A gradient on its way: from the buffer that a backward has written to where it rests, and on to the optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..wire.collectives import InFlight, finish
from .carrier import Channels
from .gradient import Gradient
from .scale import GradScale


@dataclass(slots=True)
class Reduction:
    """A gradient on its way in `buffer`; `rows` is memory for what of it is under way, if it is encoded."""

    gradient: Gradient
    buffer: Tensor
    rows: Tensor | None
    flights: list[InFlight]
    is_sync: bool
    is_at_rest: bool = False

    @classmethod
    def start(
        cls,
        gradient: Gradient,
        taken: Sequence[Tensor | None],
        slot: Tensor | None,
        rows: Tensor | None,
        is_sync: bool,
        channels: Channels,
        scale: GradScale,
    ) -> "Reduction":
        """Close the open places with what autograd left, and send the gradient on its way.

        Only the first hop is started here. `taken` must be held until the fill has run.
        """
        flat, carrier = gradient.flat, gradient.carrier
        buffer = gradient.grads if slot is None else slot
        assert buffer is not None
        gradient.close(taken, scale)
        if (
            len(flat.reduce_hops) == 1
            and gradient.stage == "empty"
            and not flat.grads_on_host
            and channels[flat.reduce_hops[0].axis].num_ranks > 1
        ):
            # Nothing to add to: the sum goes straight to where it rests.
            assert gradient.grads is not None
            flight = carrier.start_to(gradient.grads, buffer, flat.reduce_hops[0], channels, rows)
            return cls(gradient, buffer, rows, [flight], is_sync, is_at_rest=True)
        hops = flat.reduce_hops or (flat.sync_hops if is_sync else ())
        return cls(gradient, buffer, rows, carrier.start(buffer, 0, hops[:1], channels, rows), is_sync)

    def finish(self, channels: Channels, scale: GradScale, scratch: Callable[[int], Tensor]) -> None:
        gradient, flat = self.gradient, self.gradient.flat
        assert gradient.grads is not None
        for flight in self.flights:
            finish(flight)
        if flat.grads_on_host:
            self._finish_on_host(channels, scale, scratch)
            return
        sync_hops = flat.sync_hops
        if self.is_at_rest:
            pass
        elif flat.depth_of_grads > 0:
            gradient.carrier.run(self.buffer, 0, flat.reduce_hops[1:], channels, self.rows)
            part = self.buffer[gradient.in_whole]
            if gradient.stage == "local":
                gradient.grads.add_(part)
            else:
                gradient.grads.copy_(part)
        else:
            # Whole gradients: the first hop of the sync was the reduction itself.
            sync_hops = sync_hops[1:]
        gradient.stage = "local"
        if self.is_sync:
            gradient.sync(sync_hops, self.rows, channels, scale)

    def _finish_on_host(self, channels: Channels, scale: GradScale, scratch: Callable[[int], Tensor]) -> None:
        """The sum is made in the slot; `scratch` is for what comes back from the host."""
        gradient, flat = self.gradient, self.gradient.flat
        assert gradient.grads is not None
        part, sync_hops = self.buffer, flat.sync_hops[1:]
        if flat.depth_of_grads > 0:
            gradient.carrier.run(self.buffer, 0, flat.reduce_hops[1:], channels, self.rows)
            part, sync_hops = self.buffer[gradient.in_whole], flat.sync_hops
            if gradient.stage == "local":
                gradient.add_from_host(part, scratch(gradient.grads.nbytes))
        gradient.stage = "local"
        gradient.leaving = (gradient.grads, part)
        if self.is_sync:
            gradient.sync_in(part, sync_hops, self.rows, channels, scale)
