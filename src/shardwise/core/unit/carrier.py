"""Moves of a flat's bytes: from rank to rank, hop by hop and in place, and between device and host.

Gathers and reductions use the `Carrier` of a flat; nothing else starts a collective on it. It prepares each collective
and each copy once; the same ones run in every step. If a flat is sent encoded, `rows` is memory for the encoded bytes.
A hop over one rank moves and encodes nothing.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..offload.host_memory import OffloadedState
from ..schedule.flat import Flat, Hop
from ..schedule.state_bytes import LOST
from ..wire.codec import Codec, encoded_bytes
from ..wire.collectives import (
    Channel,
    Collective,
    Work,
    all_gather,
    all_reduce,
    exchange_of_rows,
    gather_of_rows,
    reduce_scatter,
)
from ..wire.reference_codecs import decoder, encoder

KINDS = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}

Channels = dict[str, Channel]


class Carrier:
    def __init__(self, flat: Flat, unit_name: str, offloaded: OffloadedState | None) -> None:
        self.unit_name = unit_name
        self._flat = flat
        self._offloaded = offloaded
        # Encodings are counted for their seeds, which only stochastic rounding reads.
        codecs = [codec for codec in (flat.params_codec, flat.grads_codec) if codec is not None]
        self._needs_seeds = any(codec.is_stochastic for codec in codecs)
        self._num_encoded = 0
        # The error of encoding a gradient, by hop, to be added to the next one.
        self.lost: dict[Hop, Tensor] = {}

    def steps(
        self,
        buffer: Tensor,
        depth: int,
        hops: Sequence[Hop],
        channels: Channels,
        rows: Tensor | None = None,
        out: Tensor | None = None,
    ) -> list[Collective]:
        """Prepare the collectives of `hops`, in order. `buffer` holds the span at `depth`. With `out` there must be one
        hop, a reduce-scatter of all of `buffer`, and this rank's part of the sum goes to `out`."""
        spans, name = self._flat.spans, self.unit_name
        steps: list[Collective] = []
        for hop in hops:
            channel = channels[hop.axis]
            if channel.num_ranks == 1:
                continue
            part = buffer if hop.depth == depth else buffer[spans[hop.depth].within(spans[depth])]
            if rows is not None:
                own = part.view(channel.num_ranks, -1)[channel.index] if out is None else out
                steps.append(self._encoded_sum(part, hop, channel, rows, own))
                if hop.kind == "all_reduce":
                    steps.append(self._gather_of_sums(part, channel, rows))
            elif out is not None:
                steps.append(reduce_scatter(channel, part, name, out))
            else:
                steps.append(KINDS[hop.kind](channel, part, name))
        return steps

    def run(
        self, buffer: Tensor, depth: int, hops: Sequence[Hop], channels: Channels, rows: Tensor | None = None
    ) -> None:
        for step in self.steps(buffer, depth, hops, channels, rows):
            step.run()

    def _encoded_sum(self, part: Tensor, hop: Hop, channel: Channel, scratch: Tensor, out: Tensor) -> Collective:
        """Prepare an encoded reduce-scatter: sum `part` over the ranks (or average it, if the channel does). This
        rank's part of the result goes to `out`."""
        codec, sent, received = self._rows_in(scratch, part, channel)
        encode, sum_rows = self.encoding(codec, part, sent), decoder(codec, received, out, is_sum=True)
        collective = exchange_of_rows(channel, sent, received, codec, self.unit_name)
        collective.before, collective.then = encode, sum_rows
        if channel.averages:
            collective.then = partial(_run_all, (sum_rows, partial(out.mul_, 1.0 / channel.num_ranks)))
        if codec.has_feedback:
            if hop not in self.lost:
                # No error yet: -0, because adding it changes no number, not even -0.
                self.lost[hop] = torch.full((part.numel(),), -0.0, dtype=LOST.torch, device=part.device)
            lost = self.lost[hop]
            decode_sent = decoder(codec, sent, lost)

            def save_error() -> None:
                """Save the encoding error for the next gradient. Values that are not finite have the error 0."""
                decode_sent()
                torch.sub(part, lost, out=lost).nan_to_num_(0.0, 0.0, 0.0)

            collective.before = partial(_run_all, (partial(part.add_, lost), encode))
            collective.meanwhile = save_error
        return collective

    def _gather_of_sums(self, part: Tensor, channel: Channel, scratch: Tensor) -> Collective:
        """Prepare to gather the sums after a reduce-scatter of `part`. Every rank decodes the same bits."""
        codec, rows, _ = self._rows_in(scratch, part, channel)
        own = part.view(channel.num_ranks, -1)[channel.index]
        collective = gather_of_rows(channel, rows, codec, self.unit_name)
        collective.before = self.encoding(codec, own, rows[channel.index :][:1])
        collective.then = decoder(codec, rows, part)
        return collective

    def _rows_in(self, scratch: Tensor, part: Tensor, channel: Channel) -> tuple[Codec, Tensor, Tensor]:
        """The codec, and views of scratch memory, in use until the collective is finished: rows to send, to receive."""
        codec = self._flat.grads_codec
        assert codec is not None
        size = channel.num_ranks * encoded_bytes(codec, part.numel() // channel.num_ranks)
        sent, received = scratch[: 2 * size].view(2, channel.num_ranks, -1)
        return codec, sent, received

    def encoding(self, codec: Codec, values: Tensor, rows: Tensor) -> Work:
        """Prepare to encode, with a new seed each time."""
        encode = encoder(codec, values, rows)
        return (lambda: encode(self._next_seed())) if self._needs_seeds else partial(encode, 0)

    def _next_seed(self) -> int:
        """A different seed for every encoding on every rank."""
        self._num_encoded += 1
        return hash((self._num_encoded, *self._flat.axis_indices))

    def row_steps(self, rows: Tensor, hops: Sequence[Hop], channels: Channels) -> list[Collective]:
        """Prepare the collectives of `hops` on `rows`: each row is one rank's encoded master."""
        flat, codec = self._flat, self._flat.params_codec
        assert codec is not None
        steps: list[Collective] = []
        for hop in hops:
            span, channel = flat.spans[hop.depth], channels[hop.axis]
            if channel.num_ranks > 1:
                part = rows[span.start // flat.num_master : span.stop // flat.num_master]
                steps.append(gather_of_rows(channel, part, codec, self.unit_name))
        return steps

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, and count the bytes if they move between device and host."""
        target.copy_(source, non_blocking=True)
        if self._offloaded is not None:
            memory = self._offloaded.memory
            is_from_host = memory.arena.owns(source)
            if is_from_host != memory.arena.owns(target):
                memory.moves.add("to_device" if is_from_host else "to_host", source.nbytes)


def _run_all(works: Iterable[Work]) -> None:
    for work in works:
        work()
