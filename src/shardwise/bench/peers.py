"""The peers, set up as their own users would have them: torch's DDP, FSDP1, FSDP2 and HSDP, and DeepSpeed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import ConfigurationError
from .case import Case
from .deepspeed_config import config_of
from .model import loss_of
from .names import read_deepspeed
from .step import COMPUTE, DTYPES, WEIGHTS, Run, adamw, autocast, clipping, device_of, model_of, step_of, torch_clipping

# The ranges that torch puts around the step of any optimizer: the host updates weights there, if they are on it.
_OPTIMIZER_STEP = "Optimizer.step#"


def torch_ddp(case: Case) -> Run:
    if case.precision == "pure-bf16" and case.reduce != "bf16":
        raise ConfigurationError(f"ddp reduces bf16 gradients as bf16, not in {case.reduce}: leave --reduce-dtype out")
    model = nn.parallel.DistributedDataParallel(model_of(case), gradient_as_bucket_view=True)
    if case.precision != "pure-bf16" and case.reduce == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        model.register_comm_hook(None, bf16_compress_hook)
    step = step_of(
        model, adamw(model.parameters()), torch_clipping(case, model), autocast(case), before_last=model.no_sync
    )
    return Run(step, WEIGHTS[case.precision])


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
    """`is_replicated`: split in the node, replicated over the nodes."""
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
        # As torchtitan does; a tied weight belongs to both ends, and stays with the root.
        stages = [model.embed, *stages, [model.norm, model.head]]
    for stage in stages:
        shard_on_mesh(stage, reshard_after_forward=stage is not stages[-1])
    shard_on_mesh(model)
    firsts = [stage[0] if isinstance(stage, list) else stage for stage in stages]
    for module, following in zip([model, *firsts], firsts, strict=False):
        module.set_modules_to_forward_prefetch([following])
    _own_group_for_reductions(model, num_shards=sizes[-1])
    step = step_of(model, adamw(model.parameters()), clipping(case, partial(_clip_sharded, model)))
    return Run(step, compute_dtype, _OPTIMIZER_STEP if is_offloaded else "")


def _clip_sharded(model: nn.Module, max_norm: float) -> None:
    """The norm is summed over the ranks once, not for every gradient that it scales."""
    params = list(model.parameters())
    norm: Any = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], foreach=True)
    nn.utils.clip_grads_with_norm_(params, max_norm, norm.full_tensor(), foreach=True)


def _own_group_for_reductions(model: Any, num_shards: int) -> None:
    """Gathers then need not queue behind reductions."""
    if torch.__version__ >= "2.13":  # a version, not a text: it compares by its numbers
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
        raise ConfigurationError("deepspeed keeps fp32 masters beside bf16 weights: it runs with --precision bf16")
    ds.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    model = model_of(case)
    asked = read_deepspeed(argument)
    refuse_what_deepspeed_leaves_out(case, asked.parts, ds.accelerator.get_accelerator().device_count())
    engine, _, _, _ = ds.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=None if asked.away else adamw(model.parameters()),
        config=config_of(case, asked),
    )

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for batch in micro_batches:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Run(step, COMPUTE[case.precision], _OPTIMIZER_STEP if asked.away else "")


def refuse_what_deepspeed_leaves_out(case: Case, parts: Sequence[str], ranks_per_node: int) -> None:
    """Without a word. `ranks_per_node` is its own count: the devices of this machine."""
    if "hpz" in parts and case.node_size == 1:
        raise ConfigurationError("deepspeed splits hpz's second copy in a node, and a node has 1 rank: give it more")
    if "qgz" in parts and ranks_per_node != case.node_size:
        raise ConfigurationError(
            f"deepspeed takes the {ranks_per_node} devices of this machine for a node of qgz, and a node has "
            f"{case.node_size} ranks: run it on nodes of {ranks_per_node}"
        )
    if "qgz" in parts and case.world_size == case.node_size:
        raise ConfigurationError(
            f"deepspeed has qgz between nodes only, and all {case.world_size} ranks are one node: give it more nodes"
        )
