"""Ranks that leave out units which other ranks compute: training is what one process makes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import Pool
from tests.support.trainee import LAYOUTS, NODES, Trainee, check, features

NUM_BLOCKS = 6
WORLDS = [(2, {}, LAYOUTS), (4, {"node_size": 2}, NODES)]
IDS = ["two ranks", "two nodes"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """A tower that a batch may not need, and a body; the root keeps `scale` and the head."""

    num_frozen = 0
    is_checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(16, 4)
        for layer in self.layers[: self.num_frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor, skipped: tuple[int, ...] = ()) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index not in skipped:
                x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(x * self.scale)


class FrozenTower(Tower):
    num_frozen = 3


class CheckpointedTower(Tower):
    is_checkpointed = True


Skips = Callable[[int, int], tuple[int, ...]]
ALL = tuple(range(NUM_BLOCKS))
# Nobody, four in a row at either end and in the middle, all but one, all, every other one.
PATTERNS = [(), ALL[:4], ALL[1:5], ALL[2:], ALL[1:], ALL, ALL[::2]]


def on_first(step: int, rank: int) -> tuple[int, ...]:
    return PATTERNS[step % len(PATTERNS)] if rank == 0 else ()


def by_rank(step: int, rank: int) -> tuple[int, ...]:
    """Every rank another one, from the first step on."""
    return PATTERNS[(step + 1 + 2 * rank) % len(PATTERNS)]


def train(trainee: Trainee, skips: Skips, num_micro: int = 1, looks: bool = False) -> list[float]:
    losses = []
    for step in range(len(PATTERNS)):
        for micro in range(num_micro):
            at = num_micro * step + micro
            loss = trainee.share(
                lambda rank, at=at, step=step, micro=micro: (
                    trainee.model(features(at, rank), skips(step + 3 * micro, rank)).square().mean()
                )
            )
            if looks:
                with torch.no_grad():
                    seen = trainee.share(
                        lambda rank, at=at, step=step: (
                            trainee.model(features(at, rank), skips(step + 2, rank)).square().mean()
                        )
                    )
                losses.append(trainee.mean(seen))
            if micro < num_micro - 1:
                with trainee.accumulate():
                    loss.backward()
            else:
                loss.backward()
            losses.append(trainee.mean(loss))
        losses.append(trainee.clip(1.0))
        trainee.step()
    return losses


def skip_on_first(trainee: Trainee) -> list[float]:
    return train(trainee, on_first)


def skip_by_rank(trainee: Trainee) -> list[float]:
    return train(trainee, by_rank)


def skip_in_micro_batches(trainee: Trainee) -> list[float]:
    return train(trainee, by_rank, num_micro=3)


def skip_around_a_look(trainee: Trainee) -> list[float]:
    return train(trainee, by_rank, num_micro=2, looks=True)


STORIES = [skip_on_first, skip_by_rank, skip_in_micro_batches, skip_around_a_look]
MODELS = [Tower, FrozenTower, CheckpointedTower]


@pytest.mark.quick("two ranks")
@pytest.mark.parametrize(("world", "options", "layouts"), WORLDS, ids=IDS)
def test_units_skipped_by_rank(run_ranks: Pool, world: int, options: Any, layouts: list[str]) -> None:
    check(run_ranks, skip_around_a_look, Tower, layouts, world=world, **options)


def test_a_mapping(run_ranks: Pool) -> None:
    layouts: Any = {"layers.0": "ddp", "layers.4": "shard_grad_op", "*": "zero3"}
    check(run_ranks, skip_in_micro_batches, Tower, layouts)


def test_offload(run_ranks: Pool) -> None:
    check(run_ranks, skip_in_micro_batches, Tower, ["zero3_offload"])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(("world", "options", "layouts"), WORLDS, ids=IDS)
def test_every_way_of_skipping(
    run_ranks: Pool, world: int, options: Any, layouts: list[str], story: Any, model: Any
) -> None:
    check(run_ranks, story, model, layouts, world=world, deadline=180, **options)
    if world == 2:
        check(run_ranks, story, model, ["zero3_offload", "zero2_offload"], world=world, deadline=180, **options)
        for units, budget in ((["Linear"], None), ("auto", 1 << 16)):
            check(run_ranks, story, model, ["zero3"], units=units, memory_budget=budget, deadline=180)


# ---------------------------------------------------------------------------------------------------------
# vision-language models, and a rank whose batch has no image


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, num_hidden_layers=5, image_size=16, patch_size=8, projection_dim=16)
    text = LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2, vocab_size=64, pad_token_id=0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=63, vision_feature_layer=-1)
    )
    for name, param in model.named_parameters():
        # Softmax does not see it: its gradient is made of roundings alone.
        param.requires_grad_(not name.endswith("k_proj.bias"))
    return model


def qwen() -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "max_position_embeddings": 64}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
    vision = {**sizes, **patches, "depth": 5, "num_heads": 2, "out_hidden_size": 16, "fullatt_block_indexes": [1, 3]}
    config = Qwen2_5_VLConfig(
        text_config={**sizes, **ends, **heads, **rope, "num_hidden_layers": 4, "vocab_size": 64},
        vision_config=vision,
        image_token_id=63,
        video_token_id=62,
        vision_start_token_id=61,
        vision_end_token_id=60,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def llava_frozen() -> nn.Module:
    model = llava()
    model.model.vision_tower.requires_grad_(False)
    return model


def qwen_frozen() -> nn.Module:
    model = qwen()
    model.model.visual.requires_grad_(False)
    return model


def a_batch(model: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    """Every second step, every second rank has text alone."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(3, 60, (2, 12), generator=draw)
    batch = {"input_ids": tokens.clone(), "labels": tokens}
    if (step + rank) % 2:
        batch["input_ids"][:, 1:5] = 63
        if "Llava" in type(model).__name__:
            batch["pixel_values"] = torch.randn(2, 3, 16, 16, generator=draw)
        else:
            batch["input_ids"][:, 0] = 61
            batch["pixel_values"] = torch.randn(32, 96, generator=draw)
            batch["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return batch


def images_now_and_then(trainee: Trainee) -> list[float]:
    losses = []
    for step in range(4):
        for micro in range(2):
            at = 2 * step + micro if step < 3 else 4  # in the end, with an image on the same ranks twice
            loss = trainee.share(lambda rank, at=at: trainee.model(**a_batch(trainee.model, at, rank)).loss)
            if micro == 0:
                with trainee.accumulate():
                    loss.backward()
            else:
                loss.backward()
            losses.append(trainee.mean(loss))
        losses.append(trainee.clip(1.0))
        trainee.step()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("model", [llava, llava_frozen, qwen, qwen_frozen])
@pytest.mark.parametrize(("world", "options", "layouts"), WORLDS, ids=IDS)
def test_vision_language_models(run_ranks: Pool, world: int, options: Any, layouts: list[str], model: Any) -> None:
    # AdamW turns roundings of small gradients into steps of the learning rate.
    check(run_ranks, images_now_and_then, model, layouts, world=world, deadline=180, make_optimizer=sgd, **options)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)
