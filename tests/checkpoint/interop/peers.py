"""The libraries that people come from train a small model for two steps, save it their way, and train on.

The model has what checkpoints lose: a frozen matrix, buffers (one of them counts), tied weights, two groups of the
optimizer, and lengths that no number of ranks divides. Batches are a function of the step and a slice of it, so that
another world goes on with the same data.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

BATCH = 12
NUM_BEFORE, NUM_AFTER = 2, 2
VOCAB, HIDDEN = 29, 10


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 13)
        self.down = nn.Linear(13, HIDDEN, bias=False)
        self.down.weight.requires_grad_(index != 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.silu(self.up(hidden)))


class Net(nn.Module):
    scale: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(index) for index in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        hidden = self.embed(tokens) * self.scale.sum()
        for block in self.blocks:
            hidden = block(hidden)
        # What comes out depends on the count, so a load that loses it is noticed.
        return self.head(self.norm(hidden)) / (1 + 0.1 * self.seen)


def fresh(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net()
    with torch.no_grad():
        net.scale.copy_(torch.rand(3) + 0.2)
    return net.train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups. By name, because some wrappers show parameters as rows."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    rows = {name for name in trained if name.endswith("bias") or "norm" in name}
    return torch.optim.AdamW(
        [
            {"params": [param for name, param in trained.items() if name not in rows], "weight_decay": 0.1},
            {"params": [param for name, param in trained.items() if name in rows], "weight_decay": 0.0, "lr": 2e-3},
        ],
        lr=5e-3,
        betas=(0.8, 0.95),
        eps=1e-4,
    )


def batch(step: int) -> Tensor:
    """This rank's slice of a step's batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCAB, (BATCH, 6), generator=generator).chunk(world)[rank]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step))
        loss.backward()
        losses.append(mean_over_ranks(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


BEFORE, AFTER = range(NUM_BEFORE), range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER)


@dataclass(frozen=True)
class Peer:
    """What the library that wrote a checkpoint had in it when it did, by name, and the losses that came after."""

    weights: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    losses: list[float]


def run_alone() -> Peer:
    """One process, and torch alone: what all of them should hold."""
    model = fresh()
    optimizer = adamw(model)
    losses = train(model, optimizer, BEFORE)
    state = {name: optimizer.state[param] for name, param in model.named_parameters() if param.requires_grad}
    return Peer(dict(model.state_dict()), whole(state), losses)


# ---------------------------------------------------------------------------------------------------------
# fully_shard with DCP, and Accelerate


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def fully_sharded(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fresh(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def run_fsdp2(root: Path) -> Peer:
    """Saved as `nested` (by the state dicts' own functions), as `flat` (as torchtitan does), and by Accelerate."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    model, optimizer = fully_sharded()
    train(model, optimizer, BEFORE)
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "step": 2}, checkpoint_id=root / "nested")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({**weights, "optimizer": flat, "train_state": {"step": torch.tensor(2)}}, checkpoint_id=root / "flat")
    save_with_accelerate(root, model, optimizer)
    seen = whole(weights), whole(state["state"])
    return Peer(*seen, train(model, optimizer, AFTER))


def run_fsdp1(path: Path) -> list[float]:
    """The older FSDP, with sharded state dicts of its own; the losses that came after."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        fresh(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = adamw(model)
    train(model, optimizer, BEFORE)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=path)
    return train(model, optimizer, AFTER)


def save_with_accelerate(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Its own functions, on our ranks: Accelerate itself runs FSDP on accelerators alone."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    accelerator = Accelerator(cpu=True)
    for kind, name in {"SHARDED_STATE_DICT": "accelerate", "FULL_STATE_DICT": "gathered"}.items():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        save_fsdp_model(plugin, accelerator, model, str(root / name))
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(root / name))


# ---------------------------------------------------------------------------------------------------------
# DeepSpeed


def run_deepspeed(root: Path) -> dict[str, Peer]:
    """Saved under the names of the stages."""
    names = ["zero0", "zero1", "zero2", "zero3", "zero1-bf16", "zero2-bf16", "zero3-bf16"]
    return {name: _deepspeed_stage(root / name, int(name[4]), name.endswith("bf16")) for name in names}


def _deepspeed_stage(path: Path, stage: int, is_bf16: bool) -> Peer:
    import deepspeed

    model = fresh()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)

    def train_on(steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(engine, batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(mean_over_ranks(loss))
        return losses

    train_on(BEFORE)
    engine.save_checkpoint(str(path))
    weights = _deepspeed_holds(model) if stage else {}
    return Peer(weights, {}, train_on(AFTER))


def _deepspeed_holds(model: nn.Module) -> dict[str, Tensor]:
    """Masters, frozen parameters and buffers, as it gives them itself."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    weights = dict(model.named_buffers())
    for name, param in model.named_parameters():
        if param.requires_grad:
            weights[name] = safe_get_full_fp32_param(param)
        else:
            with deepspeed.zero.GatheredParameters([param]):
                weights[name] = param.detach().clone()
    return whole(weights)


# ---------------------------------------------------------------------------------------------------------
# shardwise


def go_on(path: Path, strategy: str, precision: str = "fp32") -> list[float]:
    """Load what a peer wrote, into another model with other settings, and train on."""
    sw.init()
    net = fresh(seed=1)
    optimizer = adamw(net)
    for group in optimizer.param_groups:
        group.update(lr=1.0, betas=(0.5, 0.5), weight_decay=3.0)
    model, sharded = sw.shard(net, optimizer, strategy, precision=precision)
    sw.load(path, model, sharded)
    return train(model, sharded, AFTER)
