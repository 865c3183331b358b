"""Models as users have them: ties, frozen parts, adapters, odd dtypes and shapes, buffers, generation."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.engine.guards import engine_of
from shardwise.core.precision import PRECISIONS
from tests.harness import Pool
from tests.support.models import MODELS, SEQ, VOCAB, tokens
from tests.support.trainee import LAYOUTS, NODES, ONE_OF_EACH, Block, Told, Trainee, check, features
from tests.support.training import adamw

NUM_STEPS = 4


def train(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        loss = trainee.share(lambda rank, step=step: trainee.model(features(step, rank)).square().mean())
        loss.backward()
        losses.extend([trainee.mean(loss), trainee.clip(0.5)])
        trainee.step()
    return losses


def train_on_tokens(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        loss = trainee.share(
            lambda rank, step=step: MODELS["llama"].loss(trainee.model, tokens(step, rank, trainee.world))
        )
        loss.backward()
        losses.extend([trainee.mean(loss), trainee.clip(0.5)])
        trainee.step()
    return losses


def trained_only(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return adamw([param for param in params if param.requires_grad])


class Stack(nn.Module):
    block: Callable[[], nn.Module] = Block

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList(self.block() for _ in range(num_blocks))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---------------------------------------------------------------------------------------------------------
# ties


def tied_ends() -> nn.Module:
    model = Stack()
    model.head.weight = model.stem.weight
    return model


def tied_blocks() -> nn.Module:
    """Blocks share a matrix with each other, and a vector with the root."""
    model = Stack()
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[3].down.weight = model.layers[1].down.weight
    model.layers[1].norm.weight = model.stem.bias
    return model


def tied_inside() -> nn.Module:
    model = Stack()
    for layer in model.layers:
        layer.extra = nn.Linear(16, 23)
        layer.extra.weight = layer.up.weight
    return model


@pytest.mark.quick("tied_ends", "tied_inside")
@pytest.mark.parametrize("build", [tied_ends, tied_blocks, tied_inside])
def test_tied_weights(run_ranks: Pool, build: Any) -> None:
    check(run_ranks, train, build, ONE_OF_EACH)


@pytest.mark.parametrize("units", [["Linear", "Block"], 1])
def test_tied_weights_of_units_of_their_own(run_ranks: Pool, units: Any) -> None:
    check(run_ranks, train, tied_ends, "zero3", units=units)
    check(run_ranks, train, tied_blocks, "shard_grad_op", units=units)


@pytest.mark.slow
def test_tied_weights_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, train, tied_blocks, NODES, world=4, node_size=2)


# ---------------------------------------------------------------------------------------------------------
# frozen parts


def frozen_blocks() -> nn.Module:
    """The first and a middle block frozen, parts of another, and half of the root."""
    model = Stack()
    model.layers[0].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    model.layers[1].norm.requires_grad_(False)
    model.layers[1].up.bias.requires_grad_(False)
    model.stem.requires_grad_(False)
    return model


def frozen_but_one() -> nn.Module:
    model = Stack().requires_grad_(False)
    model.layers[1].up.bias.requires_grad_()
    return model


@pytest.mark.parametrize("build", [frozen_blocks, frozen_but_one])
def test_frozen_parameters(run_ranks: Pool, build: Any) -> None:
    told = check(run_ranks, train, build, ONE_OF_EACH, make_optimizer=trained_only)
    torch.manual_seed(0)
    given = dict(build().named_parameters())
    for found in (ranks[0] for ranks in told.values()):
        assert isinstance(found, Told)
        for name, param in given.items():
            assert torch.equal(found.weights[name], param.detach()) == (not param.requires_grad), name


def test_frozen_parameters_may_be_given_to_the_optimizer(run_ranks: Pool) -> None:
    check(run_ranks, train, frozen_blocks, ["ddp", "zero3"])


@pytest.mark.slow
def test_frozen_parameters_on_nodes(run_ranks: Pool) -> None:
    check(run_ranks, train, frozen_blocks, NODES, world=4, node_size=2)


def frozen_blocks_in_double() -> nn.Module:
    return frozen_blocks().to(torch.float64)


def frozen_at_rest(strategy: str, precision: str) -> bool:
    """Frozen weights come back bit for bit, although they compute in another dtype."""
    sw.init()
    model = frozen_blocks_in_double()
    given = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    model, optimizer = sw.shard(model, trained_only(list(model.parameters())), strategy, precision=precision)
    for step in range(2):
        model(features(step, 0)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = sw.full_state_dict(model)
    return all(torch.equal(weights[name], given[name]) for name in frozen)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
def test_frozen_weights_lose_nothing(run_ranks: Pool, strategy: str, precision: str) -> None:
    assert all(run_ranks(2, frozen_at_rest, strategy, precision))


# ---------------------------------------------------------------------------------------------------------
# adapters


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(MODELS["llama"].fresh(), config)


def with_adapters_on_bf16() -> nn.Module:
    model = with_adapters()
    for name, param in model.named_parameters():
        if "lora" not in name:
            param.data = param.data.bfloat16()
    return model


def train_adapters(trainee: Trainee) -> list[float]:
    before = trainee.weights()
    losses = train_on_tokens(trainee)
    after = trainee.weights()
    for name, value in before.items():
        assert torch.equal(value, after[name]) == ("lora" not in name), name
    return losses


def test_adapters_equal_one_process(run_ranks: Pool) -> None:
    check(
        run_ranks,
        train_adapters,
        with_adapters,
        ["ddp", "zero1", "zero2", "shard_grad_op", "zero3"],
        make_optimizer=trained_only,
    )


@pytest.mark.slow
def test_adapters_equal_one_process_on_nodes(run_ranks: Pool) -> None:
    check(
        run_ranks,
        train_adapters,
        with_adapters,
        NODES,
        make_optimizer=trained_only,
        world=4,
        node_size=2,
    )


def bytes_at_rest(strategy: str, precision: str, node_size: int | None) -> tuple[int, int, int]:
    """Of the frozen base on this rank: its parts, and the memory under them; and one unit."""
    sw.init()
    model = with_adapters_on_bf16()
    model, optimizer = sw.shard(
        model, trained_only(list(model.parameters())), strategy, precision=precision, node_size=node_size
    )
    MODELS["llama"].loss(model, tokens(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    states = [state for unit in engine_of(model).units for state in unit.states if not state.flat.trainable]
    base = [param for state in states for param in state.resting_params]
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in base}
    assert all(param.dtype == torch.bfloat16 for param in base)
    largest = max(sum(param.numel() for param in layer.parameters()) for layer in with_adapters().model.model.layers)
    return sum(param.nbytes for param in base), sum(storages.values()), 2 * largest


@pytest.mark.quick("zero3-*")
@pytest.mark.parametrize(
    ("strategy", "world", "node_size", "share"),
    [
        ("ddp", 2, None, 1),
        ("zero2", 2, None, 1),
        ("zero3", 2, None, 2),
        ("shard_grad_op", 4, None, 4),
        ("zero3", 4, None, 4),
        ("hsdp", 4, 2, 2),
        ("hfsdp", 4, 2, 2),
    ],
)
def test_the_frozen_base_rests_in_shards(
    run_ranks: Pool, strategy: str, world: int, node_size: int | None, share: int
) -> None:
    """2 bytes a parameter, divided by the ranks that share it; padding goes up to 256 elements a parameter."""
    base = [param for name, param in with_adapters().named_parameters() if "lora" not in name]
    total = 2 * sum(param.numel() for param in base)
    padding = 2 * 256 * (len(base) + 5 * share)
    ranks = run_ranks(world, bytes_at_rest, strategy, "bf16", node_size)
    assert sum(shown for shown, _, _ in ranks) == total * world // share
    for _, held, _ in ranks:
        assert total / share <= held + padding
        assert held <= (total + padding) / share


def adapter_weights(strategy: str) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    sw.init()
    model = with_adapters()
    model, _ = sw.shard(model, None, strategy, precision="bf16")
    with pytest.raises(sw.StateError):
        get_peft_model_state_dict(model)
    return get_peft_model_state_dict(model, state_dict=sw.full_state_dict(model))


@pytest.mark.slow
def test_peft_saves_adapters_of_a_whole_state_dict(run_ranks: Pool) -> None:
    from peft import get_peft_model_state_dict

    torch.manual_seed(0)
    expected = get_peft_model_state_dict(with_adapters())
    for seen in run_ranks(2, adapter_weights, "zero3"):
        assert list(seen) == list(expected)
        assert all(torch.equal(seen[name], expected[name]) for name in expected)


# ---------------------------------------------------------------------------------------------------------
# dtypes


def mixed() -> nn.Module:
    """Matrices given in bf16, norms in fp32, one bias in fp16: three dtypes in every unit."""
    model = Stack()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.bfloat16()
            if module.bias is not None:
                module.bias.data = module.bias.data.half()
    return model


def train_mixed(strategy: str, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    sw.init()
    model = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = sw.shard(model, optimizer, strategy, precision=precision)
    trainee = Trainee(model, optimizer, dist.get_world_size(), dist.get_rank())
    return train(trainee), trainee.weights()


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_several_given_dtypes_in_one_unit(run_ranks: Pool, strategy: str) -> None:
    """They compute and are updated in fp32, as one process does after `.float()`, and come back as given."""
    torch.manual_seed(0)
    given = mixed()
    model = mixed()
    model.load_state_dict(given.state_dict())
    model = model.float()
    alone = Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 2, None)
    losses = train(alone)
    for seen_losses, weights in run_ranks(2, train_mixed, strategy, "fp32"):
        assert seen_losses == pytest.approx(losses, rel=1e-5)
        assert list(weights) == list(given.state_dict())
        for name, value in given.state_dict().items():
            assert weights[name].dtype == value.dtype
            expected = model.state_dict()[name]
            # One rounding to the given dtype, and those of fp32 beside it.
            torch.testing.assert_close(
                weights[name].float(),
                expected,
                rtol=1e-5 if value.dtype == torch.float32 else 2.0**-8,
                atol=1e-6,
            )


@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_several_given_dtypes_train_in_every_precision(run_ranks: Pool, precision: str, strategy: str) -> None:
    ranks = run_ranks(2, train_mixed, strategy, precision)
    losses = ranks[0][0][::2]
    assert losses[-1] < losses[0]
    assert {name: value.dtype for name, value in ranks[0][1].items()} == {
        name: value.dtype for name, value in mixed().state_dict().items()
    }


class Peeking(Block):
    """Notes the dtypes it computes in."""

    seen: list[tuple[torch.dtype, ...]]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        self.seen.append((x.dtype, self.norm.weight.dtype, normed.dtype, self.up.weight.dtype))
        return x + self.down(self.up(normed).tanh())


class Peeked(Stack):
    block = Peeking


def train_kept(strategy: str, keep: tuple[str, ...]) -> tuple[dict[str, Tensor], set[tuple[torch.dtype, ...]]]:
    sw.init()
    torch.manual_seed(0)
    model = Peeked()
    seen: list[tuple[torch.dtype, ...]] = []
    for layer in model.layers:
        layer.seen = seen
    precision = sw.Precision(torch.bfloat16, torch.float32, torch.float32, keep_fp32=keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = sw.shard(model, optimizer, strategy, precision=precision)
    out = model(features(0, dist.get_rank()))
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    optimizer.step()
    return sw.full_state_dict(model), set(seen)


def by_hand(model: Stack, x: Tensor) -> Tensor:
    """Linears in bf16, norms in fp32 between casts."""
    x = model.stem(x.bfloat16())
    for layer in model.layers:
        normed = layer.norm(x.float()).bfloat16()
        x = x + layer.down(layer.up(normed).tanh())
    return model.head(x)


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_modules_kept_in_fp32(run_ranks: Pool, strategy: str) -> None:
    torch.manual_seed(0)
    model = Stack()
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bfloat16()
    grads = {name: torch.zeros_like(value) for name, value in masters.items()}
    for rank in range(2):
        model.zero_grad()
        by_hand(model, features(0, rank)).float().square().mean().backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            grads[name] += param.grad.float()
    for weights, dtypes in run_ranks(2, train_kept, strategy, ("*.norm",)):
        assert dtypes == {(torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)}
        for name, master in masters.items():
            torch.testing.assert_close(weights[name], master - grads[name] / 2, rtol=1e-6, atol=1e-6)


def test_whole_blocks_kept_in_fp32(run_ranks: Pool) -> None:
    for _, dtypes in run_ranks(2, train_kept, "zero3", ("layers.*",)):
        assert dtypes == {(torch.float32,) * 4}


def dtypes_of_t5(precision: str) -> dict[str, torch.dtype]:
    """What T5's last projection computes in."""
    sw.init()
    model = MODELS["t5"].fresh()
    seen = {}
    block = model.encoder.block[0].layer[-1].DenseReluDense

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["wi"], seen["wo"] = block.wi.weight.dtype, block.wo.weight.dtype

    block.register_forward_hook(note)
    model, _ = sw.shard(model, None, "zero3", precision=precision)
    with torch.no_grad():
        MODELS["t5"].loss(model, tokens(0))
    return seen


