"""Adapters, quantised weights and the objective in files of the Trainer, TRL, LLaMA-Factory and Axolotl.

The four programs have different keys for the same arguments of peft and bitsandbytes, and for the same losses over
pairs of a chosen and a rejected answer.
"""

from pathlib import Path

from ..planner.training import ALL_LINEAR
from ..trainer.settings import READ_BY, WITH_REFERENCE
from .account import Block
from .tables import read_setting, table

OBJECTIVES = ("stage", "rl", "pref_loss", "loss_type")
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
    is_all = top.flag("lora_target_linear") or {"all", ALL_LINEAR} & set(targets) or (kind == "lora" and not targets)
    if is_all and {"embed_tokens", "lm_head"} & set(targets):
        top.refused(targets_key, "all linear layers are without embeddings and head; name every module instead")
    if is_all:
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
    bits, known = top.whole("quantization_bit", 0, least=0), table("hugging_face")
    asked = {"load_in_4bit": 4 * top.flag("load_in_4bit"), "load_in_8bit": 8 * top.flag("load_in_8bit")}
    asked |= {"quantization_bit": bits}
    chosen = max(asked.values())
    is_double = len({*asked.values()} - {0}) > 1
    for key, value in asked.items():
        if value and (str(value) not in known["bits"] or is_double):
            top.refused(key, "weights are quantised to 4 or 8 bits, and only in one of them")
        elif value and not {"lora", "lora_from"} & set(top.settings):
            top.refused(key, "weights that are trained are not quantised; train LoRA adapters")
        elif value:
            top.sets(key, known["bits"][str(value)][1], quantize=known["bits"][str(value)][0])
        else:
            top.ignored(key, "it is off")
    if top.text("adapter").lower() == "qlora" and chosen != 4:
        top.refused("adapter", "qlora needs load_in_4bit: true")
    for key, kinds in known["quantisation"].items():
        if chosen and top.has(key) and top.text(key).lower() not in kinds:
            top.refused(key, f"weights are quantised as bitsandbytes does: {', '.join(kinds)}")
        top.ignored(key, f"quantize {top.settings.get('quantize', 'none')} decides it")


def _read_objective(top: Block) -> None:
    """Read the loss: the next token, or one over pairs."""
    known, stage = table("hugging_face"), top.text("stage").lower()
    key = top.first_of("rl", "pref_loss", "loss_type")
    word = top.text(key).lower() if stage in ("", "dpo") else stage
    if not word and (stage == "dpo" or top.has("beta")):
        key, place = "stage" if stage else "beta", "/".join(Path(top.source).parts[-3:]).lower()
        word = next((name for name in TRAINERS if not stage and name in place), "sigmoid")
    keys, ours = (*OBJECTIVES, *known["objective_keys"]), known["objectives"].get(word, "")
    if not ours:
        is_next = word in ("", "none", "false", "sft", "pt", "nll")
        names = ", ".join(known["objectives"])
        if not is_next:
            top.refused("stage" if word == stage else key, f"there is no objective {word}; known: {names}")
        top.ignored(keys, "the next token is predicted" if is_next else "the objective is refused")
        return
    if ours in WITH_REFERENCE and "lora" not in top.settings:
        top.refused(key, f"the reference of {ours} is the model without its adapters: train new LoRA adapters")
    top.settings["objective"] = ours
    top.used((*OBJECTIVES, "beta"), f"objective {ours}")
    for name, written in known["objective_settings"].items():
        key = top.first_of(*written)
        if ours in READ_BY[name][1]:
            read_setting(top, key, name)
        else:
            top.ignored(key, f"{ours} does not read it")
    top.ignored("max_prompt_length", "a pair that is too long is cut as a whole, as in newer versions of TRL")
