"""One checkpoint into another, whoever wrote it: streaming, in memory of a few blocks, and without ranks.

Nothing is lost on the way into our own form: frozen weights, buffers, tied names, the optimizer's groups and state, and
what the program that saved it wanted back. Files are read with their checksums, and written with new ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ..version import VERSION
from . import folder
from .index import File, Index, Piece, Stored, require_sound
from .index_json import to_json
from .opened import Opened
from .tensor_files import state_key
from .tree import stored_state
from .writer import Source, Tell, file_names, new_folder, split, stored_source, write_note, write_sources, write_weights


def without_optimizer(opened: Opened) -> Opened:
    """The weights and buffers alone."""
    tensors = {name: replace(saved, group=None, state={}) for name, saved in opened.index.tensors.items()}
    return Opened(opened.folder, replace(opened.index, tensors=tensors, optimizer=None, extra={}))


def num_bytes_of(opened: Opened) -> int:
    return sum(stored.num_bytes for _, stored in opened.index.every_stored())


def write_own(opened: Opened, path: Path, max_bytes: int | None, tell: Tell) -> None:
    """Our own form: whole tensors in files of at most `max_bytes`; None: one of weights, and one of state.

    Replaces what is there, when it is complete.
    """
    index = opened.index
    into = folder.begin(path)
    try:
        with opened.reader() as reader:
            weights = [stored_source(name, reader, saved.stored) for name, saved in index.tensors.items()]
            state = [
                stored_source(state_key(key, name), reader, item)
                for name, saved in index.tensors.items()
                for key, item in stored_state(saved).items()
            ]
            files: list[File] = []
            weight_places = _write_files(into, "model", weights, max_bytes, files, tell)
            state_places = _write_files(into, "optimizer", state, max_bytes, files, tell) if state else {}
        tensors = {
            name: replace(
                saved,
                stored=_at(saved.stored, *weight_places[name]),
                state=saved.state
                | {key: _at(item, *state_places[state_key(key, name)]) for key, item in stored_state(saved).items()},
            )
            for name, saved in index.tensors.items()
        }
        made = Index(tuple(files), tensors, index.optimizer, index.extra, {**index.origin, **_converted()})
        require_sound(made)
        folder.complete(path, to_json(made))
    except BaseException:
        folder.abandon(path)
        raise


def write_bare_weights(opened: Opened, path: Path, max_bytes: int, tell: Tell) -> None:
    """The weights and buffers as in a Hugging Face folder, under the names that they have, and nothing else."""
    with new_folder(path) as into, opened.reader() as reader:
        sources = [stored_source(name, reader, saved.stored) for name, saved in opened.index.tensors.items()]
        write_weights(into, sources, max_bytes, tell)
        write_note(into, {**opened.index.origin, **_converted()})


def _write_files(
    into: Path, stem: str, sources: Sequence[Source], max_bytes: int | None, files: list[File], tell: Tell
) -> dict[str, tuple[int, int]]:
    """Adds to `files`; returns the file and the offset of every tensor."""
    contents = [list(sources)] if max_bytes is None else split(sources, max_bytes)
    places: dict[str, tuple[int, int]] = {}
    for name, content in zip(file_names(stem, len(contents)), contents, strict=True):
        file, layout = write_sources(into / name, content, tell, is_summed=True)
        places |= {key: (len(files), offset) for key, offset in layout.offsets.items()}
        files.append(file)
    return places


def _at(stored: Stored, file: int, offset: int) -> Stored:
    """The same tensor in one piece."""
    pieces = (Piece(file, offset, 0, stored.num_elems),) if stored.num_elems else ()
    return replace(stored, pieces=pieces)


def _converted() -> dict[str, str]:
    return {"converted_by": f"shardwise {VERSION}", "converted": datetime.now(UTC).isoformat(timespec="seconds")}