def test_what_a_hugging_face_model_wants_in_fp32_stays_so_beside_fp16(run_ranks: Pool) -> None:
    assert run_ranks(2, dtypes_of_t5, "fp16")[0] == {"wi": torch.float16, "wo": torch.float32}
    assert run_ranks(2, dtypes_of_t5, "bf16")[0] == {"wi": torch.bfloat16, "wo": torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------
# buffers


class Normalised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, 16))
        self.register_buffer("phases", torch.linspace(0, 1, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (self.offset + self.phases.sin()).to(x.dtype))


class WithBuffers(Stack):
    block = Normalised


def train_with_buffers(strategy: str, precision: Any) -> tuple[list[float], dict[str, Tensor], float]:
    sw.init()
    torch.manual_seed(0)
    model = WithBuffers()
    model, optimizer = sw.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, precision=precision)
    trainee = Trainee(model, optimizer, dist.get_world_size(), dist.get_rank())
    losses = train(trainee)
    model.eval()
    with torch.no_grad():
        evaluated = trainee.mean(model(features(0, 0)).square().mean())
    return losses, trainee.weights(), evaluated


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_buffers(run_ranks: Pool, strategy: str) -> None:
    """Parameters as in one process; statistics are each rank's own, of its own samples."""
    torch.manual_seed(0)
    model = WithBuffers()
    alone = Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, None)
    losses = train(alone)
    expected = model.state_dict()
    trained = {name for name, _ in model.named_parameters()}
    ranks = run_ranks(2, train_with_buffers, strategy, "fp32")
    for seen_losses, weights, evaluated in ranks:
        assert seen_losses == pytest.approx(losses, rel=1e-5)
        assert list(weights) == list(expected)
        for name, value in expected.items():
            assert (weights[name].shape, weights[name].dtype) == (value.shape, value.dtype)
            if name in trained or "offset" in name:
                torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        assert weights["layers.0.norm.num_batches_tracked"] == NUM_STEPS
        assert evaluated > 0
    name = "layers.0.norm.running_mean"
    assert not torch.equal(ranks[0][1][name], ranks[1][1][name])


