"""The contenders: each a function from a Case to a Run, looked up by name with `find`.

    shardwise:S     shardwise with strategy S: a preset, or a JSON mapping from unit patterns to presets;
                    S@early with early updates, S@capture as a CUDA graph of the whole step, S@meta from a model
                    on the meta device (other weights than the rest, drawn alike)
    fsdp2           fully_shard: units as torchtitan makes them, explicit forward prefetch, the last unit kept
                    between forward and backward, a communicator of its own for reductions
    fsdp2+offload   the same with CPUOffloadPolicy: pinned parameters, gradients and optimizer on the host
    fsdp1           FullyShardedDataParallel: forward and backward prefetch, limited gathers, original parameters
    ddp             DistributedDataParallel, gradients as views of its buckets
    deepspeed:N     DeepSpeed's ZeRO stage N (0 to 3) with overlapped communication; N+offload has the optimizer on the
                    host (and at stage 3 parameters), 3+nvme on disk, and so on: `names.AWAY`
    plain           one process, nothing sharded
    compute         floor: forward and backward of the whole model in the compute dtype, nothing else
    compute+update  floor: the same, and AdamW on one rank's part of the parameters

All build the same weights, make units of blocks, and use torch's fused AdamW with the same hyper-parameters; DeepSpeed
has its own on the host. Models are built whole on the device, and what leaves it does so when the contender is set up.

Precisions. `fp32`: everywhere. `bf16`: bf16 compute with fp32 master weights; `ddp` and `plain` have no such thing and
keep fp32 weights under `torch.autocast`, as their users do. `pure-bf16`: weights, gradients and optimizer state are
bf16 for everyone. Gradients are reduced in the dtype asked for; `ddp` uses its bf16 compression hook (on GPUs only)
where they are fp32 and should travel as bf16, and cannot reduce bf16 gradients in fp32.

Micro-batches. `ddp` (no_sync) and `deepspeed` wait for the last one to reduce; `fsdp1` and `fsdp2` reduce every one,
because waiting would keep whole gradients; shardwise does what the layout says.

The process group is there before a contender is set up, except for those in `names.SOLO`, which need none.
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

from ..errors import ConfigurationError
from ..train.checkpointing import Mode, checkpoint_blocks
from .case import Case
from .deepspeed_config import ADAMW, config_of
from .model import build, loss_of
from .names import OFFLOADED_FSDP2, is_auto, read_deepspeed, read_strategy, rests_on_disk

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WEIGHTS = {"fp32": torch.float32, "bf16": torch.float32, "pure-bf16": torch.bfloat16}
_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "pure-bf16": torch.bfloat16}
# Ranges in which the host updates weights: ours, and those that torch puts around the step of any optimizer.
_OUR_UPDATES, _OPTIMIZER_STEP = "shardwise::host update", "Optimizer.step#"


@dataclass(frozen=True, slots=True)
class Run:
    """A contender that is set up. `step` takes micro-batches and returns their mean loss, left on the device.

    `host_updates` begins the names of the profiler's ranges in which the host updates weights, if it does.
    """

    step: Callable[[Sequence[Tensor]], Tensor]
    input_dtype: torch.dtype
    host_updates: str = ""
    moved_bytes: Callable[[], float | None] = lambda: None  # by this rank in the last step, if it is counted


def device_of(case: Case) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")


def adamw(params: Any, capturable: bool = False) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **ADAMW, fused=True, capturable=capturable)


def _model(case: Case, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Not wrapped yet. Blocks are checkpointed and compiled for every contender alike."""
    model = build(case.shape, device or device_of(case), case.seed).to(dtype or _WEIGHTS[case.precision])
    checkpoint_blocks(model, cast(Mode, case.checkpointing), blocks=[type(model.blocks[0])])
    if case.compile:
        for block in model.blocks:
            block.compile()
    return model


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object],
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Sequence[Tensor]], Tensor]:
    """The training step of all contenders that train with torch's own words."""

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for place, batch in enumerate(micro_batches, start=1):
            with nullcontext() if place == len(micro_batches) else before_last():
                with forward():
                    loss = loss_of(model, batch)
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def _clipping(case: Case, clip_to: Callable[[float], object]) -> Callable[[], object]:
    return partial(clip_to, case.clip) if case.clip else lambda: None


def _torch_clipping(case: Case, model: nn.Module) -> Callable[[], object]:
    return _clipping(case, partial(nn.utils.clip_grad_norm_, list(model.parameters())))


def _clip_sharded(model: nn.Module, max_norm: float) -> None:
    """The norm is summed over the ranks once, not for every gradient that it scales."""
    params = list(model.parameters())
    norm: Any = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], foreach=True)
    nn.utils.clip_grads_with_norm_(params, max_norm, norm.full_tensor(), foreach=True)


def _autocast(case: Case) -> Callable[[], AbstractContextManager[Any]]:
    return partial(torch.autocast, case.device, torch.bfloat16) if case.precision == "bf16" else nullcontext


def plain(case: Case) -> Run:
    model = _model(case)
    step = _step(model, adamw(model.parameters()), _torch_clipping(case, model), forward=_autocast(case))
    return Run(step, _WEIGHTS[case.precision])


def compute(case: Case) -> Run:
    model = _model(case, _COMPUTE[case.precision])
    nothing = torch.optim.SGD([torch.zeros(0)])

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        loss = forward_and_backward(micro_batches)
        model.zero_grad()
        return loss

    forward_and_backward = _step(model, nothing, lambda: None)
    return Run(step, _COMPUTE[case.precision])


