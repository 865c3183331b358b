"""Hugging Face's TrainingArguments in a file, and the files of TRL, LLaMA-Factory and Axolotl, which use its names.

`deepspeed` (a file, or its keys) decides the sharding; without it, `fsdp` with `fsdp_config` (a file, or its keys);
without both, nothing is sharded. A file may also be such an `fsdp_config` alone.

If a file has training keys, the keys that it leaves out get the defaults of Hugging Face's Trainer. Files of TRL and
LLaMA-Factory get the same ones, although these programs have others.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..trainer.settings import Metric
from .accelerate import PRECISIONS, precision_for, read_completed, read_device
from .account import FALSE, TRUE, Block
from .fine_tuning import read_fine_tuning
from .fsdp import ON_HOST, Fsdp, known_keys, read_fsdp, read_groups, set_strategy, strategies
from .migrated import Change, Original
from .tables import apply_rules, read_setting, rules, table
from .training_data import read_data

# Defaults of Hugging Face's Trainer, where those of shardwise's trainer differ.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "seed": 42,
    "eval_fraction": 0.0,
    "packing": "padded",
}
EPOCHS = 3.0
# A file with one of these says how to train, and not only how to shard.
TRAINING_KEYS = ("output_dir", "learning_rate", "max_steps", "num_train_epochs", "num_epochs")
REPORTERS = ("tensorboard", "wandb")
DTYPES = ("torch_dtype", "dtype")
# The model's key in Axolotl's files. Axolotl loads weights in bf16 if bf16 is on; fsdp_config needs no `fsdp: true`.
AXOLOTL = "base_model"
# The dtype of loaded weights: `auto` is the checkpoint's, `pure` bf16 without fp32 masters.
Loaded = Literal["fp32", "bf16", "auto", "pure"]


def read_hugging_face(top: Block, folder: Path) -> Original:
    """Read all keys of the file into `top.settings`. Return the engine that the Trainer would use."""
    fixed = {**rules("hugging_face", "trainer"), **rules("hugging_face", "programs")}
    names = table("hugging_face")["settings"]
    others = {*fixed, *(key for keys in names.values() for key in keys), "fsdp", "fsdp_config", "deepspeed"}
    if set(top.values) & known_keys() and not set(top.values) & others:
        return set_strategy(top, read_fsdp(top, 0))
    for read in (
        _names_and_length,
        _schedule,
        _optimizer,
        _intervals,
        _best_model,
        _checkpointing_and_compilation,
        read_fine_tuning,
        _rest,
    ):
        read(top)
    read_data(top, folder)
    word, loaded = _dtypes(top)
    apply_rules(top, "hugging_face", "trainer")
    apply_rules(top, "hugging_face", "programs")
    if _is_on(top, "deepspeed"):
        return _deepspeed(top, folder, word, loaded)
    top.ignored("deepspeed", "no file is named")
    fsdp = _fsdp(top, folder)
    precision, becomes = precision_for(word, fsdp is not None)
    if word != "no":
        top.used(word, becomes)
    top.settings["precision"] = _precision(top, word, loaded, fsdp is not None)
    if top.settings["precision"] == PRECISIONS[word]:
        top.settings |= precision
    return set_strategy(top, fsdp, _groups(top))


def _is_on(top: Block, key: str) -> bool:
    return _lower(top, key) not in (*FALSE, "", "none", "[]", "{}")


def _lower(top: Block, key: str) -> str:
    return str(top.values[key]).lower() if top.has(key) else ""


# Sharding, by fsdp or by deepspeed


def _fsdp(top: Block, folder: Path) -> Fsdp | None:
    """Read `fsdp` (true, false, or words: the name of a strategy, auto_wrap, offload) and `fsdp_config`."""
    words = _words(top)
    block = _inner(top, "fsdp_config", folder)
    is_on = bool(words) or (not top.has("fsdp") and top.has(AXOLOTL) and bool(block.values))
    if not is_on:
        if block.values and not top.has("fsdp"):
            block.settle_rest("refused", "it is only read with fsdp: true")
        block.settle_rest("ignored", "fsdp is off")
        top.ignored(("fsdp", "fsdp_version"), "nothing is sharded")
        return None
    top.whole("fsdp_version", 2, least=1, most=2)
    top.used("fsdp_version", "one engine for both versions")
    known = ["true", "auto_wrap", "offload", *map(str.lower, strategies())]
    names = [word.upper() for word in words if word.upper() in strategies()]
    if len(set(names)) > 1:
        top.refused("fsdp", f"{names[0]} and {names[1]} are two strategies; leave one")
    unknown = [word for word in words if word not in (*known, *TRUE)]
    if unknown:
        top.refused("fsdp", f"{unknown[0]} is none of {', '.join(known)}")
    fsdp = read_fsdp(block, 0, names[0] if names else "")
    becomes = f"strategy {strategies()[fsdp.name]}"
    top.used("fsdp", becomes)
    if "offload" in words and all(change.words != ON_HOST for change in fsdp.changes):
        fsdp.changes.insert(0, Change(top, "fsdp", ON_HOST, f"{becomes}, offloaded to the host"))
    return replace(fsdp, key=fsdp.key or ("fsdp" if names else ""))


def _words(top: Block) -> list[str]:
    """The words of `fsdp`; none if it is off."""
    if not top.has("fsdp"):
        return []
    if isinstance(top.values["fsdp"], list):
        return [word.lower() for word in top.texts("fsdp")]
    words = top.text("fsdp").lower().replace(",", " ").split()
    return [] if len(words) == 1 and words[0] in FALSE else words


def _inner(top: Block, key: str, folder: Path) -> Block:
    """The mapping under a key, or in the file that the key names."""
    return top.inner_file(key, folder) if isinstance(top.values.get(key), str) else top.inner(key)


def _groups(top: Block) -> Block | None:
    """Return the block that has the sizes of groups of ranks: Axolotl writes them at the top. None without them."""
    return top if any(top.has(key) for key in ("dp_shard_size", "dp_replicate_size")) else None


def _deepspeed(top: Block, folder: Path, word: str, loaded: Loaded) -> Original:
    block, settings = _inner(top, "deepspeed", folder), top.settings
    if _is_on(top, "fsdp"):
        top.refused("fsdp", "deepspeed is on, too; leave one of them")
    top.ignored("fsdp", "it is off")
    _inner(top, "fsdp_config", folder).settle_rest("ignored", "deepspeed shards")
    top.ignored("fsdp_version", "deepspeed shards")
    if _groups(top) is not None:
        read_groups(top, None, None)
    theirs, original = read_completed(block, word)
    # The Trainer's keys and DeepSpeed's must agree where both are written; `auto` in DeepSpeed's is the Trainer's.
    names = table("hugging_face")["settings"]
    if word != "no" and theirs.get("precision", word) != word:
        top.refused(word, f"deepspeed has {theirs['precision']}; leave it to deepspeed, or write auto there")
    for name in sorted(settings.keys() & theirs.keys()):
        written = next((key for key in names.get(name, (name,)) if top.has(key)), None)
        if written is None or settings[name] == theirs[name]:
            continue
        if name == "logging_steps" or (name == "max_grad_norm" and not block.has("gradient_clipping")):
            theirs[name] = settings[name]
        else:
            top.refused(written, f"deepspeed has {theirs[name]}; write it in one of the two, or the same in both")
    keys = (*DTYPES, "pure_bf16") if loaded == "pure" else DTYPES
    if loaded != "fp32" and theirs["precision"] == "fp32":
        top.refused(keys, "DeepSpeed's own keys decide the dtype: write bf16 there, or leave it out")
    top.used(keys, f"precision {theirs['precision']}: DeepSpeed's own keys decide it, and masters are fp32")
    top.settings |= theirs
    return original


# The model: precision, checkpointing, compilation, adapters


def _dtypes(top: Block) -> tuple[str, Loaded]:
    """Return mixed precision in Accelerate's words (no, bf16 or fp16), and the dtype of loaded weights."""
    enabled = []
    for key in ("bf16", "fp16"):
        # Axolotl: `auto` is bf16 if the GPU supports it, and `full` is bf16 without fp32 masters.
        is_word = key == "bf16" and _lower(top, key) in ("auto", "full")
        is_on = is_word or top.flag(key)
        pure = "pure-" if is_word and _lower(top, key) == "full" else ""
        top.used(key, f"precision {pure}{key}" if is_on else "it is off")
        enabled += [key] * is_on
    if len(enabled) == 2:
        top.refused("fp16", "bf16 is on, too; leave one of them")
    word = enabled[0] if enabled else "no"
    loaded: Loaded = "bf16" if word == "bf16" and top.has(AXOLOTL) else "fp32"
    if top.flag("bfloat16") and not enabled:  # Axolotl: weights in bf16, without mixed precision
        loaded = "bf16"
    top.used("bfloat16", "weights are loaded in bf16" if loaded == "bf16" else "bf16 decides it")
    if top.flag("float16") and not enabled:
        top.refused("float16", "weights are float32 or bfloat16 here")
    top.ignored("float16", "bf16 and fp16 decide it")
    for key in DTYPES:
        name = _lower(top, key).removeprefix("torch.")
        if name in ("bfloat16", "bf16"):
            loaded = "bf16"
        elif name == "auto":
            loaded = "auto"
        elif top.has(key) and name not in ("float32", "fp32") and not (word == "bf16" and "quantize" in top.settings):
            top.refused(key, "weights are float32 or bfloat16 here")
    if top.flag("pure_bf16") or _lower(top, "bf16") == "full":
        loaded = "pure"
    else:
        top.used("pure_bf16", "it is off")
    return word, loaded


