"""Find a checkpoint and read its index, whichever library wrote it: one value for all readers."""

import re
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import CheckpointError
from . import folder
from .index import Index, from_json
from .interop import dcp, deepspeed, hugging_face
from .interop.described import Groups
from .reader import Reader

_LOOKED_FOR = (
    f"shardwise ({folder.MARKER}; {folder.CHECKPOINTS}/ of a run), torch DCP ({dcp.METADATA}), Accelerate "
    f"({dcp.MODEL_PART}), DeepSpeed ({deepspeed.LATEST}, *_model_states.pt), Hugging Face "
    f"({', '.join(hugging_face.NAMES)})"
)
# In a folder of ours, none of these files is a checkpoint by itself.
_OWN_FILE = re.compile(rf"{re.escape(folder.INDEX)}|{folder.MARKER}|rank-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class Opened:
    folder: Path
    index: Index

    def reader(self, is_shared: bool = False) -> Reader:
        """Return a reader of its files. `is_shared`: others on this machine read the same bytes."""
        return Reader(self.folder, self.index.files, is_shared)


def open_checkpoint(path: Path, groups: Groups = ()) -> Opened:
    """Open any checkpoint, ours or another library's. Tensors are not read.

    The path of a run leads to its newest complete checkpoint, and a folder of the Trainer's or of Accelerate's to the
    checkpoint in it. `groups`: the parameters that an optimizer has, for one that was saved by number. Raises
    CheckpointError, with the path, where there is none or it cannot be understood.
    """
    with folder.os_errors_as(CheckpointError, f"cannot read {path}"):
        return _open(path, groups)


def _open(path: Path, groups: Groups) -> Opened:
    path = folder.newest_in(path)
    if folder.find(path) is not None or (path / folder.INDEX).is_file() or not path.exists():
        path, text = folder.read_index(path)
    else:
        text = None
    try:
        return _open_others(path, groups) if text is None else Opened(path, from_json(text))
    except CheckpointError as error:
        if str(error).startswith((f"cannot read {path}", f"{path} ")):  # the message has the path already
            raise
        raise type(error)(f"cannot read {path}: {error}") from error


def _open_others(path: Path, groups: Groups) -> Opened:
    if path.is_file():
        if _OWN_FILE.fullmatch(path.name) and (path.parent / folder.INDEX).is_file():
            raise CheckpointError(f"{path} is one file of a checkpoint: give the folder, {path.parent}")
        return Opened(path.parent, hugging_face.read_file(path))
    if not path.is_dir():
        raise CheckpointError("it is neither a file nor a folder")
    if (path / dcp.METADATA).is_file():
        return Opened(path, dcp.read(path))
    if (path / dcp.MODEL_PART / dcp.METADATA).is_file():
        return Opened(path, dcp.read_accelerate(path))
    if (place := deepspeed.folder_of(path)) is not None:
        return Opened(place, deepspeed.read(place))
    if (name := hugging_face.file_of(path)) is not None:
        return Opened(path, hugging_face.read(path, name, groups))
    if (newest := _newest_run_in(path)) is not None:
        raise CheckpointError(f"{path} holds runs, and is none itself: name one, the newest is {newest}")
    raise CheckpointError(f"it holds no checkpoint of {_LOOKED_FOR}")


def _newest_run_in(path: Path) -> Path | None:
    saved = [place for root in path.glob(f"*/{folder.CHECKPOINTS}") if (place := folder.latest(root)) is not None]
    newest = max(saved, key=lambda place: place.stat().st_mtime, default=None)
    return None if newest is None else newest.parent.parent


def looks_whole(path: Path) -> bool:
    """Return whether a checkpoint can be opened and its files have their lengths; the files are not read."""
    try:
        opened = open_checkpoint(path)
        with opened.reader() as reader:
            for number in range(len(opened.index.files)):
                reader.require_length(number)
    except CheckpointError:
        return False
    return True