def compute_and_update(case: Case) -> Run:
    run = compute(case)
    device = device_of(case)
    num_elems = sum(weight.numel() for weight in build(case.shape, torch.device("meta"), 0).parameters())
    shard = nn.Parameter(torch.randn(num_elems // case.world_size, device=device, dtype=_WEIGHTS[case.precision]))
    shard.grad = torch.randn_like(shard)
    optimizer = adamw([shard])

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        loss = run.step(micro_batches)
        optimizer.step()
        return loss

    return Run(step, run.input_dtype)


def torch_ddp(case: Case) -> Run:
    if case.precision == "pure-bf16" and case.reduce != "bf16":
        raise ConfigurationError(f"ddp reduces bf16 gradients as bf16, not in {case.reduce}: leave --reduce-dtype out")
    model = nn.parallel.DistributedDataParallel(_model(case), gradient_as_bucket_view=True)
    if case.precision != "pure-bf16" and case.reduce == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        model.register_comm_hook(None, bf16_compress_hook)
    step = _step(
        model, adamw(model.parameters()), _torch_clipping(case, model), _autocast(case), before_last=model.no_sync
    )
    return Run(step, _WEIGHTS[case.precision])


def fsdp1(case: Case) -> Run:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    inner = _model(case)
    compute_dtype = _COMPUTE[case.precision]
    model = FullyShardedDataParallel(
        inner,
        auto_wrap_policy=ModuleWrapPolicy({type(inner.blocks[0])}),
        mixed_precision=MixedPrecision(compute_dtype, _DTYPES[case.reduce], compute_dtype),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        use_orig_params=True,
        device_id=device_of(case),
    )
    return Run(_step(model, adamw(model.parameters()), _clipping(case, model.clip_grad_norm_)), compute_dtype)


def fsdp2(case: Case, is_offloaded: bool = False) -> Run:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = _model(case)
    compute_dtype, reduce_dtype = _COMPUTE[case.precision], _DTYPES[case.reduce]
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == _WEIGHTS[case.precision] else compute_dtype,
        reduce_dtype=None if reduce_dtype == compute_dtype else reduce_dtype,
    )
    offload = CPUOffloadPolicy(pin_memory=case.device == "cuda") if is_offloaded else OffloadPolicy()
    stages = list(model.blocks)
    if case.shape.vocab and not case.shape.tied:
        # As torchtitan does; a tied weight belongs to both ends, and stays with the root.
        stages = [model.embed, *stages, [model.norm, model.head]]
    for stage in stages:
        fully_shard(stage, mp_policy=policy, offload_policy=offload, reshard_after_forward=stage is not stages[-1])
    fully_shard(model, mp_policy=policy, offload_policy=offload)
    firsts = [stage[0] if isinstance(stage, list) else stage for stage in stages]
    for module, following in zip([model, *firsts], firsts, strict=False):
        module.set_modules_to_forward_prefetch([following])
    _own_group_for_reductions(model)
    step = _step(model, adamw(model.parameters()), _clipping(case, partial(_clip_sharded, model)))
    return Run(step, compute_dtype, _OPTIMIZER_STEP if is_offloaded else "")


def _own_group_for_reductions(model: Any) -> None:
    """Gathers then need not queue behind reductions."""
    if torch.__version__ >= "2.13":  # a version, not a text: it compares by its numbers
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(2)
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    own_group = dist.new_group()

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
    model = _model(case)
    asked = read_deepspeed(argument)
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

    return Run(step, _COMPUTE[case.precision], _OPTIMIZER_STEP if asked.away else "")


def shardwise(case: Case, strategy: str) -> Run:
    sw.init(device=device_of(case))
    layouts, ways = read_strategy(strategy)
    is_chosen = is_auto(layouts)
    is_meta = "meta" in ways
    model = _model(case, device=torch.device("meta") if is_meta else None)
    model, optimizer = sw.shard(
        model,
        adamw(model.parameters(), capturable="capture" in ways),
        strategy=layouts,
        precision=case.precision,
        reduce_dtype=case.reduce,
        early_update="early" in ways,
        seed=case.seed if is_meta else None,
        batch=(case.batch, case.shape.tokens, case.micro_batches) if is_chosen else None,
        disk_path=case.disk_path or None if is_chosen or rests_on_disk(case.contender) else None,
    )
    step = _step(
        model,
        optimizer,
        _clipping(case, optimizer.clip_grad_norm),
        before_last=partial(sw.accumulate, model),
    )
    if "capture" in ways:
        captured = sw.capture(model, optimizer, lambda *micro_batches: step(micro_batches))
        return Run(lambda micro_batches: captured(*micro_batches).clone(), _COMPUTE[case.precision], _OUR_UPDATES)
    return Run(step, _COMPUTE[case.precision], _OUR_UPDATES, lambda: sw.traffic(model).wire_bytes)


_SETUPS: dict[str, Callable[..., Run]] = {
    "shardwise": shardwise,
    "fsdp2": fsdp2,
    OFFLOADED_FSDP2: partial(fsdp2, is_offloaded=True),
    "fsdp1": fsdp1,
    "ddp": torch_ddp,
    "deepspeed": deepspeed,
    "plain": plain,
    "compute": compute,
    "compute+update": compute_and_update,
}


def find(name: str) -> Callable[[Case], Run]:
    """The set-up of a contender, and after the colon its one argument."""
    family, colon, argument = name.partition(":")
    setup = _SETUPS[family]
    return (lambda case: setup(case, argument)) if colon else setup
