"""The contenders: each is a function from a Case to a Run, found by name with `find`.

All build the same weights, make each block a unit, and use torch's fused AdamW with the same hyper-parameters.
benchmarks/README.md says what each one is, its precisions, and when it reduces gradients. The process group exists
before a contender is set up, except for those in `case.SINGLE_PROCESS`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw

from ..base.errors import ConfigurationError
from ..trainer.checkpointing import Mode, checkpoint_blocks
from .case import HSDP, NVME, OFFLOADED_FSDP2, Case, DeepSpeed, is_auto, needs_disk, read_deepspeed, read_strategy
from .model import build, device_of, loss_of, num_params

# The same hyper-parameters for every contender.
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS = {"fp32": torch.float32, "bf16": torch.float32, "pure-bf16": torch.bfloat16}
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "pure-bf16": torch.bfloat16}
_HOST_UPDATES = "shardwise::host update"  # the profiler ranges in which our engine updates weights on the host
# The profiler range that torch puts around any optimizer's step. In it, offloaded weights are updated on the host.
_OPTIMIZER_STEP = "Optimizer.step#"
_AIO = {  # DeepSpeed's asynchronous I/O to disk
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}


@dataclass(frozen=True, slots=True)
class Run:
    """A contender that is ready to train. `step` takes micro-batches and returns their mean loss, on the device.

    `host_updates` is the prefix of the profiler ranges in which the host updates weights; empty if it does not.
    """

    step: Callable[[Sequence[Tensor]], Tensor]
    input_dtype: torch.dtype
    host_updates: str = ""
    moved_bytes: Callable[[], float | None] = lambda: None  # by this rank in the last step; None: not counted


def adamw(params: Any, capturable: bool = False) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **ADAMW, fused=True, capturable=capturable)


def model_of(case: Case, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Build the model, not wrapped yet. Blocks are checkpointed and compiled in the same way for every contender."""
    model = build(case.shape, device or device_of(case), case.seed).to(dtype or WEIGHTS[case.precision])
    checkpoint_blocks(model, cast(Mode, case.checkpointing), blocks=[type(model.blocks[0])])
    if case.compile:
        for block in model.blocks:
            block.compile()
    return model


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object],
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Sequence[Tensor]], Tensor]:
    """The training step of a contender that works like plain torch."""

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for number, batch in enumerate(micro_batches, start=1):
            with nullcontext() if number == len(micro_batches) else before_last():
                with forward():
                    loss = loss_of(model, batch)
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def clipping(case: Case, clip_to: Callable[[float], object]) -> Callable[[], object]:
    return partial(clip_to, case.clip) if case.clip else lambda: None


def autocast_run(case: Case, model: nn.Module, before_last: Callable[[], Any] = nullcontext) -> Run:
    """Return the run of a model under autocast, whose gradients are plain tensors that torch can clip."""
    clip = clipping(case, partial(nn.utils.clip_grad_norm_, list(model.parameters())))
    forward = partial(torch.autocast, case.device, torch.bfloat16) if case.precision == "bf16" else nullcontext
    return Run(step_of(model, adamw(model.parameters()), clip, forward, before_last), WEIGHTS[case.precision])


def plain(case: Case) -> Run:
    return autocast_run(case, model_of(case))


def compute(case: Case) -> Run:
    """Forward and backward alone."""
    model = model_of(case, COMPUTE[case.precision])
    nothing = torch.optim.SGD([torch.zeros(0)])
    # Instead of clipping, the step drops the gradients.
    return Run(step_of(model, nothing, clip=model.zero_grad), COMPUTE[case.precision])


def compute_and_update(case: Case) -> Run:
    run = compute(case)
    num_elems = num_params(case.shape) // case.world_size
    shard = nn.Parameter(torch.randn(num_elems, device=device_of(case), dtype=WEIGHTS[case.precision]))
    shard.grad = torch.randn_like(shard)
    optimizer = adamw([shard])

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        loss = run.step(micro_batches)
        optimizer.step()
        return loss

    return Run(step, run.input_dtype)


