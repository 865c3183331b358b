"""`zero_optimization` and precision of DeepSpeed: stage, offloading, groups of ranks, quantisation, dtypes.

A stage is never changed to another one. If our layouts do not allow an option, its key is refused and the strategy is
made without it, so `layout_of` accepts every result.

DeepSpeed keeps fp32 masters of 16-bit weights, as we do. By default it sends, stores and sums gradients in the model's
16-bit dtype; we do so in fp32. The result has DeepSpeed's dtype: `bf16` alone becomes a reduce dtype of bf16. If a file
stores gradients in one dtype and sends them in another, they are summed in the wider one. If they are sent in the
narrower one, it becomes the codec of the collective (`grads_as=`).
"""

from dataclasses import dataclass

from ..base.errors import ConfigurationError
from ..trainer.offload import offload_of
from .account import Block
from .migrated import Change, with_changes
from .tables import apply_rules, rules, table

LAST = 3  # the highest stage
PLACES = {"cpu": "host", "nvme": "disk"}
GATHERS = "gather_16bit_weights_on_model_save"
EXPORT = "export: the trainer writes whole weights at the end"
OPEN = "the precision that is given elsewhere, --precision or precision=, else bf16 on GPUs"


@dataclass(slots=True)
class Sharding:
    """The result of reading `zero_optimization`. `change` adds offloading and quantisation to `strategy`."""

    stage: int
    strategy: str
    block: Block
    grouped: str = ""  # for the report on the key `stage`: how stage 3 uses groups of ranks
    has_norm: bool = True
    bucket_elems: int = 0  # elements of the buffers that DeepSpeed has in addition to the states

    def report_stage(self, note: str = "") -> None:
        self.block.used("stage", f"strategy {self.strategy.partition('+')[0]}{self.grouped}{note}")

    def use_groups(self, key: str, size: int, strategy: str, how: str, becomes: str) -> None:
        self.strategy, self.block.settings["node_size"] = table("deepspeed")[strategy], size
        self.grouped = f", stage {LAST} {how} groups of ranks ({key})"
        self.block.used(key, f"strategy {self.strategy} with node_size {size}: {becomes}")

    def change(self, block: Block, key: str, words: str, becomes: str) -> None:
        self.strategy = with_changes(self.strategy, [Change(block, key, words, becomes)])


@dataclass(frozen=True, slots=True)
class Computes:
    """The precision of the training; `name` is one of ours. `is_open`: the file leaves the choice to the trainer."""

    name: str
    is_open: bool = False

    @property
    def model(self) -> str:
        """The dtype in which DeepSpeed computes: fp32, bf16 or fp16."""
        return self.name.removeprefix("pure-")


def read_sharding(top: Block) -> Sharding:
    stages = table("deepspeed")["stages"]
    if top.has("zero_optimization") and not isinstance(top.values["zero_optimization"], dict | list):
        # `"zero_optimization": true`, as old files have it.
        name = stages[stage := int(top.flag("zero_optimization"))]
        top.used("zero_optimization", f"strategy {name}, as DeepSpeed reads it; the stage is better written out")
        return Sharding(stage, name, Block({}, top.source, "zero_optimization", top))
    zero = top.inner("zero_optimization")
    stage = zero.whole("stage", 0, least=0, most=LAST)
    sharding = Sharding(stage, stages[stage], zero, bucket_elems=_bucket_elems(zero, stage))
    # DeepSpeed also accepts the keys that begin with `stage3_` without this prefix.
    for key in rules("deepspeed", "zero_optimization"):
        short = key.removeprefix("stage3_")
        if short != key and zero.has(short) and zero.has(key):
            zero.refused(short, f"it is {key} by another name; leave one")
    sharding.has_norm = zero.flag("compute_grad_norm", True)
    apply_rules(zero, "deepspeed", "zero_optimization")
    apply_rules(zero.inner("leaf_module"), "deepspeed", "zero_optimization.leaf_module")
    _read_groups(zero, sharding)
    _read_optimizer_offload(zero, sharding)
    _read_param_offload(zero, sharding)
    _read_quantised(zero, sharding)
    for key in (f"stage3_{GATHERS}", GATHERS, "stage3_gather_fp16_weights_on_model_save"):
        is_exported = zero.auto(key, EXPORT) or zero.flag(key)
        zero.settings |= {"export": True} if is_exported else {}
        later = "sw.full_state_dict and shardwise export gather whole weights when they are called"
        zero.used_if(is_exported, key, EXPORT, later)
    sharding.report_stage()
    return sharding


