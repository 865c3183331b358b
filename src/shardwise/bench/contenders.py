"""The contenders: each a function from a Case to a Run, looked up by name with `find`.

    shardwise:S     shardwise with strategy S: a preset, or a JSON mapping from unit patterns to presets;
                    S@early with early updates, S@capture as a CUDA graph of the whole step, S@meta from a model
                    on the meta device (other weights than the rest, drawn alike)
    fsdp2           fully_shard: units as torchtitan makes them, explicit forward prefetch, the last unit kept
                    between forward and backward, a communicator of its own for reductions
    fsdp2+offload   the same with CPUOffloadPolicy: pinned parameters, gradients and optimizer on the host
    hsdp            fsdp2 on a mesh of nodes x ranks: split in the node, replicated over the nodes
    fsdp1           FullyShardedDataParallel: forward and backward prefetch, limited gathers, original parameters
    ddp             DistributedDataParallel, gradients as views of its buckets
    deepspeed:N     DeepSpeed's ZeRO stage N (0 to 3) with overlapped communication; N+offload has the optimizer on the
                    host (and at stage 3 parameters), 3+nvme on disk, and so on: `names.AWAY`; 3+hpz, 3+qwz, 3+qgz and
                    3+zeropp have that part of ZeRO++, or all
    plain           one process, nothing sharded
    compute         floor: forward and backward of the whole model in the compute dtype, nothing else
    compute+update  floor: the same, and AdamW on one rank's part of the parameters

All build the same weights, make units of blocks, and use torch's fused AdamW with the same hyper-parameters; DeepSpeed
has its own on the host. Models are built whole on the device, and what leaves it does so when the contender is set up.

Precisions. `fp32`: everywhere. `bf16`: bf16 compute with fp32 master weights; `ddp` and `plain` have no such thing and
keep fp32 weights under `torch.autocast`, as their users do. `pure-bf16`: weights, gradients and optimizer state are
bf16 for everyone. Gradients are reduced in the dtype asked for; `ddp` uses its bf16 compression hook (on GPUs only)
where they are fp32 and should travel as bf16, and cannot reduce bf16 gradients in fp32.

Micro-batches. `ddp` (no_sync) and `deepspeed` at stages 0 and 1 wait for the last one to reduce; `fsdp1`, `fsdp2` and
`deepspeed` at stages 2 and 3 reduce every one, because waiting would keep whole gradients; shardwise does what the
layout says.

The process group is there before a contender is set up, except for those in `names.SOLO`, which need none.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import shardwise as sw

from .case import Case
from .model import build
from .names import HSDP, OFFLOADED_FSDP2, is_auto, read_strategy, rests_on_disk
from .peers import deepspeed, fsdp1, fsdp2, torch_ddp
from .step import COMPUTE, WEIGHTS, Run, adamw, autocast, clipping, device_of, model_of, step_of, torch_clipping

_HOST_UPDATES = "shardwise::host update"  # the ranges in which the host updates weights


def plain(case: Case) -> Run:
    model = model_of(case)
    step = step_of(model, adamw(model.parameters()), torch_clipping(case, model), forward=autocast(case))
    return Run(step, WEIGHTS[case.precision])


def compute(case: Case) -> Run:
    model = model_of(case, COMPUTE[case.precision])
    nothing = torch.optim.SGD([torch.zeros(0)])

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        loss = forward_and_backward(micro_batches)
        model.zero_grad()
        return loss

    forward_and_backward = step_of(model, nothing, lambda: None)
    return Run(step, COMPUTE[case.precision])


def compute_and_update(case: Case) -> Run:
    run = compute(case)
    device = device_of(case)
    num_elems = sum(weight.numel() for weight in build(case.shape, torch.device("meta"), 0).parameters())
    shard = nn.Parameter(torch.randn(num_elems // case.world_size, device=device, dtype=WEIGHTS[case.precision]))
    shard.grad = torch.randn_like(shard)
    optimizer = adamw([shard])

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        loss = run.step(micro_batches)
        optimizer.step()
        return loss

    return Run(step, run.input_dtype)


def shardwise(case: Case, strategy: str) -> Run:
    sw.init(device=device_of(case))
    layouts, ways = read_strategy(strategy)
    is_chosen = is_auto(layouts)
    is_meta = "meta" in ways
    model = model_of(case, device=torch.device("meta") if is_meta else None)
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
    step = step_of(
        model,
        optimizer,
        clipping(case, optimizer.clip_grad_norm),
        before_last=partial(sw.accumulate, model),
    )
    if "capture" in ways:
        captured = sw.capture(model, optimizer, lambda *micro_batches: step(micro_batches))
        return Run(lambda micro_batches: captured(*micro_batches).clone(), COMPUTE[case.precision], _HOST_UPDATES)
    return Run(step, COMPUTE[case.precision], _HOST_UPDATES, lambda: sw.traffic(model).wire_bytes)


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
    """The set-up of a contender, and after the colon its one argument."""
    family, colon, argument = name.partition(":")
    setup = _SETUPS[family]
    return (lambda case: setup(case, argument)) if colon else setup
