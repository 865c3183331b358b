"""Hugging Face's TrainingArguments in a file, and the files of TRL, LLaMA-Factory and Axolotl, which use its names.

`deepspeed` (a file or its keys) shards, else `fsdp` with `fsdp_config` (its keys, or a file of them), else nothing
does. A file may also be such an `fsdp_config` alone.
"""

from pathlib import Path
from typing import Any, Literal

from .accelerate import PRECISIONS, precision_settings, precision_text, read_completed
from .account import FALSE, TRUE, Block
from .files import named_file
from .fsdp import ON_HOST, Fsdp, known_keys, read_fsdp, read_parallelism, sharded
from .hugging_face_training import read_intervals, read_names, read_optimizer, read_schedule
from .migrated import Original
from .strategies import SHARDING_STRATEGIES, Change, strategy_name
from .tables import apply_rules, rules, table

REPORTERS = ("tensorboard", "wandb")
DTYPES = ("torch_dtype", "dtype")
# Axolotl's name of the model. It loads weights in bf16 where bf16 is on, and its fsdp_config needs no `fsdp: true`.
AXOLOTL = "base_model"
# The dtype of loaded weights: `auto` is the checkpoint's, `pure` bf16 without fp32 masters.
Loaded = Literal["fp32", "bf16", "auto", "pure"]
RANKS = ("lora_r", "lora_rank")
TARGETS = ("lora_target_modules", "lora_target")
Read = tuple[dict[str, Any], Original]


def read_hugging_face(top: Block, folder: Path) -> Read:
    """Settings of the trainer, and what the Trainer would run."""
    fixed = {**rules("hugging_face", "trainer"), **rules("hugging_face", "programs")}
    names = table("hugging_face")["settings"]
    others = {*fixed, *(key for keys in names.values() for key in keys), "fsdp", "fsdp_config", "deepspeed"}
    if set(top.values) & known_keys() and not set(top.values) & others:
        alone = read_fsdp(top, 0)
        return sharded({}, alone, alone.name, None)
    settings = read_names(top)
    read_schedule(top, settings)
    read_optimizer(top, settings)
    read_intervals(top, settings)
    _checkpointing(top, settings)
    _compilation(top, settings)
    _adapters(top, settings)
    _rest(top, settings)
    word, loaded = _dtypes(top)
    apply_rules(top, fixed)
    if _is_on(top, "deepspeed"):
        return _deepspeed(top, folder, settings, word, loaded)
    top.ignored("deepspeed", "no file is named")
    fsdp = _fsdp(top, folder)
    if word != "no":
        top.used(word, precision_text(word, fsdp is not None))
    precision = _precision(top, word, loaded, fsdp is not None, "lora" in settings)
    settings["precision"] = precision
    if precision == PRECISIONS[word]:
        settings |= precision_settings(word, fsdp is not None)
    return sharded(settings, fsdp, *_groups(top, fsdp))


def _is_on(top: Block, key: str) -> bool:
    return top.has(key) and str(top.values[key]).lower() not in (*FALSE, "", "none", "[]", "{}")


def _lower(top: Block, key: str) -> str:
    return str(top.values[key]).lower() if top.has(key) else ""


# What shards


def _fsdp(top: Block, folder: Path) -> Fsdp | None:
    """`fsdp` is true, false, or words: a strategy's name, auto_wrap, offload."""
    words = _words(top)
    block = _fsdp_block(top, folder)
    is_on = bool(words) or (not top.has("fsdp") and top.has(AXOLOTL) and bool(block.values))
    if not is_on:
        if block.values and not top.has("fsdp"):
            block.refused_whole("it is only read with fsdp: true")
        block.ignored_whole("fsdp is off")
        for key in ("fsdp", "fsdp_version"):
            top.ignored(key, "nothing is sharded")
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
    fsdp = read_fsdp(block, 0, names[0] if names else "")
    becomes = f"strategy {SHARDING_STRATEGIES[fsdp.name]}"
    top.used("fsdp", becomes)
    changes = fsdp.changes
    if "offload" in words and all(change.words != ON_HOST for change in changes):
        changes = (Change(top, "fsdp", ON_HOST, f"{becomes}, offloaded to the host"), *changes)
    return Fsdp(fsdp.name, fsdp.key or ("fsdp" if names else ""), changes, fsdp.settings)


def _words(top: Block) -> list[str]:
    """The words of `fsdp`; none if it is off."""
    if not top.has("fsdp"):
        return []
    if isinstance(top.values["fsdp"], list):
        return [word.lower() for word in top.texts("fsdp")]
    words = top.text("fsdp").lower().replace(",", " ").split()
    return [] if len(words) == 1 and words[0] in FALSE else words


def _fsdp_block(top: Block, folder: Path) -> Block:
    if isinstance(top.values.get("fsdp_config"), str):
        return named_file(top, "fsdp_config", folder)
    return top.inner("fsdp_config")


