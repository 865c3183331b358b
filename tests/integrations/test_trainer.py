"""Hugging Face's Trainer: what it logs, saves and goes on from under every strategy is what it does without us."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainerCallback

import shardwise as sw
from shardwise.integrations.transformers import sharded
from tests.harness import Pool
from tests.integrations.scripts import NUM_STEPS, Sentences, arguments, forget_accelerate, logged, tiny_llama
from tests.support.deepspeed import DeepSpeed

TOLERANCE = 1e-5
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "hsdp": {"strategy": "hsdp", "node_size": 1},
    "zero3_offload": {"strategy": "zero3_offload"},
}
HALF = NUM_STEPS // 2
Logs = dict[str, list[float]]


def plain(model: LlamaForCausalLM) -> LlamaForCausalLM:
    return model


def lora(model: LlamaForCausalLM) -> PeftModel:
    """Adapters, drawn at random on each rank."""
    torch.seed()
    targets = ["q_proj", "up_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))


def train(
    folder: Path, words: dict[str, Any] | None, num_ranks: int, kind: Any = plain, resume: Any = None, **changes: Any
) -> Any:
    """The script. `words` is what is asked of the engine: None where there is none."""
    forget_accelerate()
    trainer = (Trainer if words is None else sharded(Trainer, **words))(
        model=kind(tiny_llama()),
        args=arguments(folder, num_ranks, **changes),
        train_dataset=Sentences(),
        eval_dataset=Sentences(24),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def train_and_tell(*args: Any, **kwargs: Any) -> Logs:
    trainer = train(*args, **kwargs)
    found = {key: logged(trainer, key) for key in ("loss", "grad_norm", "learning_rate", "eval_loss")}
    return {**found, "flos": [trainer.state.total_flos]}


def assert_equal(found: Logs, expected: Logs, keys: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> None:
    for key in keys:
        assert found[key] == pytest.approx(expected[key], abs=TOLERANCE, rel=TOLERANCE), key


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    """One process without us."""
    return train_and_tell(tmp_path_factory.mktemp("alone"), None, 1)


@pytest.fixture(scope="module")
def beside(run_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Logs:
    """Two processes without us: the Trainer's evaluation is not quite the same on more of them."""
    folder = tmp_path_factory.mktemp("beside")
    return run_ranks(
        2, train_and_tell, folder, None, 2, eval_strategy="steps", eval_steps=HALF, ddp_find_unused_parameters=False
    )[0]


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=() if name == "zero3" else pytest.mark.slow) for name in STRATEGIES]
)
def test_losses_and_norms_are_those_of_one_process(
    run_ranks: Pool, tmp_path: Path, alone: Logs, beside: Logs, strategy: str
) -> None:
    words = STRATEGIES[strategy]
    first, second = run_ranks(2, train_and_tell, tmp_path, words, 2, eval_strategy="steps", eval_steps=HALF)
    assert len(first["loss"]) == NUM_STEPS
    assert_equal(first, alone, ("loss", "grad_norm", "learning_rate", "flos"))
    assert_equal(first, beside, ("eval_loss",))
    assert second["grad_norm"] == first["grad_norm"]


# ---------------------------------------------------------------------------------------------------------
# saving, and going on


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
        moments = [optimizer.kept(param, "exp_avg") for param in model.parameters()]
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


# ---------------------------------------------------------------------------------------------------------
# precision, evaluation, generation


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
