"""Look at a checkpoint: `shardwise inspect` shows its content, `shardwise verify` finds damage."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from ..base.errors import printable
from ..base.text import count, plural, size
from .shared import documented, progress_bar, require_exists, say

if TYPE_CHECKING:
    from ..checkpoint.index import Index
    from ..checkpoint.opened import Opened
    from ..checkpoint.tree import Node
    from ..checkpoint.verification import Report

MAX_NAMED = 4  # files or tied names; the rest are counted
HEADINGS = ("", "shape", "elements", "weights", "state", "")


@documented
def inspect(
    path: Path,
    depth: int | None = None,
    as_json: bool = False,
) -> None:
    require_exists(path)
    from ..checkpoint.opened import open_checkpoint
    from ..checkpoint.tree import tree_of, walk

    opened = open_checkpoint(path)
    if as_json:
        print(json.dumps(_as_json(opened), indent=1))
        return
    say(str(opened.folder), *(f"  {name:<12}{text}" for name, text in _facts(opened.index)))
    if depth == 0 or not opened.index.tensors:
        return
    # Equal modules share one row, which shows their sum; their children are shown once.
    nodes = walk(tree_of(opened.index.tensors), depth)
    rows = [HEADINGS, *(tuple(map(printable, _row(level, node))) for level, node in nodes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers, remarks in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        print("  ".join([name.ljust(widths[0]), *cells, remarks]).rstrip())


def _facts(index: "Index") -> Iterator[tuple[str, str]]:
    from ..checkpoint.tree import totals_of

    totals = SimpleNamespace(**totals_of(index))
    if index.origin:
        about = (value if key == "format" else f"{key} {value}" for key, value in index.origin.items())
        yield "format", ", ".join(about)
    known = {key: value for key, value in index.extra.items() if isinstance(value, str | int | float | bool)}
    if known:
        yield "notes", ", ".join(f"{key} {value}" for key, value in known.items())
    trained, frozen = (_known(number, count) for number in (totals.num_trained, totals.num_frozen))
    yield (
        "parameters",
        f"{totals.num_params:,} in {plural(totals.num_tensors - (totals.num_buffers or 0), 'tensor')}, "
        f"trained {trained}, frozen {frozen}",
    )
    if totals.num_buffers:
        yield "buffers", f"{plural(totals.num_buffers, 'tensor')}"
    tied = [" = ".join((name, *saved.tied)) for name, saved in index.tensors.items() if saved.tied]
    if tied:
        yield "tied", _named(tied)
    yield "dtypes", ", ".join(f"{dtype} {count(number)}" for dtype, number in totals.dtypes.items())
    yield (
        "bytes",
        f"weights {size(totals.weights_bytes)}, optimizer state {size(totals.state_bytes)}, "
        f"buffers {_known(totals.buffers_bytes, size)}",
    )
    if index.optimizer is not None:
        yield "optimizer", f"{index.optimizer.name or 'unnamed'}, {plural(len(index.optimizer.groups), 'group')}"
        members = Counter(saved.group for saved in index.tensors.values())
        for number, group in enumerate(index.optimizer.groups):
            shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in group.items() if value}
            words = ", ".join(f"{key}={value}" for key, value in shown.items())
            yield f"  group {number}", f"{plural(members[number], 'tensor')}; {words}"
    yield "files", _named([f"{file.name} {size(file.num_bytes)}" for file in index.files])


def _known(number: int | None, written: Callable[[int], str]) -> str:
    return "unknown" if number is None else written(number)


def _named(words: list[str]) -> str:
    more = [f"{len(words) - MAX_NAMED:,} more"] if len(words) > MAX_NAMED else []
    return ", ".join([*words[:MAX_NAMED], *more])


def _row(level: int, node: "Node") -> tuple[str, ...]:
    """A row of the tree: name, shape and dtype, elements, bytes, bytes of state, and remarks."""
    times, stored = node.times, node.saved
    remarks = [f"{times} equal"] if times > 1 else []
    shape = ""
    if stored is not None:
        shape = f"{'x'.join(map(str, stored.shape)) or 'scalar'} {stored.dtype}"
        remarks += ["buffer"] if stored.kind == "buffer" else ["frozen"] if stored.is_trained is False else []
        remarks += ["tied"] if stored.tied else []
    state = size(times * node.state_bytes) if node.state_bytes else ""
    numbers = (count(times * node.num_elems), size(times * node.num_bytes), state)
    return "  " * (level + 1) + node.name, shape, *numbers, ", ".join(remarks)


def _as_json(opened: "Opened") -> dict[str, Any]:
    from ..checkpoint.tree import totals_of

    index = opened.index
    return {
        "path": str(opened.folder),
        "origin": index.origin,
        "extra": index.extra,
        "totals": totals_of(index),
        "optimizer": None if index.optimizer is None else dataclasses.asdict(index.optimizer),
        "files": [
            {"name": file.name, "num_bytes": file.num_bytes, "num_checksums": len(file.checks)} for file in index.files
        ],
        "tensors": {name: _described(saved) for name, saved in index.tensors.items()},
    }


def _described(item: Any) -> Any:
    """Describe a tensor for JSON. Plain values of an optimizer's state are returned unchanged."""
    from ..checkpoint.index import Saved, Stored

    if not isinstance(item, Stored):
        return item
    about = {"shape": item.shape, "dtype": item.dtype, "num_bytes": item.num_bytes, "num_pieces": len(item.pieces)}
    if isinstance(item, Saved):
        about |= {name: getattr(item, name) for name in ("kind", "is_trained", "tied", "group")}
        about["state"] = {key: _described(part) for key, part in item.state.items()}
    return about