def test_buffers_keep_their_dtype_in_bf16(run_ranks: Pool) -> None:
    precision = sw.Precision(torch.bfloat16, torch.float32, torch.float32, keep_fp32=("*.norm",))
    losses, weights, _ = run_ranks(2, train_with_buffers, "zero3", precision)[0]
    assert losses[-2] < losses[0]
    assert {name: value.dtype for name, value in weights.items()} == {
        name: value.dtype for name, value in WithBuffers().state_dict().items()
    }


# ---------------------------------------------------------------------------------------------------------
# shapes


class Odd(nn.Module):
    """A scalar, an empty matrix, a vector shorter than the world, and one of 17 x 257."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.short = nn.Parameter(torch.randn(1, 1, 1))
        self.inner = nn.Linear(16, 257)
        self.large = nn.Parameter(torch.randn(17, 257) / 16)
        self.back = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh() @ self.large.T  # (samples, 17)
        return x * self.scalar + hidden[:, :16] * self.short[0] + self.empty.sum() + self.back.mean()


class OddStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd() for _ in range(3))
        self.nothing = nn.Parameter(torch.empty(4, 0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.nothing.sum()


class OnlyScalars(nn.Module):
    """Every parameter is smaller than the world, so some ranks hold nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def scalars() -> nn.Module:
    return nn.Sequential(*(OnlyScalars() for _ in range(4)))


