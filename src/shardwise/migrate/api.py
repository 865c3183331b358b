"""`sw.from_deepspeed` and `sw.from_accelerate`: read a configuration file, or a mapping with the same keys.

One error names every key that is refused.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.documents import Repeated, Tree, as_strings
from ..base.errors import ConfigurationError, did_you_mean
from .accelerate import read_accelerate
from .account import Block, mapping_in, name_of
from .deepspeed import read_deepspeed
from .hugging_face import read_hugging_face
from .migrated import TITLES, Kind, Migrated
from .tables import table

Source = str | os.PathLike[str] | Mapping[str, Any]

READERS = {
    "deepspeed": lambda top, folder: read_deepspeed(top),
    "accelerate": read_accelerate,
    "hugging-face": read_hugging_face,
}
MIN_CLEAR = 3  # the number of typical keys that make a file's kind clear
# Libraries whose own readers refuse a key that is written twice.
STRICT = {"deepspeed", "LLaMA-Factory"}
# These are mappings in DeepSpeed's files, and single values in others.
BLOCKS = {"fp16", "bf16", "optimizer", "scheduler"}


def from_deepspeed(source: Source) -> Migrated:
    """Read a DeepSpeed configuration (a file, or the mapping itself), for `sw.shard` and the trainer.

    migrated = sw.from_deepspeed("ds.json")
    model, optimizer = sw.shard(model, optimizer, **migrated.words)
    """
    return read(source, "deepspeed").require_accepted()


def from_accelerate(source: Source) -> Migrated:
    """Read an Accelerate configuration (`accelerate config` writes one)."""
    return read(source, "accelerate").require_accepted()


def read(source: Source, kind: Kind | None = None) -> Migrated:
    """Read a configuration without raising for refused keys. Without `kind`, the keys decide which kind it is."""
    if not isinstance(source, Mapping | str | os.PathLike):
        raise ConfigurationError(f"a configuration is a file or a mapping, not {type(source).__name__} {source!r}")
    name, folder = "the configuration", Path()
    repeated: Repeated = {}
    try:
        if isinstance(source, Mapping):
            tree = as_strings(dict(source))
        else:
            name, folder = os.fspath(source), Path(source).parent
            tree = mapping_in(Path(source), repeated)
    except RecursionError:
        raise ConfigurationError(f"{name} is nested too deep") from None
    chosen, typical = kind or kind_of(tree, name), _typical(tree)
    most = max(TITLES, key=lambda title: len(typical[title]))
    if not typical[chosen] and len(typical[most]) >= MIN_CLEAR:
        raise ConfigurationError(f"{name} is a configuration of {TITLES[most]}, and not of {TITLES[chosen]}")
    top = Block(tree, name)
    original = READERS[chosen](top, folder)
    entries = top.entries()
    is_strict = bool(STRICT & {chosen, *programs_of(tree)})
    for key, (first, last) in repeated.items():
        told = {entry for entry in entries if entry.key.split(".")[-1] == name_of(key)}
        if is_strict or not told:
            raise ConfigurationError(f"file {name}: {key} is said twice, in line {first} and line {last}")
        note = f" (written twice, in line {first} and line {last}: the last one counts)"
        entries = tuple(replace(entry, text=entry.text + note) if entry in told else entry for entry in entries)
    return Migrated(name, chosen, top.settings, original, entries, top.files)


def kind_of(tree: Mapping[str, Tree], name: str) -> Kind:
    """The kind of file with the most typical keys at the top level; an error if two kinds have equally many."""
    counts = {kind: len(keys) for kind, keys in _typical(tree).items()}
    best = [kind for kind, count in counts.items() if count == max(counts.values())]
    if len(best) > 1:
        keys = ", ".join(list(tree)[:5]) or "none"
        raise ConfigurationError(
            f"{name} is neither clearly a DeepSpeed nor an Accelerate nor a Hugging Face configuration (its keys: "
            f"{keys}); name it with --kind {', '.join(TITLES)}"
        )
    return best[0]


def refuse_as_ours(path: Path, own: Collection[str]) -> None:
    """Raise if a file for shardwise has typical keys of another library. Keys in `own` do not count."""
    try:
        tree = mapping_in(path)
    except ConfigurationError:
        return
    typical = _typical({key: value for key, value in tree.items() if key not in own})
    kind, marks = max(typical.items(), key=lambda item: len(item[1]))
    if not marks:
        return
    owner = next(iter(programs_of(tree) if kind == "hugging-face" else ()), TITLES[kind])
    also = {"deepspeed": "; or pass it with --deepspeed", "accelerate": "; or pass it with --accelerate-config"}
    raise ConfigurationError(
        f"{path} is a configuration of {owner} ({', '.join(marks[:3])}), not of shardwise: run "
        f"`shardwise convert {path} -o run.yaml` first, and train with run.yaml{also.get(kind, '')}"
    )


def programs_of(tree: Mapping[str, Tree]) -> list[str]:
    """Programs on top of Hugging Face's Trainer that have keys of the tree."""
    return [name for name, words in table("hugging_face")["program_keys"].items() if set(words) & set(tree)]


def _typical(tree: Mapping[str, Tree]) -> dict[Kind, list[str]]:
    """Keys of the tree that only one kind of file has, by kind."""
    found: dict[Kind, list[str]] = {}
    for kind in TITLES:
        known = table(kind.replace("-", "_"))["typical"]
        written = [key for key, value in tree.items() if key in known and value is not None]
        is_deepspeed = kind == "deepspeed"
        found[kind] = [key for key in written if key not in BLOCKS or isinstance(tree[key], dict) == is_deepspeed]
    return found


def known_kind(word: str) -> Kind:
    """The kind that a value of --kind names."""
    for kind in TITLES:
        if word.lower().replace("_", "-") == kind:
            return kind
    raise ConfigurationError(f"--kind: unknown {word!r}; {did_you_mean(word, TITLES)}")