@documented
def verify(
    path: Path,
    as_json: bool = False,
) -> None:
    from ..checkpoint import verification as verifying

    require_exists(path)
    places = verifying.checkpoints_in(path)
    reports = [_verified(place) for place in places or verifying.parts_of_others(path) or [path]]
    newest = reversed(reports) if places else iter(())  # resuming loads the first usable one, or stops at a refused one
    decisive = next((report for report in newest if report.is_usable or report.is_refused), None)
    resumed, stops = (None, decisive) if decisive is not None and decisive.is_refused else (decisive, None)
    # An unfinished save of a run is not a problem, but at least one checkpoint must be complete.
    counted = [report for report in reports if report.is_complete] if places else reports
    is_good = bool(counted) and not any(report.problems for report in counted)
    if as_json:
        about: dict[str, Any] = {
            "is_good": is_good,
            "checkpoints": [
                {**dataclasses.asdict(report), "path": str(report.path), "is_usable": report.is_usable}
                for report in reports
            ],
            "resumes_from": None if resumed is None else str(resumed.path),
            "stops_at": None if stops is None else str(stops.path),
        }
        print(json.dumps(about, indent=1))
    else:
        for report in reports:
            _print_report(report)
        if stops is not None:
            what = f"stop at {stops.path}: {stops.damage[0]}; to load an older checkpoint, name it"
        else:
            what = f"load {resumed.path if resumed else 'none of them'}"
        if places:
            say(f"train --resume-from-checkpoint latest would {what}")
    raise typer.Exit(0 if is_good else 5)


def _verified(place: Path) -> "Report":
    from ..checkpoint import verification as verifying

    report, opened = verifying.look_at(place)
    if opened is not None:
        with progress_bar(place.name, report.num_bytes) as advance:
            verifying.verify(report, opened, advance)
    return report


def _print_report(report: "Report") -> None:
    if not report.problems:
        num = report.num_checksums
        checked = f"{plural(num, 'checksum')} correct" if num else "no checksums in this format"
        what = f"{plural(report.num_tensors, 'tensor')} in {plural(report.num_files, 'file')}, {size(report.num_bytes)}"
        say(f"{report.path}: good. {what}; {checked}, every number finite")
        return
    word = "not good" if report.is_complete else "incomplete"
    say(f"{report.path}: {word}, {plural(len(report.problems), 'problem')}")
    say(*(f"  {problem}" for problem in report.problems))
