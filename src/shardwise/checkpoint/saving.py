"""Write a checkpoint. Every rank calls it and writes its own share.

    1. rank 0 makes an empty folder next to the place of the checkpoint.
    2. every rank writes its parts: into a file of its own, or, if whole tensors are requested, at its offsets in two
       files that all ranks share. The offsets follow from the shapes alone, so nothing is gathered.
    3. rank 0 collects the list of written parts, and writes the index, then the marker; then it renames the folder.

After each phase the ranks wait for each other: a failure on one rank is raised on all, and an older checkpoint is kept.
In the background (`start_save`) a thread does the same, with its own process group, from copies on the host. A rank may
notice a failure a step earlier than another; if it raised then, the others would wait in a collective. So the threads
agree on a step that no rank has begun yet, and every rank raises in that step.
"""

import itertools
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..base.errors import CheckpointError, SaveError, StateError
from ..base.intervals import round_up
from ..core.engine.guards import engine_of
from ..core.engine.rank_agreement import Facts, attempt, require_agreement
from ..core.engine.runtime import Engine
from ..core.mesh import patient_hosts
from ..core.offload.arena import Arena
from ..core.wire.collectives import Channel, exchange
from ..version import VERSION
from . import folder
from .index import FORMAT, Check, File, Index, Saved, require_sound, to_json
from .optimizer_state import Optimizers, own_optimizers
from .share import Share, merge_shares, share_of
from .tensor_files import Source, check_bytes, lay_out, whole_name, write_file, write_pieces

_ALIGNMENT_BYTES = 64
WHOLE_FILES = ("model.safetensors", "optimizer.safetensors")

T = TypeVar("T")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> None:
    """Write the model's weights and buffers, the optimizer's state, and rank 0's `extra` (JSON) to a folder.

    Every rank calls it between steps, with the same path on a file system that all of them share. An existing
    checkpoint is replaced once the new one is complete. Gradients are not saved. With `whole`, every tensor is stored
    in one piece under its own name, in `model.safetensors` and `optimizer.safetensors`; `load` reads both forms.
    """
    place, share = _prepare("save", path, model, optimizer, extra, whole)
    _write(place, share, whole, patient_hosts())


def start_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    whole: bool = False,
) -> "Saving":
    """Save like `save`, but in a thread: return when everything is copied to the host, so that training goes on.

    The host memory is reused by the next save. The next save, of either kind and of any model, waits for this one. If
    this one fails, a later `optimizer.step()` raises, in the same step on every rank; so does `finish()` of the
    returned value. State that is offloaded to disk does not fit on the host, and is refused.
    """
    engine = engine_of(model)
    on_disk = next((unit for unit in engine.schedule.units if unit.layout.uses_disk), None)
    if on_disk is not None:
        what = f"sw.start_save of unit {on_disk.name!r}, which is offloaded to disk ({on_disk.layout.name})"
        raise StateError(f"{what}: it is copied to the host first; use sw.save, which reads it as it is written")
    place, share = _prepare("start_save", path, model, optimizer, extra, whole)
    world = engine.mesh.world
    copied = together(world, lambda: copy_to_host(engine, share), SaveError)
    channel = patient_hosts()
    write = partial(_write, place, copied, whole, channel)
    return together(world, lambda: Saving(engine, channel, write), SaveError)


def _prepare(
    verb: str,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    extra: Mapping[str, Any] | None,
    is_whole: bool,
) -> tuple[Path, Share]:
    engine = engine_of(model)
    own = own_optimizers(engine, optimizer)
    begin_between_steps(engine, verb, path, own, [("whether they save whole tensors", str(is_whole))])

    def prepare() -> tuple[Path, Share]:
        place = Path(path).resolve()
        if not place.name:
            raise CheckpointError(f"{place} cannot become a checkpoint: name a folder in it")
        try:
            as_loaded = json.loads(json.dumps(dict(extra or {})))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra= must be what JSON can hold: {error}") from error
        return place, share_of(engine, model, own, as_loaded)

    return together(engine.mesh.world, prepare, SaveError)


