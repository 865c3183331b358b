"""Kinds of optimizers: elementwise ones, and those that mix parameters."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, adam, sgd, start


def train_with(loop: Loop, make: Callable[[nn.Module], torch.optim.Optimizer], num_steps: int = 3) -> nn.Module:
    model, optimizer = start(loop, make=make)
    loop.train(model, optimizer, range(num_steps))
    return model


@scenario(equal=ALL)
def sgd_with_everything(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: sgd(m, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=False), 4)


@scenario(equal=ALL)
def parameters_that_change_groups(loop: Loop) -> nn.Module:
    """One moves to the group with another rate, then another one leaves the groups."""
    model = Net()
    params = list(model.parameters())
    groups = [{"params": params[:5], "lr": 0.1}, {"params": params[5:], "lr": 0.01}]
    model, optimizer = loop.shard(model, torch.optim.SGD(groups, momentum=0.9))
    first, second = (group["params"] for group in optimizer.param_groups)
    changes = {1: lambda: second.append(first.pop(0)), 3: first.pop}
    loop.train(model, optimizer, range(6), each=lambda step: changes.get(step, list)())
    return model


@scenario(equal=ALL)
def adam_with_amsgrad(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1))


@scenario(equal=ALL)
def rmsprop(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: torch.optim.RMSprop(m.parameters(), lr=0.003, momentum=0.5, centered=True))


@scenario(equal=ALL, tolerance=1e-4)
def adagrad(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01))


@scenario()
def averaged_sgd(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: torch.optim.ASGD(m.parameters(), lr=0.05))


@scenario(tolerance=1e-4)
def rprop(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: torch.optim.Rprop(m.parameters(), lr=0.01))


@scenario(tolerance=1e-4)
def adafactor(loop: Loop) -> nn.Module:
    """Keeps row and column statistics of every matrix."""
    return train_with(loop, lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05))


@scenario()
def adam_for_each_implementation(loop: Loop) -> list[nn.Module]:
    models = []
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        torch.manual_seed(0)
        models.append(train_with(loop, lambda m, o=options: torch.optim.AdamW(m.parameters(), lr=0.01, **o)))
    return models


@scenario(equal=ALL)
def learning_rate_as_a_tensor(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)))


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer that torch does not have."""

    def __init__(self, params: object, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                update = (0.9 * average + 0.1 * param.grad).mul(50).tanh()
                param.sub_(group["lr"] * update)
                average.lerp_(param.grad, 0.01)


@scenario(equal=ALL)
def an_elementwise_optimizer_of_ones_own(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: Lion(m.parameters()))


class Prodigal(torch.optim.Optimizer):
    """Estimates one step size from sums over all parameters, as Prodigy and D-Adaptation do."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"d": 0.01})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for param in params:
            self.state[param].setdefault("start", param.clone())
        numerator = sum(float((p.grad * (self.state[p]["start"] - p)).sum()) for p in params)
        denominator = sum(float(p.grad.abs().sum()) for p in params)
        for group in self.param_groups:
            group["d"] = max(group["d"], 0.5 * numerator / denominator, 0.5 / denominator)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["d"] * param.grad)


@scenario()
def step_size_from_all_parameters(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: Prodigal(m.parameters()), 4)


class ClippingSgd(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


@scenario()
def clipping_inside_step(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: ClippingSgd(m.parameters(), lr=0.5))


class MeanSgd(torch.optim.Optimizer):
    """Takes the mean over all gradients off each of them."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        mean = torch.cat([grad.flatten() for grad in grads]).mean()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * (param.grad - mean))


@scenario()
def mean_over_all_gradients(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: MeanSgd(m.parameters()))


class Lamb(torch.optim.Optimizer):
    """Scales every parameter's update by the ratio of two norms, as LARS and LAMB do."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    ratio = param.norm().clamp(0.1, 10) / (param.grad.norm() + 1e-6)
                    param.sub_(group["lr"] * ratio * param.grad)


@scenario()
def trust_ratios_per_parameter(loop: Loop) -> nn.Module:
    return train_with(loop, lambda m: Lamb(m.parameters()))


class GradNoise(torch.optim.SGD):
    """Adds noise from torch's generator, which is seeded alike everywhere."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(torch.randn(param.shape) * 0.05)
        super().step()


@scenario()
def noise_inside_step(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=lambda m: GradNoise(m.parameters(), lr=0.5))
    torch.manual_seed(11)
    loop.train(model, optimizer)
    return model


@scenario()
def lbfgs_with_a_closure(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3))
    for step in range(2):
        x, y = loop.batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@scenario()
def step_with_a_closure(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=adam)
    for step in range(3):
        x, y = loop.batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loop.log(optimizer.step(closure))
    return model
