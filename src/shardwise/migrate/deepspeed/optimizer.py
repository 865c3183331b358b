"""`optimizer`: a type and its parameters, as the trainer's settings. In a loop of one's own they belong to nobody here:
there the optimizer is the one that `sw.shard` is given.

Adam is AdamW, as DeepSpeed runs it unless `adam_w_mode` is false. What is not written is what the class that DeepSpeed
takes has: its own Adam decays nothing, torch's AdamW a hundredth.
"""

from typing import Any

from ..account import Block

# What the trainer has.
TYPES = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"}
OTHERS = (
    "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "OneBitLamb", "ZeroOneAdam",
    "FusedAdam", "Adafactor", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "LBFGS", "SparseAdam",
)  # fmt: skip
LEARNING_RATE = 1e-3
MATRICES = (
    "DeepSpeed decays every parameter that it is given in one group; the trainer, and Hugging Face's with DeepSpeed, "
    "leave out norms and biases"
)
# Flags that must be as the trainer has them.
FIXED = {
    "amsgrad": (False, "there is no such variant in the trainer"),
    "maximize": (False, "losses are made smaller; turn the loss's sign"),
    "nesterov": (False, "there is no such variant in the trainer"),
    "bias_correction": (True, "AdamW always corrects its moments"),
    "fp32_optimizer_states": (True, "moments are fp32 beside fp32 masters"),
}
FREE = ("legacy_fusion", "set_grad_none", "foreach", "fused", "capturable", "differentiable")


def read_optimizer(block: Block, params: Block) -> dict[str, Any]:
    block.flag("legacy_fusion")
    block.ignored("legacy_fusion", "how DeepSpeed launches its kernels; results are the same")
    if not block.has("type"):
        params.refused_whole("no type of optimizer is named, so that DeepSpeed would make none; write optimizer.type")
        return {}
    asked = block.word("type", (*TYPES, *OTHERS), "")
    if asked not in TYPES:
        block.refused(
            "type",
            f"the trainer has {', '.join(dict.fromkeys(TYPES.values()))}; leave the block out and give sw.shard your "
            "own optimizer",
        )
        params.ignored_whole("belongs to an optimizer that is refused")
        return {}
    name = TYPES[asked]
    found: dict[str, Any] = {"optimizer": name, **_read_shared(params)}
    decay = _read_adam(params, found, asked) if name == "adamw" else _read_sgd(params, found)
    _read_decay(params, found, decay)
    block.used("type", f"optimizer {name}" + (", which DeepSpeed runs for Adam as well" if asked == "Adam" else ""))
    return found


def _read_shared(params: Block) -> dict[str, Any]:
    for key, (wanted, why) in FIXED.items():
        if params.flag(key, wanted) != wanted:
            params.refused(key, why)
        params.ignored(key, why)
    for key in FREE:
        params.flag(key)
        params.ignored(key, "how kernels are launched; results are the same")
    params.refused("max_grad_norm", "DeepSpeed refuses it here, too; write gradient_clipping at the top")
    if params.auto("lr", "--learning-rate, as the trainer has it"):
        return {}
    rate = params.number("lr", LEARNING_RATE, least=0)
    params.used("lr", f"learning_rate {rate:g}")
    return {"learning_rate": rate}


def _read_adam(params: Block, found: dict[str, Any], asked: str) -> float:
    """What decays where nothing is said."""
    if not params.auto("betas", "--adam-beta1 and --adam-beta2, as the trainer has them"):
        betas = params.numbers("betas", (0.9, 0.999))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            params.refused("betas", "it must be two numbers, each at least 0 and below 1")
        else:
            found |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
            params.used("betas", f"adam_beta1 {betas[0]:g} and adam_beta2 {betas[1]:g}")
    if not params.auto("eps", "--adam-epsilon, as the trainer has it"):
        found["adam_epsilon"] = params.number("eps", 1e-8, least=0)
        params.used("eps", f"adam_epsilon {found['adam_epsilon']:g}")
    decouples = params.flag("adam_w_mode", True) or asked == "AdamW"
    is_torch = params.flag("torch_adam")
    params.ignored("torch_adam", "torch's fused AdamW is what updates here")
    params.ignored("adam_w_mode", "weights decay beside the update, as AdamW does it")
    decay = 0.01 if is_torch and decouples else 0.0
    is_decayed = params.auto("weight_decay", "") or params.number("weight_decay", decay, least=0) > 0
    if not decouples and is_decayed:
        params.refused("adam_w_mode", "decay inside of the gradient is not AdamW; write true, or weight_decay 0")
    return decay


def _read_sgd(params: Block, found: dict[str, Any]) -> float:
    found["momentum"] = params.number("momentum", 0.0, least=0)
    params.used("momentum", f"momentum {found['momentum']:g}")
    if params.number("dampening"):
        params.refused("dampening", "the trainer's SGD has none; write 0")
    params.ignored("dampening", "none, as here")
    return 0.0


def _read_decay(params: Block, found: dict[str, Any], default: float) -> None:
    if params.auto("weight_decay", f"--weight-decay, as the trainer has it; {MATRICES}"):
        return
    found["weight_decay"] = params.number("weight_decay", default, least=0)
    told = f"; {MATRICES}" if found["weight_decay"] else ""
    params.used("weight_decay", f"weight_decay {found['weight_decay']:g}{told}")
