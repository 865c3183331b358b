"""Checkpoints as two ranks would have written them, made in this process from tensors at hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import folder
from shardwise.checkpoint.index import NAMES, File, Index, Optimizer, Piece, Saved, Stored, to_json
from shardwise.checkpoint.tensor_files import Source, lay_out, write_file

GROUPS = ({"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.1}, {"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0})


def source_of(name: str, tensor: Tensor) -> Source:
    return Source(name, tensor.dtype, tuple(tensor.shape), lambda: [tensor])


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
    pieces: dict[str, list[tuple[int, str, int, int]]] = {}

    def cut(label: str, tensor: Tensor) -> Stored:
        row = tensor.detach().reshape(-1)
        middle = row.numel() // 3
        pieces[label] = []
        for number, (start, stop) in enumerate(((0, middle), (middle, row.numel()))):
            if stop > start:
                parts[number][f"{label}/{start}"] = row[start:stop]
                pieces[label].append((number, f"{label}/{start}", start, stop))
        return Stored(tuple(tensor.shape), NAMES[tensor.dtype], ())

    found: dict[str, Saved] = {}
    torch.manual_seed(3)
    for name, tensor in tensors.items():
        is_trained = name not in frozen and name not in buffers
        state: dict[str, Any] = {}
        if with_optimizer and is_trained:
            state = {key: cut(f"{key} of {name}", torch.rand(tensor.shape)) for key in ("exp_avg", "exp_avg_sq")}
            state["step"] = 3.0
        found[name] = Saved(
            cut(name, tensor),
            "buffer" if name in buffers else "parameter",
            None if name in buffers else is_trained,
            (tied or {}).get(name, ()),
            int(tensor.dim() < 2) if state else None,
            state,
        )
    into = folder.begin(path)
    files: list[File] = []
    places: list[Mapping[str, int]] = []
    for number, part in enumerate(parts):
        layout = lay_out([source_of(key, tensor) for key, tensor in part.items()])
        files.append(write_file(into / folder.rank_file(number), layout))
        places.append(layout.offsets)

    def placed(label: str, stored: Stored) -> Stored:
        return Stored(
            stored.shape,
            stored.dtype,
            tuple(Piece(number, places[number][key], start, stop) for number, key, start, stop in pieces[label]),
        )

    complete = {
        name: Saved(
            placed(name, saved.stored),
            saved.kind,
            saved.is_trained,
            saved.tied,
            saved.group,
            {
                key: placed(f"{key} of {name}", item) if isinstance(item, Stored) else item
                for key, item in saved.state.items()
            },
        )
        for name, saved in found.items()
    }
    optimizer = Optimizer("AdamW", GROUPS) if with_optimizer else None
    index = Index(tuple(files), complete, optimizer, dict(extra or {}), {"shardwise": "by hand"})
    folder.complete(path, to_json(index))
    return index


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
