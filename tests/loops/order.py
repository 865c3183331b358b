"""Forwards and backwards in other orders than one after the other."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, start


def finish_step(loop: Loop, optimizer: object, loss: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()
    loop.log(loss)


@scenario(equal=ALL)
def forward_without_gradients_between_forward_and_backward(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        out = model(x)
        with torch.no_grad():
            target = model(x + 0.1)
        loss = F.mse_loss(out, y) + F.mse_loss(out, target)
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def forward_without_gradients_before_forward(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        with torch.no_grad():
            target = model(x)
        loss = F.mse_loss(model(x + 0.1), target) + F.mse_loss(model(x), y)
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def evaluation_between_forward_and_backward(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        model.eval()
        with torch.inference_mode():
            loop.log(model(loop.inputs(50 + step)).pow(2).mean())
        model.train()
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def two_forwards_one_backward(loop: Loop) -> nn.Module:
    """Contrastive learning: two views, one loss."""
    model, optimizer = start(loop)
    for step in range(3):
        x, _ = loop.batch(step)
        a, b = model(x), model(x.flip(1))
        loss = (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1).mean()
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def two_forwards_two_backwards(loop: Loop) -> nn.Module:
    """The first forward's backward comes first."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        first = F.mse_loss(model(x), y)
        second = model(x.flip(1)).pow(2).mean()
        with loop.accumulate(model):
            first.backward()
        second.backward()
        finish_step(loop, optimizer, first + second)
    return model


