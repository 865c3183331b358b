"""`fp16`, `bf16`, `torch_autocast`, `data_types` and `communication_data_type`: formats, and steps that are left out.

DeepSpeed keeps fp32 masters beside 16-bit weights, as we do. Unless something is said, its gradients travel, rest and
are summed in the model's format, 16 bits; ours in fp32. What a file says is kept to: `bf16` alone is a reduce dtype of
bf16. What rests in one format and travels in another is summed in the wider one, and encoded on its way where the
narrower one was asked for.
"""

from dataclasses import dataclass
from typing import Any

from ..account import Block
from ..rules import settle
from .keys import IGNORED
from .sharding import Sharding

FORMATS = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
SHORT = {word: name for name, words in FORMATS.items() for word in words}
TOLD = {
    True: "gradients travel, rest and are summed in 16 bits, as DeepSpeed's do where nothing else is said",
    False: "gradients are summed in what the file says",
}
AT_THE_START = "; DeepSpeed's stage 0 steps once with zeros before the first step, which is not done here"
OPEN = "the precision that is said elsewhere, --precision or precision=, else bf16 on GPUs"


@dataclass(frozen=True, slots=True)
class Computes:
    """`name` is a precision of ours. Where a file leaves it to the trainer, nothing more is said of gradients."""

    name: str
    model: str  # fp32, bf16 or fp16: what DeepSpeed computes in
    is_open: bool = False


def read_precision(top: Block, found: Sharding) -> dict[str, Any]:
    """Settings; what gradients travel as goes behind the strategy."""
    half = top.inner("fp16")
    old, new = top.inner("bfloat16"), top.inner("bf16")
    brain = new if top.has("bf16") else old
    if top.has("bf16") and top.has("bfloat16"):
        old.refused_whole("bf16 says the same under its newer name; leave one")
    computes = _computes(half, brain)
    _read_half(half, is_off=computes.model != "fp16" and not computes.is_open)
    _read_autocast(top.inner("torch_autocast"))
    types = top.inner("data_types")
    rests = _format(types, "grad_accum_dtype")
    _read_types(types, computes)
    skips = _skips(brain, computes, found, rests)
    reduce = _read_gradients(top, types, rests, computes, found)
    if skips:
        found.tell_stage("; steps whose gradient is not finite are left out, as DeepSpeed does it (skip_nonfinite)")
    also = AT_THE_START if found.stage == 0 else ""
    if computes.model == "bf16" and not computes.is_open:
        brain.used("enabled", f"precision {computes.name}, reduce_dtype {reduce}: {TOLD[reduce == 'bf16']}{also}")
    elif computes.model == "fp16":
        half.used("enabled", f"precision fp16; gradients are summed in fp32, where DeepSpeed does it in fp16{also}")
    return {
        **({} if computes.is_open else {"precision": computes.name}),
        **({} if reduce is None else {"reduce_dtype": reduce}),
        **({"skip_nonfinite": True} if skips else {}),
    }


def _computes(half: Block, brain: Block) -> Computes:
    left_open = [block.auto("enabled", OPEN) for block in (half, brain)]
    is_half = not left_open[0] and half.flag("enabled")
    is_brain = not left_open[1] and brain.flag("enabled")
    if is_half and is_brain:
        half.refused("enabled", "bf16 is enabled, too, and a model computes in one of them")
    is_pure = _is_pure(brain, is_brain, left_open[1])
    name = "pure-bf16" if is_pure else "bf16" if is_brain else "fp16" if is_half else "fp32"
    if not is_brain and not left_open[1]:
        brain.used("enabled", "precision fp32, unless another is enabled")
    if not is_half and not left_open[0]:
        half.used("enabled", "precision fp32, unless another is enabled")
    if any(left_open) and not (is_half or is_brain):
        return Computes("bf16", "bf16", is_open=True)
    for block, was_open in ((half, left_open[0]), (brain, left_open[1])):
        if was_open:
            block.used("enabled", f"off: precision {name} is enabled")
    return Computes(name, name.removeprefix("pure-"))


def _is_pure(brain: Block, is_on: bool, is_open: bool) -> bool:
    """Masters, gradients and moments in bf16: all of them, or none."""
    keys = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    asked = [brain.flag(key) for key in keys]
    for key, is_asked in zip(keys, asked, strict=True):
        if not is_asked:
            brain.ignored(key, "masters and moments are fp32")
        elif is_open:
            brain.refused(key, "whether bf16 is enabled is not said; write enabled: true with it")
        elif not is_on:
            brain.ignored(key, "bf16 is off")
        elif not all(asked):
            brain.refused(key, f"masters and moments have one format here: write {' and '.join(keys)}, or neither")
        else:
            brain.used(key, "precision pure-bf16: masters, gradients and moments in bf16")
    return is_on and all(asked)


