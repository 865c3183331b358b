"""What a custom function keeps: a recompute stops before its product, and a block's inputs go with its backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from shardwise.core.saved_tensors import keep, kept


class Times(torch.autograd.Function):
    num_products = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        keep(ctx, x, weight)
        Times.num_products += 1
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = kept(ctx)
        return grad @ weight.t(), x.t() @ grad


def chain(num_blocks: int) -> tuple[Tensor, Tensor, list[StorageWeakRef]]:
    """Blocks of two products, their weight, and the memory of their inputs."""
    weight = torch.full((8, 8), 0.1, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=True)
    inputs = []
    for _ in range(num_blocks):
        inputs.append(StorageWeakRef(x.untyped_storage()))
        x = checkpoint(lambda x: Times.apply(Times.apply(x, weight).tanh(), weight), x, use_reentrant=False)
    return x.sum(), weight, inputs


def test_a_recompute_stops_before_the_last_product() -> None:
    loss, weight, _ = chain(1)
    Times.num_products = 0
    loss.backward()
    assert Times.num_products == 1, "the first one of the block, and not the second"
    assert weight.grad is not None


def test_inputs_of_a_block_go_when_its_backward_is_over() -> None:
    loss, _, inputs = chain(3)
    loss.backward()
    # The graph is still alive here: `loss` holds it.
    assert [ref.expired() for ref in inputs[1:]] == [True, True]
    assert loss.grad_fn is not None


def test_gradients_are_those_without_hooks() -> None:
    loss, weight, _ = chain(2)
    loss.backward()
    plain = torch.full((8, 8), 0.1, requires_grad=True)
    x = torch.ones(4, 8)
    for _ in range(2):
        x = (x @ plain).tanh() @ plain
    x.sum().backward()
    assert weight.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(weight.grad, plain.grad)


def test_a_second_backward_needs_the_graph() -> None:
    loss, _, _ = chain(1)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
