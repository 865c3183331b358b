"""One JSON, two engines: DeepSpeed trains from it, and we from what `from_deepspeed` makes of it. The same losses.

Two gloo ranks, 20 steps of the in-tree model. DeepSpeed makes optimizer and schedule itself; beside it our loop takes
`sw.shard(**migrated.words)` and the trainer's functions for everything else, with all parameters in one group, as
DeepSpeed is given them.

The largest relative errors that were seen: in fp32 2e-7 of a loss, 1.4e-6 of a norm, 3e-7 of a weight tensor, because
both sum in another order (bit for bit without clipping). With bf16 weights 0.2% of a loss: gradients are rounded to 8
bits before and after they are summed, in another order again.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.migrate.api import from_deepspeed
from shardwise.trainer.optimizers import learning_rate, set_learning_rate
from shardwise.trainer.settings import Settings
from tests.harness import Pool
from tests.support.deepspeed import DeepSpeed
from tests.support.models import BATCH, IN_TREE, MODELS, tokens
from tests.support.training import Outcome, relative, weight_error

# DeepSpeed's import alone warns of a dozen deprecations.
pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_STEPS = 20
WORLD = 2


def written(stage: int, num_micro: int = 1, **also: Any) -> dict[str, Any]:
    adam = {"lr": 5e-3, "betas": [0.9, 0.98], "eps": 1e-4, "weight_decay": 0.05, "torch_adam": True}
    warmup = {"warmup_num_steps": 4, "warmup_max_lr": 5e-3, "warmup_min_lr": 5e-4, "total_num_steps": NUM_STEPS}
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": num_micro,
        "gradient_clipping": 0.6,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
        **also,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1e6, **also.get("zero_optimization", {})},
    }


CPU = {"device": "cpu"}
# The host updates with DeepSpeed's own Adam, which it compiles.
ON_HOST: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.98], "eps": 1e-4, "weight_decay": 0.05}},
    "zero_optimization": {"offload_optimizer": CPU},
}
BF16 = {"bf16": {"enabled": True}}
IN_FP32 = {
    **{f"stage {stage}": written(stage) for stage in range(4)},
    **{f"stage {stage}, accumulated": written(stage, num_micro=3) for stage in range(4)},
    "stage 2, without clipping": written(2, gradient_clipping=0),
    **{f"stage {stage}, on the host": written(stage, **ON_HOST) for stage in (1, 2, 3)},
    "stage 3, all on the host": written(
        3, **ON_HOST | {"zero_optimization": {"offload_optimizer": CPU, "offload_param": CPU}}
    ),
    "stage 3, a second copy": written(3, zero_optimization={"zero_hpz_partition_size": 2}),
}
IN_BF16 = {
    "stage 3 in fp32, sent in bf16": written(3, communication_data_type="bf16"),
    **{f"stage {stage}": written(stage, **BF16) for stage in range(4)},
    "stage 2, accumulated": written(2, num_micro=3, **BF16),
    "stage 2, on the host": written(2, **BF16, **ON_HOST),
    "stage 1, summed in fp32": written(1, num_micro=3, data_types={"grad_accum_dtype": "fp32"}, **BF16),
    "stage 3, sent in fp32": written(3, communication_data_type="fp32", **BF16),
}


def train_with_deepspeed(config: dict[str, Any]) -> Outcome:
    import deepspeed

    rank, num_micro = dist.get_rank(), config["gradient_accumulation_steps"]
    spec = MODELS[IN_TREE]
    model = spec.fresh()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        total = torch.zeros(())
        for micro in range(num_micro):
            loss = spec.loss(engine, tokens(step, rank * num_micro + micro, WORLD * num_micro))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / num_micro
        losses.append(_mean(total))
        norm = engine.get_global_grad_norm()
        if norm is not None and config["gradient_clipping"]:
            norms.append(float(norm))
    params = dict(model.named_parameters())
    is_split = config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.GatheredParameters(list(params.values())) if is_split else nullcontext():
        weights = {name: param.detach().clone() for name, param in params.items()}
    return Outcome(losses, norms, weights)


def train_from_the_same(config: dict[str, Any]) -> Outcome:
    sw.init()
    migrated = from_deepspeed(config)
    settings = Settings(**migrated.settings)
    rank, num_micro = dist.get_rank(), settings.gradient_accumulation_steps or 1
    spec = MODELS[IN_TREE]
    model = spec.fresh()
    optimizer: Any = torch.optim.AdamW(
        model.parameters(),
        settings.learning_rate,
        (settings.adam_beta1, settings.adam_beta2),
        settings.adam_epsilon,
        settings.weight_decay,
    )
    if "bf16" in config and settings.strategy == "ddp":
        _step_with_zeros(optimizer)
    model, optimizer = sw.shard(model, optimizer, **migrated.words)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        set_learning_rate(optimizer, learning_rate(settings, step, NUM_STEPS))
        total = torch.zeros(())
        for micro in range(num_micro):
            with sw.accumulate(model) if micro < num_micro - 1 else nullcontext():
                loss = spec.loss(model, tokens(step, rank * num_micro + micro, WORLD * num_micro))
                (loss / num_micro).backward()
                total += loss.detach() / num_micro
        losses.append(_mean(total))
        if settings.max_grad_norm:
            norms.append(float(optimizer.clip_grad_norm(settings.max_grad_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, norms, sw.full_state_dict(model))


def _step_with_zeros(optimizer: torch.optim.Optimizer) -> None:
    """As DeepSpeed does once, in stage 0 with 16-bit weights: Adam's bias correction is a step ahead from then on."""
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def _mean(loss: torch.Tensor) -> float:
    total = loss.clone()
    dist.all_reduce(total)
    return float(total / WORLD)


def errors(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    assert len(ours.losses) == len(theirs.losses) == NUM_STEPS
    assert theirs.losses[-1] < theirs.losses[0], "nothing was learnt"
    return {
        "losses": max(map(relative, ours.losses, theirs.losses)),
        # Stage 0 does not tell its norm.
        "norms": max(map(relative, ours.norms, theirs.norms), default=0.0),
        "weights": weight_error(
            {name: value.float() for name, value in ours.weights.items()},
            {name: value.float() for name, value in theirs.weights.items()},
        ),
    }


@pytest.mark.parametrize("name", IN_FP32)
def test_fp32(run_ranks: Pool, on_deepspeed: DeepSpeed, name: str) -> None:
    ours = run_ranks(WORLD, train_from_the_same, IN_FP32[name])[0]
    found = errors(ours, on_deepspeed(train_with_deepspeed, IN_FP32[name]))
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("name", IN_BF16)
def test_bf16(run_ranks: Pool, on_deepspeed: DeepSpeed, name: str) -> None:
    ours = run_ranks(WORLD, train_from_the_same, IN_BF16[name])[0]
    found = errors(ours, on_deepspeed(train_with_deepspeed, IN_BF16[name]))
    assert found["losses"] <= 0.005, found
