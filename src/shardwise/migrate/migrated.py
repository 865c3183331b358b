"""The result of reading another library's configuration: settings, keywords of `sw.shard`, and every key's entry.

A strategy is a preset from the tables, followed by changes: `zero3+params=host`.
"""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ..base.errors import ConfigurationError, printable
from ..core.layout import layout_of
from ..trainer.config import as_yaml
from ..trainer.offload import offload_of
from ..trainer.settings import parse_units
from .account import Block, Entry

Kind = Literal["deepspeed", "accelerate", "hugging-face"]
TITLES: dict[Kind, str] = {
    "deepspeed": "DeepSpeed",
    "accelerate": "Accelerate",
    "hugging-face": "Hugging Face",
}
# Settings of the trainer that are keywords of `sw.shard`, too.
SHARD_KEYWORDS = ("strategy", "precision", "reduce_dtype", "node_size", "skip_nonfinite")


@dataclass(frozen=True, slots=True)
class Original:
    """The engine for which the file was written; its memory is compared with ours."""

    engine: Literal["deepspeed", "fsdp", "ddp"]
    bucket_elems: float = 0  # elements of its buffers, in addition to the states


@dataclass(frozen=True, slots=True)
class Change:
    """One offload or quantisation, and the key that asks for it.

    `words`, such as `params=host`, are added to a strategy.
    """

    block: Block
    key: str
    words: str
    becomes: str


def with_changes(strategy: str, changes: Iterable[Change]) -> str:
    """Add every change that the layout allows; refuse the keys of the others, with the layout's reason."""
    for change in changes:
        candidate = f"{strategy}+{change.words}"
        try:
            layout_of(candidate)
        except ConfigurationError as error:
            change.block.refused(change.key, str(error).removeprefix("layout: "))
        else:
            strategy = candidate
            change.block.used(change.key, change.becomes)
    return strategy


@dataclass(frozen=True, slots=True)
class Migrated:
    """A configuration file after its conversion. `settings`: of our trainer, by name. `entries`: one per key."""

    source: str
    kind: Kind
    settings: Mapping[str, Any]
    original: Original
    entries: tuple[Entry, ...]
    files: Mapping[str, str] = field(default_factory=dict)  # texts that settings name, to be written next to ours

    @property
    def refused(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.fate == "refused")

    def require_accepted(self) -> "Migrated":
        """Return this, or raise one error that names every refused key."""
        if self.refused:
            reasons = "; ".join(f"{entry.key} {entry.value}: {entry.text}" for entry in self.refused)
            raise ConfigurationError(f"{self.source}: {reasons}")
        return self

    @property
    def strategy(self) -> str:
        return str(self.settings["strategy"])

    @property
    def precision(self) -> str:
        """The precision; bf16 if the file leaves it open, as in `sw.shard`."""
        return str(self.settings.get("precision") or "bf16")

    @property
    def words(self) -> dict[str, Any]:
        """Keywords of `sw.shard`: model, optimizer = sw.shard(model, optimizer, **words)."""
        found = {name: self.settings[name] for name in SHARD_KEYWORDS if self.settings.get(name) is not None}
        if self.settings.get("units"):
            found["units"] = parse_units(self.settings["units"])
        folder = offload_of(self.settings.get("offload", ())).folder
        if folder is not None:
            found["disk_path"] = str(folder)
        return found


def yaml_of(migrated: Migrated, paths: Mapping[str, Path] = MappingProxyType({})) -> str:
    """Return the text of our configuration file, with the ignored keys as comments. `paths`: of its files, by name."""
    title = f"{printable(migrated.source)} ({TITLES[migrated.kind]})"
    lines = [f"# From {title}, by shardwise convert; for shardwise train."]
    values = {
        name: str(paths[str(value)]) if str(value) in paths else value for name, value in migrated.settings.items()
    }
    lines += [f"{name}: {as_yaml(value)}" for name, value in values.items()]
    ignored = [entry for entry in migrated.entries if entry.fate == "ignored"]
    if ignored:
        lines += ["", "# Not taken over:"]
    for entry in ignored:
        # Printable, so that a line break in it cannot turn a comment into a setting.
        text = printable(f"{entry.key}: {entry.value}: {entry.text}")
        lines += textwrap.wrap(text, 116, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"
