"""What people look at between steps: sizes, values, identities of parameters."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, sgd, start


@scenario(equal=ALL)
def same_objects_as_before(loop: Loop) -> nn.Module:
    model = Net()
    before = dict(model.named_parameters())
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer)
    after = dict(model.named_parameters())
    loop.check(list(before) == list(after), [before[name] is after[name] for name in before])
    loop.train(model, optimizer, range(3, 5))
    return model


@scenario(equal=ALL)
def sizes_and_kinds(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def look(_step: int = 0) -> None:
        params = list(model.parameters())
        loop.check(sum(p.numel() for p in params), [list(p.shape) == list(p.size()) for p in params])
        loop.check([float(s) for p in params for s in p.shape], [p.ndim for p in params], [len(p) for p in params])
        loop.check([p.dtype == torch.float32 and p.device.type == "cpu" and p.is_leaf for p in params])
        loop.check([p.requires_grad and isinstance(p, nn.Parameter) for p in params])

    look()
    loop.train(model, optimizer, each=look)
    return model


@scenario(equal=ALL)
def sizes_of_old_objects(loop: Loop) -> nn.Module:
    model = Net()
    params = list(model.parameters())
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer)
    loop.check(sum(p.numel() for p in params), [float(s) for p in params for s in p.shape])
    return model


@scenario(equal=ALL)
def printing(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def show(_step: int) -> None:
        texts = [repr(model), str(model), *(f"{p!r} {p}" for p in model.parameters())]
        loop.check([len(text) > 0 for text in texts])

    loop.train(model, optimizer, each=show)
    return model


@scenario(equal=ALL)
def keys_of_dicts_and_sets(loop: Loop) -> nn.Module:
    model = Net()
    names = {param: name for name, param in model.named_parameters()}
    no_decay = {param for name, param in model.named_parameters() if name.endswith("bias")}
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer)
    loop.check([names.get(param) == name for name, param in model.named_parameters()])
    loop.check([param in no_decay for param in model.parameters()], len({*no_decay, *model.parameters()}))
    loop.check([id(param) in {id(p) for p in names} for param in model.parameters()])
    return model


@scenario()
def comparing(loop: Loop) -> nn.Module:
    model = Net()
    start_values = {name: param.detach().clone() for name, param in model.named_parameters()}
    model, optimizer = loop.shard(model, sgd(model))
    loop.check([torch.equal(param, start_values[name]) for name, param in model.named_parameters()])
    loop.train(model, optimizer)
    loop.check([torch.equal(param, start_values[name]) for name, param in model.named_parameters()])
    loop.check([bool((param == param.detach()).all()) for param in model.parameters()])
    return model


@scenario()
def reading_norms(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def read(_step: int) -> None:
        with torch.no_grad():
            loop.check(*(param.norm() for param in model.parameters()))

    loop.train(model, optimizer, each=read)
    return model


@scenario()
def reading_data(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: loop.check(*(param.data.abs().mean() for param in model.parameters())))
    return model


@scenario()
def reading_detached(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: loop.check(*(p.detach().float().std() for p in model.parameters())))
    return model


@scenario()
def reading_as_numpy(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: loop.check(*(p.detach().numpy().mean() for p in model.parameters())))
    return model


@scenario()
def reading_as_lists_and_items(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def read(_step: int) -> None:
        loop.check(model.head.bias.tolist(), model.head.weight[0, 0].item(), float(model.layers[1].norm.weight[3]))

    loop.train(model, optimizer, each=read)
    return model


@scenario()
def reading_a_row(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: loop.check(model.layers[0].up.weight[3], model.embed.weight[:, :2]))
    return model


@scenario()
def reading_in_a_forward_of_another_module(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def read(_step: int) -> None:
        with torch.no_grad():
            loop.check(F.linear(torch.ones(2, 8), model.layers[2].up.weight, model.layers[2].up.bias))

    loop.train(model, optimizer, each=read)
    return model


@scenario()
def parameters_as_a_vector(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda _: loop.check(parameters_to_vector(model.parameters())))
    return model


@scenario(equal=ALL)
def reading_inside_whole(loop: Loop) -> nn.Module:
    model = Net()
    old = list(model.parameters())
    model, optimizer = loop.shard(model, sgd(model))

    def read(_step: int) -> None:
        with loop.whole(model):
            loop.check(*(param.detach() for param in model.parameters()), *(param.detach() for param in old))

    loop.train(model, optimizer, each=read)
    return model