@scenario(equal=ALL)
def two_forwards_and_the_last_backward_first(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        first = F.mse_loss(model(x), y)
        second = model(x.flip(1)).pow(2).mean()
        with loop.accumulate(model):
            second.backward()
        first.backward()
        finish_step(loop, optimizer, first + second)
    return model


@scenario(equal=ALL)
def three_forwards_and_one_loss_that_is_dropped(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        dropped = model(x * 2).pow(2).mean()
        loop.log(dropped)
        del dropped
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def forwards_with_gradients_that_are_never_used(loop: Loop) -> nn.Module:
    """The loop looks at the loss with gradients on and goes on without a backward."""
    model, optimizer = start(loop)
    for step in range(4):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        if step % 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def recursion_through_the_model(loop: Loop) -> nn.Module:
    """The output goes in again, three times, and one backward goes through all."""
    model, optimizer = start(loop)
    for step in range(2):
        x, y = loop.batch(step)
        state = x
        for _ in range(3):
            state = torch.cat([model(state), x[:, 4:]], 1)
        loss = F.mse_loss(state[:, :4], y)
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario()
def backward_twice_with_retain_graph(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario()
def two_losses_of_one_forward(loop: Loop) -> nn.Module:
    """Multi-task: each loss goes backward by itself through the same graph."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        out = model(x)
        a, b = F.mse_loss(out, y), out.abs().mean()
        a.backward(retain_graph=True)
        b.backward()
        finish_step(loop, optimizer, a + b)
    return model


@scenario()
def two_losses_of_one_forward_accumulated(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        out = model(x)
        a, b = F.mse_loss(out, y), out.abs().mean()
        with loop.accumulate(model):
            a.backward(retain_graph=True)
        b.backward()
        finish_step(loop, optimizer, a + b)
    return model


@scenario()
def backward_twice_without_retain_graph(loop: Loop) -> nn.Module:
    """An error of torch's in one process; the loop catches it and goes on."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        caught = False
        try:
            loss.backward()
        except RuntimeError:
            caught = True
        loop.check(caught)
        finish_step(loop, optimizer, loss)
    return model


@scenario()
def step_between_forward_and_backward(loop: Loop) -> nn.Module:
    """The graph is older than the weights: torch refuses this in one process as well."""
    model, optimizer = start(loop)
    x, y = loop.batch(0)
    old = F.mse_loss(model(x), y)
    loop.train(model, optimizer, range(1, 2))
    caught = False
    try:
        old.backward()
    except RuntimeError:
        caught = True
    loop.check(caught)
    optimizer.zero_grad()
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def gradient_penalty(loop: Loop) -> nn.Module:
    """WGAN-GP: the norm of the gradient of the inputs, with `create_graph`."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        x.requires_grad_(True)
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, y) + 0.1 * (gradient.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario()
def gradient_penalty_of_parameters(loop: Loop) -> nn.Module:
    """The squared gradient of all parameters is part of the loss."""
    model, optimizer = start(loop)

    def loss_of(rank: int) -> Tensor:
        x = loop.samples(0, rank)
        loss = F.mse_loss(model(x), x[:, :4])
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(grad.pow(2).sum() for grad in grads)

    loss = loop.mean_of(loss_of)
    loss.backward()
    finish_step(loop, optimizer, loss)
    return model


@scenario()
def backward_with_create_graph(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(2):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward(create_graph=True)
        finish_step(loop, optimizer, loss)
    return model


@scenario(tolerance=1e-3)  # sums that nearly cancel
def hessian_vector_product(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    x, y = loop.batch(0)
    params = list(model.parameters())
    grads = torch.autograd.grad(F.mse_loss(model(x), y), params, create_graph=True)
    products = torch.autograd.grad(sum(grad.sum() for grad in grads), params)
    for product in products:
        loop.log(product.sum())
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def backward_of_a_vector(loop: Loop) -> nn.Module:
    """`tensor.backward(gradient)`, of an output that is no scalar."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        out = model(x)
        out.backward((out - y).detach() / len(x))
        finish_step(loop, optimizer, (out - y).pow(2).mean())
    return model


@scenario(equal=ALL)
def gradient_cache(loop: Loop) -> nn.Module:
    """GradCache: features without a graph, the gradient of the loss at the features, then features with a graph."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        with torch.no_grad():
            features = model(x)
        features.requires_grad_(True)
        loss = F.mse_loss(features, y)
        loss.backward()
        (model(x) * features.grad).sum().backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def truncated_backpropagation_through_time(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    state = torch.zeros(4 * len(loop.ranks), 4)
    for step in range(4):
        x, y = loop.batch(step)
        state = model(torch.cat([state, x[:, 4:]], 1))
        loss = F.mse_loss(state, y)
        loss.backward()
        state = state.detach()
        finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def reinforcement(loop: Loop) -> nn.Module:
    """A rollout without gradients, then two epochs over it, as in PPO."""
    model, optimizer = start(loop)
    for step in range(2):
        x, y = loop.batch(step)
        with torch.no_grad():
            old = torch.cat([model(row.unsqueeze(0)) for row in x.split(1) for row in row])
        for _ in range(2):
            out = model(x)
            ratio = (out - old).exp().clamp(0.8, 1.2)
            loss = (ratio * (out - y).pow(2)).mean()
            loss.backward()
            finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def two_models_in_one_loss(loop: Loop) -> list[nn.Module]:
    first, second = Net(), Net(2)
    first, a = start(loop, first)
    second, b = start(loop, second)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(first(x) * second(x), y)
        loss.backward()
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
        loop.log(loss)
    return [first, second]


@scenario(equal=ALL)
def one_model_feeds_another(loop: Loop) -> list[nn.Module]:
    first, a = start(loop, nn.Sequential(Net(2), nn.Linear(4, 8)))
    second, b = start(loop, Net(2))
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(second(first(x)), y)
        loss.backward()
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
        loop.log(loss)
    return [first, second]


@scenario(equal=ALL)
def gradients_of_the_inputs(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        x.requires_grad_(True)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        loop.log(x.grad.sum())
        finish_step(loop, optimizer, loss)
    return model


@scenario(equal=ALL)
def set_grad_enabled_in_the_loop(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(4):
        training = step % 2 == 0
        model.train(training)
        x, y = loop.batch(step)
        with torch.set_grad_enabled(training):
            loss = F.mse_loss(model(x), y)
        if training:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def inputs_changed_in_place(loop: Loop) -> nn.Module:
    """Buffers of the data loader are filled again and again."""
    model, optimizer = start(loop)
    x, y = loop.batch(0)
    for step in range(3):
        new_x, new_y = loop.batch(step)
        x.copy_(new_x)
        y.copy_(new_y)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        finish_step(loop, optimizer, loss)
    return model


@scenario()
def backward_in_a_thread(loop: Loop) -> nn.Module:
    from concurrent.futures import ThreadPoolExecutor

    model, optimizer = start(loop)
    with ThreadPoolExecutor(1) as thread:
        for step in range(3):
            x, y = loop.batch(step)
            loss = thread.submit(lambda x=x, y=y: F.mse_loss(model(x), y)).result()
            thread.submit(loss.backward).result()
            finish_step(loop, optimizer, loss)
    return model
