"""`shardwise check`: explain every key of another library's configuration. Needs no torch."""

import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..base.errors import ConfigurationError
from ..base.text import size
from .shared import documented

if TYPE_CHECKING:
    from ..migrate.account import Entry
    from ..migrate.memory_comparison import MemoryComparison
    from ..migrate.migrated import Migrated

NARROWEST, WIDEST = 60, 140
KEYS = 0.44  # the first column takes at most this fraction of the width
NAMES = 30  # width of the names of settings


@documented
def check(
    file: Path,
    kind: str | None = None,
    as_json: bool = False,
    model: str | None = None,
    gpus: str | None = None,
    nodes: int | None = None,
) -> None:
    from ..migrate.api import known_kind, read
    from ..migrate.memory_comparison import MemoryComparison, compare_memory

    migrated = read(file, None if kind is None else known_kind(kind))
    memory: MemoryComparison | str = "a key is refused"
    if not migrated.refused:
        try:
            memory = compare_memory(migrated, model, gpus, nodes)
        except ConfigurationError as error:
            if model is not None or gpus is not None:
                raise
            memory = str(error)  # no plan can be made for the sizes in the file
    if as_json:
        about = {
            "file": migrated.source,
            "kind": migrated.kind,
            "keys": [asdict(entry) for entry in migrated.entries],
            "settings": dict(migrated.settings),
            "shard": migrated.words,
            "memory": {"why_not": memory} if isinstance(memory, str) else asdict(memory),
        }
        print(json.dumps(about, indent=1))
    else:
        columns = shutil.get_terminal_size((120, 24)).columns
        print("\n".join(_lines(migrated, memory, min(max(columns, NARROWEST), WIDEST))))
    if migrated.refused:
        raise typer.Exit(2)


def _lines(migrated: "Migrated", memory: "MemoryComparison | str", width: int) -> Iterator[str]:
    from ..core.layout import layout_of
    from ..migrate.migrated import TITLES

    fates = [entry.fate for entry in migrated.entries]
    counts = ", ".join(f"{fates.count(fate)} {fate}" for fate in dict.fromkeys(fates)) or "the file is empty"
    yield f"{migrated.source}: {TITLES[migrated.kind]}, {counts}"
    yield ""
    yield from _table(migrated.entries, width)
    yield ""
    if migrated.refused:
        yield "It cannot be used: change or leave out the refused keys."
        return
    for name, value in {"layout": layout_of(migrated.strategy), **migrated.settings}.items():
        if isinstance(value, list | tuple):
            value = ", ".join(map(str, value))
        line = f"  {name:<{NAMES}}{str(value).lower() if isinstance(value, bool) else value}"
        yield from textwrap.wrap(line, width, subsequent_indent=" " * (NAMES + 2))
    yield ""
    if isinstance(memory, str):
        yield from textwrap.wrap(f"memory not planned: {memory}", width, initial_indent="  ", subsequent_indent="  ")
    else:
        yield from _memory(memory, width)


def _table(entries: Sequence["Entry"], width: int) -> Iterator[str]:
    """Three columns; a cell that is too long is wrapped within its column."""
    rows = [("key", "becomes", "effect")]
    for entry in entries:
        key = f"{entry.key}: {entry.value}"
        effect = f"{'ignored' if entry.fate == 'ignored' else 'REFUSED'} because {entry.text}"
        rows.append((key, entry.text, "used") if entry.fate == "used" else (key, "-", effect))
    left = min(max(len(row[0]) for row in rows), int(width * KEYS))
    middle = min(max(len(row[1]) for row in rows), (width - left - 4) // 2)
    widths = (left, middle, width - left - middle - 4)
    for row in rows:
        for parts in zip_longest(*map(_wrapped, row, widths), fillvalue=""):
            yield f"{parts[0]:<{left}}  {parts[1]:<{middle}}  {parts[2]}".rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a text. A name that is longer than the column is broken after a dot, a dash or an underscore."""
    too_long = rf"(?=\S{{{width + 1}}})(\S{{0,{width - 1}}}[._-]|\S{{{width}}})"
    return textwrap.wrap(re.sub(too_long, r"\1 ", text), width, break_on_hyphens=False) or [""]


def _memory(memory: "MemoryComparison", width: int) -> Iterator[str]:
    """The memory table, without empty columns."""
    columns = {"states": "states", "extra": "buffers", "peak": "peak", "host": "host of a node", "disk": "its disk"}
    shown = [name for name in columns if any(getattr(need, name) for need in memory.needs)]
    yield f"  memory of a rank: {memory.model} on {memory.cluster}"
    names = max(len(need.who) for need in memory.needs)
    yield f"    {'':<{names}}" + "".join(f"{columns[name]:>16}" for name in shown)
    for need in memory.needs:
        sizes = [getattr(need, name) for name in shown]
        yield f"    {need.who:<{names}}" + "".join(f"{size(value) if value else '-':>16}" for value in sizes)
    for need in memory.needs:
        yield from textwrap.wrap(f"{need.who}: {need.source}", width, initial_indent="  ", subsequent_indent="    ")
