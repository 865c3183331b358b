"""`zero_optimization`: the stage, what rests elsewhere, groups of ranks, and what travels in fewer bits.

A stage is never another stage. Whatever our table refuses is a refusal of the key that asked for it, in the table's
own sentence, and the strategy goes without it: what comes out is always one that `layout_of` accepts.
"""

from dataclasses import dataclass

from ...base.errors import ConfigurationError
from ...core.layout import layout_of
from ...trainer.offload import offload_of
from ..account import AUTO, Block
from ..names import IN_GROUPS, STAGE_3_WITH_A_COPY_PER_NODE, STAGES
from ..rules import settle
from .keys import IGNORED, SHORT_NAMES

LAST = len(STAGES) - 1
DEVICES = ("none", "cpu", "nvme")
PLACES = {"cpu": "host", "nvme": "disk"}
GATHERS = "gather_16bit_weights_on_model_save"
EXPORT = "export: the trainer writes whole weights at the end"


@dataclass(slots=True)
class Sharding:
    """What the block comes to. `strategy` grows by what is asked for beside the stage."""

    stage: int
    strategy: str
    block: Block
    grouped: str = ""  # how stage 3 uses groups of ranks, for its row
    node_size: int | None = None
    folder: str | None = None
    exports: bool = False
    has_norm: bool = True
    bucket_elems: int = 0  # of buffers that DeepSpeed keeps beside the states

    def tell_stage(self, also: str = "") -> None:
        self.block.used("stage", f"strategy {self.strategy.partition('+')[0]}{self.grouped}{also}")

    def change(self, block: Block, key: str, words: str, becomes: str, fix: str = "") -> None:
        """Behind the strategy's name; the key is refused where the table does not know such a row."""
        strategy = f"{self.strategy}+{words}"
        try:
            layout_of(strategy)
        except ConfigurationError as error:
            block.refused(key, str(error).removeprefix("layout: ") + fix)
        else:
            self.strategy = strategy
            block.used(key, becomes)


def read_sharding(top: Block) -> Sharding:
    if top.has("zero_optimization") and not isinstance(top.values["zero_optimization"], dict | list):
        return _old_form(top)
    zero = top.inner("zero_optimization")
    stage = zero.whole("stage", 0, least=0, most=LAST)
    found = Sharding(stage, STAGES[stage], zero, bucket_elems=_bucket_elems(zero, stage))
    _refuse_both_names(zero)
    settle(zero, IGNORED["zero_optimization"])
    settle(zero.inner("leaf_module"), IGNORED["zero_optimization.leaf_module"])
    _read_groups(zero, found)
    _read_optimizer(zero, found)
    _read_params(zero, found)
    _read_codecs(zero, found)
    _read_rest(zero, found)
    found.tell_stage()
    return found


def _old_form(top: Block) -> Sharding:
    """`"zero_optimization": true`, as it was written once."""
    stage = int(top.flag("zero_optimization"))
    top.used("zero_optimization", f"strategy {STAGES[stage]}, as DeepSpeed reads it; the stage is better written out")
    return Sharding(stage, STAGES[stage], top.account.block(top.path_of("zero_optimization"), {}))


def _refuse_both_names(zero: Block) -> None:
    for short, key in SHORT_NAMES.items():
        if zero.has(short) and zero.has(key):
            zero.refused(short, f"it is {key} by another name; leave one")


def _read_groups(zero: Block, found: Sharding) -> None:
    """Groups of ranks that hold everything (MiCS), or a second copy of the parameters (hpZ)."""
    key, second = "mics_shard_size", "zero_hpz_partition_size"
    size = zero.whole(key, -1, least=-1)
    copy_size = zero.whole(second, 1, least=0)
    if size < 1:
        zero.ignored(key, "no groups")
    elif found.stage != LAST:
        zero.refused(key, f"groups are of stage {LAST}, and this is stage {found.stage}")
    else:
        found.strategy, found.node_size = IN_GROUPS, size
        found.grouped = f", stage {LAST} in groups of ranks (mics_shard_size)"
        zero.used(key, f"strategy {IN_GROUPS} with node_size {size}: split in groups of {size}, equal across them")
    if copy_size <= 1:
        zero.ignored(second, "no second copy")
    elif found.stage != LAST:
        zero.ignored(second, f"DeepSpeed keeps a second copy in stage {LAST} alone, and this is stage {found.stage}")
    elif found.node_size is not None:
        zero.refused(second, f"groups of {copy_size} with mics_shard_size {size}: a group has its copy already")
    else:
        found.strategy, found.node_size = STAGE_3_WITH_A_COPY_PER_NODE, copy_size
        found.grouped = f", stage {LAST} with a second copy in groups of ranks (zero_hpz_partition_size)"
        zero.used(
            second,
            f"strategy {found.strategy} with node_size {copy_size}: the copy in a group is what parameters rest in, "
            "refreshed after each update",
        )


def _read_optimizer(zero: Block, found: Sharding) -> None:
    block = zero.inner("offload_optimizer")
    settle(block, IGNORED["zero_optimization.offload_optimizer"])
    device = _device(zero, block, "cpu_offload")
    ratio = block.number("ratio", 1.0, least=0, most=1)
    if device == "none":
        block.ignored("ratio", "nothing leaves the device")
        return
    source, key = (block, "device") if block.has("device") else (zero, "cpu_offload")
    if found.stage == 0:
        source.refused(key, f"DeepSpeed moves the optimizer in stages 1 to {LAST} alone; write a stage")
    elif device == "nvme" and found.stage != LAST:
        source.refused(
            key, f"in stage {found.stage} DeepSpeed keeps it on the host all the same; write cpu, or stage {LAST}"
        )
    elif ratio == 0:
        block.refused("ratio", "it moves nothing; leave offload_optimizer out, or write a part above 0")
        source.ignored(key, "a part of 0 moves nothing")
    else:
        place = PLACES[device]
        part = f":{ratio:g}" if ratio < 1 else ""
        becomes = f"optimizer={place}{part} and grads=host behind the strategy: updates run on the host"
        found.change(source, key, f"optimizer={place}{part}+grads=host", becomes)
    block.used("ratio", f"optimizer={PLACES[device]}:{ratio:g}: this part of the parameters is updated on the host")
    _take_folder(block, found, device)


