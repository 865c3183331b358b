"""Communicators that take the mean, as NCCL does, give what those that only sum give.

gloo only sums, so here it is made to average: what travels is divided before the sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.core import mesh
from shardwise.core.engine.guards import engine_of
from shardwise.core.wire import collectives
from tests.harness import Pool
from tests.support.strategies import NAMED, disk_for, slow_but


@contextmanager
def gloo_averages() -> Iterator[None]:
    backends, original = mesh.AVERAGING, collectives.Collective.start
    sums = {id(collectives._SCATTER[True]): collectives._SCATTER[False]}
    sums[id(collectives._ALL_REDUCE[True])] = collectives._ALL_REDUCE[False]

    def start(flight: collectives.Collective) -> None:
        *tensors, options = getattr(flight.queue, "args", [None])
        if id(options) in sums:
            queue = partial(flight.queue.func, *tensors, sums[id(options)])

            def divide_and_queue() -> Any:
                flight.buffer.div_(flight.channel.num_ranks)
                return queue()

            flight.queue = divide_and_queue
        original(flight)

    mesh.AVERAGING, collectives.Collective.start = ("gloo",), start
    try:
        yield
    finally:
        mesh.AVERAGING, collectives.Collective.start = backends, original


def train(strategy: Any, averages: bool, accumulates: bool, node_size: int) -> dict[str, torch.Tensor]:
    """Two backwards a step: properly, or as a user may have forgotten."""
    with gloo_averages() if averages else nullcontext():
        sw.init()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = sw.shard(
            model,
            optimizer,
            strategy,
            precision="fp32",
            units=["Sequential"],
            node_size=node_size,
            **disk_for(strategy),
        )
        assert engine_of(model).scale.wire_averages == averages
        for step in range(3):
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * step + micro + 100 * torch.distributed.get_rank())
                with sw.accumulate(model) if accumulates and micro == 0 else nullcontext():
                    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.clip_grad_norm(0.3)
            optimizer.step()
            optimizer.zero_grad()
        return sw.full_state_dict(model)


@pytest.mark.quick("ddp-True", "zero2-True", "zero3-True", "hpz-True", "zero3_nvme-True", "zeropp-True")
@pytest.mark.parametrize("accumulates", slow_but([True], [True, False]))
@pytest.mark.parametrize("strategy", [*NAMED, "zeropp", "ddp+grads_as=int8", "hsdp+grads_as=int8"])
def test_a_mean_on_the_wire_is_the_mean(run_ranks: Pool, strategy: str, accumulates: bool) -> None:
    for world, node_size in ((2, 2), (4, 2)):
        summed, averaged = (
            run_ranks(world, train, strategy, averages, accumulates, node_size)[0] for averages in (False, True)
        )
        for name, weight in summed.items():
            torch.testing.assert_close(averaged[name], weight, rtol=1e-5, atol=1e-6)
