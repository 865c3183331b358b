"""A configuration of another library, read: what it asks for in our words, and what became of every key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..base.errors import ConfigurationError
from ..trainer.offload import offload_of
from ..trainer.settings import units_asked
from .account import Entry

Kind = Literal["deepspeed", "accelerate", "hugging-face"]
TITLES: dict[Kind, str] = {
    "deepspeed": "DeepSpeed",
    "accelerate": "Accelerate",
    "hugging-face": "Hugging Face",
}
# Settings of the trainer that are keywords of `sw.shard`, too.
SHARED = ("strategy", "precision", "reduce_dtype", "node_size", "skip_nonfinite")


@dataclass(frozen=True, slots=True)
class Original:
    """What the library that the file was written for would run, for a comparison of memory."""

    engine: Literal["deepspeed", "fsdp", "ddp"]
    bucket_elems: float = 0  # of buffers that it keeps beside the states


@dataclass(frozen=True, slots=True)
class Migrated:
    """`settings` are the trainer's, by name; `words` are keywords of `sw.shard`."""

    source: str
    kind: Kind
    settings: Mapping[str, Any]
    original: Original
    entries: tuple[Entry, ...]

    @property
    def refused(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.fate == "refused")

    def require_accepted(self) -> None:
        """One sentence with everything that is refused."""
        if self.refused:
            told = "; ".join(f"{entry.key} {entry.value}: {entry.text}" for entry in self.refused)
            raise ConfigurationError(f"{self.source}: {told}")

    @property
    def strategy(self) -> str:
        return str(self.settings["strategy"])

    @property
    def precision(self) -> str:
        """What the file leaves open is bf16, as it is for `sw.shard`."""
        return str(self.settings.get("precision") or "bf16")

    @property
    def words(self) -> dict[str, Any]:
        """model, optimizer = sw.shard(model, optimizer, **words)"""
        found = {name: self.settings[name] for name in SHARED if self.settings.get(name) is not None}
        if self.settings.get("units"):
            found["units"] = units_asked(self.settings["units"])
        folder = offload_of(self.settings.get("offload", ())).folder
        if folder is not None:
            found["disk_path"] = str(folder)
        return found
