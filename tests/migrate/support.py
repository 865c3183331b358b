"""What every test of an account asks of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.core.layout import layout_of
from shardwise.migrate.account import Entry, name_of
from shardwise.migrate.migrated import Migrated
from shardwise.trainer.offload import check_strategy
from shardwise.trainer.settings import Settings


def rows(migrated: Migrated) -> dict[str, Entry]:
    found = {entry.key: entry for entry in migrated.entries}
    assert len(found) == len(migrated.entries), "a key has two entries"
    return found


def require_all_told(migrated: Migrated, written: Mapping[str, Any]) -> None:
    """Every key that is written has one entry, its own or that of a block that it stands in; and nothing else has."""
    told = rows(migrated)
    assert all(entry.text for entry in told.values()), "somebody says nothing"
    keys = list(_keys(written))
    for ways in keys:
        assert set(ways) & set(told), f"{ways[-1]} is dropped"
    assert set(told) <= {way for ways in keys for way in ways}, "a key nobody wrote"


def require_sound(migrated: Migrated) -> None:
    """What comes out can be run: a row of the table, and settings if nothing is refused."""
    layout_of(migrated.strategy)
    if not migrated.refused:
        Settings(**migrated.settings)
        check_strategy(migrated.strategy, migrated.settings.get("offload", ()))


def _keys(block: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of every value that is no block: its path, and those of the blocks around it before it."""
    for key, value in block.items():
        ways = (*above, f"{above[-1]}.{name_of(key)}" if above else name_of(key))
        if isinstance(value, dict) and value:
            yield from _keys(value, ways)
        else:
            yield ways
