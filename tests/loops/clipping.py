"""Gradients clipped, scaled and read whole between backward and step."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, SkipNet, adam, start
from tests.loops.training import backward


@scenario(equal=ALL)
def clipping_by_norm(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        loop.check(loop.clip(optimizer, 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def clipping_by_other_norms(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step, norm_type in enumerate([1.0, 2.0, 3.0, float("inf")]):
        backward(loop, model, step)
        loop.check(loop.clip(optimizer, 0.05, norm_type=norm_type))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def clipping_by_value(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        if loop.is_sharded:
            optimizer.clip_grad_value(0.01)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def clipping_that_finds_a_nan(loop: Loop) -> nn.Module:
    """`error_if_nonfinite` raises on every rank, the loop drops the gradients and goes on."""
    model, optimizer = start(loop)
    raised = []
    for step in range(3):
        x, y = loop.batch(step)
        if step == 1 and 1 in loop.ranks:
            y[-1] = float("nan")
        F.mse_loss(model(x), y).backward()
        try:
            loop.clip(optimizer, 1.0, error_if_nonfinite=True)
            optimizer.step()
        except RuntimeError:
            raised.append(step)
        optimizer.zero_grad()
    loop.check(raised)
    return model


@scenario(equal=ALL)
def clipping_without_a_gradient(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.check(loop.clip(optimizer, 1.0))
    loop.train(model, optimizer)
    return model


@scenario()
def torch_clip_grad_norm(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        loop.check(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def torch_clip_grad_norm_of_old_objects(loop: Loop) -> nn.Module:
    model = Net()
    params = list(model.parameters())
    model, optimizer = loop.shard(model, adam(model))
    for step in range(3):
        backward(loop, model, step)
        loop.check(nn.utils.clip_grad_norm_(params, 0.1, foreach=False))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def torch_clip_grad_value(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def torch_get_total_norm(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        loop.check(nn.utils.get_total_norm(grads))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def scaling_by_hand(loop: Loop) -> nn.Module:
    """Gradients divided by a number that is known after the backward, as when tokens are counted."""
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        if loop.is_sharded:
            optimizer.scale_grads(1 / (step + 2))
        else:
            for param in model.parameters():
                param.grad.mul_(1 / (step + 2))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def scaling_in_place(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        for param in model.parameters():
            param.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def scaling_by_foreach(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def norms_per_parameter(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        if loop.is_sharded:
            norms = sw.grad_norms(model)
        else:
            norms = {name: param.grad.norm() for name, param in model.named_parameters()}
        loop.check(*(norms[name] for name in sorted(norms)))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def whole_gradients_read(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        with loop.whole(model, grads=True):
            loop.check(*(param.grad for param in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def whole_gradients_changed(loop: Loop) -> nn.Module:
    """Gradient centralisation: the mean of every row is taken off."""
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        with loop.whole(model, grads=True, write=True):
            for param in model.parameters():
                if param.ndim > 1:
                    param.grad.sub_(param.grad.mean(1, keepdim=True))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def whole_gradients_of_unused_parameters(loop: Loop) -> nn.Module:
    """A gradient is None where no rank made one, and is there where one rank made it."""
    model, optimizer = start(loop, SkipNet())
    for step in range(2):
        x = loop.inputs(step)

        def loss_of(rank: int, x: Tensor = x) -> Tensor:
            rows = x if loop.is_sharded else x[4 * rank : 4 * rank + 4]
            return model(rows, (0, 1) if rank == 0 else (0,)).pow(2).mean()

        loss = loop.mean_of(loss_of)
        loss.backward()
        loop.log(loss)
        with loop.whole(model, grads=True):
            loop.check([param.grad is None for param in model.parameters()])
            loop.check(*(param.grad for param in model.layers[1].parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return model
