"""Adapters, quantised weights and the objective in files of the Trainer, TRL, LLaMA-Factory and Axolotl.

The four programs have different keys for the same arguments of peft and bitsandbytes, and for the same losses over
pairs of a chosen and a rejected answer.
"""

from .account import Block
from .tables import read_setting, table

ALL_LINEAR = "all-linear"
WITH_REFERENCE = ("dpo", "hinge", "ipo")  # the model without its adapters
# Trainers of TRL whose files have `beta`, as their recipes are named.
TRAINERS = ("orpo", "kto", "cpo", "grpo", "gkd", "rloo")


def read_fine_tuning(top: Block) -> None:
    _read_adapters(top)
    _read_quantised(top)
    _read_objective(top)


def _read_adapters(top: Block) -> None:
    """Read the arguments of PEFT."""
    adapter = top.text("adapter").lower()
    kind = top.word("finetuning_type", ("full", "lora", "freeze", "oft"), "full")
    if adapter not in ("", "lora", "qlora", "none"):
        top.refused("adapter", "adapters are lora here, or qlora")
    if kind in ("freeze", "oft"):
        top.refused("finetuning_type", "all weights are trained here, or LoRA adapters: full or lora")
    is_lora = adapter in ("lora", "qlora") or kind == "lora" or top.flag("use_peft")
    becomes = "LoRA adapters" if is_lora else "all weights are trained"
    top.used(("adapter", "finetuning_type", "use_peft"), becomes)
    rank_key = top.first_of("lora_r", "lora_rank")
    targets_key = top.first_of("lora_target_modules", "lora_target")
    saved_key = top.first_of("lora_modules_to_save", "additional_target")
    rank = top.whole(rank_key, 8 if kind == "lora" else 16, least=1, most=2**31)
    alpha = top.number("lora_alpha", 2.0 * rank, least=0)
    dropout = top.number("lora_dropout", 0.0, least=0, most=0.999)
    targets, saved = list(top.texts(targets_key)), list(top.texts(saved_key))
    if top.flag("lora_target_linear") or {"all", ALL_LINEAR} & set(targets) or (kind == "lora" and not targets):
        targets = [ALL_LINEAR]
    if is_lora and top.has("lora_alpha") and alpha == 0:
        top.refused("lora_alpha", "it must be above 0")
    lora = {"r": rank, "alpha": alpha, "dropout": dropout, "targets": targets}
    lora |= {"modules_to_save": saved} if saved else {}
    for ours, keys in {"rslora": ("use_rslora", "peft_use_rslora"), "dora": ("use_dora", "peft_use_dora")}.items():
        key = top.first_of(*keys)
        lora |= {ours: True} if top.flag(key) else {}
        top.used_if(is_lora, key, f"lora {ours} {str(top.flag(key)).lower()}", "no adapters are asked for")
    for key, text in {
        rank_key: f"lora r {rank}",
        "lora_alpha": f"lora alpha {alpha:g}",
        "lora_dropout": f"lora dropout {dropout:g}",
        targets_key: f"lora targets {', '.join(targets)}",
        "lora_target_linear": f"lora targets {', '.join(targets)}",
        saved_key: f"lora modules_to_save {', '.join(saved)}",
    }.items():
        top.used_if(is_lora, key, text, "no adapters are asked for")
    top.settings |= {"lora": lora} if is_lora else {}
    start = top.first_of("adapter_name_or_path", "lora_model_dir")
    if is_lora and top.has(start) and not top.flag("create_new_adapter"):
        top.settings.pop("lora")
        top.sets(start, ", which gives all values of lora", lora_from=top.text(start))
    elif top.has(start):
        top.refused(start, "merge it into its model first (shardwise export --merge), and name that as the model")
    top.ignored("create_new_adapter", f"{start} says where adapters start from")


def _read_quantised(top: Block) -> None:
    """Read in how many bits the frozen weights are, and how."""
    keys, bits = ("load_in_4bit", "load_in_8bit", "quantization_bit"), top.whole("quantization_bit", 0, least=0)
    asked = {4: top.flag("load_in_4bit") or bits == 4, 8: top.flag("load_in_8bit") or bits == 8}
    names = {4: "nf4", 8: "int8"}
    notes = {4: ", with double quantisation", 8: " in blocks of weights; products are in 16 bits, not in int8"}
    chosen = next((bits for bits, is_on in asked.items() if is_on), 0)
    for key in filter(top.has, keys):
        is_on = bits if key == "quantization_bit" else top.flag(key)
        if is_on and (not chosen or all(asked.values())):
            top.refused(key, "weights are quantised to 4 or 8 bits, and only in one of them")
        elif is_on and not {"lora", "lora_from"} & set(top.settings):
            top.refused(key, "weights that are trained are not quantised; train LoRA adapters")
        elif is_on:
            top.sets(key, notes[chosen], quantize=names[chosen])
        top.ignored(key, "it is off") if not is_on else None
    if top.text("adapter").lower() == "qlora" and chosen != 4:
        top.refused("adapter", "qlora needs load_in_4bit: true")
    for key, kinds in table("hugging_face")["quantisation"].items():
        if chosen and top.has(key) and top.text(key).lower() not in kinds:
            top.refused(key, f"weights are quantised as bitsandbytes does: {', '.join(kinds)}")
        top.ignored(key, f"quantize {top.settings.get('quantize', 'none')} decides it")


def _read_objective(top: Block) -> None:
    """Read the loss: the next token, or one over pairs."""
    stage = top.text("stage", "").lower()
    key = top.first_of("rl", "pref_loss", "loss_type")
    word = top.text(key).lower() if stage in ("", "dpo") else stage
    if not word and (stage == "dpo" or top.has("beta")):
        name = top.source.lower()
        word = next((word for word in TRAINERS if not stage and word in name), "sigmoid")
        key = "stage" if stage else "beta"
    known = table("hugging_face")["objectives"]
    rest = ("stage", "rl", "pref_loss", "loss_type")
    if word in ("", "none", "false", "sft", "pt", "nll"):
        top.used(rest, "the next token is predicted")
        top.ignored(table("hugging_face")["objective_keys"], "the next token is predicted")
        return
    if word not in known:
        top.refused(
            key if stage in ("", "dpo") else "stage", f"there is no objective {word}; known: {', '.join(known)}"
        )
        top.ignored((*rest, *table("hugging_face")["objective_keys"]), "it belongs to an objective that is refused")
        return
    ours = known[word]
    if ours in WITH_REFERENCE and "lora" not in top.settings:
        top.refused(key, f"the reference of {ours} is the model without its adapters: train new LoRA adapters")
    top.settings["objective"] = ours
    top.used((*rest, "beta"), f"objective {ours}")
    beta = top.first_of("pref_beta", "rl_beta", "dpo_beta", "orpo_alpha", "beta")
    read_setting(top, beta, "dpo_beta")
    read_setting(top, "simpo_gamma", "simpo_gamma")
    read_setting(top, top.first_of("dpo_label_smoothing", "label_smoothing"), "label_smoothing")
    top.ignored("max_prompt_length", "a pair that is too long is cut as a whole, as in newer versions of TRL")
