"""What the hosts tell each other in a step: one small vector, summed over all ranks beside the computation.

A round is started after a step was queued and finished before the next one is: nobody waits for it. It brings the
number of targets in the coming step (every rank counts its own), whether any rank was asked to save or to stop, and the
loss of an earlier step, which has reached the hosts by then. All ranks finish the same round at the same place, so
what they decide from it they decide alike.
"""

from dataclasses import dataclass

import torch

from ..core.wire.collectives import Channel, InFlight, finish, start_all_reduce
from .signals import INTERRUPTED, TERMINATED, Requests

# Exit codes with which a run can be asked to stop; the first that any rank was asked for counts.
STOPS = (TERMINATED, INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Agreed:
    num_targets: int  # of the coming step
    loss_sum: float  # of the step that was handed in
    stop: int | None  # the exit code that was asked for
    save: bool


class Rounds:
    def __init__(self, channel: Channel, requests: Requests) -> None:
        self._channel = channel
        self._requests = requests
        self._flight: InFlight | None = None

    def start(self, num_targets: int, loss_sum: float) -> None:
        stop, save = self._requests.stop, self._requests.save
        asked = [float(stop == code) for code in STOPS]
        vector = torch.tensor([num_targets, loss_sum, float(save), *asked], dtype=torch.float64)
        with self._channel.ledger.uncounted():
            self._flight = start_all_reduce(self._channel, vector, "what the hosts agree on", sums=True)

    def finish(self) -> Agreed:
        assert self._flight is not None, "a round is started before it is finished"
        finish(self._flight)
        num_targets, loss_sum, save, *asked = self._flight.buffer.tolist()
        stop = next((code for code, num in zip(STOPS, asked, strict=True) if num), None)
        return Agreed(int(num_targets), loss_sum, stop, bool(save))
