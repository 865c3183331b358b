"""Hugging Face's TrainingArguments in a file, and the files of TRL, LLaMA-Factory and Axolotl, which have its names.

What shards is `deepspeed` (a file or its keys), else `fsdp` with `fsdp_config` (its keys, or a file of them), else
nothing does. A file may also be such an `fsdp_config` alone.
"""

from pathlib import Path
from typing import Any

from ..accelerate.completed import read_completed
from ..accelerate.fsdp import ON_HOST, Change, Fsdp, read_fsdp, sharded, strategy_name
from ..accelerate.fsdp_keys import KNOWN as FSDP_KEYS
from ..accelerate.parallelism import read_parallelism
from ..accelerate.precision import PRECISIONS, precision_settings, told
from ..account import FALSE, TRUE, Block
from ..files import named_file
from ..migrated import Original
from ..names import SHARDING_STRATEGIES
from ..rules import settle
from .keys import KEYS
from .model import AXOLOTL, DTYPES, Loaded, precision_of, read_model, read_precision
from .programs import PROGRAMS
from .schedule import read_intervals, read_optimizer, read_schedule
from .training import NAMES, read_names

REPORTERS = ("tensorboard", "wandb")
Read = tuple[dict[str, Any], Original]


def read_hugging_face(top: Block, folder: Path) -> Read:
    """Settings of the trainer, and what the Trainer would run."""
    if _is_fsdp_alone(top):
        alone = read_fsdp(top, 0)
        return sharded({}, alone, alone.name, None)
    settings = read_names(top)
    read_schedule(top, settings)
    read_optimizer(top, settings)
    read_intervals(top, settings)
    read_model(top, settings)
    _rest(top, settings)
    word, loaded = read_precision(top)
    settle(top, KEYS)
    settle(top, {key: rule for key, rule in PROGRAMS.items() if key not in KEYS})
    if _says(top, "deepspeed"):
        return _deepspeed(top, folder, settings, word, loaded)
    top.ignored("deepspeed", "no file is named")
    asked = _fsdp(top, folder)
    if word != "no":
        top.used(word, told(word, asked is not None))
    precision = precision_of(top, word, loaded, asked is not None, "lora" in settings)
    settings["precision"] = precision
    if precision == PRECISIONS[word]:
        settings |= precision_settings(word, asked is not None)
    return sharded(settings, asked, *_groups(top, asked))


def _is_fsdp_alone(top: Block) -> bool:
    others = {*KEYS, *PROGRAMS, *(key for keys in NAMES.values() for key in keys), "fsdp", "fsdp_config", "deepspeed"}
    return bool(set(top.values) & FSDP_KEYS) and not set(top.values) & others


def _fsdp(top: Block, folder: Path) -> Fsdp | None:
    """`fsdp` is true, false, or words: a strategy's name, auto_wrap, offload."""
    words = _words(top)
    block = _fsdp_block(top, folder)
    is_on = bool(words) or (not top.has("fsdp") and top.has(AXOLOTL) and bool(block.values))
    if not is_on:
        if block.values and not top.has("fsdp"):
            block.refused_whole("it is only read with fsdp: true")
        block.ignored_whole("fsdp is off")
        top.ignored("fsdp", "nothing is sharded")
        top.ignored("fsdp_version", "nothing is sharded")
        return None
    top.whole("fsdp_version", 2, least=1, most=2)
    top.used("fsdp_version", "one engine for both versions")
    names = [name for word in words if (name := strategy_name(word)) and not word.isdigit()]
    if len(set(names)) > 1:
        top.refused("fsdp", f"{names[0]} and {names[1]} are two strategies; leave one")
    for word in words:
        if (word.isdigit() or not strategy_name(word)) and word not in ("auto_wrap", "offload", *TRUE):
            known = ", ".join(["true", "auto_wrap", "offload", *map(str.lower, SHARDING_STRATEGIES)])
            top.refused("fsdp", f"{word} is none of {known}")
    asked = read_fsdp(block, 0, names[0] if names else "")
    top.used("fsdp", f"strategy {SHARDING_STRATEGIES[asked.name]}")
    changes = asked.changes
    if "offload" in words and all(change.words != ON_HOST for change in changes):
        becomes = f"strategy {SHARDING_STRATEGIES[asked.name]}, all of it on the host"
        changes = (Change(top, "fsdp", ON_HOST, becomes), *changes)
    return Fsdp(asked.name, asked.key or ("fsdp" if names else ""), changes, asked.settings)


def _words(top: Block) -> list[str]:
    """Of `fsdp`; none where it is off."""
    if not top.has("fsdp"):
        return []
    value = top.values["fsdp"]
    if isinstance(value, list):
        return [word.lower() for word in top.texts("fsdp")]
    found = top.text("fsdp").lower().replace(",", " ").split()
    return [] if found and found[0] in FALSE and len(found) == 1 else found