def _read_groups(zero: Block, sharding: Sharding) -> None:
    """Read groups of ranks. Each group holds all of the state (MiCS), or a second copy of the parameters (hpZ)."""
    key, second = "mics_shard_size", "zero_hpz_partition_size"
    size, copy_size = zero.whole(key, -1, least=-1), zero.whole(second, 1, least=0)
    in_groups = size >= 1 and sharding.stage == LAST
    if size < 1:
        zero.ignored(key, "no groups")
    elif not in_groups:
        zero.refused(key, f"groups need stage {LAST}, and this is stage {sharding.stage}")
    else:
        sharding.use_groups(key, size, "in_groups", "in", f"sharded in groups of {size}, equal across them")
    if copy_size <= 1:
        zero.ignored(second, "no second copy")
    elif sharding.stage != LAST:
        zero.ignored(second, f"DeepSpeed keeps a second copy in stage {LAST} only, and this is stage {sharding.stage}")
    elif in_groups:
        zero.refused(second, f"groups of {copy_size} with mics_shard_size {size}: a group has its copy already")
    else:
        becomes = "parameters are kept in the group's copy, which is refreshed after each update"
        sharding.use_groups(second, copy_size, "with_a_copy_per_node", "with a second copy in", becomes)


def _read_optimizer_offload(zero: Block, sharding: Sharding) -> None:
    block, device, source, key = _offload(zero, "offload_optimizer", "cpu_offload")
    ratio = block.number("ratio", 1.0, least=0, most=1)
    block.ignored("ratio", "nothing is offloaded")
    if device == "none":
        return
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
    _take_folder(block, device)


def _read_param_offload(zero: Block, sharding: Sharding) -> None:
    block, device, source, key = _offload(zero, "offload_param", "cpu_offload_param")
    if device == "none":
        return
    if sharding.stage != LAST:
        why = f"DeepSpeed offloads parameters in stage {LAST} only, and does not read it in stage {sharding.stage}"
        source.ignored(key, why)
        block.ignored("nvme_path", why)
        return
    if "optimizer=" not in sharding.strategy:
        # DeepSpeed keeps 16-bit shards next to the fp32 masters and offloads them.
        why = "gathers read the masters here, which offload_optimizer alone moves: there is no 16-bit shard to offload"
        source.ignored(key, why)
        block.ignored("nvme_path", why)
        return
    words = f"params={PLACES[device]}"
    sharding.change(source, key, words, f"{words} after the strategy")
    _take_folder(block, device)


def _offload(zero: Block, name: str, old: str) -> tuple[Block, str, Block, str]:
    """Return the block, its device, and the key that names the device: in the block, or `old`, the older flag."""
    block = apply_rules(zero.inner(name), "deepspeed", f"zero_optimization.{name}")
    device, is_old = block.word("device", ("none", *PLACES), "none"), zero.flag(old)
    if is_old and block.has("device"):
        zero.refused(old, f"it is the old form of {block.path}; leave {block.path}")
    for holder, key in ((block, "device"), (zero, old)):
        holder.ignored(key, "it stays on the device")
    block.ignored("nvme_path", f"the device is {device}, and nothing is stored on a disk")
    if block.has("device"):
        return block, device, block, "device"
    return block, "cpu" if is_old else "none", zero, old


