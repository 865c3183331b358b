"""Collectives of encoded values.

A buffer of N equal parts is N rows of bytes, one for each part, each encoded by itself; so a part of the buffer is made
of whole rows. Rows are gathered over one axis after the other, and decoded once, at the end. A reduction sends every
rank the rows of its own part (an all-to-all), decodes the rows of all ranks and sums them in fp32: there is one
encoding for each hop, and no rank receives more than it needs. A sum that every rank needs is encoded once more and
gathered.

`scratch` is memory for the rows in flight (`Flat.exchanged_bytes`); it is in use until the collective is finished.
"""

from functools import partial

from torch import Tensor

from .codec import Codec, encoded_bytes
from .collectives import Channel, InFlight, start_exchange, start_gather
from .ledger import Call, Kind
from .reference_codecs import decode, decode_sum, encode


def start_gather_of_rows(channel: Channel, rows: Tensor, codec: Codec, what: str) -> InFlight:
    """Gather rows in place; this rank's own rows are in their place already."""
    return start_gather(_flight("all_gather", channel, rows, codec, what))


def start_encoded_reduce_scatter(
    channel: Channel, buffer: Tensor, codec: Codec, what: str, out: Tensor, scratch: Tensor, seed: int
) -> InFlight:
    """Start to sum this rank's part of `buffer` over the ranks into `out`, or to average it if the channel does."""
    sent, received = rows_under_way(channel, buffer, codec, scratch)
    encode(codec, buffer, sent, seed)
    flight = _flight("reduce_scatter", channel, sent, codec, what)
    flight.then = partial(_sum_rows, channel, codec, received, out)
    return start_exchange(flight, received.view(-1))


def start_gather_of_sums(
    channel: Channel, buffer: Tensor, codec: Codec, what: str, scratch: Tensor, seed: int
) -> InFlight:
    """Start, after the reduce-scatter of `buffer`, to gather its parts into `buffer`: the same bits on every rank."""
    rows, _ = rows_under_way(channel, buffer, codec, scratch)
    own = buffer.view(channel.num_ranks, -1)[channel.index]
    encode(codec, own, rows[channel.index :][:1], seed)
    flight = start_gather_of_rows(channel, rows, codec, what)
    flight.then = partial(decode, codec, rows, buffer)
    return flight


def rows_under_way(channel: Channel, buffer: Tensor, codec: Codec, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a reduction in scratch memory: those that are sent, and those that are received."""
    size = channel.num_ranks * encoded_bytes(codec, buffer.numel() // channel.num_ranks)
    sent, received = scratch[: 2 * size].view(2, channel.num_ranks, -1)
    return sent, received


def _flight(kind: Kind, channel: Channel, rows: Tensor, codec: Codec, what: str) -> InFlight:
    """A collective of rows, which the ledger counts under the codec's name."""
    call = Call(kind, channel.axis, str(codec), rows.nbytes, channel.num_ranks)
    return InFlight(kind, channel, what, rows.view(-1), call=call)


def _sum_rows(channel: Channel, codec: Codec, rows: Tensor, out: Tensor) -> None:
    decode_sum(codec, rows, out)
    if channel.averages:
        out.mul_(1.0 / channel.num_ranks)