def begin_between_steps(
    engine: Engine, verb: str, path: str | os.PathLike[str], optimizers: Optimizers, facts: Facts = ()
) -> None:
    """Wait for transfers and for the last save. Raise in the middle of an update, or if the ranks' requests differ."""
    engine.reductions.refuse_after_early(verb)
    finish_background_save()
    engine.rest()
    engine.await_gradients()
    what = ("the model", "the model and its optimizer", "the model and its optimizers")[min(len(optimizers), 2)]
    own: Facts = [(f"sw.{verb}'s path", os.fspath(path)), (f"what they {verb}", what)]
    require_agreement(engine.mesh.world, [*own, *facts])


# The files that a rank wrote, and its tensors with the places of their parts.
_Written = tuple[list[File], dict[str, Saved]]


def _write(place: Path, share: Share, is_whole: bool, world: Channel) -> None:
    is_first, into = world.index == 0, folder.partial_of(place)

    def on_first(do: Callable[[], object]) -> None:
        together(world, lambda: do() if is_first else None, SaveError)

    try:
        on_first(lambda: folder.begin(place))
        if is_whole:
            whole = merge_shares(exchange(world, share.tensors))
            written = together(world, lambda: _write_whole(into, whole, share, is_first), SaveError)
        else:
            written = together(world, lambda: _write_own_file(into, world.index, share), SaveError)
        everything = exchange(world, written, "what the ranks wrote", to_all=False)
        on_first(lambda: _complete(place, share, everything))
    except CheckpointError:
        if is_first:
            folder.abandon(place)
        raise


def _write_own_file(into: Path, rank: int, share: Share) -> _Written:
    layout = lay_out(share.portions)
    file = write_file(into / folder.rank_file(rank), layout)
    placed = ((portion, portion.piece(rank, layout.offsets[portion.name])) for portion in share.portions)
    return [file], share.with_pieces(placed)


def _write_whole(into: Path, tensors: Mapping[str, Saved], share: Share, is_first: bool) -> _Written:
    """Write this rank's parts into the shared files; the first rank writes their headers as well."""
    state = {whole_name(key, name): item for name, saved in tensors.items() for key, item in saved.stored_state.items()}
    placed, files = [], []
    # There is a second file only if the optimizer has tensors.
    for number, stored in enumerate((tensors, state) if state else (tensors,)):
        sources = [Source(key, item.torch_dtype, item.shape, tuple) for key, item in stored.items()]
        layout, path = lay_out(sources, {"format": "pt"}), into / WHOLE_FILES[number]
        here = []
        for portion in (portion for portion in share.portions if number == (portion.key is not None)):
            whole = layout.offsets[whole_name(portion.key, portion.tensor)]
            offset = whole + portion.start * portion.dtype.itemsize
            here.append((portion, portion.piece(number, offset)))
        rows = ((piece.offset, row) for portion, piece in here for row in portion.checked_rows())
        header = [(0, layout.header)] if is_first else []
        with folder.os_errors_as(CheckpointError, f"cannot write {path}"):
            checks = write_pieces(path, itertools.chain(header, rows), check_bytes(layout.num_bytes))
        files.append(File(path.name, layout.num_bytes, tuple(checks)))
        placed += here
    return files, share.with_pieces(placed)


def merge_checks(shares: Iterable[Iterable[File]]) -> list[File]:
    """Return the files that ranks wrote; a file that they share has the checksums of all."""
    checks: dict[tuple[str, int], list[Check]] = {}
    for file in itertools.chain.from_iterable(shares):
        checks.setdefault((file.name, file.num_bytes), []).extend(file.checks)
    return [File(name, num_bytes, tuple(sorted(own))) for (name, num_bytes), own in checks.items()]