def _precision(top: Block, word: str, loaded: Loaded, is_sharded: bool) -> str:
    """Return our name of the precision. If weights are loaded in bf16, FSDP makes fp32 masters of them for mixed
    precision, and PEFT makes fp32 masters of adapters. DDP makes none: it trains the weights as they are."""
    makes_masters = is_sharded and word != "no" and _lower(top, "bf16") != "full"
    has_adapters = "lora" in top.settings
    keys = (*DTYPES, "pure_bf16") if loaded == "pure" else DTYPES
    if loaded == "auto" and not makes_masters and not (has_adapters and word != "no"):
        top.refused(keys, "the dtype is known from the checkpoint only: write float32 or bfloat16")
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
    top.used(keys, f"precision {precision}{how}")
    if word == "bf16" and how and not makes_masters:
        top.used(word, f"precision {precision}{how}")
    return precision


def _checkpointing_and_compilation(top: Block) -> None:
    key = "gradient_checkpointing"
    if top.text(key).lower() in ("unsloth", "offload", "offload_disk"):
        top.refused(key, "+activations=host after a strategy offloads activations; write true")
    elif top.flag(key):
        top.settings[key] = "full"
    top.used(key, f"gradient_checkpointing {top.settings.get(key, 'none')}")
    apply_rules(top.inner(f"{key}_kwargs"), "hugging_face", f"{key}_kwargs")
    top.settings |= {"compile": "on"} if top.flag("torch_compile") else {}
    top.used("torch_compile", f"compile {top.settings.get('compile', 'auto')}")