def _read_half(half: Block, is_off: bool) -> None:
    settle(half, IGNORED["fp16"])
    if half.number("loss_scale", least=0) and not is_off:
        half.refused("loss_scale", "losses are scaled dynamically here: write 0, or use bf16, which needs no scale")
    half.ignored("loss_scale", "fp16 is off" if is_off else "dynamic, as here")
    half.flag("auto_cast")
    half.ignored("auto_cast", "fp16 is off" if is_off else "floating-point inputs of the model are always cast here")
    key = "fp16_master_weights_and_grads"
    if half.flag(key) and not is_off:
        half.refused(key, "masters are fp32 here, or all is bf16 (bf16 with bf16_master_weights_and_grads)")
    half.ignored(key, "masters are fp32")


def _read_autocast(block: Block) -> None:
    is_on = block.flag("enabled")
    for key, check in (("dtype", Block.text), ("lower_precision_safe_modules", Block.texts)):
        check(block, key)
        block.ignored(key, "torch_autocast is off" if not is_on else "belongs to torch_autocast")
    if is_on:
        block.refused(
            "enabled",
            "write bf16 or fp16 with enabled: true, where weights themselves are cast; or leave it out, and call the "
            "model under torch.autocast in your loop",
        )
    block.ignored("enabled", "it is off")


def _skips(brain: Block, computes: Computes, found: Sharding, rests: str) -> bool:
    """Whether steps whose gradient is not finite are left out: DeepSpeed does so nearly always, also in fp32."""
    brain.flag("immediate_grad_update")
    brain.ignored("immediate_grad_update", "gradients are added to the sum as they come, here always")
    key = "check_grad_overflow"
    checks = brain.flag(key, True)
    # Another class of DeepSpeed's is stage 1 with sums in fp32, and that one always looks.
    is_asked = computes.model == "bf16" and (found.stage == 2 or (found.stage == 1 and rests != "fp32"))
    if is_asked:
        brain.used(key, f"skip_nonfinite {str(checks).lower()}")
    else:
        brain.ignored(key, "DeepSpeed asks it for bf16 in stage 2, and in stage 1 unless sums are fp32")
    if computes.model == "fp16":  # leaves them out by itself
        return False
    if is_asked:
        return checks
    if computes.model == "bf16" and not computes.is_open:
        return True
    return found.stage > 0 and found.has_norm


def _read_gradients(top: Block, types: Block, rests: str, computes: Computes, found: Sharding) -> str | None:
    """What gradients are summed in, if it is not what our precision says."""
    travels = _format(top, "communication_data_type")
    model = computes.model
    if "fp16" in (rests, model):
        summed = "fp32"
    else:
        summed = "fp32" if "fp32" in (rests or model, travels or model) or travels == "fp16" else "bf16"
    if rests == summed:
        on_wire = "" if travels else ", and travel in it: communication_data_type bf16 lets them travel in 16 bits"
        types.used("grad_accum_dtype", f"reduce_dtype {summed}: gradients rest and are summed in it{on_wire}")
    else:
        types.ignored("grad_accum_dtype", f"gradients of {model} rest in the format they are summed in, {summed} here")
    if travels == summed:
        top.used("communication_data_type", f"reduce_dtype {summed}: gradients travel, rest and are summed in it")
    elif travels and "grads_as=" in found.strategy:
        top.ignored("communication_data_type", "gradients travel in 4 bits (zero_quantized_gradients)")
    elif travels:
        words = f"grads_as={travels}"
        becomes = f"{words} behind the strategy: matrices travel so, and are summed in {summed}"
        found.change(top, "communication_data_type", words, becomes)
    if computes.is_open and not (rests or travels):
        return None
    return None if computes.name == "fp16" or summed == model == "fp32" else summed


def _read_types(types: Block, computes: Computes) -> None:
    key = "param_dtype"
    wanted = _format(types, key)
    if wanted and wanted != computes.model and not computes.is_open:
        types.refused(key, f"it contradicts precision {computes.name}, which it follows from; leave it out")
    types.used(key, f"precision {computes.name}")
    key = "buffer_dtype"
    _format(types, key)
    types.refused(key, "buffers stay in the format they have; cast them before sw.shard, and leave it out")
    key = "keep_in_fp32_modules"
    if not types.auto(key, ""):
        types.texts(key)
    types.ignored(key, "buffers stay in the format they have")


def _format(block: Block, key: str) -> str:
    """Of fp32, bf16 and fp16, by any of its names; empty where nothing is said."""
    return SHORT.get(block.word(key, SHORT, ""), "")
