"""Gradients read, changed, dropped and accumulated."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import adam, start
from tests.loops.training import backward


@scenario()
def reading_gradients(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        loop.check(*(param.grad.norm() for param in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def gradient_is_none(loop: Loop) -> nn.Module:
    """`None` before the first backward and after `zero_grad`, something after a backward."""
    model, optimizer = start(loop)
    loop.check([param.grad is None for param in model.parameters()])
    for step in range(2):
        backward(loop, model, step)
        loop.check([param.grad is None for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        loop.check([param.grad is None for param in model.parameters()])
    return model


@scenario()
def looking_for_nans(loop: Loop) -> nn.Module:
    """A loop that skips the step if a gradient is not finite; in the second step one rank's is not."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        if step == 1 and 1 in loop.ranks:
            y[-1] = float("inf")
        F.mse_loss(model(x), y).backward()
        if all(bool(torch.isfinite(param.grad).all()) for param in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def assigning_gradients(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        for param in model.parameters():
            param.grad = param.grad.sign()
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def assigning_gradients_of_ones_own(loop: Loop) -> nn.Module:
    """Evolution strategies: gradients that no backward made."""
    model, optimizer = start(loop)
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.full(param.shape, 0.1 * (step + 1))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def dropping_gradients_by_hand(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(4):
        backward(loop, model, step)
        if step != 1:
            optimizer.step()
        for param in model.parameters():
            param.grad = None
    return model


@scenario()
def dropping_the_gradient_of_one_layer(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        for param in model.layers[1].parameters():
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def zero_grad_of_the_model(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        model.zero_grad()
        backward(loop, model, step)
        optimizer.step()
    return model


@scenario()
def zero_grad_of_a_layer(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        model.layers[1].zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def zero_grad_first(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        optimizer.zero_grad()
        backward(loop, model, step)
        optimizer.step()
    return model


@scenario()
def zero_grad_to_zeros(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=adam)
    for step in range(3):
        backward(loop, model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


@scenario(equal=ALL)
def forgetting_zero_grad(loop: Loop) -> nn.Module:
    """Gradients of all steps add up."""
    model, optimizer = start(loop)
    for step in range(3):
        backward(loop, model, step)
        optimizer.step()
    return model


@scenario(equal=ALL)
def accumulating_without_saying_so(loop: Loop) -> nn.Module:
    """Two backwards before a step, without `sw.accumulate`."""
    model, optimizer = start(loop)
    for step in range(2):
        backward(loop, model, 2 * step)
        backward(loop, model, 2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def accumulating(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        for index in range(2):
            with loop.accumulate(model):
                backward(loop, model, 10 * step + index)
        backward(loop, model, 10 * step + 9)
        loop.check(loop.clip(optimizer, 0.2))
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def accumulating_and_stepping_inside(loop: Loop) -> nn.Module:
    """The last micro-batch is inside `accumulate` too: its gradients were never reduced."""
    model, optimizer = start(loop)
    for step in range(3):
        with loop.accumulate(model):
            backward(loop, model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario()
def gradient_of_a_parameter_by_autograd_grad(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for grad in grads:
            loop.log(grad.sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def adaptive_weight_by_autograd_grad(loop: Loop) -> nn.Module:
    """VQ-GAN: two losses are balanced by their gradients at the last layer."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        out = model(x)
        a, b = F.mse_loss(out, y), out.abs().mean()
        last = model.head.weight
        (ga,) = torch.autograd.grad(a, last, retain_graph=True)
        (gb,) = torch.autograd.grad(b, last, retain_graph=True)
        loop.log(ga.sum())
        loop.log(gb.sum())
        loss = a + 0.1 * b
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def backward_into_chosen_inputs(loop: Loop) -> nn.Module:
    """`backward(inputs=...)` fills the gradients of some parameters only."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward(inputs=list(model.head.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def sharpness_aware_minimisation(loop: Loop) -> nn.Module:
    """SAM as it is usually written: climb by the gradient, take the gradient there, go back, step."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            grads = [param.grad for param in model.parameters()]
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            climbs = [0.05 * grad / norm for grad in grads]
            for param, climb in zip(model.parameters(), climbs, strict=True):
                param.add_(climb)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for param, climb in zip(model.parameters(), climbs, strict=True):
                param.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def sharpness_aware_minimisation_inside_whole(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        F.mse_loss(model(x), y).backward()
        with loop.whole(model, grads=True, write=True), torch.no_grad():
            grads = [param.grad.clone() for param in model.parameters()]
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.add_(0.05 * grad / norm)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with loop.whole(model, grads=True, write=True), torch.no_grad():
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.sub_(0.05 * grad / norm)
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model