def shardwise(case: Case, strategy: str) -> Run:
    sw.init(device=device_of(case))
    layouts, modifiers = read_strategy(strategy)
    is_chosen, is_meta = is_auto(layouts), "meta" in modifiers
    model = model_of(case, device=torch.device("meta") if is_meta else None)
    model, optimizer = sw.shard(
        model,
        adamw(model.parameters(), capturable="capture" in modifiers),
        strategy=layouts,
        precision=case.precision,
        reduce_dtype=case.reduce,
        early_update="early" in modifiers,
        seed=case.seed if is_meta else None,
        batch=(case.batch, case.shape.tokens, case.micro_batches) if is_chosen else None,
        disk_path=case.disk_path or None if is_chosen or needs_disk(case.contender) else None,
    )
    clip = clipping(case, optimizer.clip_grad_norm)
    step = step_of(model, optimizer, clip, before_last=partial(sw.accumulate, model))
    if "capture" in modifiers:
        captured = sw.capture(model, optimizer, lambda *micro_batches: step(micro_batches))
        return Run(lambda micro_batches: captured(*micro_batches).clone(), COMPUTE[case.precision], _HOST_UPDATES)
    return Run(step, COMPUTE[case.precision], _HOST_UPDATES, lambda: sw.traffic(model).wire_bytes)


def torch_ddp(case: Case) -> Run:
    if case.precision == "pure-bf16" and case.reduce != "bf16":
        raise ConfigurationError(f"ddp reduces bf16 gradients as bf16, not in {case.reduce}: leave --reduce-dtype out")
    model = nn.parallel.DistributedDataParallel(model_of(case), gradient_as_bucket_view=True)
    if case.precision != "pure-bf16" and case.reduce == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        model.register_comm_hook(None, bf16_compress_hook)
    return autocast_run(case, model, before_last=model.no_sync)


def fsdp1(case: Case) -> Run:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    inner = model_of(case)
    compute_dtype = COMPUTE[case.precision]
    model = FullyShardedDataParallel(
        inner,
        auto_wrap_policy=ModuleWrapPolicy({type(inner.blocks[0])}),
        mixed_precision=MixedPrecision(compute_dtype, DTYPES[case.reduce], compute_dtype),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        use_orig_params=True,
        device_id=device_of(case),
    )
    return Run(step_of(model, adamw(model.parameters()), clipping(case, model.clip_grad_norm_)), compute_dtype)