def _take_folder(block: Block, device: str) -> None:
    if device != "nvme":
        return
    path = block.text("nvme_path")
    folder = f"disk:{path}"
    try:
        offload_of((folder,))
        is_path = bool(path) and "=" not in path
    except ConfigurationError:
        is_path = False
    (other,) = block.settings.setdefault("offload", (folder,)) if is_path else (folder,)
    if not is_path:
        key = "nvme_path" if block.has("nvme_path") else "device"
        block.refused(key, "it needs nvme_path, a folder on a local disk")
    elif other != folder:
        block.refused("nvme_path", f"{other} is named, too, and everything on disk is in one folder")
    block.used("nvme_path", f"offload {folder} (disk_path= of sw.shard)")


def _read_quantised(zero: Block, sharding: Sharding) -> None:
    """Read the quantisation of ZeRO++. We quantise matrices only; norms, biases and embeddings are sent as they are."""
    gradients = "grads_as=int4"
    if zero.has("zeropp_loco_param"):  # LoCo adds the quantisation error to the next gradient
        apply_rules(zero.inner("zeropp_loco_param"), "deepspeed", "zero_optimization.zeropp_loco_param")
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
    """Return the elements of DeepSpeed's buffers: gradients wait for their reduction in one buffer, or in two that
    alternate; stage 3 prefetches weights. "auto" (of Hugging Face) gives a small buffer, and counts as 0."""
    reduce, prefetch = (
        0 if zero.auto(key, "") else zero.whole(key, default, least=0)
        for key, default in (("reduce_bucket_size", 500_000_000), ("stage3_prefetch_bucket_size", 50_000_000))
    )
    alternating = 2 if not zero.auto("overlap_comm", "") and zero.flag("overlap_comm") else 1
    return (0, alternating * reduce, alternating * reduce, reduce + prefetch)[stage]


def read_precision(top: Block, sharding: Sharding) -> None:
    """Read all dtypes into the settings. The dtype in which gradients are sent is added to the strategy."""
    half, old, new = (top.inner(key) for key in ("fp16", "bfloat16", "bf16"))
    brain = new if top.has("bf16") else old
    if top.has("bf16") and top.has("bfloat16"):
        old.settle_rest("refused", "bf16 is its newer name, and is written, too; leave one")
    computes = _computes(half, brain)
    is_half = computes.model == "fp16" or computes.is_open
    apply_rules(half, "deepspeed", "fp16")
    apply_rules(half, "deepspeed", "fp16 that is on" if is_half else "fp16 that is off")
    apply_rules(top.inner("torch_autocast"), "deepspeed", "torch_autocast")
    apply_rules(brain, "deepspeed", "bf16")
    types = top.inner("data_types")
    stored, param = _dtype(types, "grad_accum_dtype"), _dtype(types, "param_dtype")
    if param and param != computes.model and not computes.is_open:
        types.refused("param_dtype", f"it contradicts precision {computes.name}, which decides it; leave it out")
    types.used("param_dtype", f"precision {computes.name}")
    apply_rules(types, "deepspeed", "data_types")
    skips = _skips(brain, computes, sharding, stored)
    reduce = _read_gradients(top, types, stored, computes, sharding)
    if skips:
        sharding.report_stage("; steps with a non-finite gradient are skipped, as in DeepSpeed (skip_nonfinite)")
    note = "; DeepSpeed's stage 0 steps once with zeros before the first step, which is not done here"
    note = note if sharding.stage == 0 else ""
    if computes.model == "bf16" and not computes.is_open:
        how = (
            ", in which gradients are sent, stored and summed, as DeepSpeed does by default" if reduce == "bf16" else ""
        )
        brain.used("enabled", f"precision {computes.name}, reduce_dtype {reduce}{how}{note}")
    elif computes.model == "fp16":
        half.used("enabled", f"precision fp16; gradients are summed in fp32, where DeepSpeed does it in fp16{note}")
    top.settings |= {} if computes.is_open else {"precision": computes.name}
    top.settings |= {} if reduce is None else {"reduce_dtype": reduce}
    top.settings |= {"skip_nonfinite": True} if skips else {}