def _rest(top: Block) -> None:
    """Read the keys for reporting, resuming, packing and the device."""
    settings = top.settings
    reporters = ["tensorboard"] if top.flag("use_tensorboard") else []
    top.used("use_tensorboard", f"report_to {'tensorboard' if reporters else 'decides it'}")
    words = [word.lower() for word in top.texts("report_to")]
    others = [word for word in words if word not in (*REPORTERS, "none")]
    reporters += [word for word in words if word in REPORTERS]
    if top.flag("use_wandb"):
        reporters.append("wandb")
    top.used("use_wandb", f"report_to {'wandb' if 'wandb' in reporters else 'decides it'}")
    if reporters or top.has("report_to"):
        settings["report_to"] = tuple(dict.fromkeys(reporters))
        note = f"; nothing is sent to {', '.join(others)}: metrics.jsonl is always written" if others else ""
        top.used("report_to", f"report_to {', '.join(settings['report_to']) or 'nobody'}{note}")
    for name in top.texts("plugins"):
        why = table("hugging_face")["plugins"].get(name.rpartition(".")[2])
        if why is None:
            top.refused("plugins", f"{name} runs in Axolotl only")
    top.ignored("plugins", "they change how results are computed or reported, not the results")
    resume = top.text("resume_from_checkpoint")
    if resume.lower() not in (*FALSE, "", "none", "null"):
        settings["resume_from_checkpoint"] = "latest" if resume.lower() in TRUE else resume
    elif top.flag("auto_resume_from_checkpoints"):
        settings["resume_from_checkpoint"] = "auto"
    becomes = f"resume_from_checkpoint {settings.get('resume_from_checkpoint', 'none')}"
    top.used(("resume_from_checkpoint", "auto_resume_from_checkpoints"), becomes)
    for key in filter(top.has, ("packing", "sample_packing")):
        top.sets(key, packing="packed" if top.flag(key) else "padded")
    top.ignored("neat_packing", "packing decides if samples are packed")
    if top.flag("neat_packing"):
        top.sets("neat_packing", ": attention stops at their ends", packing="packed", isolate_documents=True)
    read_device(top, "use_cpu", "no_cuda")


# The training: settings that one key decides, the schedule, the optimizer, and intervals


