"""Preference objectives: losses and gradients are TRL's, and the same for any split of the pairs and any strategy."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.checks import look_ahead
from shardwise.trainer.data.samples import Batch
from shardwise.trainer.models.build import build
from shardwise.trainer.models.headloss import LossPath, losses, set_path
from shardwise.trainer.objectives import MEASURES, sums
from shardwise.trainer.settings import Lora, Settings
from tests.harness import Pool
from tests.support.running import rows, save_llama, settings_for, train
from tests.support.strategies import slow_but
from tests.trainer.models.architectures import VOCAB, saved

CPU = torch.device("cpu")


def pairs(num: int = 3, length: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (2 * num, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, (start, end) in enumerate([(4, 12), (4, 9), (7, 24), (7, 16), (2, 5), (2, 20)][: 2 * num]):
        targets[row, :start], targets[row, end:] = -100, -100
        tokens[row, : start + 1] = tokens[row // 2 * 2, : start + 1]
    return Batch(tokens[:, :-1], targets, None, 2)


def adapted(folder: Path, **changes: Any) -> tuple[Any, Settings]:
    """A model with adapters that change nothing yet."""
    saved("llama", folder)
    settings = Settings(model=str(folder), tokenizer="bytes", lora=Lora(r=4, targets=("all-linear",)), **changes)
    built = build(settings, 257, CPU)
    model = built.model.to_empty(device="cpu")
    model.load_state_dict(dict(built.weights or {}), strict=False)
    base = model.get_base_model()
    base.model.rotary_emb.__init__(base.config)
    return model, settings


def change(model: Any) -> None:
    """Make the adapters what a training could have made of them."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name and ".default" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)


@pytest.mark.parametrize("asked", ["dpo", "hinge", "ipo"])
@pytest.mark.slow
def test_losses_and_gradients_are_those_of_trl(tmp_path: Path, asked: str) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from shardwise.trainer.data.tokenizer import write_byte_tokenizer

    model, settings = adapted(tmp_path / "base", objective=asked, dpo_beta=0.3)
    batch = pairs()
    (tmp_path / "tokenizer").mkdir()
    write_byte_tokenizer(tmp_path / "tokenizer", 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    kind = {"dpo": "sigmoid"}.get(asked, asked)
    trainer: Any = DPOTrainer(
        model=model,
        args=DPOConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, beta=0.3, loss_type=[kind], report_to="none",
                       gradient_checkpointing=False, disable_tqdm=True),
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
        processing_class=tokenizer,
    )  # fmt: skip
    change(model)  # TRL's reference is a copy of the adapters at the start
    order = [0, 2, 4, 1, 3, 5]
    whole = torch.cat([batch.tokens, batch.targets[:, -1:].clamp(min=0)], 1)[order]
    is_answer = torch.cat([torch.zeros(6, 1, dtype=torch.bool), batch.targets >= 0], 1)[order]
    inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole), "completion_mask": is_answer.long()}
    right = trainer.compute_loss(trainer.model, dict(inputs))
    right.backward()
    expected = {name: param.grad.clone() for name, param in trainer.model.named_parameters() if param.grad is not None}
    told = {
        name: float(torch.tensor(values, dtype=torch.float64).mean())
        for name, values in trainer._metrics["train"].items()
    }
    trainer.model.zero_grad()
    found = sums(model, batch, settings) / 3
    found[0].backward()
    assert float(found[0].detach()) == pytest.approx(float(right.detach()), abs=1e-5)
    for name, value in zip(MEASURES, found[1:].tolist(), strict=True):
        assert value == pytest.approx(told[name], abs=1e-5), name
    own = {name: param.grad for name, param in trainer.model.named_parameters() if param.grad is not None}
    assert set(own) == set(expected)
    for name, grad in own.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("asked", slow_but(["dpo"], ["simpo", "orpo", "dpo"]))
def test_losses_without_a_reference_are_those_of_trl(tmp_path: Path, asked: str) -> None:
    smoothing = 0.1 if asked == "simpo" else 0.0
    model, settings = adapted(tmp_path, objective=asked, dpo_beta=0.5, label_smoothing=smoothing)
    batch = pairs()
    if asked != "dpo":
        change(model)
    each = -losses(model, batch, "none")
    logits = model(input_ids=batch.tokens).logits.log_softmax(-1)
    plain = logits.gather(2, batch.targets.clamp(min=0)[..., None])[..., 0].masked_fill(batch.targets < 0, 0)
    torch.testing.assert_close(each, plain, rtol=1e-5, atol=1e-5)
    means = plain.sum(1) / (batch.targets >= 0).sum(1)
    chosen, rejected = means[0::2], means[1::2]
    device = SimpleNamespace(device=CPU)
    if asked == "simpo":
        cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
        asks = SimpleNamespace(alpha=0.0, loss_type="simpo", simpo_gamma=0.5, beta=0.5, label_smoothing=smoothing)
        asks.accelerator = device
        right = cpo.cpo_loss(asks, chosen, rejected)[0]
    elif asked == "orpo":
        orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
        right = -chosen - orpo.odds_ratio_loss(SimpleNamespace(beta=0.5, accelerator=device), chosen, rejected)[0]
    else:  # at the start of the training, the model is its own reference
        right = torch.full((3,), 0.6931471805599453)
    found = sums(model, batch, settings)
    assert float(found[0].detach()) == pytest.approx(float(right.sum().detach()), abs=1e-5)
    assert bool(found[1:].eq(0).all()) == (asked == "dpo")


