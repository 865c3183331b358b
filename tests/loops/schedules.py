"""Schedules, parameter groups, several optimizers, and the state of optimizers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, adam, sgd, start

# --- schedules and groups


@scenario(equal=ALL)
def schedules(loop: Loop) -> list[nn.Module]:
    makers: list[Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = [
        lambda o: lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=5),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
    ]
    models = []
    for make in makers:
        torch.manual_seed(0)
        model, optimizer = start(loop, Net(1), lambda m: sgd(m, momentum=0.9))
        schedule = make(optimizer)
        loop.train(model, optimizer, range(3), each=lambda _, schedule=schedule: schedule.step())
        loop.check(schedule.get_last_lr())
        models.append(model)
    return models


@scenario(equal=ALL)
def schedule_by_the_loss(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    loop.train(model, optimizer, each=lambda _: schedule.step(1.0))
    loop.check(optimizer.param_groups[0]["lr"])
    return model


@scenario()
def schedule_of_the_old_optimizer(loop: Loop) -> nn.Module:
    """The schedule was made before sharding, so it has the user's optimizer."""
    model = Net()
    optimizer = sgd(model)
    schedule = lr_scheduler.StepLR(optimizer, 1, 0.1)
    model, optimizer = loop.shard(model, optimizer)
    loop.train(model, optimizer, each=lambda _: schedule.step())
    return model


@scenario(equal=ALL)
def learning_rate_by_hand(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=lambda m: sgd(m, momentum=0.9))

    def each(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["momentum"] = 0.5
            group["weight_decay"] = 0.1 * step

    loop.train(model, optimizer, range(4), each=each)
    return model


@scenario(equal=ALL)
def groups_with_settings_of_their_own(loop: Loop) -> nn.Module:
    """No decay for biases and norms, a smaller rate for the lower layers, none for the head."""
    model = Net()
    groups = [
        {"params": [p for p in model.layers.parameters() if p.ndim > 1], "weight_decay": 0.1, "lr": 0.005},
        {"params": [p for p in model.layers.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        {"params": list(model.embed.parameters()), "lr": 0.0},
        {"params": list(model.head.parameters()), "betas": (0.5, 0.9)},
    ]
    model, optimizer = loop.shard(model, torch.optim.AdamW(groups, lr=0.01))
    loop.train(model, optimizer)
    optimizer.param_groups[2]["lr"] = 0.02
    loop.train(model, optimizer, range(3, 5))
    return model


@scenario()
def looking_at_groups(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    loop.check(len(params), sum(param.numel() for param in params))
    loop.check([param is params[i] for i, param in enumerate(model.parameters()) if i < len(params)])
    return model


@scenario()
def adding_a_group_that_was_frozen(loop: Loop) -> nn.Module:
    """Unfreezing as Lightning does it: a group is added for what was frozen."""
    model = Net()
    model.layers[:3].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, optimizer = loop.shard(model, optimizer)
    loop.train(model, optimizer, range(2))
    model.layers[2].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.layers[2].parameters()), "lr": 0.01})
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def adding_a_group_of_new_parameters(loop: Loop) -> nn.Module:
    """A parameter that the optimizer has and the model has not."""
    model, optimizer = start(loop)
    temperature = nn.Parameter(torch.tensor(1.0))
    optimizer.add_param_group({"params": [temperature], "lr": 0.1})
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x) * temperature, y))
    loop.check(temperature.detach())
    return model


@scenario()
def temperature_outside_the_model(loop: Loop) -> nn.Module:
    model = Net()
    temperature = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.05)
    model, optimizer = loop.shard(model, optimizer)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x) * temperature, y))
    loop.check(temperature.detach())
    return model


@scenario(equal=ALL)
def parameters_without_an_optimizer(loop: Loop) -> nn.Module:
    """Trainable parameters that the optimizer was not given stay as they are."""
    model = Net()
    optimizer = torch.optim.SGD([*model.layers.parameters()], lr=0.05)
    model, optimizer = loop.shard(model, optimizer)
    loop.train(model, optimizer)
    return model


# --- more than one optimizer