def _computes(half: Block, brain: Block) -> Computes:
    half_is_open, brain_is_open = half.auto("enabled", OPEN), brain.auto("enabled", OPEN)
    is_half = not half_is_open and half.flag("enabled")
    is_brain = not brain_is_open and brain.flag("enabled")
    if is_half and is_brain:
        half.refused("enabled", "bf16 is enabled, too, and a model computes in one of them")
    is_pure = _is_pure(brain, is_brain, brain_is_open)
    name = "pure-bf16" if is_pure else "bf16" if is_brain else "fp16" if is_half else "fp32"
    is_open = (half_is_open or brain_is_open) and name == "fp32"
    for block, is_left_open in ((half, half_is_open), (brain, brain_is_open)):
        if not (is_open and is_left_open):
            block.used("enabled", f"precision {name}")
    return Computes("bf16" if is_open else name, is_open)


def _is_pure(brain: Block, is_on: bool, is_open: bool) -> bool:
    """Return True if masters, gradients and moments are all in bf16. A mixture of dtypes is refused."""
    keys = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    flags = {key: brain.flag(key) for key in keys}
    is_pure = is_on and all(flags.values())
    for key, is_set in flags.items():
        if is_set and (is_open or is_on) and not is_pure:
            fix = f"write {' and '.join(keys)} with enabled: true, or neither"
            brain.refused(key, f"masters and moments have one dtype here: {fix}")
        brain.used_if(is_pure, key, "precision pure-bf16: masters, gradients and moments in bf16", "it is off")
    return is_pure


def _skips(brain: Block, computes: Computes, sharding: Sharding, stored: str) -> bool:
    """Return True if steps with a non-finite gradient are skipped: DeepSpeed does so nearly always, also in fp32."""
    key = "check_grad_overflow"
    checks = brain.flag(key, True)
    # For stage 1 with sums in fp32 DeepSpeed has another optimizer class, which always checks.
    if computes.model == "bf16" and (sharding.stage == 2 or (sharding.stage == 1 and stored != "fp32")):
        brain.used(key, f"skip_nonfinite {str(checks).lower()}")
        return checks
    brain.ignored(key, "DeepSpeed reads it for bf16 in stage 2, and in stage 1 unless sums are fp32")
    if computes.model == "fp16":  # the loss scaler skips them
        return False
    return (computes.model == "bf16" and not computes.is_open) or (sharding.stage > 0 and sharding.has_norm)


def _read_gradients(top: Block, types: Block, stored: str, computes: Computes, sharding: Sharding) -> str | None:
    """Return the dtype in which gradients are summed; None if it is the default of our precision."""
    key, model = "communication_data_type", computes.model
    sent = _dtype(top, key)
    is_fp32 = "fp16" in (stored, model, sent) or "fp32" in (stored or model, sent or model)
    summed = "fp32" if is_fp32 else "bf16"
    note = "" if sent else ", and sent in it: communication_data_type bf16 sends them in 16 bits"
    becomes = f"reduce_dtype {summed}: gradients are stored and summed in it{note}"
    why = f"gradients of {model} are stored in the dtype in which they are summed, {summed} here"
    types.used_if(stored == summed, "grad_accum_dtype", becomes, why)
    if sent == summed:
        top.used(key, f"reduce_dtype {summed}: gradients are sent, stored and summed in it")
    elif sent and "grads_as=" in sharding.strategy:
        top.ignored(key, "gradients are sent in 4 bits (zero_quantized_gradients)")
    elif sent:
        becomes = f"grads_as={sent} after the strategy: matrices are sent in it, and summed in {summed}"
        sharding.change(top, key, f"grads_as={sent}", becomes)
    is_default = computes.is_open and not (stored or sent)
    return None if is_default or computes.name == "fp16" or summed == model == "fp32" else summed


def _dtype(block: Block, key: str) -> str:
    """Return fp32, bf16 or fp16 for any name of a dtype; "" if the key is not written."""
    names = table("deepspeed")["dtypes"]
    return str(names.get(block.word(key, names, ""), ""))
