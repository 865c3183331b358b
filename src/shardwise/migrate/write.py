"""A configuration of ours, written from one of another library."""

import textwrap
from collections.abc import Iterator

from ..base.errors import printable
from ..trainer.config import as_yaml
from .migrated import TITLES, Migrated


def yaml_of(migrated: Migrated) -> str:
    """With what became of the keys that have no setting here, so that nothing is lost on the way."""
    return "\n".join(_lines(migrated)) + "\n"


def _lines(migrated: Migrated) -> Iterator[str]:
    yield f"# From {printable(migrated.source)} ({TITLES[migrated.kind]}), by shardwise convert; for shardwise train."
    for name, value in migrated.settings.items():
        yield f"{name}: {as_yaml(value)}"
    ignored = [entry for entry in migrated.entries if entry.fate == "ignored"]
    if ignored:
        yield ""
        yield "# Not taken over:"
    for entry in ignored:
        # In one line: a comment must not become a setting.
        told = printable(f"{entry.key}: {entry.value}: {entry.text}")
        yield from textwrap.wrap(told, 116, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False)