@pytest.mark.parametrize("how", ["chunked", "plain"])
def test_gradients_of_single_losses_are_those_of_all_logits(tmp_path: Path, how: Any) -> None:
    """Also of a trained head, and in chunks."""
    saved("llama", tmp_path)
    built = build(Settings(model=str(tmp_path), tokenizer="bytes"), 257, CPU)
    model: Any = built.model.to_empty(device="cpu")
    model.load_state_dict(dict(built.weights or {}), strict=False)
    model.model.rotary_emb.__init__(model.config)
    batch, weights = pairs(), torch.linspace(-2, 3, 6)[:, None]

    def gradients(loss: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss.backward()
        return [param.grad.clone() for param in model.parameters()]

    logits = model(input_ids=batch.tokens).logits
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    right = gradients((plain.view_as(batch.targets) * weights).sum())
    set_path(model, LossPath(how, True))
    for one, other in zip(gradients((losses(model, batch, "none") * weights).sum()), right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------
# whole runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pairs")
    made = [{"prompt": "say " * (n % 4), "chosen": "yes " * (1 + n % 5), "rejected": "no " * (1 + n % 3)}
            for n in range(40)]  # fmt: skip
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    save_llama(folder / "llama")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": "some words " * 20}) + "\n" for _ in range(40)))
    return {
        "model": str(folder / "llama"), "shape": {}, "tokenizer": "bytes", "train_file": (str(folder / "pairs.jsonl"),),
        "objective": "dpo", "eval_fraction": 0.1, "lora": Lora(r=4, targets=("all-linear",), dora=True),
    }  # fmt: skip


SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 x 4": (2, {"strategy": "zero3"}),
    "2 x 4, accumulated": (2, {"strategy": "zero2", "gradient_accumulation_steps": 2}),
    "1 x 8, accumulated": (1, {"per_device_train_batch_size": 1}),
    "4 x 2": (4, {"strategy": "hsdp", "node_size": 2, "gradient_checkpointing": "full"}),
    "2 x 4, offloaded": (2, {"strategy": "zero3-offload"}),
    "2 x 4, zero1": (2, {"strategy": "zero1", "per_device_eval_batch_size": 3}),
}


@pytest.mark.parametrize("names", slow_but([["2 x 4"]], [["2 x 4"], [*SPLITS][1:]]), ids=len)
def test_any_split_of_the_pairs_gives_the_same_run(
    run_ranks: Pool, data: dict[str, Any], tmp_path: Path, names: list[str]
) -> None:
    def told(folder: Path) -> list[list[float]]:
        found = [[row[name] for name in ("loss", *MEASURES)] for row in rows(folder) if "loss" in row]
        last = rows(folder)[-1]
        return [*found, [last[name] for name in ("eval_loss", "eval_rewards/margins", "eval_rewards/accuracies")]]

    assert train(run_ranks, 1, settings_for(tmp_path / "whole", **data)) == 0
    right = told(tmp_path / "whole")
    assert right[0][0] == pytest.approx(0.6931472, abs=1e-6)
    assert right[5][0] < 0.69
    assert right[5][4] == pytest.approx(right[5][1] - right[5][2], abs=1e-6)
    for name in names:
        num_ranks, changes = SPLITS[name]
        assert train(run_ranks, num_ranks, settings_for(tmp_path / name, **data, **changes)) == 0
        for found, expected in zip(told(tmp_path / name), right, strict=True):
            assert found == pytest.approx(expected, rel=2e-5, abs=2e-6), name
    if len(names) == 1:
        return
    # A run that was stopped goes on, without a row of its own for the steps before.
    parts = {**data, "save_steps": 2, "logging_steps": 4}
    assert train(run_ranks, 1, settings_for(tmp_path / "parts", **parts)) == 0
    for later in (tmp_path / "parts" / "checkpoints").glob("step-*"):
        if later.name != "step-000002":
            (later / "complete").unlink()
    before = rows(tmp_path / "parts")
    again = settings_for(tmp_path / "parts", **parts, resume_from_checkpoint="latest", strategy="zero3")
    assert train(run_ranks, 2, again) == 0
    for row, right_row in zip(rows(tmp_path / "parts"), before, strict=True):
        for name in {"loss", *MEASURES} & {*right_row}:
            assert row[name] == pytest.approx(right_row[name], rel=1e-5, abs=2e-6), name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"train_file": "text"}, "objective dpo needs preference rows"),
    "pairs alone": ({"objective": None}, "give --objective dpo"),
    "all weights": ({"lora": None}, "all weights are trained"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(data: dict[str, Any], tmp_path: Path, name: str) -> None:
    changes, words = REFUSED[name]
    if "train_file" in changes:
        changes = {"train_file": (data["train_file"][0].replace("pairs.jsonl", "text.jsonl"),)}
    with pytest.raises(ConfigurationError, match=words):
        look_ahead(settings_for(tmp_path, **{**data, **changes}), 1, print)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dpo_beta": 0.0, "objective": "dpo"}, "dpo_beta: 0.0 must be above 0"),
        ({"dpo_beta": 0.2}, "dpo_beta 0.2 belongs to objective dpo"),
        ({"label_smoothing": 0.1, "objective": "ipo"}, "label_smoothing 0.1 belongs to objective dpo, simpo"),
        ({"lora": {"targets": ("all-linear", "q_proj")}}, "all-linear stands alone"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    if "lora" in changes:
        with pytest.raises(ConfigurationError, match=words):
            Lora(**changes["lora"])
    else:
        with pytest.raises(ConfigurationError, match=words):
            Settings(**changes)
