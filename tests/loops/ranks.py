"""Ranks that do different things: they must come out as one process would, or end in an error soon."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from tests.loops.frame import ALL, scenario
from tests.loops.loop import Loop, UserError
from tests.loops.models import Block, Net, SkipNet, adam, start

Orders = dict[int, tuple[int, ...]]


def train_orders(loop: Loop, model: nn.Module, optimizer: object, orders: list[Orders], micro: int = 1) -> None:
    """Train with the layers that each rank runs in each step, all of them where nothing is said."""
    everything = tuple(range(len(model.layers)))
    for step, by_rank in enumerate(orders):
        for index in range(micro):

            def loss_of(rank: int, step: int = step, index: int = index, by_rank: Orders = by_rank) -> Tensor:
                x = loop.samples(10 * step + index, rank)
                return F.mse_loss(model(x, by_rank.get(rank, everything)), x[:, :4]) / micro

            loss = loop.mean_of(loss_of)
            if index + 1 < micro:
                with loop.accumulate(model):
                    loss.backward()
            else:
                loss.backward()
            loop.log(loss)
        optimizer.step()
        optimizer.zero_grad()


@scenario(equal=ALL)
def one_layer_skipped_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet())
    train_orders(loop, model, optimizer, [{0: (0, 2, 3)}, {1: (0, 1, 3)}, {}])
    return model


@scenario(equal=ALL)
def four_layers_skipped_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet(6))
    train_orders(loop, model, optimizer, [{0: (0, 5)}, {1: (0, 5)}, {0: (5,)}, {1: (0,)}])
    return model


@scenario(equal=ALL)
def all_layers_skipped_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet(6))
    train_orders(loop, model, optimizer, [{0: ()}, {1: ()}, {}])
    return model


@scenario(equal=ALL)
def seven_layers_skipped_with_adamw(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet(9), adam)
    train_orders(loop, model, optimizer, [{1: (0, 8)}, {0: (8,)}, {0: (0,), 1: (3, 4)}])
    return model


@scenario(equal=ALL)
def early_exit_by_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet(6))
    train_orders(loop, model, optimizer, [{0: (0, 1)}, {1: (0,)}, {0: (0, 1, 2), 1: (0, 1)}, {}])
    return model


@scenario(equal=ALL)
def layer_drop_with_different_seeds(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet(6))
    orders: list[Orders] = []
    for step in range(4):
        generators = [torch.Generator().manual_seed(100 * step + rank) for rank in range(loop.world)]
        draws = [torch.rand(6, generator=generator) for generator in generators]
        orders.append({rank: tuple(i for i in range(6) if draw[i] > 0.5) for rank, draw in enumerate(draws)})
    train_orders(loop, model, optimizer, orders)
    return model


@scenario(equal=ALL)
def layers_skipped_in_micro_batches(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet(6))
    train_orders(loop, model, optimizer, [{0: (0, 5)}, {1: (0, 1)}, {0: (), 1: (2, 3)}], micro=2)
    return model


@scenario(equal=ALL, tolerance=1e-3)  # Adam makes much of rounding
def layers_that_no_rank_ran(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet(), adam)
    nobody = dict.fromkeys(range(loop.world), (0, 3))
    train_orders(loop, model, optimizer, [nobody, {}, nobody])
    return model


@scenario()
def layers_in_another_order_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet())
    train_orders(loop, model, optimizer, [{}, {0: (3, 2, 1, 0)}, {1: (1, 0, 3, 2)}])
    return model


@scenario()
def layers_in_another_order_from_the_first_step(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet())
    train_orders(loop, model, optimizer, [{0: (3, 2, 1, 0)}, {}])
    return model


@scenario(equal=ALL)
def layers_in_another_order_on_all_ranks(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet())
    backwards = dict.fromkeys(range(loop.world), (3, 2, 1, 0))
    train_orders(loop, model, optimizer, [{}, backwards, {}, backwards])
    return model


@scenario()
def a_layer_twice_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, SkipNet())
    train_orders(loop, model, optimizer, [{}, {0: (0, 1, 1, 2, 3)}, {1: (0, 1, 2, 3, 3)}])
    return model


class VisionLanguage(nn.Module):
    """A tower for images, which a batch of text does not use, and layers for text."""

    def __init__(self, num_tower_layers: int = 5) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(num_tower_layers))
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(text)
        if image is not None:
            for block in self.tower:
                image = block(image)
            x = x + image
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train_vision_language(loop: Loop, frozen_tower: bool) -> nn.Module:
    model = VisionLanguage()
    if frozen_tower:
        model.tower.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = loop.shard(model, torch.optim.AdamW(params, lr=0.01))
    for step in range(4):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = loop.samples(step, rank)
            return F.mse_loss(model(x, x.flip(1) if (step + rank) % 3 else None), x[:, :4])

        loss = loop.mean_of(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def text_only_batch_on_one_rank(loop: Loop) -> nn.Module:
    return train_vision_language(loop, frozen_tower=False)


@scenario(equal=ALL)
def text_only_batch_on_one_rank_with_a_frozen_tower(loop: Loop) -> nn.Module:
    return train_vision_language(loop, frozen_tower=True)


class Experts(nn.Module):
    """Experts as modules, of which a batch runs those that its samples choose, in the order of their first use."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for index in dict.fromkeys(chosen.tolist()):
            rows = (chosen == index).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.experts[index](x[rows]) * scores[rows, index].unsqueeze(1))
        return x + out


