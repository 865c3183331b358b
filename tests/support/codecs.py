"""Encoding and decoding once, for tests: the engine prepares both and runs them in every step."""

import torch
from torch import Tensor

from shardwise.core.wire.codec import Codec
from shardwise.core.wire.reference_codecs import decoder, encoder


@torch.no_grad()
def encode(codec: Codec, values: Tensor, rows: Tensor, seed: int = 0) -> None:
    encoder(codec, values, rows)(seed)


@torch.no_grad()
def decode(codec: Codec, rows: Tensor, out: Tensor) -> None:
    decoder(codec, rows, out)()


@torch.no_grad()
def decode_sum(codec: Codec, rows: Tensor, out: Tensor) -> None:
    decoder(codec, rows, out, is_sum=True)()
