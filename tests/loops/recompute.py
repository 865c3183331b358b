"""Checkpointing, compilation and torch's tools around a loop."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop
from tests.loops.models import Block, Net, SkipNet, start

COMPILE_DEADLINE_S = 90.0


class Checkpointed(SkipNet):
    def __init__(self, reentrant: bool = False, inside: bool = False) -> None:
        super().__init__()
        self.reentrant, self.inside = reentrant, inside

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        x = self.embed(x)
        for index in order:
            x = checkpoint(self.layers[index], x, use_reentrant=self.reentrant)
        return self.head(x)


@scenario(equal=ALL)
def checkpointed_layers(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Checkpointed())
    loop.train(model, optimizer)
    return model


@scenario()
def checkpointed_layers_reentrant(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Checkpointed(reentrant=True))
    loop.train(model, optimizer)
    return model


class CheckpointedInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@scenario(equal=ALL)
def checkpointed_inside_layers(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=CheckpointedInside))
    loop.train(model, optimizer)
    return model


class CheckpointedReentrantInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


@scenario()
def checkpointed_inside_layers_reentrant(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=CheckpointedReentrantInside))
    loop.train(model, optimizer)
    return model


@scenario()
def the_whole_model_checkpointed(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, loss_of=lambda m, x, y: F.mse_loss(checkpoint(m, x, use_reentrant=False), y))
    return model


@scenario()
def checkpointed_in_segments(loop: Loop) -> nn.Module:
    """`checkpoint_sequential`: a segment has several units."""

    class Segments(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint_sequential(list(self.layers), 2, self.embed(x), use_reentrant=False)
            return self.head(x)

    model, optimizer = start(loop, Segments())
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def checkpointed_layers_skipped_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Checkpointed())
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = loop.samples(step, rank)
            return F.mse_loss(model(x, (0, 3) if rank == step % 2 else (0, 1, 2, 3)), x[:, :4])

        loss = loop.mean_of(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL, deadline_s=COMPILE_DEADLINE_S)
def compiled_layers(loop: Loop) -> nn.Module:
    model = Net(2)
    for layer in model.layers:
        layer.compile(backend="eager")
    model, optimizer = start(loop, model)
    loop.train(model, optimizer)
    return model


@scenario(deadline_s=COMPILE_DEADLINE_S)
def the_whole_model_compiled(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(2))
    compiled = torch.compile(model, backend="eager")
    loop.train(model, optimizer, loss_of=lambda _m, x, y: F.mse_loss(compiled(x), y))
    return model


@scenario(equal=ALL)
def anomaly_detection(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    with torch.autograd.detect_anomaly(check_nan=True):
        loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def flops_counted_around_the_loop(loop: Loop) -> nn.Module:
    """A dispatch mode sees every operation; so do counters of memory and of numerics."""
    from torch.utils.flop_counter import FlopCounterMode

    model, optimizer = start(loop)
    with FlopCounterMode(display=False) as counter:
        loop.train(model, optimizer)
    loop.check(counter.get_total_flops() > 0)
    return model


@scenario(equal=ALL)
def deterministic_algorithms(loop: Loop) -> nn.Module:
    torch.use_deterministic_algorithms(True)
    try:
        model, optimizer = start(loop)
        loop.train(model, optimizer)
    finally:
        torch.use_deterministic_algorithms(False)
    return model


@scenario()
def default_dtype_is_double(loop: Loop) -> nn.Module:
    """A whole script in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer = start(loop)
        for step in range(3):
            x, y = loop.batch(step)
            loss = F.mse_loss(model(x.double()), y.double())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.log(loss)
        loop.finish([model])
    finally:
        torch.set_default_dtype(torch.float32)
    return []


@scenario(equal=ALL)
def default_device_context(loop: Loop) -> nn.Module:
    with torch.device("cpu"):
        model, optimizer = start(loop)
        loop.train(model, optimizer)
    return model


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: object, out_grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return out_grad @ weight, 2 * out_grad.t() @ x


class CustomBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(Doubling.apply(x, self.weight))


@scenario(equal=ALL)
def an_autograd_function_that_keeps_weights(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=CustomBlock))
    loop.train(model, optimizer)
    return model


class StashingBlock(nn.Module):
    """Keeps a view of its weight as a plain attribute for the backward of the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight[:4]
        return x + torch.tanh(torch.cat([x @ rows.t(), x @ self.weight[4:].t()], 1))


@scenario(equal=ALL)
def weights_used_through_views(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=StashingBlock))
    loop.train(model, optimizer)
    return model


class MultiplyingBlock(nn.Module):
    """Elementwise products keep the weight itself for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(8) + 0.5)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.gain) + self.gain.pow(2) * self.shift.exp()


@scenario(equal=ALL)
def weights_kept_by_products(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=MultiplyingBlock))
    loop.train(model, optimizer)
    return model
