"""A checkpoint that has been found and understood, whoever wrote it: one value for everything that reads."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from . import folder
from .index import Index, from_json
from .reader import Reader


@dataclass(frozen=True, slots=True)
class Opened:
    folder: Path
    index: Index

    def reader(self) -> Reader:
        return Reader(self.folder, self.index.files)


def open_checkpoint(path: Path) -> Opened:
    """Raises CheckpointError, with the path, where there is none or it cannot be understood. Tensors are not read."""
    place, text = folder.read_index(path)
    try:
        return Opened(place, from_json(text))
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {place}: {error}") from error
