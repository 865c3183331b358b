"""What of a Hugging Face file is about the model: precision, adapters, checkpointing, compilation."""

from typing import Any, Literal

from ..accelerate.precision import PRECISIONS
from ..account import Block

HALF = ("bfloat16", "bf16")
WHOLE = ("float32", "fp32")
DTYPES = ("torch_dtype", "dtype")
# Axolotl's name of the model. It loads weights in bf16 where bf16 is on, and its fsdp_config needs no word beside it.
AXOLOTL = "base_model"
# What weights are loaded as: `auto` is what the checkpoint has, `pure` bf16 whose masters nobody makes.
Loaded = Literal["fp32", "bf16", "auto", "pure"]
ADAPTERS = ("adapter", "finetuning_type", "use_peft")
RANKS = ("lora_r", "lora_rank")
TARGETS = ("lora_target_modules", "lora_target")


def read_precision(top: Block) -> tuple[str, Loaded]:
    """Accelerate's word for what computes, and what weights are loaded as."""
    found = [key for key in ("bf16", "fp16") if _is_on(top, key)]
    if len(found) == 2:
        top.refused("fp16", "bf16 is on, too; leave one of them")
    word = found[0] if found else "no"
    loaded: Loaded = "bf16" if word == "bf16" and top.has(AXOLOTL) else "fp32"
    for key in DTYPES:
        name = _raw(top, key).removeprefix("torch.")
        if name in HALF:
            loaded = "bf16"
        elif name == "auto":
            loaded = "auto"
        elif top.has(key) and name not in WHOLE:
            top.refused(key, "weights are float32 or bfloat16 here")
    if top.flag("pure_bf16") or _raw(top, "bf16") == "full":
        loaded = "pure"
    else:
        top.used("pure_bf16", "it is off")
    return word, loaded


def precision_of(top: Block, word: str, loaded: Loaded, is_sharded: bool, has_adapters: bool) -> str:
    """Ours. Weights that are loaded in bf16 have fp32 masters where FSDP makes them, which it does for mixed precision,
    and adapters where PEFT does; DDP trains weights as they are."""
    makes_masters = is_sharded and word != "no" and _raw(top, "bf16") != "full"
    keys = (*DTYPES, "pure_bf16") if loaded == "pure" else DTYPES
    if loaded == "auto" and not makes_masters and not (has_adapters and word != "no"):
        for key in keys:
            top.refused(key, "only the checkpoint knows which format that is: write float32 or bfloat16")
    if loaded in ("fp32", "auto") or word == "fp16" or makes_masters:
        how = ": FSDP makes fp32 masters, whatever weights are loaded as" if makes_masters else ""
        precision = PRECISIONS[word]
    elif has_adapters and loaded == "bf16":
        how = ": weights that are not trained are bf16, and adapters have fp32 masters, as PEFT makes them"
        precision = "bf16"
    else:
        by = ", as Axolotl does (it may keep norms and embeddings in fp32)" if top.has(AXOLOTL) else ""
        how = f": weights are loaded and trained in bf16{by}, and nothing makes fp32 masters of them"
        precision = "pure-bf16"
    for key in keys:
        top.used(key, f"precision {precision}{how}")
    if word == "bf16" and how and not makes_masters:
        top.used(word, f"precision {precision}{how}")
    return precision


def _is_on(top: Block, key: str) -> bool:
    """`auto` (Axolotl's) is bf16 where a GPU can, and `full` bf16 without fp32 masters."""
    if key == "bf16" and _raw(top, key) in ("auto", "full"):
        top.used(key, "precision bf16" if _raw(top, key) == "auto" else "precision pure-bf16")
        return True
    is_on = top.flag(key)
    top.used(key, f"precision {key}" if is_on else "it is off")
    return is_on


def _raw(top: Block, key: str) -> str:
    return str(top.values[key]).lower() if top.has(key) else ""


def read_model(top: Block, settings: dict[str, Any]) -> None:
    _checkpointing(top, settings)
    if top.flag("torch_compile"):
        settings["compile"] = True
    top.used("torch_compile", f"compile {str('compile' in settings).lower()}")
    backend = top.text("torch_compile_backend", "inductor").lower()
    if backend != "inductor":
        top.refused("torch_compile_backend", "blocks are compiled by inductor only")
    top.used("torch_compile_backend", "inductor")
    _adapters(top, settings)


def _checkpointing(top: Block, settings: dict[str, Any]) -> None:
    key = "gradient_checkpointing"
    if top.text(key).lower() in ("unsloth", "offload", "offload_disk"):
        top.refused(key, "activations go to the host by +activations=host behind a strategy; write true")
    elif top.flag(key):
        settings[key] = "full"
    top.used(key, f"gradient_checkpointing {settings.get(key, 'none')}")
    words = top.inner("gradient_checkpointing_kwargs")
    words.flag("use_reentrant")
    words.ignored("use_reentrant", "checkpoints are never reentrant here; what is computed is the same")
    for word in ("preserve_rng_state", "determinism_check", "debug", "early_stop"):
        words.ignored(word, "what is computed again is computed as before")


def _adapters(top: Block, settings: dict[str, Any]) -> None:
    """PEFT's words, in three programs' names."""
    is_lora = _wants_lora(top)
    rank_key = next((key for key in RANKS if top.has(key)), RANKS[0])
    targets_key = next((key for key in TARGETS if top.has(key)), TARGETS[0])
    rank = top.whole(rank_key, 16, least=1, most=2**31)
    alpha = top.number("lora_alpha", 2.0 * rank, least=0)
    dropout = top.number("lora_dropout", 0.0, least=0, most=0.999)
    targets = tuple(top.texts(targets_key))
    every = top.flag("lora_target_linear")
    if is_lora and (every or {"all", "all-linear"} & set(targets)):
        top.refused("lora_target_linear" if every else targets_key, "modules have to be named, as q_proj,v_proj")
        targets = ()
    if is_lora and top.has("lora_alpha") and alpha == 0:
        top.refused("lora_alpha", "it must be above 0")
    told = {
        rank_key: f"lora r {rank}",
        "lora_alpha": f"lora alpha {alpha:g}",
        "lora_dropout": f"lora dropout {dropout:g}",
        targets_key: f"lora targets {', '.join(targets)}",
        "lora_target_linear": "modules are named one by one",
    }
    for key, text in told.items():
        if is_lora:
            top.used(key, text)
        else:
            top.ignored(key, "no adapters are asked for")
    for key in (*RANKS, *TARGETS):
        if key not in told and top.has(key):
            top.refused(key, f"{rank_key if key in RANKS else targets_key} says it, too; leave one of them")
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
    for key in ADAPTERS:
        top.used(key, "LoRA adapters" if is_lora else "all weights are trained")
    return is_lora