def _complete(place: Path, share: Share, written: Sequence[_Written]) -> None:
    files = merge_checks(files for files, _ in written)
    for file in files:
        path = folder.partial_of(place) / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise CheckpointError(f"{path} is not there as it was written: save to a file system that all ranks share")
    origin = {
        "format": FORMAT,
        "shardwise": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": str(len(written)),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    tensors = merge_shares(tensors for _, tensors in written)
    index = Index(tuple(files), tensors, share.optimizer, share.extra, origin)
    require_sound(index)
    folder.complete(place, to_json(index))


def together(world: Channel, do: Callable[[], T], error: type[CheckpointError] | None = None) -> T:
    """Run `do` on every rank and wait for all. If it fails, raise on every rank the reason of the first that failed.

    The exception has the class `error`; by default, that of the CheckpointError on that rank.
    """
    result, failure, reports = attempt(world, do, CheckpointError, CheckpointError)
    first = next((report for report in reports if report is not None), None)
    if first is not None:
        kind, reason = first
        alike = all(report == first for report in reports)
        raise (error or kind)(reason if alike else f"rank {reports.index(first)}: {reason}") from failure
    return result  # type: ignore[return-value]


# Host memory for the copies of background saves, by engine: allocated once, and pinned if the state is on a GPU.
_host_memory: "WeakKeyDictionary[Engine, Arena]" = WeakKeyDictionary()


def copy_to_host(engine: Engine, share: Share) -> Share:
    """Copy a share to the host, so that training does not change it any more."""
    sizes = [round_up(portion.num_bytes, _ALIGNMENT_BYTES) for portion in share.portions]
    is_cuda = engine.mesh.device.type == "cuda"
    if engine not in _host_memory or _host_memory[engine].num_bytes < sum(sizes):
        _host_memory.pop(engine, None)  # free the old memory before the new one is allocated
        _host_memory[engine] = Arena(sum(sizes), pin=is_cuda)
    copies = []
    for portion, place in zip(share.portions, _host_memory[engine].row[: sum(sizes)].split(sizes), strict=True):
        copy = place[: portion.num_bytes].view(portion.dtype)
        for row in portion.rows():
            copy.copy_(row, non_blocking=True)
        copies.append(replace(portion, rows=partial(iter, (copy,))))
    if is_cuda:
        torch.cuda.synchronize(engine.mesh.device)
    return replace(share, portions=copies)


class Saving:
    """A save that a background thread is writing."""

    def __init__(self, engine: Engine, channel: Channel, write: Callable[[], None]) -> None:
        self._engine = engine
        self._channel = channel
        self._write = write
        self._failure: Exception | None = None
        self._began = self._ended = time.perf_counter()
        self._num_steps = 0
        self._lock = threading.Lock()
        self._agreed = threading.Event()  # set when the ranks have agreed on `_raise_at`
        self._raise_at = 0
        # Not a daemon: a program that ends waits until its checkpoint is written.
        self._thread = threading.Thread(target=self._run, name="shardwise-save")
        self._thread.start()
        _under_way.append(self)
        engine.at_step.append(self._at_step)

    @property
    def is_finished(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """True when the checkpoint is complete. A failure is raised elsewhere, on all ranks at once."""
        return self.is_finished and self._failure is None

    @property
    def seconds(self) -> float:
        """Seconds from the end of the copy to the end of the writing."""
        return self._ended - self._began

    def finish(self) -> None:
        """Wait until the checkpoint is complete, or raise why it is not. Every rank calls it."""
        self._thread.join()
        self._forget()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # noqa: BLE001  it is raised again in the training loop
            with self._lock:
                self._failure = error
                num_steps = self._num_steps
            with suppress(Exception):  # if the other ranks are gone, this one raises alone
                num_steps = max(exchange(self._channel, num_steps))
            self._raise_at = num_steps + 1
            self._agreed.set()
        finally:
            self._ended = time.perf_counter()

    def _at_step(self) -> None:
        with self._lock:
            self._num_steps += 1
            failure = self._failure
        if failure is not None:
            self._agreed.wait()
            if self._num_steps >= self._raise_at:
                self._forget()
                raise failure
        elif self.is_complete:
            self._forget()

    def _forget(self) -> None:
        if self._at_step in self._engine.at_step:
            self._engine.at_step.remove(self._at_step)
        if self in _under_way:
            _under_way.remove(self)


# At most one save, whatever the model: the threads of two saves would use one channel at the same time.
_under_way: list[Saving] = []


def finish_background_save() -> None:
    """Wait for the save in the background. Raise its failure, unless that was raised before."""
    for last in tuple(_under_way):
        last.finish()
