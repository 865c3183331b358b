"""Samples: the same on every rank and from every form in which a run has left its model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.folder import step_folder
from shardwise.trainer.data.tokenizer import tokenizer_for
from shardwise.trainer.model import Transformer
from shardwise.trainer.models.build import build
from shardwise.trainer.models.export import export
from shardwise.trainer.models.headloss import LossPath, set_path
from shardwise.trainer.models.restore import find_restorable, restore, settings_of
from shardwise.trainer.models.sample import Sampling, sample
from shardwise.trainer.settings import Lora, Settings
from shardwise.trainer.shapes import TransformerShape
from tests.checkpoint.by_hand import save_by_hand
from tests.harness import Pool
from tests.trainer.models.architectures import saved

CPU = torch.device("cpu")
BYTES = tokenizer_for("bytes")
SHAPE = TransformerShape(vocab=300, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40, max_seq=16)


class Scripted(nn.Module):
    """Prefers, after token t, token t + 1; the vocabulary is larger than the tokenizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.rows: list[Tensor] = []
        set_path(self, LossPath("in-tree", isolates=True))

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        self.rows.append(tokens)
        logits = torch.zeros(*tokens.shape, 300)
        logits.scatter_(-1, (tokens[..., None] + 1) % 300, 5.0)
        logits[..., 299] = 9.0  # nobody's token
        return logits


def test_the_likeliest_token_follows_and_a_long_text_slides() -> None:
    model = Scripted().train()
    assert sample(model, BYTES, "ab", 6, Sampling(temperature=0), max_seq=4) == "cdefgh"
    assert model.training
    assert {tuple(row.shape) for row in model.rows} == {(1, 4)}, "one shape, so compiled blocks are compiled once"
    assert model.rows[-1].tolist() == [list(b"defg")]
    assert model.rows[0].tolist() == [[97, 98, 256, 256]]


def test_a_document_may_end_and_an_empty_prompt_begins_one() -> None:
    model = Transformer(SHAPE)
    set_path(model, LossPath("in-tree", isolates=True))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model.embed.weight[:, 0] = model.norm.weight[0] = 1.0
        model.head.weight[BYTES.end_id, 0] = 1.0
    assert sample(model, BYTES, "", 5, Sampling(temperature=0), max_seq=8) == "", "the end comes at once"


def test_the_seed_decides() -> None:
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    set_path(model, LossPath("in-tree", isolates=True))

    def text(seed: int, **changes: Any) -> str:
        sampling = Sampling(**{"temperature": 1.0, "top_k": 0, "seed": seed, **changes})
        return sample(model, BYTES, "The", 6, sampling, max_seq=16)

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1, top_k=1) == text(2, top_k=1) == text(3, temperature=0)
    with pytest.raises(sw.ConfigurationError, match="must not be negative"):
        text(1, temperature=-1.0)


def moved(run: Path) -> Path:
    """A checkpoint of the run that lies elsewhere now."""
    return run.with_name(f"{run.name}-moved")


def left_behind(settings: Settings, run: Path) -> str:
    """A run folder as a run leaves it; what its model says."""
    sw.init()
    built = build(settings, 257, CPU)
    model, _ = sw.shard(built.model, None, "zero3", precision="bf16", seed=settings.seed)
    if built.weights is not None:
        sw.load_full_state_dict(model, built.weights)
    sw.save(step_folder(run / "checkpoints", 10), model)
    sw.save(moved(run), model, extra={"configuration": json.loads(settings.to_json())})
    export(model, built, settings, run / "export")
    (run / "config.json").write_text(settings.to_json())
    return said(model, built.facts.max_seq)


def said(model: Any, max_seq: int) -> str:
    return sample(model, BYTES, "It was", 12, Sampling(temperature=0), max_seq=max_seq)


def restored(path: Path) -> str:
    model, tokenizer, max_seq = restore(path, "ddp")
    assert tokenizer.name == "bytes"
    return said(model, max_seq)


def all_ways(cases: list[tuple[Settings, Path]]) -> list[list[str]]:
    texts = []
    for settings, run in cases:
        said_then = left_behind(settings, run)
        places = (run, run / "export", step_folder(run / "checkpoints", 10), moved(run))
        texts.append([said_then, *map(restored, places)])
    return texts


def test_runs_exports_and_checkpoints_say_the_same(run_ranks: Pool, tmp_path: Path) -> None:
    saved("llama", tmp_path / "llama")
    shape: dict[str, int | bool] = {"hidden": 24, "layers": 2, "heads": 4, "ffn": 40, "vocab": 300}
    settings = [
        Settings(model="tiny", shape=shape, precision="bf16", seed=3),
        Settings(model="tiny", shape=shape, lora=Lora(r=4), seed=3),
        Settings(model=str(tmp_path / "llama"), tokenizer="bytes"),
        Settings(model=str(tmp_path / "llama"), tokenizer="bytes", lora=Lora(r=4)),
    ]
    cases = [(each, tmp_path / f"run-{index}") for index, each in enumerate(settings)]
    first, second = run_ranks(2, all_ways, cases)
    assert first == second
    for texts in first:
        # In 16 bits a run may choose otherwise; what it has left is read in 32.
        assert len(set(texts[1:])) == 1
        assert texts[1]


def test_what_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.ConfigurationError, match="there is no such folder"):
        find_restorable(tmp_path / "none")
    with pytest.raises(sw.ConfigurationError, match="nor a complete checkpoint, nor a run folder"):
        find_restorable(tmp_path)


def test_which_model_a_checkpoint_belongs_to(tmp_path: Path) -> None:
    settings = Settings(model="tiny", seed=7)
    place = tmp_path / "run" / "checkpoints" / "step-000001"
    (tmp_path / "run").mkdir()
    assert settings_of(place, {}) is None
    assert settings_of(place, {"configuration": json.loads(settings.to_json())}) == settings
    with pytest.raises(sw.ConfigurationError, match=r"'configuration' of .*step-000001 does not hold the settings"):
        settings_of(place, {"configuration": [1]})
    (tmp_path / "run" / "config.json").write_text(settings.to_json())
    assert settings_of(place, {"configuration": [1]}) == settings
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(sw.ConfigurationError, match=r"config.json does not hold the settings of a run"):
        settings_of(place, {})
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}')
    assert settings_of(place, {}) is None


def nobody_says(place: Path) -> None:
    with pytest.raises(sw.ConfigurationError, match=r"its model is unknown.*shardwise export"):
        restore(place, "ddp")


def test_a_checkpoint_of_no_run_is_told_how_it_can_be_continued(run_ranks: Pool, tmp_path: Path) -> None:
    save_by_hand(tmp_path / "other", {"a": torch.ones(2)})
    run_ranks(1, nobody_says, tmp_path / "other")
