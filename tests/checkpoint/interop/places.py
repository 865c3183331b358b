"""Tensors out of files by hand: what the pieces of a description say, and nothing else."""

from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.index import Stored, require_cover


def whole(path: Path, stored: Stored) -> Tensor:
    """A tensor whose pieces lie in one file."""
    require_cover("it", stored.pieces, stored.num_elems)
    size, content = stored.torch_dtype.itemsize, path.read_bytes()
    rows = [content[piece.offset : piece.offset + (piece.stop - piece.start) * size] for piece in stored.pieces]
    joined = bytearray(b"".join(rows))
    row = torch.frombuffer(joined, dtype=stored.torch_dtype) if joined else torch.empty(0, dtype=stored.torch_dtype)
    return row.view(stored.shape)
