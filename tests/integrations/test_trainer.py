"""Hugging Face's Trainer: what it logs under every strategy is what it logs without us."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer

import shardwise as sw
from shardwise.integrations.transformers import sharded
from tests.harness import Pool
from tests.integrations.scripts import NUM_STEPS, Sentences, arguments, forget_accelerate, logged, tiny_llama
from tests.integrations.training import HALF, TOLERANCE, Logs, assert_equal, train, train_and_tell
from tests.support.strategies import slow_but

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "hsdp": {"strategy": "hsdp", "node_size": 1},
    "zero3_offload": {"strategy": "zero3_offload"},
}


@pytest.mark.parametrize("strategy", slow_but(["zero3"], STRATEGIES))
def test_losses_and_norms_are_those_of_one_process(
    run_ranks: Pool, tmp_path: Path, alone: Logs, beside: Logs, strategy: str
) -> None:
    words = STRATEGIES[strategy]
    first, second = run_ranks(2, train_and_tell, tmp_path, words, 2, eval_strategy="steps", eval_steps=HALF)
    assert len(first["loss"]) == NUM_STEPS
    assert_equal(first, alone, ("loss", "grad_norm", "learning_rate", "flos"))
    assert_equal(first, beside, ("eval_loss",))
    assert second["grad_norm"] == first["grad_norm"]


class Regression(nn.Module):
    """A model that is not one of Hugging Face's, with a statistic that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(61, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layers(self.table(input_ids)).squeeze(-1) + self.offset
        return {"loss": (found - labels.clamp(min=0) / 61).square().mean(), "logits": found}


def every_verb(folder: Path, words: dict[str, Any] | None, is_hugging_face: bool) -> tuple[list[float], list[str]]:
    """Evaluated before there is anything sharded, trained, saved without its optimizer, evaluated and trained again."""

    def new_trainer() -> Trainer:
        forget_accelerate()
        return (Trainer if words is None else sharded(Trainer, **words))(
            model=tiny_llama() if is_hugging_face else Regression(),
            args=arguments(folder, 2, max_steps=4, save_strategy="steps", save_steps=4, save_only_model=True),
            train_dataset=Sentences(),
            eval_dataset=Sentences(24),
        )

    trainer = new_trainer()
    seen = [trainer.evaluate()["eval_loss"]]
    # A plain Trainer that has evaluated its model does not wrap it any more: its ranks would train apart.
    trainer = new_trainer() if words is None else trainer
    for _ in range(2):
        trainer.train()
        seen += logged(trainer)
        seen.append(trainer.evaluate()["eval_loss"])
    return seen, sorted(path.name for path in (folder / "checkpoint-4").iterdir())


@pytest.mark.parametrize("is_hugging_face", [True, False], ids=["llama", "any module"])
def test_evaluated_first_saved_alone_and_trained_again(run_ranks: Pool, tmp_path: Path, is_hugging_face: bool) -> None:
    expected, files = run_ranks(2, every_verb, tmp_path / "plain", None, is_hugging_face)[0]
    found, our_files = run_ranks(2, every_verb, tmp_path / "ours", {"strategy": "zero3"}, is_hugging_face)[0]
    assert found == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
    assert our_files == files


def precisions(folder: Path) -> list[str]:
    """What computes and what is updated, by what was said and how the model was given."""
    found = []
    for words, changes, dtype in (
        ({}, {"bf16": True}, torch.float32),
        ({}, {"bf16": True}, torch.bfloat16),
        ({}, {}, torch.bfloat16),
        ({"precision": "bf16"}, {}, torch.float32),
        ({"precision": "bf16"}, {"bf16": True}, torch.float32),
        ({}, {"fp16": True}, torch.float32),
    ):
        trainer = train(
            folder,
            {"strategy": "zero3", **words},
            2,
            lambda model, dtype=dtype: model.to(dtype),
            max_steps=2,
            **changes,
        )
        found.append(sw.describe(trainer.model).splitlines()[1])
        trainer.save_model(str(folder / "saved"))
        saved = AutoModelForCausalLM.from_pretrained(folder / "saved")
        assert saved.dtype == saved.config.dtype == dtype
    return found


def test_the_precision_is_what_the_arguments_or_the_model_say(run_ranks: Pool, tmp_path: Path) -> None:
    mixed = "computes in bfloat16, updates in float32, reduces in float32"
    pure = "computes in bfloat16, updates in bfloat16, reduces in bfloat16"
    half = "computes in float16, updates in float32, reduces in float32"
    assert run_ranks(2, precisions, tmp_path)[0] == [mixed, mixed, pure, mixed, mixed, half]


def test_tied_weights_and_early_updates_in_one_process(tmp_path: Path) -> None:
    """Weights that are one stay one; without clipping, updates inside the backward are the same."""

    def tied(model: LlamaForCausalLM) -> LlamaForCausalLM:
        return tiny_llama(tie_word_embeddings=True)

    changes = {"max_steps": 4, "max_grad_norm": 0.0}
    expected = train_and_tell(tmp_path, None, 1, tied, **changes)
    trainer = train(tmp_path, {"strategy": "zero3", "early_update": True}, 1, tied, **changes)
    assert logged(trainer) == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert not logged(trainer, "grad_norm")
    trainer.save_model(str(tmp_path / "final"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    weights = sw.full_state_dict(trainer.model)
    assert all(torch.equal(value, weights[name]) for name, value in opened.state_dict().items())


def predict_and_generate(folder: Path) -> tuple[Any, ...]:
    trainer = train(folder, {"strategy": "zero3"}, 2, max_steps=2)
    predictions = trainer.predict(Sentences(6)).predictions
    rank = trainer.args.process_index
    prompt = Sentences().tokens[rank : rank + 1, :3]
    # Ranks that come to their ends at different times.
    lengths = [trainer.model.generate(prompt, max_new_tokens=2 + 6 * rank, do_sample=False).tolist() for _ in range(2)]
    whole = tiny_llama()
    whole.load_state_dict(sw.full_state_dict(trainer.model))
    expected = whole.eval().generate(prompt, max_new_tokens=2 + 6 * rank, do_sample=False).tolist()
    assert lengths == [expected, expected]
    return predictions.shape, predictions.dtype.name


def test_prediction_and_generation(run_ranks: Pool, tmp_path: Path) -> None:
    assert run_ranks(2, predict_and_generate, tmp_path) == [((6, 12, 61), "float32")] * 2
