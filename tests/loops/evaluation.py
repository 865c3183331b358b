"""Evaluation and copies of the model: EMA, SWA, momentum encoders, teachers."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, sgd, start


@scenario(equal=ALL)
def evaluation_between_steps(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            loop.log(model(loop.inputs(50 + step)).pow(2).mean())
        model.train()

    loop.train(model, optimizer, each=evaluate)
    return model


@scenario(equal=ALL)
def evaluation_in_inference_mode(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def evaluate(step: int) -> None:
        with torch.inference_mode():
            loop.log(model(loop.inputs(50 + step)).pow(2).mean())

    evaluate(-1)
    loop.train(model, optimizer, each=evaluate)
    return model


@scenario(equal=ALL)
def evaluation_with_gradients_on(loop: Loop) -> nn.Module:
    """A validation that forgot `no_grad`."""
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda step: loop.log(model(loop.inputs(50 + step)).pow(2).mean()))
    return model


@scenario(equal=ALL)
def evaluation_in_the_middle_of_an_accumulation(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(2):
        x, y = loop.batch(step)
        with loop.accumulate(model):
            F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            loop.log(model(loop.inputs(50 + step)).pow(2).mean())
        F.mse_loss(model(x.flip(1)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def evaluation_between_backward_and_step(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            loop.log(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def generating(loop: Loop) -> nn.Module:
    """A model that is called on its own output, as many times on every rank."""
    model, optimizer = start(loop)

    def generate(step: int) -> None:
        x = loop.inputs(50 + step)
        with torch.no_grad():
            for _ in range(4):
                x = torch.cat([x[:, 4:], model(x)], 1)
        loop.log(x.mean())

    loop.train(model, optimizer, each=generate)
    return model


# --- averages of weights


@scenario()
def ema_by_data(loop: Loop) -> nn.Module:
    """The average is kept in a plain copy, made before sharding and updated through `.data`."""
    model = Net()
    average = copy.deepcopy(model)
    model, optimizer = loop.shard(model, sgd(model))

    def update(_step: int) -> None:
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)

    loop.train(model, optimizer, each=update)
    loop.check(*(param.detach() for param in average.parameters()))
    return model


@scenario()
def ema_by_lerp(loop: Loop) -> nn.Module:
    model = Net()
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    model, optimizer = loop.shard(model, sgd(model))

    @torch.no_grad()
    def update(_step: int) -> None:
        for name, param in model.named_parameters():
            average[name].lerp_(param, 0.5)

    loop.train(model, optimizer, each=update)
    loop.check(*average.values())
    return model


@scenario()
def ema_by_foreach(loop: Loop) -> nn.Module:
    model = Net()
    params = list(model.parameters())
    average = [param.detach().clone() for param in params]
    model, optimizer = loop.shard(model, sgd(model))

    @torch.no_grad()
    def update(_step: int) -> None:
        torch._foreach_lerp_(average, params, 0.5)

    loop.train(model, optimizer, each=update)
    loop.check(*average)
    return model


@scenario()
def ema_of_clones_after_sharding(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    average = {name: param.clone().detach() for name, param in model.named_parameters()}

    def update(_step: int) -> None:
        for name, param in model.named_parameters():
            average[name] = 0.5 * average[name] + 0.5 * param.detach()

    loop.train(model, optimizer, each=update)
    loop.check(*average.values())
    return model


@scenario(equal=ALL)
def ema_inside_whole(loop: Loop) -> nn.Module:
    model = Net()
    average = copy.deepcopy(model)
    model, optimizer = loop.shard(model, sgd(model))

    def update(_step: int) -> None:
        with loop.whole(model), torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)

    loop.train(model, optimizer, each=update)
    loop.check(*(param.detach() for param in average.parameters()))
    return model


@scenario()
def ema_by_state_dicts(loop: Loop) -> nn.Module:
    model = Net()
    average = copy.deepcopy(model)
    model, optimizer = loop.shard(model, sgd(model))

    def update(_step: int) -> None:
        state = model.state_dict()
        average.load_state_dict({name: 0.5 * value + 0.5 * state[name] for name, value in average.state_dict().items()})

    loop.train(model, optimizer, each=update)
    loop.check(*average.state_dict().values())
    return model


@scenario()
def ema_swapped_in_for_evaluation(loop: Loop) -> nn.Module:
    model = Net()
    average = [param.detach().clone() for param in model.parameters()]
    model, optimizer = loop.shard(model, sgd(model))

    def evaluate(step: int) -> None:
        with loop.whole(model, write=True), torch.no_grad():
            kept = [param.detach().clone() for param in model.parameters()]
            for mine, param in zip(average, model.parameters(), strict=True):
                mine.lerp_(param, 0.5)
                param.copy_(mine)
        with torch.no_grad():
            loop.log(model(loop.inputs(50 + step)).pow(2).mean())
        with loop.whole(model, write=True), torch.no_grad():
            for old, param in zip(kept, model.parameters(), strict=True):
                param.copy_(old)

    loop.train(model, optimizer, each=evaluate)
    return model


@scenario()
def averaged_model_made_after_sharding(loop: Loop) -> nn.Module:
    """`AveragedModel` makes a deep copy of the sharded model."""
    model, optimizer = start(loop)
    average = AveragedModel(model)
    loop.train(model, optimizer, each=lambda _: average.update_parameters(model))
    with torch.no_grad():
        loop.log(average(loop.inputs(9)).pow(2).mean())
    return model


@scenario()
def averaged_model_made_before_sharding(loop: Loop) -> nn.Module:
    """The average is whole on every rank, the model is not."""
    model = Net()
    average = AveragedModel(model)
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer, each=lambda _: average.update_parameters(model))
    loop.check(*(param.detach() for param in average.parameters()))
    return model


@scenario()
def averaged_model_sharded_as_well(loop: Loop) -> list[nn.Module]:
    model = Net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model, optimizer = loop.shard(model, sgd(model))
    average, _ = loop.shard(average)
    loop.train(model, optimizer, each=lambda _: average.update_parameters(model))
    with torch.no_grad():
        loop.log(average(loop.inputs(9)).pow(2).mean())
    return [model]


@scenario(equal=ALL)
def averaged_model_inside_whole(loop: Loop) -> nn.Module:
    model = Net()
    average = AveragedModel(model)
    model, optimizer = loop.shard(model, sgd(model))

    def update(_step: int) -> None:
        with loop.whole(model):
            average.update_parameters(model)

    loop.train(model, optimizer, each=update)
    loop.check(*(param.detach() for param in average.parameters()))
    return model


@scenario()
def statistics_of_an_averaged_model(loop: Loop) -> nn.Module:
    """`update_bn` runs the model over the data in training mode, under `no_grad`."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model, optimizer = start(loop, model)
    for step in range(3):
        loss = model(loop.samples(step, 0)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    update_bn([loop.samples(step, 0) for step in range(3)], model)
    return model


# --- momentum encoders and teachers


def momentum_encoder(loop: Loop, sharded: bool) -> list[nn.Module]:
    query = Net()
    key = copy.deepcopy(query).requires_grad_(False)
    query, optimizer = loop.shard(query, sgd(query))
    if sharded:
        key, _ = loop.shard(key)

    @torch.no_grad()
    def update(_step: int) -> None:
        for q, k in zip(query.parameters(), key.parameters(), strict=True):
            k.data.mul_(0.9).add_(q.data, alpha=0.1)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = key(x.flip(1))
        return F.mse_loss(model(x), target) + F.mse_loss(model(x), y)

    loop.train(query, optimizer, loss_of=loss_of, each=update)
    return [query, key] if sharded else [query]


@scenario()
def momentum_encoder_between_two_sharded_models(loop: Loop) -> list[nn.Module]:
    """MoCo, DINO: both are sharded alike."""
    return momentum_encoder(loop, sharded=True)


@scenario()
def momentum_encoder_that_is_whole(loop: Loop) -> list[nn.Module]:
    return momentum_encoder(loop, sharded=False)


@scenario(equal=ALL)
def momentum_encoder_inside_whole(loop: Loop) -> list[nn.Module]:
    query = Net()
    key = copy.deepcopy(query).requires_grad_(False)
    query, optimizer = loop.shard(query, sgd(query))
    key, _ = loop.shard(key)

    def update(_step: int) -> None:
        with loop.whole(query), loop.whole(key, write=True), torch.no_grad():
            for q, k in zip(query.parameters(), key.parameters(), strict=True):
                k.mul_(0.9).add_(q, alpha=0.1)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = key(x.flip(1))
        return F.mse_loss(model(x), target + y)

    loop.train(query, optimizer, loss_of=loss_of, each=update)
    return [query, key]


@scenario()
def weights_copied_into_another_sharded_model(loop: Loop) -> list[nn.Module]:
    """Target networks in reinforcement learning: a hard update every other step."""
    model = Net()
    target = Net().requires_grad_(False)
    model, optimizer = loop.shard(model, sgd(model))
    target, _ = loop.shard(target)

    def update(step: int) -> None:
        if step % 2:
            target.load_state_dict(model.state_dict())

    loop.train(model, optimizer, range(4), loss_of=lambda m, x, y: F.mse_loss(m(x), target(x) + y), each=update)
    return [model, target]


@scenario(equal=ALL)
def a_frozen_teacher(loop: Loop) -> list[nn.Module]:
    torch.manual_seed(2)
    teacher = Net(6).requires_grad_(False).eval()
    teacher, _ = loop.shard(teacher)
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(out, target) + F.mse_loss(out, y)

    loop.train(model, optimizer, loss_of=loss_of)
    return [model, teacher]


@scenario(equal=ALL)
def a_frozen_critic(loop: Loop) -> list[nn.Module]:
    """Gradients flow through a frozen sharded model into the trained one: a perceptual loss."""
    critic = nn.Sequential(nn.Linear(4, 8), Net(3)).requires_grad_(False)
    critic, _ = loop.shard(critic)
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(critic(m(x)), critic(y)))
    return [model, critic]


@scenario()
def a_whole_teacher_of_the_same_parameters(loop: Loop) -> nn.Module:
    """The teacher is a deep copy made before sharding: nothing of it is shared."""
    model = Net()
    teacher = copy.deepcopy(model)
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x), teacher(x).detach() + y))
    loop.check(*(param.detach() for param in teacher.parameters()))
    return model