def _groups(top: Block, fsdp: Fsdp | None) -> tuple[str | None, int | None]:
    """FSDP's name of the strategy, and the ranks of a group, which are at the top in Axolotl's files."""
    if any(top.has(key) for key in ("dp_shard_size", "dp_replicate_size")):
        return read_parallelism(top, fsdp, None)
    return None if fsdp is None else fsdp.name, None


def _deepspeed(top: Block, folder: Path, settings: dict[str, Any], word: str, loaded: Loaded) -> Read:
    is_inside = isinstance(top.values["deepspeed"], dict)
    block = top.inner("deepspeed") if is_inside else named_file(top, "deepspeed", folder)
    if _is_on(top, "fsdp"):
        top.refused("fsdp", "deepspeed is on, too; leave one of them")
    top.ignored("fsdp", "it is off")
    _fsdp_block(top, folder).ignored_whole("deepspeed shards")
    top.ignored("fsdp_version", "deepspeed shards")
    _groups(top, None)
    theirs, original = read_completed(block, word)
    _refuse_contradictions(top, block, settings, theirs, word)
    for key in (*DTYPES, "pure_bf16") if loaded == "pure" else DTYPES:
        if loaded != "fp32" and theirs["precision"] == "fp32":
            top.refused(key, "DeepSpeed's own keys decide the dtype: write bf16 there, or leave it out")
        top.used(key, f"precision {theirs['precision']}: DeepSpeed's own keys decide it, and masters are fp32")
    return settings | theirs, original


def _refuse_contradictions(
    top: Block, deepspeed: Block, settings: dict[str, Any], theirs: dict[str, Any], word: str
) -> None:
    """The Trainer's keys and DeepSpeed's must agree where both are written; `auto` in DeepSpeed's is the Trainer's."""
    names = table("hugging_face")["settings"]
    if word != "no" and theirs.get("precision", word) != word:
        top.refused(word, f"deepspeed has {theirs['precision']}; leave it to deepspeed, or write auto there")
    for name in sorted(settings.keys() & theirs.keys()):
        written = next((key for key in names.get(name, (name,)) if top.has(key)), None)
        if written is None or settings[name] == theirs[name]:
            continue
        if name == "logging_steps" or (name == "max_grad_norm" and not deepspeed.has("gradient_clipping")):
            theirs[name] = settings[name]
        else:
            top.refused(written, f"deepspeed has {theirs[name]}; write it in one of the two, or the same in both")


# The model: precision, checkpointing, compilation, adapters


def _dtypes(top: Block) -> tuple[str, Loaded]:
    """Accelerate's word for the precision, and the dtype of loaded weights."""
    enabled = []
    for key in ("bf16", "fp16"):
        # Axolotl: `auto` is bf16 where a GPU can, and `full` bf16 without fp32 masters.
        is_word = key == "bf16" and _lower(top, key) in ("auto", "full")
        is_on = is_word or top.flag(key)
        pure = "pure-" if is_word and _lower(top, key) == "full" else ""
        top.used(key, f"precision {pure}{key}" if is_on else "it is off")
        enabled += [key] * is_on
    if len(enabled) == 2:
        top.refused("fp16", "bf16 is on, too; leave one of them")
    word = enabled[0] if enabled else "no"
    loaded: Loaded = "bf16" if word == "bf16" and top.has(AXOLOTL) else "fp32"
    for key in DTYPES:
        name = _lower(top, key).removeprefix("torch.")
        if name in ("bfloat16", "bf16"):
            loaded = "bf16"
        elif name == "auto":
            loaded = "auto"
        elif top.has(key) and name not in ("float32", "fp32"):
            top.refused(key, "weights are float32 or bfloat16 here")
    if top.flag("pure_bf16") or _lower(top, "bf16") == "full":
        loaded = "pure"
    else:
        top.used("pure_bf16", "it is off")
    return word, loaded


def _precision(top: Block, word: str, loaded: Loaded, is_sharded: bool, has_adapters: bool) -> str:
    """Our precision. Weights that are loaded in bf16 have fp32 masters where FSDP makes them, which it does for mixed
    precision, and adapters where PEFT does; DDP trains weights as they are."""
    makes_masters = is_sharded and word != "no" and _lower(top, "bf16") != "full"
    keys = (*DTYPES, "pure_bf16") if loaded == "pure" else DTYPES
    if loaded == "auto" and not makes_masters and not (has_adapters and word != "no"):
        for key in keys:
            top.refused(key, "the dtype is known from the checkpoint only: write float32 or bfloat16")
    if loaded in ("fp32", "auto") or word == "fp16" or makes_masters:
        how = ": FSDP makes fp32 masters, whatever the dtype of loaded weights" if makes_masters else ""
        precision = PRECISIONS[word]
    elif has_adapters and loaded == "bf16":
        how = ": frozen weights are bf16, and adapters have fp32 masters, as PEFT makes them"
        precision = "bf16"
    else:
        by = ", as Axolotl does (it may keep norms and embeddings in fp32)" if top.has(AXOLOTL) else ""
        how = f": weights are loaded and trained in bf16{by}, without fp32 masters"
        precision = "pure-bf16"
    for key in keys:
        top.used(key, f"precision {precision}{how}")
    if word == "bf16" and how and not makes_masters:
        top.used(word, f"precision {precision}{how}")
    return precision


