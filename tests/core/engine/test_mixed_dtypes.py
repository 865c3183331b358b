"""Models that mix dtypes in 16 bits: statistics, weights made from others, fp32 tensors of their own."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardwise as sw
from tests.core.engine.test_models import train
from tests.harness import Pool
from tests.support.models import MODELS, tokens
from tests.support.trainee import ONE_OF_EACH, Trainee, check, features
from tests.support.training import adamw

# A rounding to bf16 is 4e-3; against one process in fp32, over a few steps.
BF16 = 5e-2

MAPPING = {"layers.0": "zero3", "layers.1": "ddp", "*": "zero2"}


class Normed(nn.Module):
    """A block whose weight is made from others by `norm`."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up = norm(nn.Linear(16, 24))
        self.down = norm(nn.Linear(24, 16, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class NormedStack(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed(norm) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def quietly(norm: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def apply(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return norm(module)

    return apply


def weight_norm() -> nn.Module:
    return NormedStack(parametrizations.weight_norm)


def spectral_norm() -> nn.Module:
    return NormedStack(parametrizations.spectral_norm)


def orthogonal() -> nn.Module:
    return NormedStack(parametrizations.orthogonal)


def old_weight_norm() -> nn.Module:
    return NormedStack(quietly(nn.utils.weight_norm))


def old_spectral_norm() -> nn.Module:
    return NormedStack(quietly(nn.utils.spectral_norm))


def train_at_once(trainee: Trainee) -> list[float]:
    """One forward a step: spectral norm goes one step of its own with each."""
    losses = []
    for step in range(4):
        ranks = range(trainee.world) if trainee.rank is None else [trainee.rank]
        loss = trainee.model(torch.cat([features(step, rank) for rank in ranks])).float().square().mean()
        loss.backward()
        losses.extend([trainee.mean(loss), trainee.clip(0.5)])
        trainee.step()
    return losses


NORMS = [weight_norm, spectral_norm, orthogonal, old_weight_norm, old_spectral_norm]


@pytest.mark.quick("weight_norm", "old_spectral_norm")
@pytest.mark.parametrize("build", NORMS, ids=lambda build: build.__name__)
def test_weights_made_from_others(run_ranks: Pool, build: Any) -> None:
    check(run_ranks, train_at_once, build, ["zero2", "zero3"], tolerance=1e-4)
    check(run_ranks, train_at_once, build, ["ddp", "zero3"], tolerance=BF16, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("build", NORMS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_weights_made_from_others_under_any_layout(run_ranks: Pool, build: Any, precision: str) -> None:
    options = {"tolerance": 1e-4 if precision == "fp32" else BF16, "precision": precision}
    check(run_ranks, train_at_once, build, [*ONE_OF_EACH, "zero3_offload"], **options)
    check(run_ranks, train_at_once, build, MAPPING, **options)
    check(run_ranks, train_at_once, build, "hsdp", world=4, node_size=2, **options)


# ---------------------------------------------------------------------------------------------------------
# running statistics


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1)) for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.unsqueeze(1))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(-1))


def convolved(strategy: Any, precision: str, node_size: int | None = None) -> tuple[list[float], list[Tensor]]:
    """Every rank sees the same samples, so statistics and losses are those of one process."""
    sw.init()
    torch.manual_seed(0)
    model = Convolved()
    model, optimizer = sw.shard(
        model, adamw(list(model.parameters())), strategy, precision=precision, node_size=node_size
    )
    losses = convolved_losses(model, optimizer)
    return losses, [buffer.clone() for buffer in model.buffers()]


def convolved_losses(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        loss = model(features(step, 0)).float().square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.quick("bf16", "fp16")
@pytest.mark.parametrize("precision", ["bf16", "pure-bf16", "bf16-autocast", "fp16"])
def test_batch_norm_in_16_bits(run_ranks: Pool, precision: str) -> None:
    torch.manual_seed(0)
    alone = Convolved()
    expected = convolved_losses(alone, adamw(list(alone.parameters())))
    for strategy in ("zero3", "zero3_offload", MAPPING):
        for losses, buffers in run_ranks(2, convolved, strategy, precision):
            assert losses == pytest.approx(expected, rel=BF16)
            for buffer, other in zip(buffers, alone.buffers(), strict=True):
                assert buffer.dtype == other.dtype
                torch.testing.assert_close(buffer, other, rtol=BF16, atol=BF16)


def test_batch_norm_in_bf16_on_nodes(run_ranks: Pool) -> None:
    torch.manual_seed(0)
    alone = Convolved()
    expected = convolved_losses(alone, adamw(list(alone.parameters())))
    for losses, _ in run_ranks(4, convolved, "hsdp", "bf16", 2):
        assert losses == pytest.approx(expected, rel=BF16)


def synced(strategy: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    sw.init()
    torch.manual_seed(0)
    model = Convolved()
    model.register_buffer("mask", torch.tensor([float("-inf"), 0.1]), persistent=False)
    model, _ = sw.shard(model, adamw(list(model.parameters())), strategy, precision="bf16")
    model(features(0, dist.get_rank())).sum().backward()
    model.layers[0][0].num_batches_tracked += dist.get_rank()
    before = [buffer.clone() for buffer in model.buffers()]
    sw.sync_buffers(model)
    return before, [buffer.clone() for buffer in model.buffers()], model.mask.clone()


def test_buffers_are_synchronised(run_ranks: Pool) -> None:
    ranks = run_ranks(3, synced, "zero3")
    befores, afters = [rank[0] for rank in ranks], [rank[1] for rank in ranks]
    for values, *results in zip(zip(*befores, strict=True), *afters, strict=True):
        mean = torch.stack(values).double().mean(0).to(values[0].dtype)
        expected = mean if values[0].is_floating_point() else values[0]
        assert all(torch.equal(result, expected) for result in results)
    assert any(not torch.equal(*pair[:2]) for pair in zip(*befores, strict=True))
    assert all(torch.equal(rank[2], torch.tensor([float("-inf"), 0.1])) for rank in ranks)


def test_only_a_sharded_model_is_synchronised() -> None:
    with pytest.raises(sw.StateError):
        sw.sync_buffers(Convolved())


# ---------------------------------------------------------------------------------------------------------
# fp32 tensors of the model's own


class Positions(nn.Module):
    """Adds a table of positions in fp32 in each block, as many models do."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.Linear(width, width)
        self.table: Tensor
        self.register_buffer("table", torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.table)
        x = self.lstm((x + self.table).unsqueeze(0), None)[0]
        mask = torch.zeros(x.shape[1], x.shape[1])
        x = self.attend(query=x.float(), key=x, value=x.float(), attn_mask=mask)[0]
        return x.squeeze(0) + self.up(torch.ones(16) * self.table)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Positions() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.quick("fp16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fp32_meets_layers_in_16_bits(run_ranks: Pool, precision: str) -> None:
    check(run_ranks, train, Placed, [*ONE_OF_EACH, "zero3_offload"], tolerance=BF16, precision=precision)


def remaining_hooks(name: str) -> tuple[int, int]:
    """Pre-hooks on layers, at first and after a few steps."""
    sw.init()
    model = MODELS[name].fresh()
    model, optimizer = sw.shard(model, adamw(list(model.parameters())), "zero3", precision="bf16")
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.LayerNorm))]
    counts = [sum(len(layer._forward_pre_hooks) for layer in layers)]
    for step in range(4):
        MODELS[name].loss(model, tokens(step, dist.get_rank(), 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return counts[0], sum(len(layer._forward_pre_hooks) for layer in layers)


@pytest.mark.parametrize("name", ["llama", "in-tree"])
def test_layers_with_nothing_to_cast_are_left_alone(run_ranks: Pool, name: str) -> None:
    for at_first, later in run_ranks(2, remaining_hooks, name):
        assert at_first - later >= len(MODELS[name].fresh().state_dict()) // 4
        assert later <= 2  # of units


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.up(x)).real


def transform(strategy: str, keep: tuple[str, ...]) -> str:
    sw.init()
    model = nn.Sequential(Fourier(), Fourier())
    precision = sw.Precision("bf16", "fp32", "fp32", keep_fp32=keep)
    model, _ = sw.shard(model, adamw(list(model.parameters())), strategy, precision=precision)
    try:
        model(features(0, 0)).sum().backward()
    except RuntimeError as error:
        return "".join(error.__notes__)
    return "trained"


def test_what_16_bits_cannot_do_is_explained(run_ranks: Pool) -> None:
    for said in run_ranks(2, transform, "zero3", ()):
        assert "keep_fp32" in said
        assert "bf16-autocast" in said
    assert run_ranks(2, transform, "zero3", ("0", "1")) == ["trained"] * 2


# ---------------------------------------------------------------------------------------------------------
# Hugging Face models


IMAGES = {"num_channels": 3, "num_labels": 4}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQ2SEQ = {
    **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
       (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32), ("layerdrop", 0.0))},
    "vocab_size": 61, "d_model": 16, "max_position_embeddings": 32, "decoder_start_token_id": 2, "use_cache": False,
    "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
PICTURES = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 32, "patch_size": 4}
SWITCH = {
    "vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
    "num_experts": 2, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, "router_jitter_noise": 0.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("AutoModelForImageClassification", {**IMAGES, "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}),
    "swinv2": ("AutoModelForImageClassification", {**IMAGES, **PICTURES, "drop_path_rate": 0.0}),
    "vit": ("AutoModelForImageClassification", {**IMAGES, **SMALL, "image_size": 32, "patch_size": 8}),
    "m2m_100": ("AutoModelForSeq2SeqLM", SEQ2SEQ),
    "switch_transformers": ("AutoModelForSeq2SeqLM", SWITCH),
    "openai-gpt": (
        "AutoModelForCausalLM",
        {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0},
    ),
    "fnet": ("AutoModelForMaskedLM", {**SMALL, "vocab_size": 61, "max_position_embeddings": 32}),
}


def family(name: str) -> nn.Module:
    import transformers

    kind, settings = FAMILIES[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(name, **settings))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def family_losses(name: str, model: nn.Module, optimizer: Any) -> list[float]:
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(3):
        if "Image" in FAMILIES[name][0]:
            batch = {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator), "labels": torch.arange(4)}
        else:
            ids = torch.randint(3, 61, (4, 8), generator=generator)
            batch = {"input_ids": ids, "labels": ids}
        loss = model(**batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_family(name: str, strategies: tuple[str, ...], precision: str) -> list[list[float]]:
    sw.init()
    found = []
    for strategy in strategies:
        model = family(name)
        model, optimizer = sw.shard(model, adamw(list(model.parameters())), strategy, precision=precision)
        found.append(family_losses(name, model, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_mix_dtypes(run_ranks: Pool, name: str, precision: str) -> None:
    alone = family(name)
    expected = family_losses(name, alone, adamw(list(alone.parameters())))
    for strategies in run_ranks(2, train_family, name, ("ddp", "zero3"), precision):
        for losses in strategies:
            assert losses == pytest.approx(expected, rel=BF16)
