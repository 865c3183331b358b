"""Checkpoints as two ranks would have written them, made in this process from tensors at hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import folder
from shardwise.checkpoint.index import NAMES, Index, Optimizer, Piece, Saved, Stored, to_json
from shardwise.checkpoint.opened import Reader
from shardwise.checkpoint.tensor_files import Source, lay_out, write_file

GROUPS = ({"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.1}, {"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0})


def source_of(name: str, tensor: Tensor) -> Source:
    return Source(name, tensor.dtype, tuple(tensor.shape), lambda: [tensor])


def read_whole(reader: Reader, stored: Stored) -> Tensor:
    row = torch.empty(stored.num_elems, dtype=stored.torch_dtype)
    reader.read(stored, 0, row)
    return row.view(stored.shape)


def require_good(reader: Reader, number: int) -> None:
    """Read a whole file, and compare every checksum."""
    num_bytes = reader._files[number].num_bytes
    read_whole(reader, Stored((num_bytes,), "U8", (Piece(number, 0, 0, num_bytes),)))


def save_by_hand(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    tied: Mapping[str, tuple[str, ...]] | None = None,
    frozen: tuple[str, ...] = (),
    buffers: tuple[str, ...] = (),
    with_optimizer: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Index:
    """Every tensor is cut in two, and each half is in another file; so are an optimizer's moments, drawn here."""
    parts: list[dict[str, Tensor]] = [{}, {}]
    torch.manual_seed(3)
    moments: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        is_trained = with_optimizer and name not in frozen and name not in buffers
        moments[name] = {key: torch.rand(tensor.shape) for key in ("exp_avg", "exp_avg_sq") if is_trained}
        for label, whole in (*((f"{key} of {name}", each) for key, each in moments[name].items()), (name, tensor)):
            for number, (start, stop) in enumerate(_halves(whole)):
                if stop > start:
                    parts[number][f"{label}/{start}"] = whole.detach().reshape(-1)[start:stop]
    into = folder.begin(path)
    layouts = [lay_out([source_of(key, tensor) for key, tensor in part.items()]) for part in parts]
    files = tuple(write_file(into / folder.rank_file(number), layout) for number, layout in enumerate(layouts))

    def stored(label: str, tensor: Tensor) -> tuple[tuple[int, ...], str, tuple[Piece, ...]]:
        pieces = (
            Piece(number, layouts[number].offsets[f"{label}/{start}"], start, stop)
            for number, (start, stop) in enumerate(_halves(tensor))
            if stop > start
        )
        return tuple(tensor.shape), NAMES[tensor.dtype], tuple(pieces)

    found: dict[str, Saved] = {}
    for name, tensor in tensors.items():
        state: dict[str, Any] = {key: Stored(*stored(f"{key} of {name}", each)) for key, each in moments[name].items()}
        found[name] = Saved(
            *stored(name, tensor),
            "buffer" if name in buffers else "parameter",
            None if name in buffers else name not in frozen,
            (tied or {}).get(name, ()),
            int(tensor.dim() < 2) if state else None,
            {**state, "step": 3.0} if state else {},
        )
    optimizer = Optimizer("AdamW", GROUPS) if with_optimizer else None
    index = Index(files, found, optimizer, dict(extra or {}), {"shardwise": "by hand"})
    folder.complete(path, to_json(index))
    return index


def _halves(tensor: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    middle = tensor.numel() // 3
    return (0, middle), (middle, tensor.numel())


def some_tensors() -> dict[str, Tensor]:
    """Three alike blocks, an embedding, a norm, a buffer, a scalar, something empty; four dtypes."""
    torch.manual_seed(1)
    blocks = {
        f"blocks.{number}.{name}": torch.randn(shape)
        for number in range(3)
        for name, shape in (("up.weight", (6, 4)), ("up.bias", (6,)), ("norm", (4,)))
    }
    return {
        "embed.weight": torch.randn(11, 4),
        **blocks,
        "norm.weight": torch.randn(4).bfloat16(),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
        "running.count": torch.arange(5),
    }
