"""Models and weights copied, saved, loaded and moved in the middle of a loop."""

import copy
import io
import pickle

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, start


@scenario()
def deepcopy_of_the_model(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    twin = copy.deepcopy(model)
    loop.train(model, optimizer, range(3, 5))
    with torch.no_grad():
        loop.log(twin(loop.inputs(9)).pow(2).mean())
    return model


@scenario()
def deepcopy_of_parameters(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    kept = [copy.deepcopy(param) for param in model.parameters()]
    loop.train(model, optimizer, range(3, 5))
    loop.check(*(param.detach() for param in kept))
    return model


@scenario()
def pickling_the_model(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    twin = pickle.loads(pickle.dumps(model))  # noqa: S301
    with torch.no_grad():
        loop.log(twin(loop.inputs(9)).pow(2).mean())
    return model


@scenario()
def state_dict_in_the_loop(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: loop.check(*model.state_dict().values()))
    return model


@scenario()
def state_dict_of_a_layer(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    loop.check(*model.layers[2].state_dict().values())
    return model


@scenario()
def best_state_kept_and_loaded(loop: Loop) -> nn.Module:
    """Early stopping: the best weights are kept as a deep copy of the state dict, and loaded at the end."""
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    best = copy.deepcopy(model.state_dict())
    loop.train(model, optimizer, range(3, 5))
    model.load_state_dict(best)
    loop.train(model, optimizer, range(5, 6))
    return model


@scenario()
def loading_a_state_dict_after_sharding(loop: Loop) -> nn.Module:
    torch.manual_seed(7)
    weights = Net().state_dict()
    model, optimizer = start(loop)
    model.load_state_dict(weights)
    loop.train(model, optimizer)
    return model


@scenario()
def loading_a_layer_after_sharding(loop: Loop) -> nn.Module:
    torch.manual_seed(7)
    weights = Net().layers[1].state_dict()
    model, optimizer = start(loop)
    model.layers[1].load_state_dict(weights)
    loop.train(model, optimizer)
    return model


@scenario()
def saving_a_parameter(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    file = io.BytesIO()
    torch.save(model.head.weight, file)
    file.seek(0)
    loop.check(torch.load(file, weights_only=True))
    return model


@scenario(equal=ALL)
def moving_to_the_same_place(loop: Loop) -> nn.Module:
    """Calls of `.to()` and its like that change nothing."""
    model, optimizer = start(loop)
    model = model.to("cpu").to(torch.float32).float()
    model.to(torch.device("cpu"), torch.float32)
    loop.train(model, optimizer)
    model.cpu()
    model.layers[0].to("cpu")
    loop.train(model, optimizer, range(3, 5))
    return model


@scenario()
def casting_to_double(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    model.double()
    x, y = loop.batch(5)
    loss = F.mse_loss(model(x.double()), y.double())
    loss.backward()
    optimizer.step()
    loop.log(loss)
    return model.float()
