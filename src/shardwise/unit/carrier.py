"""How a flat's bytes travel: from rank to rank, hop by hop and in place, and between device and host.

Gathers and reductions alike. Nothing else starts a collective on a flat.
"""

from collections.abc import Sequence

from torch import Tensor

from ..away import Away
from ..plan.flat import Flat, Hop
from ..wire.collectives import (
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


class Carrier:
    def __init__(self, flat: Flat, unit_name: str, away: Away | None) -> None:
        self.unit_name = unit_name
        self._flat = flat
        self._away = away

    def start(self, buffer: Tensor, depth: int, hops: Sequence[Hop], channels: Channels) -> list[InFlight]:
        """Queue `hops` on `buffer`, which holds the span at `depth`; each waits for the one before."""
        spans = self._flat.spans
        outer = spans[depth]
        flights: list[InFlight] = []
        for hop in hops:
            for flight in flights:
                finish(flight)
            part = buffer if hop.depth == depth else buffer[spans[hop.depth].within(outer)]
            flights = [STARTERS[hop.kind](channels[hop.axis], part, self.unit_name)]
        return flights

    def start_to(self, out: Tensor, buffer: Tensor, hop: Hop, channels: Channels) -> InFlight:
        """Queue one hop that scatters all of `buffer`, and leaves this rank's part of the sum in `out`."""
        return start_reduce_scatter(channels[hop.axis], buffer, self.unit_name, out=out)

    def run(self, buffer: Tensor, depth: int, hops: Sequence[Hop], channels: Channels) -> None:
        for flight in self.start(buffer, depth, hops, channels):
            finish(flight)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """What passes between device and host so is counted."""
        target.copy_(source, non_blocking=True)
        if self._away is not None:
            memory = self._away.memory
            is_host = [memory.arena.owns(tensor) for tensor in (target, source)]
            if is_host == [False, True]:
                memory.moves.add("to_device", target.numel() * source.element_size())
            elif is_host == [True, False]:
                memory.moves.add("to_host", source.nbytes)
