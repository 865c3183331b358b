"""Whether an account has every key that was written, each once, and none that was not."""

from collections import Counter
from typing import Any

from shardwise.migrate.migrated import Migrated

# Whose files are told under them.
NAME_FILES = ("deepspeed_config_file", "deepspeed", "fsdp_config", "dataset", "datasets", "pretraining_dataset")


def assert_all_told(tree: dict[str, Any], migrated: Migrated) -> None:
    told = [entry.key for entry in migrated.entries]
    assert max(Counter(told).values(), default=1) == 1, Counter(told).most_common(3)
    written = dict(_keys(tree, ""))
    missing = [key for key, value in written.items() if not _is_told(key, value, set(told))]
    assert not missing, missing
    assert not [key for key in told if key not in written and not _is_in_a_file(key, written)]
    assert all(entry.text for entry in migrated.entries)
    assert not [entry for entry in migrated.entries if entry.text.startswith("it has no effect here")]


def _keys(tree: dict[str, Any], path: str) -> Any:
    for key, value in tree.items():
        yield path + key, value
        if isinstance(value, list):  # of entries, as of data
            value = {str(place): entry for place, entry in enumerate(value) if isinstance(entry, dict)}
        if isinstance(value, dict):
            yield from _keys(value, f"{path}{key}.")


def _is_told(key: str, value: Any, told: set[str]) -> bool:
    """By itself, with the block that it stands in, or by its keys."""
    parts = key.split(".")
    # Entries of a list have names of their own; a text in its place is one entry.
    if isinstance(value, list | str) and any(name.startswith(f"{key}.0.") for name in told):
        return True
    if any(".".join(parts[: size + 1]) in told for size in range(len(parts))):
        return True
    return (
        isinstance(value, dict)
        and bool(value)
        and all(_is_told(f"{key}.{name}", part, told) for name, part in value.items())
    )


def _is_in_a_file(key: str, written: dict[str, Any]) -> bool:
    return any(
        isinstance(value, str | list) and key.startswith(f"{name}.") and name.rpartition(".")[2] in NAME_FILES
        for name, value in written.items()
    )