def _fsdp_block(top: Block, folder: Path) -> Block:
    if isinstance(top.values.get("fsdp_config"), str):
        return named_file(top, "fsdp_config", folder)
    return top.inner("fsdp_config")


def _groups(top: Block, asked: Fsdp | None) -> tuple[str | None, int | None]:
    """FSDP's name of the strategy, and the ranks of a group, which Axolotl says at the top."""
    if any(top.has(key) for key in ("dp_shard_size", "dp_replicate_size")):
        return read_parallelism(top, asked, None)
    return None if asked is None else asked.name, None


def _deepspeed(top: Block, folder: Path, settings: dict[str, Any], word: str, loaded: Loaded) -> Read:
    is_inside = isinstance(top.values["deepspeed"], dict)
    block = top.inner("deepspeed") if is_inside else named_file(top, "deepspeed", folder)
    if _says(top, "fsdp"):
        top.refused("fsdp", "deepspeed is on, too; leave one of them")
    top.ignored("fsdp", "nothing is said")
    _fsdp_block(top, folder).ignored_whole("deepspeed shards")
    top.ignored("fsdp_version", "deepspeed shards")
    _groups(top, None)
    theirs, original = read_completed(block, word)
    _same(top, block, settings, theirs, word)
    for key in (*DTYPES, "pure_bf16") if loaded == "pure" else DTYPES:
        if loaded != "fp32" and theirs["precision"] == "fp32":
            top.refused(key, "DeepSpeed's own keys say the format: write bf16 there, or leave it out")
        top.used(key, f"precision {theirs['precision']}: DeepSpeed's own keys say it, and masters are fp32")
    return settings | theirs, original


def _same(top: Block, deepspeed: Block, settings: dict[str, Any], theirs: dict[str, Any], word: str) -> None:
    """What the Trainer compares has to be the same in both; `auto` in DeepSpeed's keys is what the Trainer is told.
    Where only one of them says it, that is what it is."""
    if word != "no" and theirs.get("precision", word) != word:
        top.refused(word, f"deepspeed says {theirs['precision']}; leave it to deepspeed, or write auto there")
    for name in sorted(settings.keys() & theirs.keys()):
        written = next((key for key in NAMES.get(name, (name,)) if top.has(key)), None)
        if written is None or settings[name] == theirs[name]:
            continue
        if name == "logging_steps" or (name == "max_grad_norm" and not deepspeed.has("gradient_clipping")):
            theirs[name] = settings[name]
        else:
            top.refused(written, f"deepspeed says {theirs[name]}; say it in one of the two, or the same in both")


def _says(top: Block, key: str) -> bool:
    return top.has(key) and str(top.values[key]).lower() not in (*FALSE, "", "none", "[]", "{}")


def _rest(top: Block, settings: dict[str, Any]) -> None:
    """Where runs report to, what they go on from, how samples are made, and on which device."""
    if top.flag("use_tensorboard"):
        settings["report_to"] = ("tensorboard",)
    top.used("use_tensorboard", f"report_to {'tensorboard' if 'report_to' in settings else 'what it says'}")
    if top.has("report_to"):
        asked = [word.lower() for word in top.texts("report_to") if word.lower() != "none"]
        said = (*settings.get("report_to", ()), *(word for word in asked if word in REPORTERS))
        settings["report_to"] = tuple(dict.fromkeys(said))
        for word in asked:
            if word not in REPORTERS:
                top.refused("report_to", f"{word} is none of {', '.join(REPORTERS)}; metrics.jsonl is always written")
        top.used("report_to", f"report_to {', '.join(settings['report_to']) or 'nobody'}")
    resume = top.text("resume_from_checkpoint")
    if resume.lower() not in (*FALSE, "", "none", "null"):
        settings["resume_from_checkpoint"] = "latest" if resume.lower() in TRUE else resume
    elif top.flag("auto_resume_from_checkpoints"):
        settings["resume_from_checkpoint"] = "auto"
    for key in ("resume_from_checkpoint", "auto_resume_from_checkpoints"):
        top.used(key, f"resume_from_checkpoint {settings.get('resume_from_checkpoint', 'none')}")
    for key in ("packing", "sample_packing"):
        if top.has(key):
            settings["packing"] = "packed" if top.flag(key) else "padded"
            top.used(key, f"packing {settings['packing']}")
    top.ignored("neat_packing", "packing says whether samples are packed")
    if top.flag("neat_packing"):
        settings |= {"packing": "packed", "isolate_documents": True}
        top.used("neat_packing", "packing packed, isolate_documents: attention stops at the ends of documents")
    for key in ("use_cpu", "no_cuda"):
        if top.flag(key):
            settings["device"] = "cpu"
        top.used(key, f"device {settings.get('device', 'cuda, where there is one')}")
