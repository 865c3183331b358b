"""`deepspeed_config`: the name of DeepSpeed's own file, or its first few keys under names of their own.

The latter become a DeepSpeed tree that DeepSpeed's reader reads; what it says of a key is told under the name that
was written.
"""

from pathlib import Path
from typing import Any

from ...base.documents import Tree
from ..account import Account, Block
from ..deepspeed.reader import read_deepspeed
from ..files import named_file
from ..migrated import Original
from ..rules import settle
from .completed import read_completed
from .keys import DEEPSPEED, NO_FP8
from .precision import PRECISIONS

FILE = "deepspeed_config_file"
# Where a key stands in DeepSpeed's tree. The stage is 2 unless it is said.
PLACES: dict[str, tuple[str, ...]] = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
}
DEFAULT_STAGE = "2"
Read = tuple[dict[str, Any], Original]


def read_deepspeed_block(top: Block, block: Block, folder: Path) -> Read:
    settle(block, DEEPSPEED)
    word = top.word("mixed_precision", [*PRECISIONS, "fp8"], "")
    if block.has(FILE) and block.text(FILE).lower() != "none":
        return _from_file(top, block, word, folder)
    block.ignored(FILE, "no file is named")
    return _from_keys(top, block, word)


def _from_file(top: Block, block: Block, word: str, folder: Path) -> Read:
    for key in PLACES:
        block.refused(key, f"{FILE} says it; write it there")
    settings, original = read_completed(named_file(block, FILE, folder), word or "no")
    if word in PRECISIONS and settings["precision"] != PRECISIONS[word]:
        top.refused("mixed_precision", f"DeepSpeed's file says {settings['precision']}; leave it to the file")
    _tell_precision(top, word, settings)
    return settings, original


def _tell_precision(top: Block, word: str, settings: dict[str, Any]) -> None:
    if word == "fp8":
        top.refused("mixed_precision", NO_FP8)
    top.used("mixed_precision", f"precision {settings['precision']}")


def _from_keys(top: Block, block: Block, word: str) -> Read:
    tree: dict[str, Tree] = {"zero_optimization": {"stage": DEFAULT_STAGE}}
    names = {"zero_optimization.stage": "zero_stage"}
    for key, place in PLACES.items():
        if not block.has(key):
            continue
        if key.endswith("_nvme_path") and block.text(key.replace("_nvme_path", "_device")).lower() != "nvme":
            block.text(key)
            block.ignored(key, "nothing rests on a disk")
            continue
        names[".".join(place)] = key
        inner = tree
        for part in place[:-1]:
            inner = inner.setdefault(part, {})
        inner[place[-1]] = block.values[key]
    if word in ("fp16", "bf16"):
        tree[word] = {"enabled": "true"}
    account = Account(top.account.source)
    settings, original = read_deepspeed(account.block("", tree))
    for entry in account.entries:
        # A block may be told as one.
        for path, key in names.items():
            if path == entry.key or path.startswith(f"{entry.key}."):
                block.settle(key, entry.fate, entry.text)
        if word and entry.fate == "refused" and entry.key.partition(".")[0] == word:
            top.refused("mixed_precision", entry.text)
    _tell_precision(top, word, settings)
    return settings, original
