"""Accelerate's YAML, from the top: what kind of training it is, in which precision, and what its block says.

Blocks of other kinds are not read by Accelerate either; they are told as ignored. `fsdp_config` is read in fsdp.py,
`deepspeed_config` in deepspeed.py, and keys that need no thought stand in keys.py.
"""

from pathlib import Path
from typing import Any

from ...base.errors import ConfigurationError
from ..account import Block
from ..migrated import Original
from ..names import REPLICATED
from ..rules import settle
from .deepspeed import read_deepspeed_block
from .fsdp import Change, read_fsdp, sharded
from .keys import DYNAMO, FP8, MPIRUN, NO_FP8, NO_TPU, TOP, prefixed
from .launch import read_launch
from .parallelism import read_parallelism
from .precision import read_mixed_precision

FSDP, DEEPSPEED = "FSDP", "DEEPSPEED"
REPLICATES = ("NO", "MULTI_CPU", "MULTI_GPU")
# Other kinds that Accelerate knows, and why they are not ours.
REFUSED = {
    "MEGATRON_LM": "Megatron-LM splits layers and sequences, and only training state is split here",
    "XLA": NO_TPU,
    "TPU": NO_TPU,
    **{
        f"MULTI_{device}": f"there are no {device} devices here, only CUDA GPUs and CPUs"
        for device in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
    },
}
# What `accelerate launch` gives SIZE_BASED_WRAP unless a number is said.
LEAST_PARAMS = 100_000_000


def read_accelerate(top: Block, folder: Path) -> tuple[dict[str, Any], Original]:
    """Settings of the trainer, and what Accelerate would run."""
    kind = _kind(top)
    settings = read_launch(top, kind == "NO")
    if kind == "MULTI_CPU":
        settings["device"] = "cpu"
    settle(top, TOP)
    settle(top.inner("mpirun_config"), MPIRUN)
    settings |= _compile(top)
    blocks = {FSDP: top.inner("fsdp_config"), DEEPSPEED: top.inner("deepspeed_config")}
    for other, block in blocks.items():
        if other != kind:
            block.ignored_whole(f"distributed_type {kind} does not read it")
    if kind == DEEPSPEED:
        return _deepspeed(top, blocks[DEEPSPEED], folder, settings)
    asked = read_fsdp(blocks[FSDP], LEAST_PARAMS) if kind == FSDP else None
    settings |= read_mixed_precision(top, asked is not None, NO_FP8)
    ranks, machines = settings.get("nproc_per_node"), int(settings.get("nnodes", "1"))
    name, group = read_parallelism(top.inner("parallelism_config"), asked, ranks and ranks * machines)
    return sharded(settings, asked, name, group, _fp8(top))


def _kind(top: Block) -> str:
    if not top.has("distributed_type"):
        raise ConfigurationError(
            f"{top.account.source}: distributed_type is missing; write NO, MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED"
        )
    kind = top.word("distributed_type", (*REPLICATES, FSDP, DEEPSPEED, *REFUSED), "NO")
    if kind in REFUSED:
        top.refused("distributed_type", REFUSED[kind])
    elif kind in REPLICATES:
        top.used("distributed_type", f"strategy {REPLICATED}" + (" on CPUs" if kind == "MULTI_CPU" else ""))
    else:
        top.used("distributed_type", f"{'fsdp' if kind == FSDP else 'deepspeed'}_config says which strategy")
    return kind


def _deepspeed(top: Block, block: Block, folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], Original]:
    read_parallelism(top.inner("parallelism_config"), None, None)
    for change in _fp8(top):
        change.block.refused(change.key, "it goes with distributed_type FSDP")
    if top.flag("fp16"):
        top.refused("fp16", "DeepSpeed reads mixed_precision")
    top.ignored("fp16", "it is off")
    found, original = read_deepspeed_block(top, block, folder)
    return settings | found, original


def _fp8(top: Block) -> list[Change]:
    """Of products in fp8 nothing is left; parameters may still travel so."""
    block = top.inner("fp8_config")
    settle(block, prefixed(FP8, "fp8_"))
    found = []
    for key in ("enable_fsdp_float8_all_gather", "fp8_enable_fsdp_float8_all_gather"):
        if block.flag(key):
            found.append(Change(block, key, ("params_as=e4m3",), "parameters travel as e4m3 (params_as)"))
        else:
            block.used(key, "parameters travel as they are")
    return found


def _compile(top: Block) -> dict[str, Any]:
    """`dynamo_config`, or the one key that older files have for it."""
    block = top.inner("dynamo_config")
    settle(block, prefixed(DYNAMO, "dynamo_"))
    settings: dict[str, Any] = {}
    for holder, key in ((top, "dynamo_backend"), (block, "dynamo_backend"), (block, "backend")):
        word = holder.text(key).upper()
        if word == "INDUCTOR":
            settings["compile"] = True
        elif word not in ("", "NO"):
            holder.refused(key, "blocks are compiled by INDUCTOR only; write that, or NO")
        holder.used(key, f"compile {'true' if 'compile' in settings else 'false'}")
    return settings
