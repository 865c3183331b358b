"""DeepSpeed's keys as Accelerate and the Trainer complete them: 16 bits left open are those of mixed precision.

A completed copy is read; what becomes of a key is told under the key as it was written.
"""

from typing import Any

from ...base.documents import Tree
from ..account import AUTO, Account, Block, Entry
from ..deepspeed.reader import read_deepspeed
from ..migrated import Original

FORMATS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}


def read_completed(block: Block, word: str) -> tuple[dict[str, Any], Original]:
    """`word` is no, fp16 or bf16."""
    account = Account(block.account.source)
    settings, original = read_deepspeed(account.block("", completed(block.values, word)))
    _tell(block, block, {entry.key: entry for entry in account.entries})
    return settings, original


def completed(values: Any, word: str) -> dict[str, Tree]:
    """Where nothing is said of the format, and where it is `auto`."""
    tree = dict(values)
    for key, kind in FORMATS.items():
        inner = tree.get(key)
        if isinstance(inner, dict) and str(inner.get("enabled")).lower() == AUTO:
            tree[key] = inner | {"enabled": str(kind == word).lower()}
    named = [key for key, kind in FORMATS.items() if kind == word and tree.get(key) is not None]
    if word in FORMATS and not named:
        tree[word] = {"enabled": "true"}
    return tree


def _tell(root: Block, block: Block, fates: dict[str, Entry]) -> None:
    for key, path in block.paths.items():
        entry = fates.get(path.removeprefix(f"{root.path}.") if root.path else path)
        value = block.values[key]
        if entry is not None:
            block.account.settle(path, value, entry.fate, entry.text)
        elif block.has(key) and isinstance(value, dict):
            _tell(root, block.inner(key), fates)