@scenario(equal=ALL)
def two_optimizers(loop: Loop) -> nn.Module:
    """Matrices with one, the rest with another."""
    model = Net()
    a = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.05, momentum=0.9)
    b = torch.optim.AdamW([p for p in model.parameters() if p.ndim <= 1], lr=0.01)
    model, (a, b) = loop.shard(model, [a, b])
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def two_optimizers_by_layer(loop: Loop) -> nn.Module:
    model = Net()
    a = torch.optim.AdamW([*model.layers.parameters()], lr=0.01)
    b = torch.optim.SGD([*model.embed.parameters(), *model.head.parameters()], lr=0.05)
    schedules = []
    model, optimizers = loop.shard(model, [a, b])
    schedules = [lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def two_optimizers_in_turn(loop: Loop) -> nn.Module:
    """Each steps on every second batch; the gradients of the other are thrown away."""
    model = Net()
    a = torch.optim.AdamW([*model.layers.parameters()], lr=0.01)
    b = torch.optim.SGD([*model.embed.parameters(), *model.head.parameters()], lr=0.05)
    model, optimizers = loop.shard(model, [a, b])
    for step in range(4):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizers[step % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def two_optimizers_with_the_same_parameters(loop: Loop) -> nn.Module:
    model = Net()
    model, (a, b) = loop.shard(model, [sgd(model), adam(model)])
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        a.step()
        b.step()
        a.zero_grad()
        loop.log(loss)
    return model


@scenario()
def second_optimizer_that_was_not_sharded(loop: Loop) -> nn.Module:
    """Both were built before sharding, and only one was given to it."""
    model = Net()
    a = torch.optim.SGD([*model.layers.parameters()], lr=0.05)
    b = torch.optim.SGD([*model.embed.parameters(), *model.head.parameters()], lr=0.05)
    model, a = loop.shard(model, a)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
        loop.log(loss)
    return model


@scenario()
def the_old_optimizer_is_stepped(loop: Loop) -> nn.Module:
    """The loop goes on with the optimizer that it had, not with the one that came back."""
    model = Net()
    optimizer = sgd(model)
    model, _ = loop.shard(model, optimizer)
    loop.train(model, optimizer)
    return model


@scenario()
def optimizer_built_after_sharding(loop: Loop) -> nn.Module:
    model, _ = loop.shard(Net())
    optimizer = sgd(model)
    loop.train(model, optimizer)
    return model


@scenario()
def second_optimizer_built_after_sharding(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    optimizer = adam(model)  # the second stage of the training
    loop.train(model, optimizer, range(2, 4))
    return model


# --- state


@scenario()
def state_of_a_parameter(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=adam)
    loop.train(model, optimizer)
    for param in model.parameters():
        loop.check(optimizer.state[param]["exp_avg"].norm())
    return model


@scenario()
def resetting_the_state(loop: Loop) -> nn.Module:
    """Adam forgets its moments at a restart."""
    model, optimizer = start(loop, make=adam)
    loop.train(model, optimizer, range(2))
    optimizer.state.clear()
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def state_dict_of_the_optimizer(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=adam)
    loop.train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def lookahead(loop: Loop) -> nn.Module:
    """Slow weights that the loop keeps beside the fast ones."""
    model, optimizer = start(loop)
    slow = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def each(step: int) -> None:
        if step % 2:
            for kept, param in zip(slow, model.parameters(), strict=True):
                kept.lerp_(param, 0.5)
                param.copy_(kept)

    loop.train(model, optimizer, range(4), each=each)
    return model


@scenario(equal=ALL)
def stepping_without_a_backward(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=adam)
    optimizer.step()
    loop.train(model, optimizer, range(2))
    optimizer.step()
    optimizer.zero_grad()
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def stepping_twice(loop: Loop) -> nn.Module:
    """Two steps with the same gradient."""
    model, optimizer = start(loop)
    for step in range(2):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def gradient_scaler(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def gradient_scaler_with_clipping(loop: Loop) -> nn.Module:
    """Unscale, clip, step; in the second step one rank's loss is infinite, and the step is left out everywhere."""
    model, optimizer = start(loop)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for step in range(3):
        x, y = loop.batch(step)
        if step == 1 and 1 in loop.ranks:
            y[-1] = float("inf")
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        loop.clip(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loop.check(scaler.get_scale())
    return model
