"""`zero_optimization` and precision of DeepSpeed: stage, offloading, groups of ranks, quantisation, dtypes.

A stage never becomes another stage. Whatever our layouts refuse is a refusal of the key that asked for it, and the
strategy goes without it: the result is always one that `layout_of` accepts.

DeepSpeed keeps fp32 masters of 16-bit weights, as we do. By default its gradients are sent, stored and summed in the
model's 16-bit dtype; ours in fp32. The file's dtype is kept: `bf16` alone becomes a reduce dtype of bf16. Gradients
that are stored in one dtype and sent in another are summed in the wider one, and quantised on the wire where the
narrower one was asked for.
"""

from dataclasses import dataclass
from typing import Any

from ..base.errors import ConfigurationError
from ..trainer.offload import offload_of
from .account import AUTO, Block
from .strategies import IN_GROUPS, STAGE_3_WITH_A_COPY_PER_NODE, STAGES, Change, with_changes
from .tables import Rule, apply_rules, rules

LAST = len(STAGES) - 1
DEVICES = ("none", "cpu", "nvme")
PLACES = {"cpu": "host", "nvme": "disk"}
GATHERS = "gather_16bit_weights_on_model_save"
EXPORT = "export: the trainer writes whole weights at the end"
DTYPES = {
    word: name
    for name, words in {
        "fp32": ("fp32", "float32", "float", "torch.float32"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
        "fp16": ("fp16", "float16", "half", "torch.float16"),
    }.items()
    for word in words
}
OPEN = "the precision that is given elsewhere, --precision or precision=, else bf16 on GPUs"


@dataclass(slots=True)
class Sharding:
    """The result of the block. Changes are added to `strategy`."""

    stage: int
    strategy: str
    block: Block
    grouped: str = ""  # how stage 3 uses groups of ranks, for the entry of its key
    node_size: int | None = None
    folder: str | None = None
    exports: bool = False
    has_norm: bool = True
    bucket_elems: int = 0  # of buffers that DeepSpeed has in addition to the states

    def report_stage(self, note: str = "") -> None:
        self.block.used("stage", f"strategy {self.strategy.partition('+')[0]}{self.grouped}{note}")

    def change(self, block: Block, key: str, words: str, becomes: str, fix: str = "") -> None:
        self.strategy = with_changes(self.strategy, [Change(block, key, (words,), becomes, fix)])


@dataclass(frozen=True, slots=True)
class Computes:
    """`name` is a precision of ours. `is_open`: the file leaves the precision to the trainer."""

    name: str
    model: str  # fp32, bf16 or fp16: what DeepSpeed computes in
    is_open: bool = False


def read_sharding(top: Block) -> Sharding:
    if top.has("zero_optimization") and not isinstance(top.values["zero_optimization"], dict | list):
        return _old_form(top)
    zero = top.inner("zero_optimization")
    stage = zero.whole("stage", 0, least=0, most=LAST)
    sharding = Sharding(stage, STAGES[stage], zero, bucket_elems=_bucket_elems(zero, stage))
    known = dict(rules("deepspeed", "zero_optimization"))
    _add_short_names(zero, known)
    sharding.has_norm = zero.flag("compute_grad_norm", True)
    apply_rules(zero, known)
    apply_rules(zero.inner("leaf_module"), rules("deepspeed", "zero_optimization.leaf_module"))
    _read_groups(zero, sharding)
    _read_optimizer_offload(zero, sharding)
    _read_param_offload(zero, sharding)
    _read_quantised(zero, sharding)
    for key in (f"stage3_{GATHERS}", GATHERS, "stage3_gather_fp16_weights_on_model_save"):
        if zero.auto(key, EXPORT) or zero.flag(key):
            sharding.exports = True
            zero.used(key, EXPORT)
        else:
            zero.ignored(key, "sw.full_state_dict and shardwise export gather whole weights when they are called")
    sharding.report_stage()
    return sharding


def _old_form(top: Block) -> Sharding:
    """`"zero_optimization": true`, as old files have it."""
    stage = int(top.flag("zero_optimization"))
    top.used("zero_optimization", f"strategy {STAGES[stage]}, as DeepSpeed reads it; the stage is better written out")
    return Sharding(stage, STAGES[stage], top.account.block(top.path_of("zero_optimization"), {}))


def _add_short_names(zero: Block, known: dict[str, Rule]) -> None:
    """DeepSpeed reads keys that begin with `stage3_` without it, too."""
    for key in [key for key in known if key.startswith("stage3_")]:
        short = key.removeprefix("stage3_")
        known[short] = known[key]
        if zero.has(short) and zero.has(key):
            zero.refused(short, f"it is {key} by another name; leave one")


def _read_groups(zero: Block, sharding: Sharding) -> None:
    """Groups of ranks that hold everything (MiCS), or a second copy of the parameters (hpZ)."""
    key, second = "mics_shard_size", "zero_hpz_partition_size"
    size = zero.whole(key, -1, least=-1)
    copy_size = zero.whole(second, 1, least=0)
    if size < 1:
        zero.ignored(key, "no groups")
    elif sharding.stage != LAST:
        zero.refused(key, f"groups need stage {LAST}, and this is stage {sharding.stage}")
    else:
        sharding.strategy, sharding.node_size = IN_GROUPS, size
        sharding.grouped = f", stage {LAST} in groups of ranks (mics_shard_size)"
        zero.used(key, f"strategy {IN_GROUPS} with node_size {size}: sharded in groups of {size}, equal across them")
    if copy_size <= 1:
        zero.ignored(second, "no second copy")
    elif sharding.stage != LAST:
        zero.ignored(second, f"DeepSpeed keeps a second copy in stage {LAST} only, and this is stage {sharding.stage}")
    elif sharding.node_size is not None:
        zero.refused(second, f"groups of {copy_size} with mics_shard_size {size}: a group has its copy already")
    else:
        sharding.strategy, sharding.node_size = STAGE_3_WITH_A_COPY_PER_NODE, copy_size
        sharding.grouped = f", stage {LAST} with a second copy in groups of ranks (zero_hpz_partition_size)"
        becomes = f"strategy {sharding.strategy} with node_size {copy_size}: parameters are kept in the group's copy"
        zero.used(second, f"{becomes}, which is refreshed after each update")


def _read_optimizer_offload(zero: Block, sharding: Sharding) -> None:
    block = zero.inner("offload_optimizer")
    apply_rules(block, rules("deepspeed", "zero_optimization.offload_optimizer"))
    device = _device(zero, block, "cpu_offload")
    ratio = block.number("ratio", 1.0, least=0, most=1)
    if device == "none":
        block.ignored("ratio", "nothing is offloaded")
        return
    source, key = (block, "device") if block.has("device") else (zero, "cpu_offload")
    stage, place = sharding.stage, PLACES[device]
    if stage == 0:
        source.refused(key, f"DeepSpeed offloads the optimizer in stages 1 to {LAST} only; write a stage")
    elif device == "nvme" and stage != LAST:
        source.refused(key, f"in stage {stage} DeepSpeed keeps it on the host all the same; write cpu, or stage {LAST}")
    elif ratio == 0:
        block.refused("ratio", "0 offloads nothing; leave offload_optimizer out, or write a fraction above 0")
        source.ignored(key, "a ratio of 0 offloads nothing")
    else:
        words = f"optimizer={place}{f':{ratio:g}' if ratio < 1 else ''}"
        becomes = f"{words} and grads=host after the strategy: updates run on the host"
        sharding.change(source, key, f"{words}+grads=host", becomes)
    block.used("ratio", f"optimizer={place}:{ratio:g}: this fraction of the parameters is updated on the host")
    _take_folder(block, sharding, device)


def _read_param_offload(zero: Block, sharding: Sharding) -> None:
    block = zero.inner("offload_param")
    apply_rules(block, rules("deepspeed", "zero_optimization.offload_param"))
    device = _device(zero, block, "cpu_offload_param")
    if device == "none":
        return
    source, key = (block, "device") if block.has("device") else (zero, "cpu_offload_param")
    if sharding.stage != LAST:
        why = f"DeepSpeed offloads parameters in stage {LAST} only, and does not read it in stage {sharding.stage}"
        source.ignored(key, why)
        block.ignored("nvme_path", why)
        return
    words = f"params={PLACES[device]}"
    fix = ": add offload_optimizer with a device" if "optimizer=" not in sharding.strategy else ""
    sharding.change(source, key, words, f"{words} after the strategy", fix)
    _take_folder(block, sharding, device)


def _device(zero: Block, block: Block, old: str) -> str:
    """The device of a block, or of the flag that older files have for it."""
    device = block.word("device", DEVICES, "none")
    if device == "none":
        block.ignored("device", "it stays on the device")
    is_old = zero.flag(old)
    if not is_old:
        zero.ignored(old, "it stays on the device")
    elif block.has("device"):
        zero.refused(old, f"it is the old form of {block.path}; leave {block.path}")
    if device != "nvme":
        block.ignored("nvme_path", f"the device is {device}, and nothing is stored on a disk")
    return "cpu" if is_old and not block.has("device") else device


def _take_folder(block: Block, sharding: Sharding, device: str) -> None:
    if device != "nvme":
        return
    path = block.text("nvme_path")
    try:
        offload_of((f"disk:{path}",))
        is_path = bool(path.strip()) and "\0" not in path and "=" not in path
    except ConfigurationError:
        is_path = False
    if not is_path:
        key = "nvme_path" if block.has("nvme_path") else "device"
        block.refused(key, "it needs nvme_path, a folder on a local disk")
    elif sharding.folder not in (None, path):
        block.refused("nvme_path", f"{sharding.folder} is named, too, and everything on disk is in one folder")
    else:
        sharding.folder = path
        block.used("nvme_path", f"offload disk:{path} (disk_path= of sw.shard)")


def _read_quantised(zero: Block, sharding: Sharding) -> None:
    """ZeRO++. Matrices are quantised here; norms, biases and embeddings are sent as they are."""
    gradients = "grads_as=int4"
    if zero.has("zeropp_loco_param"):  # LoCo adds the quantisation error to the next gradient
        apply_rules(zero.inner("zeropp_loco_param"), rules("deepspeed", "zero_optimization.zeropp_loco_param"))
        gradients = "grads_as=int4:feedback"
    for key, words, dtype in (
        ("zero_quantized_weights", "params_as=int8", "8 bits, one scale per 256 weights (DeepSpeed: up to 8000)"),
        ("zero_quantized_gradients", gradients, "4 bits, one scale per 256 gradients (DeepSpeed: a row or a column)"),
    ):
        if not zero.flag(key):
            zero.ignored(key, "it is off, and they are sent as they are")
        elif sharding.stage != LAST:
            zero.ignored(key, f"DeepSpeed does it in stage {LAST} only, and this is stage {sharding.stage}")
        else:
            sharding.change(zero, key, words, f"{words} after the strategy: matrices are sent in {dtype}")


def _bucket_elems(zero: Block, stage: int) -> int:
    """Elements of DeepSpeed's buffers: gradients wait for their reduction in one buffer, or in two that alternate;
    stage 3 prefetches weights. An "auto" of Hugging Face depends on the model, and is small."""
    if stage == 0:
        return 0
    reduce = _size(zero, "reduce_bucket_size", 500_000_000)
    if stage == LAST:
        return reduce + _size(zero, "stage3_prefetch_bucket_size", 50_000_000)
    return reduce * (2 if zero.flag("overlap_comm") else 1)


def _size(zero: Block, key: str, default: int) -> int:
    is_auto = str(zero.values.get(key)).lower() == AUTO
    return 0 if is_auto else zero.whole(key, default, least=0)


def read_precision(top: Block, sharding: Sharding) -> dict[str, Any]:
    """Settings. The dtype in which gradients are sent is added to the strategy."""
    half = top.inner("fp16")
    old, new = top.inner("bfloat16"), top.inner("bf16")
    brain = new if top.has("bf16") else old
    if top.has("bf16") and top.has("bfloat16"):
        old.refused_whole("bf16 is its newer name, and is written, too; leave one")
    computes = _computes(half, brain)
    _read_half(half, is_off=computes.model != "fp16" and not computes.is_open)
    apply_rules(top.inner("torch_autocast"), rules("deepspeed", "torch_autocast"))
    apply_rules(brain, rules("deepspeed", "bf16"))
    types = top.inner("data_types")
    stored = _dtype(types, "grad_accum_dtype")
    _read_types(types, computes)
    skips = _skips(brain, computes, sharding, stored)
    reduce = _read_gradients(top, types, stored, computes, sharding)
    if skips:
        sharding.report_stage("; steps with a non-finite gradient are skipped, as in DeepSpeed (skip_nonfinite)")
    note = "; DeepSpeed's stage 0 steps once with zeros before the first step, which is not done here"
    note = note if sharding.stage == 0 else ""
    if computes.model == "bf16" and not computes.is_open:
        how = "gradients are sent, stored and summed in 16 bits, which is DeepSpeed's default"
        how = how if reduce == "bf16" else "gradients are summed in the dtype that the file names"
        brain.used("enabled", f"precision {computes.name}, reduce_dtype {reduce}: {how}{note}")
    elif computes.model == "fp16":
        half.used("enabled", f"precision fp16; gradients are summed in fp32, where DeepSpeed does it in fp16{note}")
    return {
        **({} if computes.is_open else {"precision": computes.name}),
        **({} if reduce is None else {"reduce_dtype": reduce}),
        **({"skip_nonfinite": True} if skips else {}),
    }


def _computes(half: Block, brain: Block) -> Computes:
    blocks = (half, brain)
    is_open = [block.auto("enabled", OPEN) for block in blocks]
    is_half, is_brain = (not auto and block.flag("enabled") for block, auto in zip(blocks, is_open, strict=True))
    if is_half and is_brain:
        half.refused("enabled", "bf16 is enabled, too, and a model computes in one of them")
    is_pure = _is_pure(brain, is_brain, is_open[1])
    name = "pure-bf16" if is_pure else "bf16" if is_brain else "fp16" if is_half else "fp32"
    for block, is_on, auto in zip(blocks, (is_half, is_brain), is_open, strict=True):
        if not is_on and not auto:
            block.used("enabled", "precision fp32, unless another is enabled")
        elif auto and (is_half or is_brain):
            block.used("enabled", f"off: precision {name} is enabled")
    if any(is_open) and not (is_half or is_brain):
        return Computes("bf16", "bf16", is_open=True)
    return Computes(name, name.removeprefix("pure-"))


def _is_pure(brain: Block, is_on: bool, is_open: bool) -> bool:
    """Masters, gradients and moments are in bf16: all of them, or none."""
    keys = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    asked = [brain.flag(key) for key in keys]
    for key, is_asked in zip(keys, asked, strict=True):
        if not is_asked:
            brain.ignored(key, "masters and moments are fp32")
        elif is_open:
            brain.refused(key, "it needs bf16; write enabled: true with it")
        elif not is_on:
            brain.ignored(key, "bf16 is off")
        elif not all(asked):
            brain.refused(key, f"masters and moments have one dtype here: write {' and '.join(keys)}, or neither")
        else:
            brain.used(key, "precision pure-bf16: masters, gradients and moments in bf16")
    return is_on and all(asked)


def _read_half(half: Block, is_off: bool) -> None:
    apply_rules(half, rules("deepspeed", "fp16"))
    if half.number("loss_scale", least=0) and not is_off:
        half.refused("loss_scale", "the loss scale is dynamic here: write 0, or use bf16, which needs no scale")
    half.ignored("loss_scale", "fp16 is off" if is_off else "dynamic, as here")
    half.flag("auto_cast")
    half.ignored("auto_cast", "fp16 is off" if is_off else "floating-point inputs of the model are always cast here")
    key = "fp16_master_weights_and_grads"
    if half.flag(key) and not is_off:
        half.refused(key, "masters are fp32 here, or everything is bf16 (bf16 with bf16_master_weights_and_grads)")
    half.ignored(key, "masters are fp32")


def _skips(brain: Block, computes: Computes, sharding: Sharding, stored: str) -> bool:
    """Return True if steps with a non-finite gradient are skipped: DeepSpeed does so nearly always, also in fp32."""
    key = "check_grad_overflow"
    checks = brain.flag(key, True)
    # Stage 1 with sums in fp32 is another class of DeepSpeed, which always checks.
    is_read = computes.model == "bf16" and (sharding.stage == 2 or (sharding.stage == 1 and stored != "fp32"))
    if is_read:
        brain.used(key, f"skip_nonfinite {str(checks).lower()}")
    else:
        brain.ignored(key, "DeepSpeed reads it for bf16 in stage 2, and in stage 1 unless sums are fp32")
    if computes.model == "fp16":  # the loss scaler skips them
        return False
    if is_read:
        return checks
    if computes.model == "bf16" and not computes.is_open:
        return True
    return sharding.stage > 0 and sharding.has_norm


def _read_gradients(top: Block, types: Block, stored: str, computes: Computes, sharding: Sharding) -> str | None:
    """The dtype in which gradients are summed; None if it is the one of our precision."""
    sent = _dtype(top, "communication_data_type")
    model = computes.model
    if "fp16" in (stored, model):
        summed = "fp32"
    else:
        summed = "fp32" if "fp32" in (stored or model, sent or model) or sent == "fp16" else "bf16"
    if stored == summed:
        note = "" if sent else ", and sent in it: communication_data_type bf16 sends them in 16 bits"
        types.used("grad_accum_dtype", f"reduce_dtype {summed}: gradients are stored and summed in it{note}")
    else:
        why = f"gradients of {model} are stored in the dtype in which they are summed, {summed} here"
        types.ignored("grad_accum_dtype", why)
    if sent == summed:
        top.used("communication_data_type", f"reduce_dtype {summed}: gradients are sent, stored and summed in it")
    elif sent and "grads_as=" in sharding.strategy:
        top.ignored("communication_data_type", "gradients are sent in 4 bits (zero_quantized_gradients)")
    elif sent:
        becomes = f"grads_as={sent} after the strategy: matrices are sent in it, and summed in {summed}"
        sharding.change(top, "communication_data_type", f"grads_as={sent}", becomes)
    if computes.is_open and not (stored or sent):
        return None
    return None if computes.name == "fp16" or summed == model == "fp32" else summed


def _read_types(types: Block, computes: Computes) -> None:
    asked = _dtype(types, "param_dtype")
    if asked and asked != computes.model and not computes.is_open:
        types.refused("param_dtype", f"it contradicts precision {computes.name}, which decides it; leave it out")
    types.used("param_dtype", f"precision {computes.name}")
    _dtype(types, "buffer_dtype")
    types.refused("buffer_dtype", "buffers keep their dtype; cast them before sw.shard, and leave it out")
    key = "keep_in_fp32_modules"
    if not types.auto(key, ""):
        types.texts(key)
    types.ignored(key, "buffers keep their dtype")


def _dtype(block: Block, key: str) -> str:
    """fp32, bf16 or fp16, by any of its names; "" without the key."""
    return DTYPES.get(block.word(key, DTYPES, ""), "")
