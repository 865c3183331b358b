"""A gradient on its way: from the buffer that a backward has written to where it rests, and on to the optimizer."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..wire.collectives import Journey
from .carrier import Channels
from .gradient import Gradient
from .scale import GradScale


def start_reduction(
    gradient: Gradient,
    taken: Sequence[Tensor | None],
    slot: Tensor | None,
    rows: Tensor | None,
    is_sync: bool,
    channels: Channels,
    scale: GradScale,
    scratch: Callable[[int], Tensor],
) -> Journey:
    """Close the open places with what autograd left, and send the gradient on its way.

    It travels in `slot`, or where it rests; `rows` is memory for what of it is under way, if it is encoded, and
    `scratch` for what comes back from the host. Only a first hop is started here. `taken` must be held until the fill
    has run.
    """
    flat, carrier, journey = gradient.flat, gradient.carrier, Journey()
    buffer = gradient.grads if slot is None else slot
    assert buffer is not None
    assert gradient.grads is not None
    gradient.close(taken, scale)
    hops, is_first = flat.reduce_hops, gradient.stage == "empty"
    gradient.stage = "local"
    if is_first and len(hops) == 1 and not flat.grads_on_host and channels[hops[0].axis].num_ranks > 1:
        # Nothing to add to: the sum goes straight to where it rests.
        journey.go([carrier.step_to(gradient.grads, buffer, hops[0], channels, rows)])
        journey.begin()
    elif hops:
        journey.go(carrier.steps(buffer, 0, hops, channels, rows))
        journey.begin()
        journey.do(partial(_add_to_rest, gradient, buffer[gradient.in_whole], is_first, scratch))
    if is_sync:
        part = buffer[gradient.in_whole] if flat.grads_on_host else gradient.grads
        gradient.sync_in(part, journey, rows, channels, scale)
    elif flat.grads_on_host:
        journey.do(partial(gradient.will_leave, buffer[gradient.in_whole]))
    if not hops:
        # Whole gradients: the first hop of the sync is the reduction itself.
        journey.begin()
    return journey


def _add_to_rest(gradient: Gradient, part: Tensor, is_first: bool, scratch: Callable[[int], Tensor]) -> None:
    """Sums over the ranks to those of earlier micro-batches; what rests on the host is added on the device."""
    assert gradient.grads is not None
    if gradient.flat.grads_on_host:
        if not is_first:
            gradient.add_from_host(part, scratch(gradient.grads.nbytes))
    elif is_first:
        gradient.grads.copy_(part)
    else:
        gradient.grads.add_(part)