def fsdp2(case: Case, is_offloaded: bool = False, is_replicated: bool = False) -> Run:
    """With `is_replicated`, shard within the node and replicate across nodes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = model_of(case)
    sizes = (case.world_size // case.node_size, case.node_size) if is_replicated else (case.world_size,)
    mesh = init_device_mesh(case.device, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    compute_dtype, reduce_dtype = COMPUTE[case.precision], DTYPES[case.reduce]
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == WEIGHTS[case.precision] else compute_dtype,
        reduce_dtype=None if reduce_dtype == compute_dtype else reduce_dtype,
    )
    offload = CPUOffloadPolicy(pin_memory=case.device == "cuda") if is_offloaded else OffloadPolicy()
    shard_on_mesh = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    stages = list(model.blocks)
    if case.shape.vocab and not case.shape.tied:
        # The same units as torchtitan. Embedding and head share a tied weight, so it stays in the root.
        stages = [model.embed, *stages, [model.norm, model.head]]
    for stage in stages:
        shard_on_mesh(stage, reshard_after_forward=stage is not stages[-1])
    shard_on_mesh(model)
    firsts = [stage[0] if isinstance(stage, list) else stage for stage in stages]
    for module, following in zip([model, *firsts], firsts, strict=False):
        module.set_modules_to_forward_prefetch([following])
    _own_group_for_reductions(model, num_shards=sizes[-1])
    params = list(model.parameters())

    def clip(max_norm: float) -> None:
        """Clip with one all-reduce of the norm. `clip_grad_norm_` would do one for every gradient that it scales."""
        norm: Any = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], foreach=True)
        nn.utils.clip_grads_with_norm_(params, max_norm, norm.full_tensor(), foreach=True)

    step = step_of(model, adamw(params), clipping(case, clip))
    return Run(step, compute_dtype, _OPTIMIZER_STEP if is_offloaded else "")


def _own_group_for_reductions(model: Any, num_shards: int) -> None:
    """Give reductions a communicator of their own, so that gathers do not queue behind them."""
    if torch.__version__ >= "2.13":  # not a plain string: it compares as a version
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(2)
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    own_group, _ = dist.new_subgroups(num_shards)

    class OwnGroup(DefaultReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False):  # type: ignore[no-untyped-def]
            return super().__call__(output_tensor, input_tensor, own_group, op, async_op)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(OwnGroup())


def deepspeed(case: Case, argument: str) -> Run:
    import deepspeed as ds  # type: ignore[import-untyped, unused-ignore]

    if case.precision == "pure-bf16":
        raise ConfigurationError("deepspeed keeps fp32 masters next to bf16 weights: it runs with --precision bf16")
    ds.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    model = model_of(case)
    request = read_deepspeed(argument)
    refuse_what_deepspeed_ignores(case, request.parts, ds.accelerator.get_accelerator().device_count())
    engine, _, _, _ = ds.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=None if request.offload else adamw(model.parameters()),
        config=config_of(case, request),
    )

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for batch in micro_batches:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Run(step, COMPUTE[case.precision], _OPTIMIZER_STEP if request.offload else "")


def config_of(case: Case, request: DeepSpeed) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`.

    Buffer sizes are those of its documentation, and for SuperOffload those of its examples. With an offloaded
    optimizer, DeepSpeed must build the optimizer itself (`DeepSpeedCPUAdam`): it refuses other optimizers there.
    """
    offload, is_third = request.offload, request.stage == 3
    is_super, on_disk = offload == "super_offload", offload == NVME
    bucket_elems = 400_000_000 if is_super else 500_000_000
    zero: dict[str, Any] = {
        "stage": request.stage,
        "overlap_comm": not is_super,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket_elems,
        "allgather_bucket_size": bucket_elems,
    }
    if is_third:
        zero["stage3_prefetch_bucket_size"] = bucket_elems
        zero["sub_group_size"] = bucket_elems if is_super else 1_000_000_000
    place: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    how: dict[str, Any] = {"ratio": request.ratio}
    if on_disk:
        place |= {"device": "nvme", "nvme_path": case.disk_path}
        how = {"pipeline_read": True, "pipeline_write": True}
    if is_super:
        how |= {"super_offload": True, "cpuadam_cores_perc": 0.9}
    if offload:
        zero["offload_optimizer"] = place | how
    if on_disk or (is_third and offload == "offload"):
        zero["offload_param"] = place
    zeropp = {
        "hpz": ("zero_hpz_partition_size", case.node_size),
        "qwz": ("zero_quantized_weights", True),
        "qgz": ("zero_quantized_gradients", True),
    }
    zero |= dict(zeropp[part] for part in request.parts)
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.micro_batches,
        "zero_optimization": zero,
        "bf16": {"enabled": case.precision == "bf16"},
        "communication_data_type": case.reduce,
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
        **({"optimizer": {"type": "AdamW", "params": ADAMW}} if offload else {}),
        **({"aio": _AIO} if on_disk else {}),
    }


def refuse_what_deepspeed_ignores(case: Case, parts: Sequence[str], ranks_per_node: int) -> None:
    """Refuse settings that DeepSpeed silently ignores. `ranks_per_node` is the number of devices that it finds here."""
    error = ""
    if "hpz" in parts and case.node_size == 1:
        error = "splits hpz's second copy in a node, and a node has 1 rank: give it more"
    elif "qgz" in parts and ranks_per_node != case.node_size:
        takes = f"takes the {ranks_per_node} devices of this machine for a node of qgz"
        error = f"{takes}, and a node has {case.node_size} ranks: run it on nodes of {ranks_per_node}"
    elif "qgz" in parts and case.world_size == case.node_size:
        error = f"has qgz between nodes only, and all {case.world_size} ranks are one node: give it more nodes"
    if error:
        raise ConfigurationError(f"deepspeed {error}")


_SETUPS: dict[str, Callable[..., Run]] = {
    "shardwise": shardwise,
    "fsdp2": fsdp2,
    OFFLOADED_FSDP2: partial(fsdp2, is_offloaded=True),
    HSDP: partial(fsdp2, is_replicated=True),
    "fsdp1": fsdp1,
    "ddp": torch_ddp,
    "deepspeed": deepspeed,
    "plain": plain,
    "compute": compute,
    "compute+update": compute_and_update,
}


def find(name: str) -> Callable[[Case], Run]:
    """Return the set-up function of the contender with this name."""
    family, colon, argument = name.partition(":")
    setup = _SETUPS[family]
    return (lambda case: setup(case, argument)) if colon else setup