def _names_and_length(top: Block) -> None:
    """Read settings that one key decides, and the length of the training: max_steps if above 0, else epochs."""
    has_training = any(top.has(key) for key in TRAINING_KEYS)
    top.settings |= DEFAULTS if has_training else {}
    for name, keys in table("hugging_face")["settings"].items():
        read_setting(top, top.first_of(*keys), name)
    _whole_batch(top)
    key, is_same = "base_model_config", top.text("base_model_config") in ("", top.text("base_model"))
    top.settle(key, "ignored" if is_same else "refused", "the configuration in the model's own folder is used")
    steps = top.whole("max_steps", -1, least=-1)
    key = top.first_of("num_train_epochs", "num_epochs")
    epochs = top.number(key, EPOCHS, least=0)
    top.used_if(steps > 0, "max_steps", f"max_steps {steps}", "epochs decide when to stop")
    if steps <= 0 and epochs == 0:
        top.refused(key, "it trains on nothing; it must be above 0")
    top.used_if(steps <= 0, key, f"num_train_epochs {epochs:g}", "max_steps decides when to stop")
    if steps > 0:
        top.settings["max_steps"] = steps
    elif epochs and has_training:
        top.settings["num_train_epochs"] = epochs


def _whole_batch(top: Block) -> None:
    """Read Axolotl's older key for the samples of a rank in a step."""
    size, micro = top.whole("batch_size", 0, least=1), top.settings.get("per_device_train_batch_size", 1)
    if top.has("gradient_accumulation_steps"):
        top.ignored("batch_size", "gradient_accumulation_steps decides it")
    elif size and size < micro:
        top.refused("batch_size", f"it is less than micro_batch_size {micro}")
    elif size:
        top.sets("batch_size", f": {size} / {micro}, as in Axolotl", gradient_accumulation_steps=size // micro)


def _schedule(top: Block) -> None:
    settings = top.settings
    key = _newer_key(top, "lr_scheduler_type", "lr_scheduler")
    names = table("hugging_face")["schedules"]
    word = top.word(key, names, "linear")
    if names[word] is None:
        known = ", ".join(name for name, ours in names.items() if ours is not None)
        top.refused(key, f"there is no such schedule here; take one of {known}")
        word = "linear"
    if top.has(key):
        settings |= {"lr_scheduler_type": names[word], "min_lr_ratio": 0.0}
    end = "" if word.startswith("constant") or "min_lr" in word else ", down to 0"
    top.used(key, f"lr_scheduler_type {names[word]}{end}")
    key = "cosine_min_lr_ratio"
    read_setting(top, key, "min_lr_ratio", 0.0 if top.has(key) else None)
    block = top.inner("lr_scheduler_kwargs")
    if word == "cosine_with_min_lr":
        ratio = block.number("min_lr_rate", 0.0, least=0, most=1)
        if block.has("min_lr"):
            rate = settings.get("learning_rate") or 0.0
            ratio = block.number("min_lr", 0.0, least=0, most=max(rate, 0.0)) / rate if rate else 0.0
        settings["min_lr_ratio"] = min(ratio, 1.0)
        block.used(("min_lr", "min_lr_rate"), f"min_lr_ratio {ratio:g}")
    elif word == "warmup_stable_decay":
        _stable_arguments(top, block)
    _warmup(top, word)


def _newer_key(top: Block, key: str, other: str) -> str:
    """Return `other` if only that one is written, otherwise `key`."""
    if top.has(other) and not top.has(key):
        return other
    top.ignored(other, f"{key} decides it")
    return key


def _stable_arguments(top: Block, block: Block) -> None:
    """Read the arguments of warmup_stable_decay. Its decay is always linear here."""
    read_setting(block, "num_decay_steps", "decay_steps")
    read_setting(block, "min_lr_ratio", "min_lr_ratio", 0.0)
    if block.word("decay_type", ("linear", "cosine", "1-sqrt"), "cosine") != "linear":
        block.refused("decay_type", "the decay is linear here; write linear")
        if not block.has("decay_type"):
            fix = "write lr_scheduler_kwargs: decay_type: linear"
            top.refused("lr_scheduler_type", f"the decay is linear here; {fix}")
    block.word("warmup_type", ("linear",), "linear")
    block.used(("decay_type", "warmup_type"), "linear")


def _warmup(top: Block, word: str) -> None:
    """Read the warm-up: a number of steps; below 1 it is a fraction of all steps."""
    for key, most in (("warmup_ratio", 1.0), ("warmup_steps", 2.0**53)):
        asked = top.number(key, 0.0, least=0, most=most)
        is_fraction = 0 < asked < 1 or (key == "warmup_ratio" and asked > 0)
        if word == "constant":
            top.ignored(key, "constant has no warm-up; constant_with_warmup has one")
        elif is_fraction and asked == 1:
            top.refused(key, "nothing is left after a warm-up of all steps; write a fraction below 1")
        elif not is_fraction and asked != int(asked):
            top.refused(key, "it is not a whole number of steps")
        elif top.has(key):
            top.settings["warmup_steps"] = asked or top.settings.get("warmup_steps", 0)
            top.used(key, f"warmup_steps {asked:g}{' of all steps' if is_fraction else ''}")


def _optimizer(top: Block) -> None:
    key = _newer_key(top, "optim", "optimizer")
    word, names = top.text(key).lower(), table("hugging_face")["optimizers"]
    if not word:
        top.ignored(key, "it is empty")
    elif word not in names:
        top.refused(key, f"there is no such optimizer here; take one of {', '.join(names)}")
    else:
        optimizer, note = names[word]
        top.settings |= {"momentum": 0.0} if optimizer == "sgd" else {}
        top.sets(key, note, optimizer=optimizer)


def _intervals(top: Block) -> None:
    strategy = top.first_of("evaluation_strategy", "eval_strategy", default="eval_strategy")
    _interval(top, strategy, "eval_steps", "evals_per_epoch")
    is_evaluated = top.text(strategy, "no").lower() != "no" or top.has("eval_steps")
    if is_evaluated and not any(top.has(key) for key in ("val_size", "val_set_size")):
        top.settings.pop("eval_fraction", None)  # our default holds out some of the data for evaluation
    _interval(top, "save_strategy", "save_steps", "saves_per_epoch")


def _best_model(top: Block) -> None:
    """Read which evaluation is the best, and what that decides. The one at the end alone decides nothing."""
    patience = top.first_of("early_stopping_patience", "early_stopping_steps")
    keys = (patience, "load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    metric, is_greater = f"eval_{top.text(keys[2], 'loss').removeprefix('eval_')}", top.flag(keys[3])
    asked: dict[str, Any] = {"early_stopping_patience": top.whole(patience, 0, least=0), keys[1]: top.flag(keys[1])}
    asked = {name: value for name, value in asked.items() if value and "eval_steps" in top.settings}
    if not asked:
        top.ignored(keys, "no evaluation before the end decides anything")
    elif metric not in get_args(Metric):
        top.refused(keys[2], f"an evaluation measures only {' and '.join(get_args(Metric))}")
    elif is_greater:
        top.refused(keys[3], f"less {metric} is better")
    else:
        top.sets(keys, **asked, metric_for_best_model=metric)


def _interval(top: Block, strategy: str, key: str, per_epoch: str) -> None:
    """Read an interval: steps, a fraction of all steps, or N times per epoch (Axolotl's key)."""
    default = "steps" if key == "save_steps" or top.has(key) else "no"
    when = top.word(strategy, ("no", "steps", "epoch", "best"), default)
    if when == "best" and (key == "eval_steps" or not top.flag("load_best_model_at_end")):
        top.refused(strategy, "write steps, epoch or no; load_best_model_at_end saves each new best evaluation, too")
    elif when == "epoch":
        _times_per_epoch(top, strategy, key, 1.0)
    else:
        top.used(strategy, f"every {key} steps" if when == "steps" else "at the end only")
    if top.has(per_epoch):
        for other in (strategy, key) if when != "steps" else (key,):
            top.refused(other, f"{per_epoch} is written, too; leave one of them")
        _times_per_epoch(top, per_epoch, key, top.number(per_epoch, 0.0, least=0))
        return
    if not top.has(key):
        return
    steps = top.number(key, 0.0, least=0, most=2.0**53)
    is_fraction = 0 < steps < 1
    if when != "steps":
        top.ignored(key, f"{strategy} {when} does not read it")
    elif not is_fraction and steps != int(steps):
        top.refused(key, "it is not a whole number of steps")
    else:
        top.sets(key, " of all steps" if is_fraction else "", **{key: steps if is_fraction else int(steps)})


def _times_per_epoch(top: Block, written: str, key: str, times: float) -> None:
    """Set an interval of N times per epoch, as a fraction of all steps: 1 / (N * epochs)."""
    epochs = top.settings.get("num_train_epochs", 0.0)
    if "max_steps" in top.settings and written.endswith("per_epoch"):  # Axolotl's part of all steps
        epochs = top.number("num_epochs", 1.0, least=0)
    num_times = times * epochs
    if not epochs and times:
        why = "the steps of an epoch are unknown without a number of epochs (max_steps replaces it)"
        top.refused(written, f"{why}; write {key}, in steps")
    elif num_times <= 1:
        top.used(written, "at the end only")
    else:
        top.sets(written, f" of all steps, {times:g} times in each epoch", **{key: 1 / num_times})
