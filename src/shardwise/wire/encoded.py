"""Collectives of what travels in fewer bits.

A buffer of N equal parts is N rows of bytes, one for each part, each encoded by itself; so a part of the buffer is so
many whole rows. Rows are gathered as they are, over one axis after the other, and decoded once, in the end. A reduction
sends each rank the rows of its own part (an all-to-all), decodes what came from all and sums that in fp32: so there is
one encoding for each hop, and nobody receives what he does not need. Where the sum should be on every rank, it is
encoded once more and gathered.

`scratch` is memory for the rows under way, of `exchange_bytes`; it is in use until the collective is finished.
"""

from functools import partial

from torch import Tensor

from .codec import Codec, encoded_bytes
from .collectives import Channel, InFlight, finish, start_exchange, start_gather
from .ledger import Call, Kind
from .quant import decode, decode_sum, encode


def rows_bytes(codec: Codec, num_elems: int, num_rows: int) -> int:
    return num_rows * encoded_bytes(codec, num_elems // num_rows)


def exchange_bytes(codec: Codec, num_elems: int, num_ranks: int) -> int:
    """Sent, and received."""
    return 2 * rows_bytes(codec, num_elems, num_ranks)


def rows_call(kind: Kind, axis: str, num_ranks: int, codec: Codec, num_bytes: int) -> Call:
    """As the ledger has it, and the plan."""
    return Call(kind, axis, str(codec), num_bytes, num_ranks)


def encode_rows(codec: Codec, values: Tensor, rows: Tensor, seed: int) -> None:
    """All of `rows`, (num_rows, bytes), from the values, which have as many equal parts."""
    for index, (part, row) in enumerate(zip(values.view(len(rows), -1), rows, strict=True)):
        encode(codec, part, row, seed + index)


def decode_rows(codec: Codec, rows: Tensor, out: Tensor) -> None:
    for part, row in zip(out.view(len(rows), -1), rows, strict=True):
        decode(codec, row, part)


def start_gather_of_rows(channel: Channel, rows: Tensor, codec: Codec, what: str) -> InFlight:
    """In place, as every gather: this rank's own rows are where they belong."""
    call = rows_call("all_gather", channel.axis, channel.num_ranks, codec, rows.nbytes)
    return start_gather(InFlight("all_gather", channel, what, rows.view(-1), call=call))


def start_encoded_reduce_scatter(
    channel: Channel, buffer: Tensor, codec: Codec, what: str, out: Tensor, scratch: Tensor, seed: int
) -> InFlight:
    """The sum, or the mean where the channel averages, of this rank's part of `buffer` goes to `out`."""
    sent, received = _rows_of(channel, buffer, codec, scratch)
    encode_rows(codec, buffer, sent, seed)
    call = rows_call("reduce_scatter", channel.axis, channel.num_ranks, codec, sent.nbytes)
    then = partial(_sum_rows, channel, codec, received, out)
    flight = InFlight("reduce_scatter", channel, what, sent.view(-1), then=then, call=call)
    return start_exchange(flight, received.view(-1))


def start_encoded_all_reduce(
    channel: Channel, buffer: Tensor, codec: Codec, what: str, scratch: Tensor, seed: int
) -> InFlight:
    """The sum, or the mean where the channel averages, goes to `buffer` on every rank: the same bits."""
    sent, received = _rows_of(channel, buffer, codec, scratch)
    own = buffer.view(channel.num_ranks, -1)[channel.index]
    flight = start_encoded_reduce_scatter(channel, buffer, codec, what, own, scratch, seed)

    def gather_sum() -> None:
        _sum_rows(channel, codec, received, own)
        encode(codec, own, sent[channel.index], seed + channel.num_ranks)
        finish(start_gather_of_rows(channel, sent, codec, what))
        decode_rows(codec, sent, buffer)

    flight.then = gather_sum
    return flight


def sent_rows(channel: Channel, buffer: Tensor, codec: Codec, scratch: Tensor) -> Tensor:
    return _rows_of(channel, buffer, codec, scratch)[0]


def _rows_of(channel: Channel, buffer: Tensor, codec: Codec, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """To be sent, and to be received."""
    size = rows_bytes(codec, buffer.numel(), channel.num_ranks)
    return tuple(scratch[start : start + size].view(channel.num_ranks, -1) for start in (0, size))  # type: ignore[return-value]


def _sum_rows(channel: Channel, codec: Codec, rows: Tensor, out: Tensor) -> None:
    decode_sum(codec, rows, out)
    if channel.averages:
        out.mul_(1.0 / channel.num_ranks)
