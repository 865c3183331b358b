"""Parts of DeepSpeed that cannot be followed here, among them those that it has removed itself: refused while they are
on, and ignored while they are off.
"""

from dataclasses import dataclass

from ..account import Block


@dataclass(frozen=True, slots=True)
class Switch:
    """A block, or a flag. `is_on` is what it is where it does not say so itself."""

    why: str
    is_on: bool = False
    # What says so: `enabled`, or the size of something that is on above 1.
    key: str = "enabled"


_GONE = "DeepSpeed has removed it"
_NO_KEY = "DeepSpeed has no such key"
_ONE_KIND = "ranks here split the state of training and the data, and nothing else"

SWITCHED: dict[str, Switch] = {
    "tensor_parallel": Switch(f"{_ONE_KIND}: no tensors; leave it out", key="autotp_size"),
    "expert_parallel": Switch(f"{_ONE_KIND}: no experts; leave it out"),
    "pipeline": Switch(f"{_ONE_KIND}: no layers; leave it out", is_on=True),
    "hybrid_engine": Switch("there is no engine for inference here; sw.whole gives whole weights for generate()"),
    "data_efficiency": Switch("the trainer has no curricula and drops no tokens; sample the data in your own loop"),
    "weight_quantization": Switch("weights are trained in 16 or 32 bits; leave it out", is_on=True),
    "autotuning": Switch("`shardwise plan` finds a strategy without running one, and --strategy auto takes it"),
    "datastates_ckpt": Switch("--async-save writes checkpoints beside the training; leave it out", is_on=True),
    "nebula": Switch(f"{_GONE}; --async-save writes checkpoints beside the training"),
    "compression_training": Switch(f"{_GONE}, and nothing is pruned or quantised here", is_on=True),
    "amp": Switch(f"{_GONE}; write bf16 or fp16 with enabled: true"),
    "quantize_training": Switch(f"{_GONE}, and nothing is quantised here"),
    "sparse_gradients": Switch(
        f"{_GONE}, and gradients of embeddings travel dense here, too; leave it out", is_on=True
    ),
    "eigenvalue": Switch(f"{_GONE}, and nothing is quantised here"),
    "sparse_attention": Switch(f"{_GONE}; attention is the model's own", is_on=True),
    "elasticity": Switch(
        f"{_GONE}; --nnodes MIN:MAX changes machines in a run, and a checkpoint goes on with any ranks"
    ),
    "graph_harvesting": Switch(f"{_GONE}; sw.capture makes one graph of a step", is_on=True),
    "curriculum_learning": Switch(f"{_GONE}; sample the data in your own loop"),
    "progressive_layer_drop": Switch(f"{_GONE}, and every layer is trained in every step here"),
    "fp8": Switch(f"{_NO_KEY}, and computes without it; write bf16, and params_as=fp8 behind a strategy for the wire"),
    "sequence_parallel": Switch(f"{_NO_KEY}, and sequences are not split here; leave it out"),
}
# Seen in examples, and read by nobody.
READ_BY_NOBODY = ("comms_config", "monitor_config", "cuda_visible_devices")


def refuse_switches(top: Block) -> None:
    for key in READ_BY_NOBODY:
        top.ignored(key, f"{_NO_KEY}, and does nothing with it")
    for key, switch in SWITCHED.items():
        if top.has(key):
            _refuse_if_on(top, key, switch)


def _refuse_if_on(top: Block, key: str, switch: Switch) -> None:
    if not isinstance(top.values[key], dict):
        if top.flag(key):
            top.refused(key, switch.why)
        top.ignored(key, "it is off")
        return
    block = top.inner(key)
    is_sized = switch.key != "enabled"
    is_on = block.whole(switch.key, least=0) > 1 if is_sized else block.flag(switch.key, switch.is_on)
    if is_on:
        where, name = (block, switch.key) if block.has(switch.key) else (top, key)
        where.refused(name, switch.why)
        block.ignored_whole(f"belongs to {key}, which is refused")
    block.ignored_whole("it is off")
