"""`torch.func`, and weights that are given to a model from outside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, sgd, start


@scenario()
def functional_call_with_its_own_parameters(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, dict(model.named_parameters()), (x,)), y)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario()
def functional_call_with_other_weights(loop: Loop) -> nn.Module:
    """A forward with weights of one's own, between the steps."""
    model = Net()
    other = {name: param.detach() * 0.5 for name, param in model.named_parameters()}
    model, optimizer = loop.shard(model, sgd(model))

    def each(step: int) -> None:
        loop.log(functional_call(model, other, (loop.inputs(50 + step),)).pow(2).mean())

    loop.train(model, optimizer, each=each)
    return model


@scenario()
def functional_call_with_trained_weights_of_ones_own(loop: Loop) -> nn.Module:
    """A hypernetwork makes some of the weights."""
    model, optimizer = start(loop)
    own = nn.Parameter(torch.ones(4, 8) * 0.1)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, {"head.weight": own * 2}, (x,)), y)

    loop.train(model, optimizer, loss_of=loss_of)
    loop.log(0.0 if own.grad is None else own.grad.sum())
    return model


@scenario()
def functional_call_with_perturbed_weights(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: param + 0.01 for name, param in model.named_parameters()}
        return F.mse_loss(functional_call(model, weights, (x,)), y)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario()
def vmap_over_the_batch(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(vmap(m)(x), y))
    return model


@scenario()
def vmap_inside_the_model(loop: Loop) -> nn.Module:
    class Mapped(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = vmap(layer)(x)
            return self.head(x)

    model, optimizer = start(loop, Mapped())
    loop.train(model, optimizer)
    return model


@scenario()
def gradients_per_sample(loop: Loop) -> nn.Module:
    """Differential privacy: one gradient for each sample, clipped by itself."""
    model, optimizer = start(loop)
    weights = {name: param.detach() for name, param in model.named_parameters()}

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, weights, (x,)), y)

    x, y = loop.batch(0)
    for name, each in vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, x, y).items():
        if name.endswith("up.weight"):
            loop.log(each.flatten(1).norm(dim=1).mean())
    loop.train(model, optimizer)
    return model


@scenario()
def forward_mode_of_the_inputs(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def each(step: int) -> None:
        x = loop.inputs(50 + step)
        _, tangent = jvp(model, (x,), (torch.ones_like(x),))
        loop.log(tangent.mean())

    loop.train(model, optimizer, each=each)
    return model


@scenario()
def forward_mode_of_the_inputs_in_the_loss(loop: Loop) -> nn.Module:
    """Physics-informed: the derivative along the inputs is a part of the loss."""
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out, tangent = jvp(model, (x,), (torch.ones_like(x),))
        return F.mse_loss(out, y) + tangent.pow(2).mean()

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario()
def forward_mode_by_dual_numbers(loop: Loop) -> nn.Module:
    from torch.autograd import forward_ad

    model, optimizer = start(loop)

    def each(step: int) -> None:
        x = loop.inputs(50 + step)
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(x, torch.ones_like(x)))
            loop.log(forward_ad.unpack_dual(out).tangent.mean())

    loop.train(model, optimizer, each=each)
    return model


@scenario()
def jacobian_of_the_inputs(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, each=lambda step: loop.log(vmap(jacrev(model))(loop.inputs(50 + step)).pow(2).mean()))
    return model


@scenario()
def gradient_of_the_inputs_by_func(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def each(step: int) -> None:
        x, y = loop.batch(50 + step)
        loop.log(grad(lambda x: F.mse_loss(model(x), y))(x).sum())

    loop.train(model, optimizer, each=each)
    return model


@scenario()
def jacobian_by_autograd_functional(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def each(step: int) -> None:
        jacobian = torch.autograd.functional.jacobian(model, loop.samples(50 + step, 0, 2, 8))
        loop.check(jacobian)

    loop.train(model, optimizer, each=each)
    return model


@scenario()
def inner_loop_of_maml(loop: Loop) -> nn.Module:
    """A step on weights of one's own, and a gradient through it into the parameters."""
    model, optimizer = start(loop)

    def loss_of(rank: int) -> Tensor:
        x = loop.samples(0, rank)
        weights = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, weights, (x,)), x[:, :4])
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: value - 0.1 * g for (name, value), g in zip(weights.items(), grads, strict=True)}
        return F.mse_loss(functional_call(model, fast, (x.flip(1),)), x[:, :4])

    for _ in range(2):
        loss = loop.mean_of(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def an_ensemble_of_whole_models(loop: Loop) -> nn.Module:
    """Members are stacked before anything is sharded; the model that is sharded is none of them."""
    members = [Net(1) for _ in range(3)]
    params, buffers = stack_module_state(members)
    model, optimizer = start(loop)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        base = Net(1)
        votes = vmap(lambda p, b: functional_call(base, (p, b), (x,)), in_dims=(0, 0))(params, buffers)
        return F.mse_loss(model(x), y + votes.mean(0).detach())

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario()
def an_ensemble_of_sharded_layers(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    params, _ = stack_module_state(list(model.layers))
    loop.check(params["up.weight"])
    loop.train(model, optimizer)
    return model
