"""The same training as the libraries people come from: torch's DistributedDataParallel and fully_shard, DeepSpeed.

All run the recipe of `tests.support.training` on the in-tree model, in a world of two unless said otherwise.

- DistributedDataParallel: bit for bit. It adds the same two gradients and halves them.
- fully_shard without clipping: bit for bit, in fp32 and in bf16.
- fully_shard and DeepSpeed with clipping: relative 1e-5 in fp32. They compute the norm, and so the factor of
  clipping, in fp32 and shard by shard, which moves the last bits of every weight in every step.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import Pool
from tests.support.deepspeed import DeepSpeed
from tests.support.models import IN_TREE, MODELS, tokens
from tests.support.strategies import STRATEGIES, slow_but
from tests.support.training import (
    CLIP,
    NUM_STEPS,
    Outcome,
    adamw,
    assert_close,
    assert_same,
    train_alone,
    train_sharded,
)

pytestmark = pytest.mark.peers

TOLERANCE = 1e-5


def ours(pool: Pool, world: int, strategy: str, **options: object) -> Outcome:
    return pool(world, train_sharded, IN_TREE, STRATEGIES[strategy], **options)[0]


def norm_and_clip(params: list[nn.Parameter]) -> float:
    """Clipping whose norm is a sum of squares in fp64, as it would be computed on paper."""
    grads = [param.grad for param in params if param.grad is not None]
    norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().float()
    factor = torch.clamp(CLIP / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return float(norm)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


# ---------------------------------------------------------------------------------------------------------
# DistributedDataParallel


def train_ddp(num_micro: int, clip: bool) -> Outcome:
    rank, world = dist.get_rank(), dist.get_world_size()
    spec = MODELS[IN_TREE]
    model = spec.fresh()
    wrapped = nn.parallel.DistributedDataParallel(model)
    params = list(model.parameters())
    optimizer = adamw(params)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        total = torch.zeros(())
        for micro in range(num_micro):
            batch = tokens(step, rank * num_micro + micro, world * num_micro)
            with wrapped.no_sync() if micro < num_micro - 1 else nullcontext():
                loss = spec.loss(wrapped, batch) / num_micro
                loss.backward()
                total += loss.detach()
        losses.append(mean_over_ranks(total))
        if clip:
            norms.append(norm_and_clip(params))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, norms, dict(model.state_dict()))


def test_ddp_is_one_process_with_two_slices(run_ranks: Pool) -> None:
    """What every strategy is compared with, bit for bit, in `test_parity`."""
    assert_same(peer_of(run_ranks, 1, True), train_alone(IN_TREE, num_slices=2))


@pytest.mark.parametrize("strategy", slow_but(("ddp", "zero3"), ["ddp", "zero1", "zero2", "zero3", "hpz"]))
def test_ddp_bit_for_bit(run_ranks: Pool, strategy: str) -> None:
    peer = peer_of(run_ranks, 1, False)
    assert_same(ours(run_ranks, 2, strategy, precision="fp32", node_size=1, clip=None), peer)


@pytest.mark.parametrize("strategy", slow_but(("zero3",), ["ddp", "zero3"]))
def test_ddp_with_clipping_bit_for_bit(run_ranks: Pool, strategy: str) -> None:
    assert_same(ours(run_ranks, 2, strategy, precision="fp32"), peer_of(run_ranks, 1, True))


@pytest.mark.parametrize("strategy", slow_but(("zero1",), ["ddp", "zero1"]))
def test_ddp_with_accumulation_bit_for_bit(run_ranks: Pool, strategy: str) -> None:
    """Where gradients rest whole, micro-batches are added before the ranks are: as under `no_sync`."""
    peer = peer_of(run_ranks, 3, True)
    assert_same(ours(run_ranks, 2, strategy, precision="fp32", num_micro=3), peer)


_peers: dict[tuple[int, bool], Outcome] = {}


def peer_of(pool: Pool, num_micro: int, clip: bool) -> Outcome:
    key = (num_micro, clip)
    if key not in _peers:
        _peers[key] = pool(2, train_ddp, num_micro, clip)[0]
    return _peers[key]


# ---------------------------------------------------------------------------------------------------------
# fully_shard


def train_fully_shard(precision: str, node_size: int | None, reshard_after_forward: bool, clip: bool) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    if node_size is None:
        mesh = init_device_mesh("cpu", (world,))
    else:
        shape, names = (world // node_size, node_size), ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    compute = torch.bfloat16 if precision == "bf16" else torch.float32
    # Its default casts what goes from block to block as well, the table of rotary positions among it; ours does not.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    spec = MODELS[IN_TREE]
    model = spec.fresh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    optimizer = adamw(list(model.parameters()))
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = spec.loss(model, tokens(step, rank, world))
        loss.backward()
        losses.append(mean_over_ranks(loss))
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return Outcome(losses, norms, weights)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    slow_but(
        [("zero3", "bf16")],
        [(strategy, precision) for strategy in ("zero3", "shard_grad_op") for precision in ("fp32", "bf16")],
    ),
)
def test_fully_shard_bit_for_bit(run_ranks: Pool, strategy: str, precision: str) -> None:
    peer = run_ranks(2, train_fully_shard, precision, None, strategy == "zero3", clip=False)[0]
    assert_same(ours(run_ranks, 2, strategy, precision=precision, clip=None), peer)


def test_fully_shard_with_clipping(run_ranks: Pool) -> None:
    peer = run_ranks(2, train_fully_shard, "fp32", None, True, clip=True)[0]
    assert_close(ours(run_ranks, 2, "zero3", precision="fp32"), peer, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hsdp"])
def test_hybrid_fully_shard(run_ranks: Pool, strategy: str) -> None:
    peer = run_ranks(4, train_fully_shard, "fp32", 2, strategy == "hsdp", clip=True)[0]
    assert_close(ours(run_ranks, 4, strategy, precision="fp32", node_size=2), peer, TOLERANCE)


# ---------------------------------------------------------------------------------------------------------
# DeepSpeed


def train_deepspeed(stages: list[int]) -> list[Outcome]:
    return [_deepspeed_stage(stage) for stage in stages]


def _deepspeed_stage(stage: int) -> Outcome:
    import deepspeed

    rank, world = dist.get_rank(), dist.get_world_size()
    spec = MODELS[IN_TREE]
    model = spec.fresh()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(list(model.parameters())), config=config)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = spec.loss(engine, tokens(step, rank, world))
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
        norms.append(float(engine.get_global_grad_norm()))
    params = dict(model.named_parameters())
    gathered = deepspeed.zero.GatheredParameters(list(params.values())) if stage == 3 else nullcontext()
    with gathered:
        weights = {name: param.detach().clone() for name, param in params.items()}
    return Outcome(losses, norms, weights)


@pytest.fixture(scope="module")
def deepspeed_outcomes(on_deepspeed: DeepSpeed) -> dict[int, Outcome]:
    return dict(zip([1, 2, 3], on_deepspeed(train_deepspeed, [1, 2, 3]), strict=True))


# Its import alone warns of a dozen deprecations.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stage", "strategy"), [(1, "zero1"), (2, "zero2"), (3, "zero3")])
def test_deepspeed(run_ranks: Pool, deepspeed_outcomes: dict[int, Outcome], stage: int, strategy: str) -> None:
    own = ours(run_ranks, 2, strategy, precision="fp32", node_size=1)
    assert_close(own, deepspeed_outcomes[stage], TOLERANCE)
