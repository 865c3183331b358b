"""`requires_grad` that changes after sharding. A frozen parameter is one that no rank used."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Net, adam, sgd, start


def toggle(module: nn.Module, on: bool) -> None:
    for param in module.parameters():
        param.requires_grad_(on)


@scenario(equal=ALL)
def freezing_before_sharding(loop: Loop) -> nn.Module:
    model = Net()
    toggle(model.layers[:2], False)
    model, optimizer = loop.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def freezing_a_layer_for_a_while(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=adam)
    loop.train(model, optimizer, range(2))
    toggle(model.layers[1], False)
    loop.train(model, optimizer, range(2, 4))
    toggle(model.layers[1], True)
    loop.train(model, optimizer, range(4, 6))
    return model


@scenario(equal=ALL)
def freezing_single_parameters_for_a_while(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, make=adam)
    loop.train(model, optimizer, range(2))
    model.layers[1].up.weight.requires_grad = False
    model.head.bias.requires_grad_(False)
    loop.train(model, optimizer, range(2, 4))
    model.layers[1].up.weight.requires_grad = True
    loop.train(model, optimizer, range(4, 6))
    return model


@scenario(equal=ALL)
def freezing_by_old_objects(loop: Loop) -> nn.Module:
    model = Net()
    first_layer = list(model.layers[0].parameters())
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer, range(2))
    for param in first_layer:
        param.requires_grad = False
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario(equal=ALL)
def freezing_by_module_requires_grad(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    model.layers[0].requires_grad_(False)
    loop.train(model, optimizer, range(2))
    model.layers.requires_grad_(False)
    loop.train(model, optimizer, range(2, 4))
    model.requires_grad_(True)
    loop.train(model, optimizer, range(4, 5))
    loop.check([param.requires_grad for param in model.parameters()])
    return model


@scenario(equal=ALL)
def progressive_unfreezing(loop: Loop) -> nn.Module:
    """Everything is sharded as trainable, then frozen, then unfrozen from the top."""
    model, optimizer = start(loop, make=adam)
    toggle(model.layers, False)
    toggle(model.embed, False)
    for stage in range(4):
        loop.train(model, optimizer, [stage])
        toggle(model.layers[3 - stage], True)
    loop.train(model, optimizer, range(4, 6))
    return model


@scenario()
def unfreezing_what_was_frozen_before_sharding(loop: Loop) -> nn.Module:
    """The optimizer was built over all parameters, and the lower layers were frozen when the model was sharded."""
    model = Net()
    toggle(model.layers[:2], False)
    model, optimizer = loop.shard(model, sgd(model))
    loop.train(model, optimizer, range(2))
    toggle(model.layers[:2], True)
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario(equal=ALL)
def freezing_with_momentum_and_weight_decay(loop: Loop) -> nn.Module:
    """A parameter without a gradient is left alone: no decay, no momentum."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    model, optimizer = loop.shard(model, optimizer)
    loop.train(model, optimizer, range(2))
    toggle(model.layers[2], False)
    loop.train(model, optimizer, range(2, 4))
    toggle(model.layers[2], True)
    loop.train(model, optimizer, range(4, 6))
    return model


@scenario(equal=ALL)
def freezing_all_but_the_biases(loop: Loop) -> nn.Module:
    """BitFit after sharding."""
    model, optimizer = start(loop)
    for name, param in model.named_parameters():
        param.requires_grad = name.endswith("bias")
    loop.train(model, optimizer)
    return model


