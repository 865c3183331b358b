"""The contenders: each a function from a Case to a Run, looked up by name with `find`.

    plain          one process, no sharding
    torch-ddp      DistributedDataParallel
    fsdp2          fully_shard, tuned as its documentation advises
    deepspeed:N    ZeRO stage N, on the CPU
    shardwise:S    shardwise with strategy S

All build the same weights and use torch's fused AdamW with the same hyper-parameters. The process group is
there before `find(name)(case)` is called, except for `plain`, which needs none. In bf16 all keep fp32
master weights, except `plain` and `torch-ddp`, whose weights are bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.model import Shape, build, loss_of


@dataclass(frozen=True)
class Case:
    shape: Shape
    device: torch.device
    precision: str = "fp32"  # or bf16: bf16 compute, fp32 master weights
    reduce_dtype: torch.dtype = torch.float32
    clip: float = 0.0  # 0: no clipping

    @property
    def compute_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.precision]


@dataclass(frozen=True)
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], Tensor]  # batch -> loss, left on the device


Setup = Callable[[Case], Run]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _run(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], object]) -> Run:
    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        if case.clip:
            clip(case.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Run(model, optimizer, step)


def _torch_run(case: Case, model: nn.Module) -> Run:
    return _run(case, model, adamw(model), partial(nn.utils.clip_grad_norm_, model.parameters()))


def plain(case: Case) -> Run:
    return _torch_run(case, build(case.shape, case.device, case.compute_dtype))


def torch_ddp(case: Case) -> Run:
    model = build(case.shape, case.device, case.compute_dtype)
    return _torch_run(case, nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))


def fsdp2(case: Case) -> Run:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(case.shape, case.device)
    policy = MixedPrecisionPolicy(param_dtype=case.compute_dtype, reduce_dtype=case.reduce_dtype)
    last = len(model.blocks) - 1
    for i, block in enumerate(model.blocks):
        fully_shard(block, mp_policy=policy, reshard_after_forward=i < last)
    fully_shard(model, mp_policy=policy)
    for module, following in zip([model, *model.blocks], model.blocks, strict=False):
        module.set_modules_to_forward_prefetch([following])
    _own_group_for_reductions(model)
    return _torch_run(case, model)


def _own_group_for_reductions(model: nn.Module) -> None:
    """Gathers then need not queue behind reductions."""
    if torch.__version__ >= (2, 13):
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(2)
        return
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    own_group = dist.new_group()

    class OwnGroup(DefaultReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            return super().__call__(output_tensor, input_tensor, own_group, op, async_op)

    for module in [model, *model.blocks]:
        module.set_custom_reduce_scatter(OwnGroup())


def deepspeed(case: Case, stage: str) -> Run:
    """Needs DS_ACCELERATOR=cpu in the environment, and fp32."""
    import deepspeed as ds

    ds.init_distributed(dist_backend="gloo", verbose=False)
    model = build(case.shape, case.device)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(stage), "overlap_comm": True, "contiguous_gradients": True},
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, _, _ = ds.initialize(model=model, optimizer=adamw(model), config=config)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Run(engine, optimizer, step)


def shardwise(case: Case, strategy: str) -> Run:
    import shardwise as sw

    sw.init()
    model = build(case.shape, case.device)
    model, optimizer = sw.shard(
        model,
        adamw(model),
        strategy=strategy,
        precision=case.precision,
        reduce_dtype=case.reduce_dtype,
        units=["Block"],
    )
    return _run(case, model, optimizer, optimizer.clip_grad_norm)


_CONTENDERS: dict[str, Callable[..., Run]] = {
    "plain": plain,
    "torch-ddp": torch_ddp,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "shardwise": shardwise,
}


def find(name: str) -> Setup:
    """`fsdp2`, `deepspeed:3`, `shardwise:zero3`: a family, and after the colon its one argument."""
    family, *argument = name.split(":")
    if family not in _CONTENDERS:
        raise SystemExit(f"no contender named {family!r}; there are {', '.join(_CONTENDERS)}")
    return lambda case: _CONTENDERS[family](case, *argument)