@pytest.mark.quick("3")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_odd_shapes(run_ranks: Pool, world: int) -> None:
    check(run_ranks, train, OddStack, ONE_OF_EACH, world=world)


@pytest.mark.quick("scalars")
@pytest.mark.parametrize("build", [OddStack, scalars])
def test_odd_shapes_on_four_ranks(run_ranks: Pool, build: Any) -> None:
    check(run_ranks, train, build, ["zero3", *NODES], world=4, node_size=2)


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_odd_shapes_in_every_precision(run_ranks: Pool, precision: str) -> None:
    assert run_ranks(3, odd_dtypes, precision) == [True] * 3


def odd_dtypes(precision: str) -> bool:
    sw.init()
    model = OddStack()
    expected = {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), "zero3", precision=precision)
    for step in range(2):
        model(features(step, dist.get_rank())).float().square().mean().backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return expected == {name: (value.shape, value.dtype) for name, value in sw.full_state_dict(model).items()}


# ---------------------------------------------------------------------------------------------------------
# generation


PROMPTS = torch.tensor([[5, 7, 11], [2, 3, 5]])


def generate(model: nn.Module, rank: int) -> Tensor:
    return model.generate(  # type: ignore[operator,no-any-return]
        PROMPTS[rank : rank + 1],
        attention_mask=torch.ones(1, 3, dtype=torch.long),
        max_new_tokens=SEQ - 4,
        min_new_tokens=SEQ - 4,  # ranks must run equally often
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )


def generate_sharded(name: str, strategy: str, node_size: int | None) -> list[Tensor]:
    """Before training, after two steps, and the step after that."""
    sw.init()
    rank = dist.get_rank()
    model = MODELS[name].fresh()
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, precision="fp32", node_size=node_size)
    found = [generate(model, rank % 2)]
    for step in range(2):
        MODELS[name].loss(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = sw.full_state_dict(model)
    found.append(generate(model, rank % 2))
    after = sw.full_state_dict(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    loss = MODELS[name].loss(model.train(), tokens(2))
    loss.backward()
    optimizer.step()
    found.append(loss.detach())
    return found


def generate_alone(name: str, rank: int) -> list[Tensor]:
    torch.set_num_threads(1)
    model = MODELS[name].fresh()
    optimizer = adamw(list(model.parameters()))
    found = [generate(model, rank)]
    for step in range(2):
        MODELS[name].loss(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found.append(generate(model, rank))
    found.append(MODELS[name].loss(model.train(), tokens(2)).detach())
    return found


@pytest.mark.quick("zero3-gpt2", "hpz-t5")
@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("strategy", ["zero2", "shard_grad_op", "zero3", "hpz"])
def test_generation(run_ranks: Pool, name: str, strategy: str) -> None:
    expected = [generate_alone(name, rank) for rank in range(2)]
    for rank, seen in enumerate(run_ranks(2, generate_sharded, name, strategy, 1 if strategy == "hpz" else None)):
        assert torch.equal(seen[0], expected[rank][0])
        assert torch.equal(seen[1], expected[rank][1])
        torch.testing.assert_close(seen[2], expected[rank][2], rtol=1e-5, atol=0)
    assert int(expected[0][1].max()) < VOCAB


# ---------------------------------------------------------------------------------------------------------
# an encoder called by hand


def after_a_part(strategy: str, precision: str) -> bool:
    """What a part of the model was gathered for is not left lying about for the weights to be read from."""
    sw.init()
    model = MODELS["t5"].fresh()
    given = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = sw.shard(model, None, strategy, precision=precision)
    with torch.no_grad():
        model.encoder(input_ids=tokens(0))
    weights = sw.full_state_dict(model)
    return all(torch.equal(weights[name], given[name]) for name in given)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_weights_after_calling_a_part_are_the_masters(run_ranks: Pool, strategy: str) -> None:
    assert run_ranks(2, after_a_part, strategy, "bf16") == [True, True]


def part_then_load(strategy: str) -> bool:
    """Weights loaded after a part was called are what the next call computes with."""
    sw.init()
    model = MODELS["t5"].fresh()
    model, _ = sw.shard(model, None, strategy, precision="fp32")
    with torch.no_grad():
        model.encoder(input_ids=tokens(0))
    other = MODELS["t5"].fresh(seed=1)
    sw.load_full_state_dict(model, other.state_dict())
    with torch.no_grad():
        seen = model.encoder(input_ids=tokens(0)).last_hidden_state
        expected = other.encoder(input_ids=tokens(0)).last_hidden_state
    return torch.allclose(seen, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_loaded_weights_reach_a_part_called_by_hand(run_ranks: Pool, strategy: str) -> None:
    assert run_ranks(2, part_then_load, strategy) == [True, True]