def _checkpointing(top: Block, settings: dict[str, Any]) -> None:
    key = "gradient_checkpointing"
    if top.text(key).lower() in ("unsloth", "offload", "offload_disk"):
        top.refused(key, "+activations=host after a strategy offloads activations; write true")
    elif top.flag(key):
        settings[key] = "full"
    top.used(key, f"gradient_checkpointing {settings.get(key, 'none')}")
    name = "gradient_checkpointing_kwargs"
    apply_rules(top.inner(name), rules("hugging_face", name))


def _compilation(top: Block, settings: dict[str, Any]) -> None:
    if top.flag("torch_compile"):
        settings["compile"] = True
    top.used("torch_compile", f"compile {str('compile' in settings).lower()}")
    if top.text("torch_compile_backend", "inductor").lower() != "inductor":
        top.refused("torch_compile_backend", "blocks are compiled by inductor only")
    top.used("torch_compile_backend", "inductor")


def _adapters(top: Block, settings: dict[str, Any]) -> None:
    """PEFT's arguments, under the names of three programs."""
    is_lora = _wants_lora(top)
    rank_key = next((key for key in RANKS if top.has(key)), RANKS[0])
    targets_key = next((key for key in TARGETS if top.has(key)), TARGETS[0])
    rank = top.whole(rank_key, 16, least=1, most=2**31)
    alpha = top.number("lora_alpha", 2.0 * rank, least=0)
    dropout = top.number("lora_dropout", 0.0, least=0, most=0.999)
    targets = tuple(top.texts(targets_key))
    every = top.flag("lora_target_linear")
    if is_lora and (every or {"all", "all-linear"} & set(targets)):
        top.refused("lora_target_linear" if every else targets_key, "name the modules, as in q_proj,v_proj")
        targets = ()
    if is_lora and top.has("lora_alpha") and alpha == 0:
        top.refused("lora_alpha", "it must be above 0")
    becomes = {
        rank_key: f"lora r {rank}",
        "lora_alpha": f"lora alpha {alpha:g}",
        "lora_dropout": f"lora dropout {dropout:g}",
        targets_key: f"lora targets {', '.join(targets)}",
        "lora_target_linear": "modules are named one by one",
    }
    for key, text in becomes.items():
        top.settle(key, "used" if is_lora else "ignored", text if is_lora else "no adapters are asked for")
    for key in (*RANKS, *TARGETS):
        if key not in becomes and top.has(key):
            top.refused(key, f"{rank_key if key in RANKS else targets_key} is written, too; leave one of them")
    if is_lora:
        settings["lora"] = {"r": rank, "alpha": alpha, "dropout": dropout, "targets": list(targets)}


def _wants_lora(top: Block) -> bool:
    adapter = top.text("adapter").lower()
    kind = top.word("finetuning_type", ("full", "lora", "freeze", "oft"), "full")
    if adapter not in ("", "lora", "none"):
        top.refused("adapter", "adapters are lora here, on weights that are not quantised")
    if kind in ("freeze", "oft"):
        top.refused("finetuning_type", "all weights are trained here, or LoRA adapters: full or lora")
    is_lora = adapter == "lora" or kind == "lora" or top.flag("use_peft")
    for key in ("adapter", "finetuning_type", "use_peft"):
        top.used(key, "LoRA adapters" if is_lora else "all weights are trained")
    return is_lora


def _rest(top: Block, settings: dict[str, Any]) -> None:
    """Reporting, resuming, packing and the device."""
    if top.flag("use_tensorboard"):
        settings["report_to"] = ("tensorboard",)
    top.used("use_tensorboard", f"report_to {'tensorboard' if 'report_to' in settings else 'decides it'}")
    if top.has("report_to"):
        asked = [word.lower() for word in top.texts("report_to") if word.lower() != "none"]
        known = (*settings.get("report_to", ()), *(word for word in asked if word in REPORTERS))
        settings["report_to"] = tuple(dict.fromkeys(known))
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
    top.ignored("neat_packing", "packing decides if samples are packed")
    if top.flag("neat_packing"):
        settings |= {"packing": "packed", "isolate_documents": True}
        top.used("neat_packing", "packing packed, isolate_documents: attention stops at the ends of documents")
    for key in ("use_cpu", "no_cuda"):
        if top.flag(key):
            settings["device"] = "cpu"
        top.used(key, f"device {settings.get('device', 'cuda, where there is one')}")
