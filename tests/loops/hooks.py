"""Hooks on parameters, modules and tensors, registered before and after sharding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, sgd, start


@scenario(equal=ALL)
def gradient_hooks_that_read(loop: Loop) -> nn.Module:
    """A hook sees the local gradient, as under DDP; the mean over the ranks is the gradient of one process."""
    model, optimizer = start(loop)
    seen: dict[str, float] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.__setitem__(name, float(grad.sum())))
    loop.train(model, optimizer, each=lambda _: [loop.log(seen.pop(name)) for name in sorted(seen)] and None)
    return model


@scenario()
def gradient_hooks_before_sharding(loop: Loop) -> nn.Module:
    model = Net()
    seen: dict[str, float] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.__setitem__(name, float(grad.sum())))
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer, each=lambda _: [loop.log(seen.pop(name)) for name in sorted(seen)] and None)
    return model


@scenario(equal=ALL)
def gradient_hooks_that_scale(loop: Loop) -> nn.Module:
    """A learning rate of its own for a layer, by a hook that returns another gradient."""
    model, optimizer = start(loop)
    for param in model.layers[1].parameters():
        param.register_hook(lambda grad: 0.1 * grad)
    model.head.weight.register_hook(lambda grad: grad * torch.tensor([1.0, 0.0, 2.0, 1.0]).unsqueeze(1))
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def gradient_hooks_removed(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    handles = [param.register_hook(lambda grad: 0 * grad) for param in model.layers[2].parameters()]
    loop.train(model, optimizer, range(2))
    for handle in handles:
        handle.remove()
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario(equal=ALL)
def gradient_hooks_with_accumulation(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    calls = [0]

    def count(grad: Tensor) -> None:
        calls[0] += 1

    model.layers[1].up.weight.register_hook(count)
    for step in range(2):
        with loop.accumulate(model):
            micro(loop, model, 10 * step)
        micro(loop, model, 10 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
    loop.check(calls)
    return model


def micro(loop: Loop, model: nn.Module, index: int) -> None:
    x, y = loop.batch(index)
    loss = F.mse_loss(model(x), y) / 2
    loss.backward()
    loop.log(loss)


@scenario(equal=ALL)
def post_accumulate_hooks_that_count(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    seen: list[Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(seen.append)
    loop.train(model, optimizer, each=lambda _: loop.check(len(seen), [p.shape.numel() > 0 for p in seen]))
    return model


@scenario(equal=ALL)
def post_accumulate_hooks_that_read_gradients(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    sums: dict[int, float] = {}
    params = list(model.parameters())
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(lambda p, i=index: sums.__setitem__(i, float(p.grad.sum())))

    def each(_step: int) -> None:
        for index in range(len(params)):
            loop.log(sums.pop(index, 0.0))

    loop.train(model, optimizer, each=each)
    return model


@scenario()
def optimizer_step_in_backward(loop: Loop) -> nn.Module:
    """Every parameter is updated by its own optimizer as soon as its gradient is there, which is then dropped."""
    model = Net()
    model, _ = loop.shard(model)
    optimizers = {param: torch.optim.SGD([param], lr=0.05) for param in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def watched_like_wandb(loop: Loop) -> nn.Module:
    """What `wandb.watch(model, log="all")` does: forward hooks on the root, gradient hooks on every parameter."""
    model, optimizer = start(loop)
    means: list[float] = []

    def log_gradient(grad: Tensor) -> None:
        means.append(float(grad.data.mean()))

    def watch(module: nn.Module, _inputs: object, _output: object) -> None:
        for param in module.parameters():
            means.append(float(param.numel()))

    model.register_forward_hook(watch)
    handles = [param.register_hook(log_gradient) for param in model.parameters() if param.requires_grad]
    loop.train(model, optimizer, each=lambda _: loop.check(len(means)))
    for handle in handles:
        handle.remove()
    loop.train(model, optimizer, range(3, 4))
    return model


@scenario()
def forward_hooks_that_read_weights(loop: Loop) -> nn.Module:
    """A histogram of every parameter, taken in a forward hook on the root, as `wandb.watch` does."""
    model, optimizer = start(loop)

    def watch(module: nn.Module, _inputs: object, _output: object) -> None:
        for param in module.parameters():
            loop.check(param.data.abs().sum())

    model.register_forward_hook(watch)
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def forward_hooks_on_layers(loop: Loop) -> nn.Module:
    """Hooks that keep activations, and one that changes an output."""
    model, optimizer = start(loop)
    kept: list[Tensor] = []
    model.layers[1].register_forward_hook(lambda _m, _i, out: kept.append(out))
    model.layers[2].up.register_forward_hook(lambda _m, _i, out: out * 2)
    model.layers[3].register_forward_pre_hook(lambda _m, args: (args[0] + 0.1,))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        kept.clear()
        return F.mse_loss(model(x), y) + kept[0].pow(2).mean()

    loop.train(model, optimizer, loss_of=loss_of)
    return model


@scenario(equal=ALL)
def forward_hooks_that_read_their_own_weights(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    model.layers[1].up.register_forward_hook(lambda m, _i, _o: loop.check(m.weight.detach().clone()))
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def full_backward_hooks(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    norms: list[float] = []
    model.layers[1].register_full_backward_hook(lambda _m, _gi, go: norms.append(float(go[0].sum())))
    model.head.register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 0.5,))
    loop.train(model, optimizer, each=lambda _: loop.check(len(norms)))
    return model


@scenario(equal=ALL)
def full_backward_pre_hooks(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    model.layers[2].register_full_backward_pre_hook(lambda _m, go: (go[0] * 0.5,))
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def tensor_hooks_on_activations(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    model.layers[1].register_forward_hook(lambda _m, _i, out: out.register_hook(lambda grad: grad * 0.5) and None)
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def global_forward_hook(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    names: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, _i, _o: names.append(type(m).__name__))
    try:
        loop.train(model, optimizer)
    finally:
        handle.remove()
    loop.check(len(names))
    return model


@scenario(equal=ALL)
def saved_tensors_hooks_around_the_loop(loop: Loop) -> nn.Module:
    """Activations packed to another place, as `save_on_cpu` does."""
    model, optimizer = start(loop)
    with torch.autograd.graph.save_on_cpu():
        loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def saved_tensors_hooks_that_copy(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loop.train(model, optimizer)
    return model


@scenario()
def gradient_hook_that_raises_on_one_rank(loop: Loop) -> nn.Module:
    from tests.loops.loop import UserError

    model, optimizer = start(loop)

    def raise_it(grad: Tensor) -> None:
        if loop.is_sharded and loop.rank == 1:
            raise UserError("a hook of the user's")

    model.layers[1].up.weight.register_hook(raise_it)
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def hooks_on_optimizers(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    loop.train(model, optimizer, each=lambda _: loop.check(len(calls)))
    return model
