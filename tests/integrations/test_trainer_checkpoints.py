"""What the Trainer saves opens elsewhere and goes on under another strategy; so does what it saved without us."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import shardwise as sw
from shardwise.integrations.transformers import sharded
from tests.harness import Pool
from tests.integrations.scripts import NUM_STEPS, Sentences, arguments, forget_accelerate, logged, tiny_llama
from tests.integrations.training import HALF, Logs, assert_equal, lora, train, train_and_tell
from tests.support.deepspeed import DeepSpeed


def train_and_save(folder: Path, *args: Any, **kwargs: Any) -> tuple[Logs, Tensor]:
    """What was logged, and the logits of the model that was trained."""
    trainer = train(folder, *args, **kwargs)
    trainer.save_model(str(folder / "final"))
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=Sentences().tokens[:2]).logits
    return {key: logged(trainer, key) for key in ("loss", "grad_norm", "learning_rate")}, logits


def test_a_checkpoint_goes_on_elsewhere_and_opens_as_a_model(run_ranks: Pool, tmp_path: Path, alone: Logs) -> None:
    """Ten steps on two ranks, ten under another strategy in one process; what is saved is what was trained."""
    first = run_ranks(
        2, train_and_tell, tmp_path, {"strategy": "zero3"}, 2, max_steps=NUM_STEPS, save_strategy="steps",
        save_steps=HALF, save_total_limit=2,
    )[0]  # fmt: skip
    assert_equal(first, alone)
    shutil.rmtree(tmp_path / f"checkpoint-{NUM_STEPS}")
    second, logits = train_and_save(tmp_path, {"strategy": "ddp+optimizer=host"}, 1, resume=True)
    assert_equal(second, alone)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    with torch.no_grad():
        assert torch.equal(opened(input_ids=Sentences().tokens[:2]).logits, logits)


def test_a_checkpoint_of_the_plain_trainer_goes_on(run_ranks: Pool, tmp_path: Path, alone: Logs) -> None:
    train(tmp_path, None, 1, save_strategy="steps", save_steps=HALF)
    shutil.rmtree(tmp_path / f"checkpoint-{NUM_STEPS}")
    assert_equal(run_ranks(2, train_and_tell, tmp_path, {"strategy": "zero2"}, 2, resume=True)[0], alone)


def as_fsdp_has_it(place: Path) -> None:
    """A checkpoint of a plain Trainer in the form that FSDP's has: torch's DCP, with the names of parameters."""
    forget_accelerate()
    trainer = Trainer(model=tiny_llama(), args=arguments(place.parent, 1))
    trainer.model.load_state_dict(load_file(place / "model.safetensors"))
    trainer.create_optimizer().load_state_dict(torch.load(place / "optimizer.pt", weights_only=True))
    state = get_optimizer_state_dict(trainer.model, trainer.optimizer)
    dcp.save({"model": trainer.model.state_dict()}, checkpoint_id=place / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": state}, checkpoint_id=place / "optimizer_0")


def test_a_checkpoint_of_fsdps_trainer_goes_on(run_ranks: Pool, tmp_path: Path, alone: Logs) -> None:
    train(tmp_path, None, 1, save_strategy="steps", save_steps=HALF)
    shutil.rmtree(tmp_path / f"checkpoint-{NUM_STEPS}")
    place = tmp_path / f"checkpoint-{HALF}"
    run_ranks(2, as_fsdp_has_it, place)
    for name in ("model.safetensors", "optimizer.pt"):
        (place / name).unlink()
    assert_equal(run_ranks(2, train_and_tell, tmp_path, {"strategy": "zero3"}, 2, resume=True)[0], alone)


def train_with_deepspeed(place: Path) -> dict[str, Tensor]:
    """Three steps under DeepSpeed, with the optimizer that a Trainer would give it; the weights."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    forget_accelerate()
    trainer = Trainer(model=tiny_llama(), args=arguments(place.parent, 1))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    optimizer = trainer.create_optimizer()
    allowed = {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=trainer.model, optimizer=optimizer, config={**config, **allowed})
    for step in range(3):
        tokens = Sentences().tokens[2 * step : 2 * step + 2]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(place))
    return {name: safe_get_full_fp32_param(param) for name, param in trainer.model.named_parameters()}


class Begun(TrainerCallback):
    """What a training begins with: weights, and whether there are moments of all of them."""

    def __init__(self) -> None:
        self.found: tuple[dict[str, Tensor], bool] = ({}, False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"].optimizer
        moments = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
        self.found = sw.full_state_dict(model), all(moment.any() for moment in moments)


def begin_from(folder: Path, words: dict[str, Any]) -> tuple[dict[str, Tensor], bool]:
    forget_accelerate()
    begun = Begun()
    args = arguments(folder, 2, max_steps=HALF + 1)
    sharded(Trainer, **words)(model=tiny_llama(4), args=args, train_dataset=Sentences(), callbacks=[begun]).train(True)
    return begun.found


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # DeepSpeed's import alone warns of a dozen deprecations
def test_a_checkpoint_of_deepspeeds_trainer_goes_on(run_ranks: Pool, on_deepspeed: DeepSpeed, tmp_path: Path) -> None:
    train(tmp_path, None, 1, save_strategy="steps", save_steps=HALF, max_steps=HALF)
    place = tmp_path / f"checkpoint-{HALF}"
    for name in ("model.safetensors", "optimizer.pt"):
        (place / name).unlink()
    expected = on_deepspeed(train_with_deepspeed, place)
    found, has_moments = run_ranks(2, begin_from, tmp_path, {"strategy": "ddp"})[0]
    assert has_moments
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def best_of(folder: Path) -> tuple[float, float]:
    """The best evaluation, which is the first here, and that of the model after the training."""
    trainer = train(
        folder, {"strategy": "zero3"}, 2, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    assert trainer.state.best_global_step == 5
    return trainer.state.best_metric, trainer.evaluate()["eval_loss"]


def test_the_best_model_comes_back(run_ranks: Pool, tmp_path: Path) -> None:
    best, after = run_ranks(2, best_of, tmp_path)[0]
    assert after == best


@pytest.mark.slow
def test_adapters_begin_alike_and_are_saved_as_adapters(run_ranks: Pool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_llama().save_pretrained(base)
    (first, logits), (_, again) = run_ranks(
        2, train_and_save, tmp_path, {"strategy": "zero3"}, 2, lora, save_strategy="steps", save_steps=HALF,
        gradient_checkpointing=True,
    )  # fmt: skip
    assert torch.equal(logits, again)
    assert first["loss"][-1] < first["loss"][0]
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names
    config = json.loads((tmp_path / "final" / "adapter_config.json").read_text())
    (tmp_path / "final" / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(base)})
    )
    opened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    with torch.no_grad():
        torch.testing.assert_close(opened(input_ids=Sentences().tokens[:2]).logits, logits)
    shutil.rmtree(tmp_path / f"checkpoint-{NUM_STEPS}")
    resumed = train_and_tell(tmp_path, {"strategy": "zero1"}, 1, lora, resume=True)
    assert_equal(resumed, first)
