"""Errors in a loop, caught or not."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop, UserError
from tests.loops.models import Net, start


class Failing(Net):
    """Raises in the middle of the forward when it is told to."""

    fails_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, layer in enumerate(self.layers):
            if index == self.fails_at:
                raise UserError("out of something")
            x = layer(x)
        return self.head(x)


def step_that_may_fail(loop: Loop, model: nn.Module, optimizer: object, step: int) -> bool:
    x, y = loop.batch(step)
    try:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        loop.log(loss)
    except UserError:
        return False
    finally:
        optimizer.zero_grad()
    return True


@scenario(equal=ALL)
def error_in_forward_on_all_ranks(loop: Loop) -> nn.Module:
    """The loop leaves the batch out and goes on."""
    model, optimizer = start(loop, Failing())
    for step in range(5):
        model.fails_at = {1: 2, 3: 0}.get(step)
        loop.check(step_that_may_fail(loop, model, optimizer, step))
    return model


class FailingBlock(nn.Module):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.fails:
            raise UserError("inside a unit")
        return torch.tanh(x)


@scenario(equal=ALL)
def error_inside_a_layer_on_all_ranks(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=FailingBlock))
    for step in range(5):
        model.layers[2].fails = step in (1, 2)
        loop.check(step_that_may_fail(loop, model, optimizer, step))
    return model


@scenario(equal=ALL)
def error_in_forward_under_no_grad_on_all_ranks(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Failing())
    for step in range(3):
        model.fails_at = 2
        try:
            with torch.no_grad():
                model(loop.inputs(50 + step))
        except UserError:
            model.fails_at = None
        loop.train(model, optimizer, [step])
    return model


@scenario(equal=ALL)
def error_of_a_wrong_shape_on_all_ranks(loop: Loop) -> nn.Module:
    """torch's own error in the first layer; the loop goes on."""
    model, optimizer = start(loop)
    for step in range(3):
        try:
            model(torch.ones(4, 9))
        except RuntimeError:
            loop.check(1.0)
        loop.train(model, optimizer, [step])
    return model


@scenario(equal=ALL)
def error_between_forward_and_backward_on_all_ranks(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(4):
        x, y = loop.batch(step)
        try:
            loss = F.mse_loss(model(x), y)
            if step == 1:
                raise UserError("in the loss")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.log(loss)
        except UserError:
            continue
    return model


class FailingBackward(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if FailingBackward.fails:
            raise UserError("in the backward")
        return grad * 2


class BackwardBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return FailingBackward.apply(torch.tanh(self.linear(x)))


@scenario()
def error_in_backward_on_all_ranks(loop: Loop) -> nn.Module:
    model = Net()
    model.layers[1] = BackwardBlock()
    model, optimizer = start(loop, model)
    try:
        for step in range(4):
            FailingBackward.fails = step == 1
            loop.check(step_that_may_fail(loop, model, optimizer, step))
    finally:
        FailingBackward.fails = False
    return model


@scenario()
def error_in_backward_on_one_rank(loop: Loop) -> nn.Module:
    """Not caught: the other ranks must learn of it."""
    model = Net()
    model.layers[1] = BackwardBlock()
    model, optimizer = start(loop, model)
    try:
        for step in range(4):
            FailingBackward.fails = loop.is_sharded and loop.rank == 1 and step == 1
            x, y = loop.batch(step)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        FailingBackward.fails = False
    return model


def fail_on_one_rank(loop: Loop, model: nn.Module, optimizer: object, fails_at: int) -> None:
    """Rank 0 fails in the second step and leaves that batch out; one process leaves out rank 0's part of it."""
    for step in range(4):

        def loss_of(rank: int, step: int = step) -> Tensor:
            model.fails_at = fails_at if step == 1 and rank == 0 else None
            x = loop.samples(step, rank)
            try:
                return F.mse_loss(model(x), x[:, :4])
            except UserError:
                return torch.zeros(())

        loss = loop.mean_of(loss_of)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)


@scenario()
def error_in_forward_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Failing())
    fail_on_one_rank(loop, model, optimizer, fails_at=2)
    return model


@scenario()
def error_early_in_forward_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Failing())
    fail_on_one_rank(loop, model, optimizer, fails_at=0)
    return model


@scenario()
def error_on_one_rank_and_the_step_is_left_out(loop: Loop) -> nn.Module:
    """One rank catches its error and goes to the next batch; the others are in the backward of the last one."""
    model, optimizer = start(loop, Failing())
    for step in range(4):
        model.fails_at = 2 if loop.is_sharded and loop.rank == 0 and step == 1 else None
        step_that_may_fail(loop, model, optimizer, step)
    if not loop.is_sharded:
        loop.log(0.0)  # no answer is right here: the ranks must be told
    return model


@scenario()
def error_on_one_rank_that_nobody_catches(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Failing())
    for step in range(3):
        model.fails_at = 2 if loop.is_sharded and loop.rank == 1 and step == 1 else None
        loop.train(model, optimizer, [step])
    return model


@scenario(equal=ALL)
def half_the_batch_after_an_error(loop: Loop) -> nn.Module:
    """Out of memory on every rank: the step is done again as two halves."""
    model, optimizer = start(loop, Failing())
    for step in range(3):
        x, y = loop.batch(step)
        model.fails_at = 3 if step == 1 else None
        try:
            loss = F.mse_loss(model(x), y)
            loss.backward()
        except UserError:
            optimizer.zero_grad()
            model.fails_at = None
            halves = [(x[::2], y[::2]), (x[1::2], y[1::2])]
            with loop.accumulate(model):
                first = F.mse_loss(model(halves[0][0]), halves[0][1]) / 2
                first.backward()
            second = F.mse_loss(model(halves[1][0]), halves[1][1]) / 2
            second.backward()
            loss = first + second
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def error_inside_accumulate_on_all_ranks(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Failing())
    for step in range(3):
        x, y = loop.batch(step)
        try:
            with loop.accumulate(model):
                F.mse_loss(model(x), y).backward()
                if step == 1:
                    raise UserError("inside")
            F.mse_loss(model(x.flip(1)), y).backward()
            optimizer.step()
        except UserError:
            loop.check(step)
        optimizer.zero_grad()
    return model


@scenario(equal=ALL)
def error_inside_whole_on_all_ranks(loop: Loop) -> nn.Module:
    """What was written before the error stays, as in one process; or nothing of it."""
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    try:
        with loop.whole(model):
            raise UserError("while reading")
    except UserError:
        loop.check(1.0)
    loop.train(model, optimizer, range(2, 4))
    return model


@scenario()
def error_in_a_closure(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)

    def closure() -> Tensor:
        raise UserError("in a closure")

    try:
        optimizer.step(closure)
    except UserError:
        loop.check(1.0)
    loop.train(model, optimizer)
    return model


@scenario(equal=ALL)
def a_loop_broken_off_and_a_new_one(loop: Loop) -> nn.Module:
    """A generator of batches ends in the middle of an accumulation; a second loop starts with another model."""
    first, optimizer = start(loop)
    x, y = loop.batch(0)
    with loop.accumulate(first):
        F.mse_loss(first(x), y).backward()
    F.mse_loss(first(x), y)
    del first, optimizer
    torch.manual_seed(1)
    second, optimizer = start(loop)
    loop.train(second, optimizer)
    return second
