"""Write checkpoints and folders of weights without ranks, in memory of a few blocks.

The tensors to write are given as `Source`s: which file a tensor goes into follows from the shapes alone, and its
elements are read when it is written. So any checkpoint is converted into another as a stream. Our own format keeps
everything: frozen weights, buffers, tied names, the optimizer's groups and state, and `extra`. A folder gets its final
name when all of it is on disk.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError, ConfigurationError, SaveError
from ..base.intervals import Interval
from ..version import VERSION
from . import folder
from .folder import os_errors_as, partial_of, put_in_place, sync
from .index import File, Index, Piece, Stored, one_piece, require_sound, to_json
from .opened import Opened, Reader
from .tensor_files import Layout, OnBytes, Source, lay_out, whole_name, write_file

MAX_FILE_BYTES = 5 * 10**9  # as in Hugging Face's libraries
WEIGHTS_INDEX = "model.safetensors.index.json"
NOTE = "shardwise.json"  # in an exported folder: its writer and its source


def stored_source(name: str, reader: Reader, stored: Stored, dtype: torch.dtype | None = None) -> Source:
    """Return a tensor of a checkpoint as a source, converted if another dtype is given."""
    dtype = dtype or stored.torch_dtype

    def rows() -> Iterator[Tensor]:
        for row in reader.rows(stored, Interval(0, stored.num_elems)):
            yield converted(name, row, dtype)

    return Source(name, dtype, stored.shape, rows)


def converted(name: str, row: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a row to another dtype; refuse where finite numbers would become infinite."""
    result = row.to(dtype)
    if dtype is torch.float16 and row.dtype is not dtype and (result.isinf() & row.isfinite()).any():
        limits = f"{float(row.abs().max()):g}, and fp16 to {torch.finfo(dtype).max:g}"
        raise CheckpointError(f"{name!r} reaches to {limits}: use bf16 or fp32")
    return result


def split(sources: Iterable[Source], max_bytes: int) -> list[list[Source]]:
    """Distribute tensors in order over files of at most `max_bytes`; a larger tensor gets a file of its own."""
    files: list[list[Source]] = [[]]
    num_bytes = 0
    for source in sources:
        if files[-1] and num_bytes + source.num_bytes > max_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(source)
        num_bytes += source.num_bytes
    return files


def write_sources(
    path: Path, sources: Sequence[Source], on_bytes: OnBytes, is_summed: bool = False
) -> tuple[File, Layout]:
    """Write one file, with checksums if `is_summed`, and wait until it is on disk."""
    layout = lay_out(sources, {"format": "pt"})  # transformers requires this entry
    return write_file(path, layout, on_bytes, is_summed), layout


def _write_files(
    into: Path, stem: str, sources: Sequence[Source], max_bytes: int | None, on_bytes: OnBytes, is_summed: bool
) -> tuple[list[File], dict[str, tuple[int, int]]]:
    """Write one file, or several of at most `max_bytes`. Return them, and the file and the offset of every tensor."""
    contents = [list(sources)] if max_bytes is None else split(sources, max_bytes)
    files: list[File] = []
    places: dict[str, tuple[int, int]] = {}
    for number, content in enumerate(contents):
        one_of_many = f"-{number + 1:05d}-of-{len(contents):05d}" if len(contents) > 1 else ""
        file, layout = write_sources(into / f"{stem}{one_of_many}.safetensors", content, on_bytes, is_summed)
        places |= {key: (number, offset) for key, offset in layout.offsets.items()}
        files.append(file)
    return files, places