@scenario(equal=ALL)
def experts_by_data(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(block=Experts))
    loop.train(model, optimizer, range(4))
    return model


@scenario()
def experts_by_data_as_units(loop: Loop) -> nn.Module:
    """Every expert is a unit of its own, so that ranks run units in different orders."""
    model, optimizer = start(loop, Net(block=Experts), units=["Linear"])
    loop.train(model, optimizer, range(4))
    return model


class SelfConditioned(SkipNet):
    def forward(self, x: Tensor, twice: bool = False, grad: bool = False) -> Tensor:
        if twice:
            with torch.set_grad_enabled(grad):
                x = x + F.pad(super().forward(x), (0, 4))
        return super().forward(x)


def train_self_conditioned(loop: Loop, grad: bool) -> nn.Module:
    model, optimizer = start(loop, SelfConditioned())
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = loop.samples(step, rank)
            return F.mse_loss(model(x, twice=(step + rank) % 2 == 0, grad=grad), x[:, :4])

        loss = loop.mean_of(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def self_conditioning_on_one_rank(loop: Loop) -> nn.Module:
    return train_self_conditioned(loop, grad=False)


@scenario()
def self_conditioning_with_gradients_on_one_rank(loop: Loop) -> nn.Module:
    return train_self_conditioned(loop, grad=True)


@scenario()
def extra_forward_on_one_rank(loop: Loop) -> nn.Module:
    """Rank 0 looks at a sample under `no_grad` before the step."""
    model, optimizer = start(loop)
    for step in range(3):
        if 0 in loop.ranks and step == 1:
            with torch.no_grad():
                model(loop.samples(99, 0))
        loop.train(model, optimizer, [step])
    return model


@scenario()
def evaluation_on_rank_zero_only(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    if loop.rank == 0:
        model.eval()
        with torch.no_grad():
            model(loop.samples(99, 0))
        model.train()
    loop.train(model, optimizer, range(3, 5))
    return model


@scenario()
def state_dict_on_rank_zero_only(loop: Loop) -> nn.Module:
    """Every script for DDP saves like this."""
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    if loop.rank == 0:
        _ = {name: value.clone() for name, value in model.state_dict().items()}
    loop.train(model, optimizer, range(3, 5))
    return model


@scenario()
def whole_weights_on_rank_zero_only(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    if loop.is_sharded and loop.rank == 0:
        sw.full_state_dict(model)
    loop.train(model, optimizer, range(3, 5))
    return model


@scenario()
def printing_on_rank_zero_only(loop: Loop) -> nn.Module:
    """Numbers of a weight are logged by rank 0."""
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    if loop.rank == 0:
        _ = f"{model.head.weight} {model.head.weight.norm():.3f} {model.head.weight.data.mean()}"
    loop.train(model, optimizer, range(3, 5))
    return model


@scenario()
def one_step_less_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    if loop.is_sharded:
        loop.train(model, optimizer, range(3 if loop.rank else 2))
    return model


@scenario()
def backward_missing_on_one_rank(loop: Loop) -> nn.Module:
    """A rank whose batch has nothing to learn from leaves the backward out; its share of the gradient is zero."""
    model, optimizer = start(loop)
    for step in range(3):
        skips = 0 if step == 1 else None

        def loss_of(rank: int, step: int = step, skips: int | None = skips) -> Tensor:
            x = loop.samples(step, rank)
            loss = F.mse_loss(model(x), x[:, :4])
            return 0 * loss.detach() if rank == skips else loss

        loss = loop.mean_of(loss_of)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def forward_and_backward_missing_on_one_rank(loop: Loop) -> nn.Module:
    """A rank without data goes straight to the step."""
    model, optimizer = start(loop)
    for step in range(3):
        skips = 0 if step == 1 else None

        def loss_of(rank: int, step: int = step, skips: int | None = skips) -> Tensor:
            x = loop.samples(step, rank)
            return torch.zeros(()) if rank == skips else F.mse_loss(model(x), x[:, :4])

        loss = loop.mean_of(loss_of)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def step_left_out_on_one_rank(loop: Loop) -> nn.Module:
    """`if not loss.isfinite(): continue` on the one rank that sees it."""
    model, optimizer = start(loop)
    for step in range(3):
        x, y = loop.batch(step)
        if step == 1 and 1 in loop.ranks:
            y[-1] = float("nan")
        loss = F.mse_loss(model(x), y)
        if not bool(loss.isfinite()):
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if loop.is_sharded:
        loop.check(0.0)
    else:
        loop.check(1.0)  # no answer is right here: the ranks must be told
    return model


@scenario(equal=ALL)
def batches_of_different_sizes(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = loop.samples(step, rank, 1 + (step + rank) % 3, 8)
            return F.mse_loss(model(x), x[:, :4])

        loss = loop.mean_of(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario(equal=ALL)
def a_batch_without_samples_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = loop.samples(step, rank, 0 if rank == step else 4, 8)
            return (model(x) - x[:, :4]).pow(2).sum()

        loss = loop.mean_of(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(loss)
    return model


@scenario()
def another_number_of_micro_batches_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    for step in range(2):
        total = torch.zeros(())
        for index in range(3):
            active = [rank for rank in loop.ranks if index < 2 + (rank == 1)]
            if not active:
                continue
            x = torch.cat([loop.samples(10 * step + index, rank) for rank in active])
            loss = (model(x) - x[:, :4]).pow(2).sum() / (1 if loop.is_sharded else loop.world)
            last = index == (2 if 1 in active else 1)
            if last:
                loss.backward()
            else:
                with loop.accumulate(model):
                    loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        loop.log(total)
    return model


@scenario()
def other_weights_on_one_rank(loop: Loop) -> nn.Module:
    """Ranks that were seeded differently: rank 0's weights, or a refusal; never a mixture."""
    torch.manual_seed(loop.rank)
    model, optimizer = start(loop)
    loop.train(model, optimizer)
    return model


@scenario()
def another_model_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop, Net(3 if loop.is_sharded and loop.rank == 1 else 4))
    loop.train(model, optimizer)
    return model


@scenario()
def another_learning_rate_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    if loop.is_sharded:
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + loop.rank)
    loop.train(model, optimizer)
    loop.check_shared(*(optimizer.param_groups[0]["lr"],))
    return model


@scenario()
def data_loader_that_fails_on_one_rank(loop: Loop) -> nn.Module:
    model, optimizer = start(loop)
    loop.train(model, optimizer, range(2))
    if loop.is_sharded and loop.rank == 1:
        raise UserError("a file could not be read")
    loop.train(model, optimizer, range(2, 4))
    return model
