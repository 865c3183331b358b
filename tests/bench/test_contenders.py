"""Equal work: in every precision all contenders have the losses of one process."""

import pytest
import torch
import torch.distributed as dist

from shardwise.bench.case import SHAPES, one_process
from shardwise.bench.compare import TOLERANCES
from shardwise.bench.contenders import find
from shardwise.bench.model import batches_of
from tests.bench.cases import smoke
from tests.harness import Pool

CONTENDERS = (
    "fsdp2",
    "fsdp2+offload",
    "fsdp1",
    "ddp",
    "shardwise:zero3",
    'shardwise:{"blocks.0":"shard_grad_op","*":"zero2"}',
)
NUM_STEPS = 3


def losses(contender: str, precision: str, reduce: str, shape: str) -> list[float]:
    """Mean over the ranks, nodes of two. Two micro-batches, clipping, checkpointing: whatever makes a step."""
    case = smoke(
        contender,
        world_size=dist.get_world_size(),
        shape=SHAPES[shape],
        precision=precision,
        reduce=reduce,
        micro_batches=2,
        clip=0.5,
        checkpointing="full",
    )
    rank = dist.get_rank()
    if contender == "plain":
        case, rank = one_process(case), 0
    run = find(contender)(case)
    steps = batches_of(case, rank, torch.device("cpu"), run.input_dtype, NUM_STEPS)
    seen = torch.stack([run.step(step) for step in steps]).float()
    dist.all_reduce(seen)
    return (seen / dist.get_world_size()).tolist()


@pytest.mark.quick("bf16-bf16-smoke")
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # FSDP1's
@pytest.mark.parametrize(
    ("precision", "reduce", "shape"),
    [
        ("fp32", "fp32", "smoke"),
        ("bf16", "fp32", "blocks-smoke"),
        ("bf16", "bf16", "smoke"),
        ("pure-bf16", "bf16", "smoke"),
    ],
)
def test_all_contenders_compute_the_same(run_ranks: Pool, precision: str, reduce: str, shape: str) -> None:
    expected = run_ranks(2, losses, "plain", precision, reduce, shape)[0]
    for contender in CONTENDERS:
        if contender == "ddp" and precision != "pure-bf16" and reduce == "bf16":
            continue  # its compression hook wants NCCL
        seen = run_ranks(2, losses, contender, precision, reduce, shape)[0]
        assert seen == pytest.approx(expected, rel=TOLERANCES[precision]), contender


@pytest.mark.quick("bf16-fp32")
@pytest.mark.peers
@pytest.mark.parametrize(("precision", "reduce"), [("fp32", "fp32"), ("bf16", "fp32")])
def test_hsdp_computes_the_same_on_two_nodes(run_ranks: Pool, precision: str, reduce: str) -> None:
    expected = run_ranks(4, losses, "plain", precision, reduce, "smoke")[0]
    seen = run_ranks(4, losses, "hsdp", precision, reduce, "smoke")[0]
    assert seen == pytest.approx(expected, rel=TOLERANCES[precision])