def write_weights(into: Path, sources: Sequence[Source], max_bytes: int, on_bytes: OnBytes) -> None:
    """Write the weights of a Hugging Face folder: one file, or several and an index."""
    files, places = _write_files(into, "model", sources, max_bytes, on_bytes, is_summed=False)
    if len(files) > 1:
        weight_map = {source.name: files[places[source.name][0]].name for source in sources}
        total = sum(source.num_bytes for source in sources)
        about = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (into / WEIGHTS_INDEX).write_text(json.dumps(about, indent=1))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder to write into. When complete, it gets its final name and replaces the old folder."""
    partial_folder = partial_of(folder)
    try:
        with os_errors_as(SaveError, f"cannot write {folder}"):
            shutil.rmtree(partial_folder, ignore_errors=True)
            partial_folder.mkdir(parents=True)
            yield partial_folder
            for path in (*partial_folder.rglob("*"), partial_folder):
                path.chmod(0o755 if path.is_dir() else 0o644)  # for everybody to read
                sync(path)  # a folder with its final name is complete, even after a power failure
            put_in_place(folder)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def write_note(into: Path, about: Mapping[str, Any]) -> None:
    (into / NOTE).write_text(json.dumps(dict(about), indent=1))


def require_free(folder: Path, is_overwriting: bool, *sources: Path, replaces_own: bool = True) -> None:
    """Raise unless a folder is missing, empty, exported by us or to be overwritten, and holds none of the sources.

    Without `replaces_own`, a folder that we exported may only be replaced with `is_overwriting`.
    """
    for source in sources:
        real = Path(os.path.realpath(source))  # not Path.resolve, which raises for circular links
        if Path(os.path.realpath(folder)) in (real, *real.parents):
            raise ConfigurationError(f"{folder} would be replaced, and {source} is read from it: name another folder")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file: name a folder to write to")
    may_be_replaced = is_overwriting or (replaces_own and (folder / NOTE).is_file())
    if any(folder.iterdir()) and not may_be_replaced:
        which = " that shardwise did not export" if replaces_own else ""
        raise ConfigurationError(f"{folder} holds files{which}: name another folder, or replace it with --overwrite")


def without_optimizer(opened: Opened) -> Opened:
    """Return the checkpoint with weights and buffers only."""
    tensors = {name: replace(saved, group=None, state={}) for name, saved in opened.index.tensors.items()}
    return Opened(opened.folder, replace(opened.index, tensors=tensors, optimizer=None, extra={}))


def write_own(opened: Opened, path: Path, max_bytes: int | None, on_bytes: OnBytes) -> None:
    """Write our own format: whole tensors in files of at most `max_bytes`. None: one file of weights, one of state.

    An old checkpoint is replaced when the new one is complete.
    """
    index = opened.index
    into = folder.begin(path)
    try:
        files: list[File] = []
        places: dict[tuple[str, str], tuple[int, int]] = {}
        with opened.reader() as reader:
            for stem in ("model", "optimizer"):
                sources = [
                    stored_source(whole_name(key, name), reader, saved.stored(key))
                    for name, saved in index.tensors.items()
                    for key in ((None,) if stem == "model" else saved.stored_state)
                ]
                if sources or stem == "model":
                    more, offsets = _write_files(into, stem, sources, max_bytes, on_bytes, is_summed=True)
                    places |= {(stem, name): (len(files) + number, at) for name, (number, at) in offsets.items()}
                    files += more
        tensors = {}
        for name, saved in index.tensors.items():
            pieces: dict[str | None, tuple[Piece, ...]] = {}
            for key in (None, *saved.stored_state):
                place = places["model" if key is None else "optimizer", whole_name(key, name)]
                pieces[key] = one_piece(*place, saved.stored(key).num_elems)
            tensors[name] = saved.with_pieces(pieces)
        made = Index(tuple(files), tensors, index.optimizer, index.extra, {**index.origin, **_converted()})
        require_sound(made)
        folder.complete(path, to_json(made))
    except BaseException:
        folder.abandon(path)
        raise


def write_bare_weights(opened: Opened, path: Path, max_bytes: int, on_bytes: OnBytes) -> None:
    """Write the weights and buffers like those of a Hugging Face folder, with their names unchanged, and no config."""
    with new_folder(path) as into, opened.reader() as reader:
        sources = [stored_source(name, reader, saved) for name, saved in opened.index.tensors.items()]
        write_weights(into, sources, max_bytes, on_bytes)
        write_note(into, {**opened.index.origin, **_converted()})


def _converted() -> dict[str, str]:
    return {"converted_by": f"shardwise {VERSION}", "converted": datetime.now(UTC).isoformat(timespec="seconds")}
