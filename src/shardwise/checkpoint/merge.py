"""What the ranks wrote of each tensor, brought together: the tensors of one index. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..base.errors import CheckpointError
from .index import Piece, Plain, Saved, Stored, in_order


def merge(shares: Iterable[Mapping[str, Saved]]) -> dict[str, Saved]:
    """The tensors of an index from what each rank wrote of them. Plain values are those of the rank that comes first.

    The pieces are put in order; whether they are complete is for `require_sound` to say.
    """
    found: dict[str, list[Saved]] = {}
    for share in shares:
        for name, saved in share.items():
            found.setdefault(name, []).append(saved)
    return {name: _merged(name, parts) for name, parts in found.items()}


def _merged(name: str, parts: list[Saved]) -> Saved:
    # A rank that wrote nothing of it knows no state.
    parts = [part for part in parts if part.stored.pieces or part.state] or parts[:1]
    parts.sort(key=lambda saved: saved.stored.pieces[0].start if saved.stored.pieces else 0)
    first = parts[0]
    for other in parts[1:]:
        if _described(other.state) != _described(first.state):
            raise CheckpointError(
                f"the optimizer's state of parameter {name!r} is {sorted(first.state)} on one rank and "
                f"{sorted(other.state)} on another: such state cannot be brought together"
            )
    state = {
        key: _joined([part.state[key] for part in parts]) if isinstance(item, Stored) else item  # type: ignore[misc]
        for key, item in first.state.items()
    }
    return Saved(_joined([part.stored for part in parts]), first.kind, first.is_trained, first.tied, first.group, state)


def _joined(parts: list[Stored]) -> Stored:
    """What lies side by side in one file becomes one piece."""
    size, joined = parts[0].torch_dtype.itemsize, list[Piece]()
    for piece in in_order(piece for part in parts for piece in part.pieces):
        if joined and piece == _next_to(joined[-1], size, piece.stop):
            joined[-1] = replace(joined[-1], stop=piece.stop)
        else:
            joined.append(piece)
    return Stored(parts[0].shape, parts[0].dtype, tuple(joined))


def _next_to(last: Piece, size: int, stop: int) -> Piece:
    return Piece(last.file, last.offset + (last.stop - last.start) * size, last.stop, stop)


def _described(state: Mapping[str, Stored | Plain]) -> dict[str, Any]:
    return {key: (item.shape, item.dtype) if isinstance(item, Stored) else None for key, item in state.items()}