@scenario()
def freezing_between_forward_and_backward(loop: Loop) -> nn.Module:
    """torch looks at `requires_grad` when a gradient is accumulated: a parameter that is frozen by then gets none."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        loss = F.mse_loss(model(x), y)
        toggle(model.layers[1], False)
        loss.backward()
        toggle(model.layers[1], True)
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def gan_toggling(loop: Loop) -> list[nn.Module]:
    """Generator and discriminator in turn; the one that is not trained is frozen."""
    generator = nn.Sequential(Net(2), nn.Linear(4, 8))
    discriminator = Net(2)
    generator, g_optimizer = start(loop, generator)
    discriminator, d_optimizer = start(loop, discriminator)
    for step in range(3):
        real, noise = loop.inputs(step), loop.inputs(100 + step)
        toggle(discriminator, True)
        fake = generator(noise).detach()
        d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        d_loss.backward()
        d_optimizer.step()
        d_optimizer.zero_grad()
        toggle(discriminator, False)
        g_loss = F.softplus(-discriminator(generator(noise))).mean()
        g_loss.backward()
        g_optimizer.step()
        g_optimizer.zero_grad()
        loop.log(d_loss)
        loop.log(g_loss)
    return [generator, discriminator]


@scenario()
def gan_without_toggling(loop: Loop) -> list[nn.Module]:
    """The generator's backward leaves gradients in the discriminator, which `zero_grad` drops before its next turn."""
    generator, discriminator = nn.Sequential(Net(2), nn.Linear(4, 8)), Net(2)
    generator, g_optimizer = start(loop, generator)
    discriminator, d_optimizer = start(loop, discriminator)
    for step in range(3):
        real, noise = loop.inputs(step), loop.inputs(100 + step)
        d_optimizer.zero_grad()
        fake = generator(noise)
        d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        d_loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = F.softplus(-discriminator(fake)).mean()
        g_loss.backward()
        g_optimizer.step()
        loop.log(d_loss)
        loop.log(g_loss)
    return [generator, discriminator]


@scenario(equal=ALL)
def adversarial_inputs_with_a_frozen_model(loop: Loop) -> nn.Module:
    """FGSM: the model is frozen while the gradient of the inputs is taken."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        toggle(model, False)
        x.requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
        toggle(model, True)
        attacked = (x + 0.1 * gradient.sign()).detach()
        loss = F.mse_loss(model(attacked), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def adversarial_inputs_of_a_trainable_model(loop: Loop) -> nn.Module:
    """FGSM by `autograd.grad` of the inputs only, with parameters that require gradients."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        x.requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
        loss = F.mse_loss(model((x + 0.1 * gradient.sign()).detach()), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def adversarial_inputs_by_backward(loop: Loop) -> nn.Module:
    """FGSM by `backward`, whose parameter gradients are thrown away."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        x.requires_grad_(True)
        F.mse_loss(model(x), y).backward()
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = F.mse_loss(model(attacked), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def optimising_the_input_of_a_frozen_model(loop: Loop) -> nn.Module:
    """A model without a trainable parameter, whose input is learnt."""
    model = Net()
    toggle(model, False)
    model, _ = loop.shard(model)
    x, y = loop.batch(0)
    x.requires_grad_(True)
    optimizer = torch.optim.SGD([x], lr=1.0)
    for _ in range(3):
        loss = F.mse_loss(model(x), y)
        (loss * (1 if loop.is_sharded else loop.world)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def detached_trunk(loop: Loop) -> nn.Module:
    """The trunk runs without gradients for a while, without being frozen."""
    model, optimizer = start(loop, Trunk())
    loop.train(model, optimizer, range(2))
    loop.train(model, optimizer, range(2, 4), loss_of=lambda model, x, y: F.mse_loss(model(x, probe=True), y))
    loop.train(model, optimizer, range(4, 5))
    return model


class Trunk(Net):
    def forward(self, x: Tensor, probe: bool = False) -> Tensor:
        if probe:
            with torch.no_grad():
                hidden = self.features(x)
        else:
            hidden = self.features(x)
        return self.head(hidden)


@scenario()
def frozen_by_one_rank_only(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(1))
    if loop.is_sharded and loop.rank == 0:
        toggle(model.layers[1], False)
    x, y = loop.batch(1)

    def loss_of(rank: int) -> Tensor:
        rows = slice(None) if loop.is_sharded else slice(4 * rank, 4 * rank + 4)
        if not loop.is_sharded:
            toggle(model.layers[1], rank != 0)
        return F.mse_loss(model(x[rows]), y[rows])

    loss = loop.mean_of(loss_of)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loop.log(loss)
    return model


@scenario(equal=ALL)
def lora_switched_off_for_a_step(loop: Loop) -> nn.Module:
    """Adapters that are disabled for the reference pass, as in DPO with one model."""
    model = Net(block=Adapted)
    toggle(model, False)
    for layer in model.layers:
        toggle(layer.adapter, True)
    model, optimizer = loop.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        for layer in model.layers:
            layer.enabled = False
        with torch.no_grad():
            base = model(x)
        for layer in model.layers:
            layer.enabled = True
        return F.mse_loss(model(x) - base, y)

    loop.train(model, optimizer, loss_of=loss_of)
    return model


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8)
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return x + torch.tanh(out + self.adapter(x) if self.enabled else out)
