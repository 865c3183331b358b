"""Weights written between steps, in every way that torch allows."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, sgd, start


@scenario()
def writing_data(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: [param.data.mul_(0.9) for param in model.parameters()] and None)
    return model


@scenario()
def assigning_data(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def write(_step: int) -> None:
        for param in model.parameters():
            param.data = param.data * 0.9

    loop.train(model, optimizer, each=write)
    return model


@scenario()
def writing_under_no_grad(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    @torch.no_grad()
    def write(_step: int) -> None:
        for param in model.parameters():
            param.mul_(0.9)

    loop.train(model, optimizer, each=write)
    return model


@scenario()
def writing_detached(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: [param.detach().mul_(0.9) for param in model.parameters()] and None)
    return model


@scenario()
def writing_numpy(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def write(_step: int) -> None:
        for param in model.parameters():
            array = param.detach().numpy()
            array *= 0.9

    loop.train(model, optimizer, each=write)
    return model


@scenario()
def writing_a_row(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net())

    @torch.no_grad()
    def write(_step: int) -> None:
        model.layers[0].up.weight[3] = 0.5
        model.head.bias[0].fill_(0.25)

    loop.train(model, optimizer, each=write)
    return model


@scenario()
def writing_by_foreach(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    @torch.no_grad()
    def write(_step: int) -> None:
        torch._foreach_mul_(list(model.parameters()), 0.9)

    loop.train(model, optimizer, each=write)
    return model


@scenario()
def writing_old_objects(loop: Loop) -> nn.Module:
    model = Net()
    params = list(model.parameters())
    model, optimizer = loop.shard(model, sgd(model))

    @torch.no_grad()
    def write(_step: int) -> None:
        for param in params:
            param.mul_(0.9)

    loop.train(model, optimizer, each=write)
    return model


@scenario()
def writing_a_vector(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def write(_step: int) -> None:
        vector = parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(vector * 0.9, model.parameters())

    loop.train(model, optimizer, each=write)
    return model


@scenario()
def writing_a_vector_of_ones_own(loop: Loop) -> nn.Module:
    model = Net()
    vector = parameters_to_vector(model.parameters()).detach() * 0.5
    model, optimizer = loop.shard(model, sgd(model))
    vector_to_parameters(vector, model.parameters())
    loop.train(model, optimizer)
    return model


@scenario()
def initialising_after_sharding(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 0.125)
            nn.init.eye_(module.weight)
    loop.train(model, optimizer)
    return model


@scenario()
def random_initialisation_after_sharding(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    torch.manual_seed(3)
    model.apply(lambda module: nn.init.xavier_uniform_(module.weight) if isinstance(module, nn.Linear) else None)
    loop.train(model, optimizer)
    return model


@scenario()
def reset_parameters_of_a_layer(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    torch.manual_seed(3)
    model.head.reset_parameters()
    loop.train(model, optimizer, range(3, 5))
    return model


@scenario()
def clipping_weights(loop: Loop) -> nn.Module:
    """Weight clipping as in WGAN."""
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: [param.data.clamp_(-0.1, 0.1) for param in model.parameters()] and None)
    return model


@scenario()
def normalising_a_weight(loop: Loop) -> nn.Module:
    """A prototype layer whose rows have length one after every step, as in SwAV."""
    model, optimizer = start(loop)

    @torch.no_grad()
    def write(_step: int) -> None:
        weight = F.normalize(model.head.weight.data.clone(), dim=1, p=2)
        model.head.weight.copy_(weight)

    loop.train(model, optimizer, each=write)
    return model


@scenario()
def copying_from_another_model(loop: Loop) -> nn.Module:
    torch.manual_seed(5)
    other = Net()
    model, optimizer = start(loop)

    @torch.no_grad()
    def write(_step: int) -> None:
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(0.5 * theirs)

    loop.train(model, optimizer, each=write)
    return model


@scenario(equal=ALL)
def writing_inside_whole(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def write(_step: int) -> None:
        with loop.whole(model, write=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
            model.layers[0].up.weight[3] = 0.5

    loop.train(model, optimizer, each=write)
    return model