def _read_params(zero: Block, found: Sharding) -> None:
    block = zero.inner("offload_param")
    settle(block, IGNORED["zero_optimization.offload_param"])
    device = _device(zero, block, "cpu_offload_param")
    if device == "none":
        return
    source, key = (block, "device") if block.has("device") else (zero, "cpu_offload_param")
    if found.stage != LAST:
        why = f"DeepSpeed moves parameters in stage {LAST} alone, and in stage {found.stage} does not read it"
        source.ignored(key, why)
        block.ignored("nvme_path", why)
        return
    place = PLACES[device]
    fix = ": add offload_optimizer with a device" if "optimizer=" not in found.strategy else ""
    found.change(source, key, f"params={place}", f"params={place} behind the strategy", fix)
    _take_folder(block, found, device)


def _device(zero: Block, block: Block, old: str) -> str:
    """Of a block, or of the flag that was there before it."""
    device = block.word("device", DEVICES, "none")
    if device == "none":
        block.ignored("device", "it stays on the device")
    is_old = zero.flag(old)
    if not is_old:
        zero.ignored(old, "it stays on the device")
    elif block.has("device"):
        zero.refused(old, f"it says the same as {block.path} in the old way; leave {block.path}")
    if device != "nvme":
        block.ignored("nvme_path", f"the device is {device}, and nothing goes to a disk")
    return "cpu" if is_old and not block.has("device") else device


def _take_folder(block: Block, found: Sharding, device: str) -> None:
    if device != "nvme":
        return
    path = block.text("nvme_path")
    try:
        offload_of((f"disk:{path}",))
        is_path = bool(path.strip()) and "\0" not in path and "=" not in path
    except ConfigurationError:
        is_path = False
    if not is_path:
        block.refused(
            "nvme_path" if block.has("nvme_path") else "device", "it needs nvme_path, a folder on a local disk"
        )
    elif found.folder not in (None, path):
        block.refused("nvme_path", f"{found.folder} is named, too, and all that rests on disk is in one folder")
    else:
        found.folder = path
        block.used("nvme_path", f"offload disk:{path} (disk_path= of sw.shard)")


def _read_codecs(zero: Block, found: Sharding) -> None:
    """ZeRO++'s. Matrices are encoded here; norms, biases and embeddings travel as they are."""
    for key, words, groups in (
        ("zero_quantized_weights", "params_as=int8", "8 bits, a scale for 256 weights (DeepSpeed: for up to 8000)"),
        (
            "zero_quantized_gradients",
            _gradient_codec(zero),
            "4 bits, a scale for 256 gradients (DeepSpeed: for a row or a column)",
        ),
    ):
        if not zero.flag(key):
            zero.ignored(key, "it is off, and they travel as they are")
        elif found.stage != LAST:
            zero.ignored(key, f"DeepSpeed does it in stage {LAST} alone, and this is stage {found.stage}")
        else:
            found.change(zero, key, words, f"{words} behind the strategy: matrices travel in {groups}")
    key = "zero_quantized_nontrainable_weights"
    if zero.flag(key):
        zero.refused(key, "frozen weights rest as they were given, in 16 or 32 bits; leave it out")
    zero.ignored(key, "it is off")


def _gradient_codec(zero: Block) -> str:
    """With what LoCo kept of its errors."""
    key = "zeropp_loco_param"
    if not zero.has(key):
        return "grads_as=int4"
    block = zero.inner(key)
    for name in ("err_beta", "reset_T"):
        block.number(name)
        block.ignored(
            name, "all that is lost of a gradient is added to the next one; there is nothing to weigh or reset"
        )
    return "grads_as=int4:feedback"


def _read_rest(zero: Block, found: Sharding) -> None:
    for key in (f"stage3_{GATHERS}", GATHERS, "stage3_gather_fp16_weights_on_model_save"):
        if zero.auto(key, EXPORT) or zero.flag(key):
            found.exports = True
            zero.used(key, EXPORT)
        else:
            zero.ignored(key, "sw.full_state_dict and shardwise export gather whole weights when they are asked")
    found.has_norm = zero.flag("compute_grad_norm", True)
    zero.ignored("compute_grad_norm", "the norm is computed where clipping, or leaving out steps, asks for it")
    if zero.flag("legacy_stage1"):
        zero.refused("legacy_stage1", "DeepSpeed has removed it; leave it out")
    zero.ignored("legacy_stage1", "it is off")
    zero.refused("zenflow", "it updates a part of the weights late, with old gradients; leave it out")


def _bucket_elems(zero: Block, stage: int) -> int:
    """Gradients wait for their reduction in one buffer, or in two that take turns; stage 3 fetches weights ahead. What
    Hugging Face would fill in depends on the model, and is small."""
    if stage == 0:
        return 0
    reduce = _size(zero, "reduce_bucket_size", 500_000_000)
    if stage == LAST:
        return reduce + _size(zero, "stage3_prefetch_bucket_size", 50_000_000)
    return reduce * (2 if zero.flag("overlap_comm") else 1)


def _size(zero: Block, key: str, default: int) -> int:
    is_auto = str(zero.values.get(key)).lower() == AUTO
    return 0 if is_auto else zero.whole(key, default, least=0)
