"""TrainingArguments in a file, and what LLaMA-Factory, Axolotl and TRL make of its names."""

from pathlib import Path
from typing import Any

import pytest

import shardwise.migrate.api as api
from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import layout_of
from shardwise.migrate.account import mapping_in
from shardwise.migrate.migrated import Migrated
from shardwise.trainer.config import resolve
from tests.migrate.told import assert_all_told

FIXTURES = Path(__file__).parent / "fixtures" / "hugging_face"
HOST = "zero3+params=host+grads=host+optimizer=host"
SUMS_IN_BF16 = {"precision": "bf16", "reduce_dtype": "bf16"}


def lora(r: int, alpha: float, *targets: str) -> dict[str, Any]:
    return {"r": r, "alpha": alpha, "dropout": 0.0, "targets": list(targets)}


# The strategy, settings besides it, units, and keys that are refused.
EXPECTED: dict[str, tuple[str, dict[str, Any], Any, tuple[str, ...]]] = {
    "llama_factory_full.yaml": (
        "zero3",
        {
            "precision": "bf16", "model": "Qwen/Qwen3-0.6B", "seq_length": 1024, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4, "learning_rate": 2e-5, "num_train_epochs": 2.0, "warmup_steps": 20,
            "lr_scheduler_type": "cosine", "min_lr_ratio": 0.0, "timeout": 7200.0, "save_steps": 100,
        },
        (),
        ("dataset", "max_samples"),
    ),
    "llama_factory_lora.yaml": (
        "ddp",
        {"precision": "fp16", "lora": lora(4, 8.0, "q_proj", "k_proj"), "eval_steps": 25, "eval_fraction": 0.1},
        (),
        ("dataset", "max_samples"),
    ),
    "llama_factory_qlora.yaml": (
        "ddp",
        {"quantize": "nf4", "lora": lora(8, 16.0, "all-linear"), "chat_template": "chat_template.jinja"},
        (),
        ("dataset",),
    ),
    "axolotl_chat_qlora.yaml": (
        "ddp",
        {
            "quantize": "nf4", "precision": "bf16", "packing": "packed", "report_to": ("wandb",),
            "chat_template": "chat_template.jinja",
            "columns": {"messages": "conversations", "role": "from", "content": "value"},
            "lora": lora(64, 32.0, "all-linear") | {
                "dropout": 0.05, "modules_to_save": ["embed_tokens", "lm_head"], "rslora": True,
            },
            "eval_fraction": 0.05, "eval_steps": pytest.approx(1 / 6), "save_steps": pytest.approx(1 / 3),
        },
        (),
        ("datasets.1.path",),
    ),
    "axolotl_dpo.yml": (
        "ddp",
        {
            "objective": "dpo", "dpo_beta": 0.2, "quantize": "int8", "lora": lora(16, 16.0, "q_proj", "v_proj"),
            "dataset": ("some/pairs:cleaned",), "dataset_split": "train", "columns": {"instruction": "question"},
            "chat_template": "chat_template.jinja", "lr_scheduler_type": "linear", "learning_rate": 5e-6,
        },
        (),
        (),
    ),
    "handbook_sft.yaml": (
        "ddp",
        {
            "quantize": "nf4", "lora": lora(16, 16.0, "all-linear"), "dataset": ("some/chats",), "precision": "bf16",
            "dataset_split": "train_sft+extra_sft", "chat_template": "chat_template.jinja", "eval_steps": 0.25,
            "num_train_epochs": 4.0, "seq_length": 2048, "warmup_steps": 0.1, "report_to": ("wandb",),
        },
        (),
        (),
    ),
    "trl_orpo.yaml": (
        "ddp",
        {
            "objective": "orpo", "dpo_beta": 0.05, "dataset": ("some/pairs:binarized",), "dataset_split": "train_prefs",
            "precision": "pure-bf16", "seq_length": 1024,
        },
        (),
        (),
    ),
    "axolotl_full.yaml": (
        "ddp",
        {
            "precision": "pure-bf16", "seq_length": 2048, "packing": "packed", "optimizer": "adamw8bit",
            "per_device_train_batch_size": 3, "gradient_checkpointing": "full", "weight_decay": 0.01,
            "eval_fraction": 0.02, "warmup_steps": 30, "eval_steps": 0.25, "save_steps": 0.5,
        },
        (),
        (),
    ),
    "axolotl_qlora_fsdp.yml": (
        HOST,
        SUMS_IN_BF16 | {
            "quantize": "nf4", "lora": lora(8, 4.0, "all-linear") | {"dropout": 0.1}, "dataset": ("some/rows",),
            "chat_template": "chat_template.jinja", "eval_fraction": 0.1,
        },
        ("LlamaDecoderLayer",),
        (),
    ),
    "axolotl_fsdp2.yaml": (
        "hsdp",
        SUMS_IN_BF16 | {"node_size": 4, "min_lr_ratio": 0.25, "gradient_checkpointing": "full"},
        ("LlamaDecoderLayer",),
        (),
    ),
    "fsdp_config.json": ("zero3", {"gradient_checkpointing": "full", "export": False}, ("LlamaDecoderLayer",), ()),
    "fsdp_config_1.json": ("hybrid_shard_zero2", {}, ("1000000",), ()),
    "training_arguments.json": (
        "shard_grad_op",
        SUMS_IN_BF16 | {
            "max_steps": 200, "warmup_steps": 0.05, "save_steps": 0.25, "min_lr_ratio": 0.2, "adam_beta2": 0.98,
            "lr_scheduler_type": "cosine", "seed": 7, "report_to": ("tensorboard",),
        },
        ("GPT2Block",),
        ("eval_strategy",),
    ),
    "trl_sft.yaml": (
        "ddp",
        {"precision": "bf16", "dataset": ("some/chats",), "lora": lora(32, 16.0, "q_proj", "v_proj")},
        (),
        ("eos_token",),
    ),
}  # fmt: skip
FILES_OF_OTHERS = {"zero3_auto.json", "fsdp_keys.json"}


def read(**keys: Any) -> Migrated:
    migrated = api.read(keys, "hugging-face")
    assert_all_told(keys, migrated)
    return migrated


def refused(migrated: Migrated) -> dict[str, str]:
    return {entry.key: entry.text for entry in migrated.refused}


def test_every_fixture_is_expected_something_of() -> None:
    assert {path.name for path in FIXTURES.iterdir()} == {*EXPECTED, *FILES_OF_OTHERS}


@pytest.mark.parametrize("name", EXPECTED)
def test_examples(name: str) -> None:
    strategy, settings, units, keys = EXPECTED[name]
    migrated = api.read(FIXTURES / name)
    assert migrated.kind == "hugging-face"
    assert tuple(refused(migrated)) == keys, migrated.refused
    assert layout_of(migrated.strategy) == layout_of(strategy)
    assert {key: migrated.settings[key] for key in settings} == settings
    assert migrated.settings.get("units", ()) == units
    assert_all_told(mapping_in(FIXTURES / name), migrated)
    if not keys:
        resolve([], {}, {}, others={name: migrated.settings})


def test_what_a_trainer_does_unsaid_is_taken_where_it_is_told_to_train() -> None:
    told = read(output_dir="out")
    assert told.settings["learning_rate"] == 5e-5
    assert told.settings["weight_decay"] == 0.0
    assert told.settings["lr_scheduler_type"] == "linear"
    assert told.settings["num_train_epochs"] == 3.0
    assert set(read(fsdp=True).settings) == {"strategy", "precision"}


@pytest.mark.parametrize(
    ("fsdp", "strategy"),
    [
        (True, "zero3"),
        ("full_shard", "zero3"),
        ("full_shard auto_wrap", "zero3"),
        (["full_shard", "auto_wrap"], "zero3"),
        ("full_shard auto_wrap offload", HOST),
        ("shard_grad_op", "shard_grad_op"),
        ("hybrid_shard", "hsdp"),
        ("hybrid_shard_zero2 auto_wrap", "hybrid_shard_zero2"),
        ("no_shard", "ddp"),
        (False, "ddp"),
        ("", "ddp"),
    ],
)
def test_words_of_fsdp(fsdp: Any, strategy: str) -> None:
    migrated = read(fsdp=fsdp)
    assert not migrated.refused
    assert migrated.strategy == strategy


def test_fsdp_and_its_config_say_the_same_or_are_refused() -> None:
    assert read(fsdp="offload", fsdp_config={"cpu_offload": True}).strategy == HOST
    migrated = read(fsdp="full_shard", fsdp_config={"reshard_after_forward": "hybrid_shard"})
    assert migrated.strategy == "zero3"
    assert set(refused(migrated)) == {"fsdp_config.reshard_after_forward"}
    assert set(refused(read(fsdp="full_shard shard_grad_op"))) == {"fsdp"}
    assert set(refused(read(fsdp="full_shrad"))) == {"fsdp"}


def test_a_config_without_fsdp_is_refused_as_the_trainer_would_not_read_it() -> None:
    migrated = read(output_dir="out", fsdp_config={"version": 2})
    assert refused(migrated) == {"fsdp_config.version": "it is only read with fsdp: true"}
    assert read(base_model="x", fsdp_config={"version": 2}).strategy == "zero3"


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"lr_scheduler_type": "constant", "warmup_steps": 9}, {"lr_scheduler_type": "constant"}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}, {"warmup_steps": 9}),
        ({"warmup_ratio": 0.101}, {"warmup_steps": 0.101}),
        ({"max_steps": 100, "warmup_steps": 0.1}, {"warmup_steps": 0.1}),
        ({"max_steps": -1, "num_train_epochs": 2}, {"num_train_epochs": 2.0}),
        ({"max_steps": 5, "num_train_epochs": 2}, {"max_steps": 5}),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 7, "decay_type": "linear", "min_lr_ratio": 0.3},
            },
            {"lr_scheduler_type": "wsd", "decay_steps": 7, "min_lr_ratio": 0.3},
        ),
        (
            {
                "learning_rate": 1e-4, "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 1e-5},
            },
            {"min_lr_ratio": pytest.approx(0.1)},
        ),
        ({"optim": "sgd"}, {"optimizer": "sgd", "momentum": 0.0}),
        ({"save_strategy": "no", "save_steps": 5}, {}),
        ({"save_strategy": "epoch", "num_train_epochs": 10}, {"save_steps": 0.1}),
        ({"save_strategy": "epoch", "num_train_epochs": 1, "output_dir": "o"}, {"num_train_epochs": 1.0}),
        ({"eval_strategy": "epoch", "output_dir": "o"}, {"eval_steps": pytest.approx(1 / 3)}),
        ({"save_steps": 0.1, "num_train_epochs": 2}, {"save_steps": 0.1}),
        ({"num_epochs": 2, "saves_per_epoch": 2, "evals_per_epoch": 1}, {"save_steps": 0.25, "eval_steps": 0.5}),
        ({"base_model": "m", "num_epochs": 1, "saves_per_epoch": 1, "save_strategy": "steps"}, {}),
        ({"neat_packing": True}, {"packing": "packed", "isolate_documents": True}),
        ({"use_tensorboard": True, "report_to": "wandb"}, {"report_to": ("tensorboard", "wandb")}),
        ({"auto_resume_from_checkpoints": True}, {"resume_from_checkpoint": "auto"}),
        ({"max_grad_norm": 0.0}, {"max_grad_norm": 0.0}),
        ({"model_revision": "main", "dataset_config": "default", "chat_template": "tokenizer_default"}, {}),
        ({"special_tokens": {"pad_token": "<pad>"}, "tokens": [], "dataset_text_field": "text"}, {}),
        ({"dtype": "bfloat16", "use_peft": True}, {"precision": "bf16"}),
        ({"dtype": "auto", "bf16": True, "fsdp": True}, SUMS_IN_BF16),
        ({"report_to": "none"}, {"report_to": ()}),
        ({"report_to": ["wandb", "mlflow"], "push_to_hub": True, "hub_model_id": "me/m"}, {"report_to": ("wandb",)}),
        ({"use_wandb": True, "use_mlflow": True, "with_tracking": True}, {"report_to": ("wandb",)}),
        ({"num_epochs": 2, "max_steps": 9, "evals_per_epoch": 2, "val_set_size": 0.1}, {"eval_steps": 0.25}),
        ({"micro_batch_size": 2, "batch_size": 8}, {"gradient_accumulation_steps": 4}),
        ({"base_model": "m", "bfloat16": True}, {"precision": "pure-bf16"}),
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True}, {}),
        ({"resume_from_checkpoint": True}, {"resume_from_checkpoint": "latest"}),
        ({"use_cpu": True, "torch_compile": True}, {"device": "cpu", "compile": "on"}),
        ({"bf16": True, "dtype": "bfloat16", "fsdp": True}, SUMS_IN_BF16),
        ({"bf16": True}, {"precision": "bf16"}),
        ({"torch_dtype": "bfloat16"}, {"precision": "pure-bf16"}),
        ({"fp16": True}, {"precision": "fp16"}),
    ],
)  # fmt: skip
def test_settings(keys: dict[str, Any], settings: dict[str, Any]) -> None:
    migrated = read(**keys)
    assert not migrated.refused
    assert {key: migrated.settings[key] for key in settings} == settings
    assert ("warmup_steps" in migrated.settings) == ("warmup_steps" in settings)
    assert ("save_steps" in migrated.settings) == ("save_steps" in settings)
    resolve([], {}, {}, others={"file": migrated.settings})


@pytest.mark.parametrize(
    "keys",
    [
        {"learning_rat": 1e-4},
        {"learning_rate": "fast"},
        {"learning_rate": -1},
        {"adam_beta2": 1.0},
        {"per_device_train_batch_size": 0},
        {"per_device_train_batch_size": 1.5},
        {"per_device_train_batch_size": 1e300},
        {"lr_scheduler_type": "polynomial"},
        {"optim": "adafactor"},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5},
        {"torch_compile_backend": "tvm"},
        {"num_train_epochs": 0},
        {"batch_size": 0},
        {"plugins": ["axolotl.integrations.grokfast.GrokfastPlugin"]},
        {"processor_type": "AutoProcessor"},
        {"float16": True},
        {"stage": "kto"},
        {"rl": "grpo"},
        {"loss_type": "apo_zero"},
        {"pref_ftx": 0.1},
        {"adapter": "qlora"},
        {"adapter": "ia3"},
        {"load_in_4bit": True},
        {"quantization_bit": 3},
        {"quantize_moe_experts": True},
        {"lora_model_dir": "adapters"},
        {"tensor_parallel_size": 2},
        {"torch_dtype": "float8"},
        {"deepspeed": "nowhere.json"},
        {"model_revision": "v1.0"},
        {"chat_template": "llama4"},
        {"template": "qween"},
        {"dataset": "identity"},
        {"max_samples": 100},
        {"eos_token": "<|im_end|>"},
        {"special_tokens": {"eos_token": "<e>"}},
        {"tokens": ["<|im_start|>"]},
        {"shuffle_merged_datasets": False},
        {"dtype": "auto"},
    ],
)
def test_refused(keys: dict[str, Any]) -> None:
    assert set(refused(read(**keys))) == set(keys)


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
EVALUATED = {"max_steps": 100, "eval_strategy": "steps", "eval_steps": 10, "save_strategy": "best"}


def test_the_best_model_and_early_stopping() -> None:
    migrated = read(output_dir="out", **EVALUATED, **BEST, early_stopping_patience=3)
    assert not migrated.refused
    assert migrated.settings["metric_for_best_model"] == "eval_loss"
    found = resolve([], {}, {}, others={"file": migrated.settings}).settings
    assert (found.load_best_model_at_end, found.early_stopping_patience, found.eval_steps) == (True, 3, 10)
    alone = read(output_dir="out", **BEST, eval_strategy="epoch", num_train_epochs=1)
    assert "load_best_model_at_end" not in alone.settings, "the only evaluation is the last one"
    assert not alone.refused
    assert set(refused(read(output_dir="out", **{**EVALUATED, **BEST, "greater_is_better": True}))) == {
        "greater_is_better"
    }
    wrong = {**EVALUATED, **BEST, "metric_for_best_model": "accuracy"}
    assert set(refused(read(output_dir="out", **wrong))) == {"metric_for_best_model"}
    assert set(refused(read(output_dir="out", **EVALUATED))) == {"save_strategy"}


@pytest.mark.parametrize(
    "keys",
    [
        {"max_steps": 100, "save_strategy": "epoch"},
        {"max_steps": 100, "eval_strategy": "epoch"},
        {"num_epochs": 3, "saves_per_epoch": 2, "save_steps": 10},
        {"num_epochs": 3, "save_strategy": "epoch", "saves_per_epoch": 2},
    ],
)
def test_epochs_that_are_not_known_or_said_twice(keys: dict[str, Any]) -> None:
    migrated = read(output_dir="out", **keys)
    assert len(migrated.refused) == 1
    assert set(refused(migrated)) < set(keys)


def test_a_key_that_is_written_twice_is_read_as_its_library_reads_it(tmp_path: Path) -> None:
    text = "output_dir: out\nlearning_rate: 1e-4\nfsdp: full_shard\nlearning_rate: 2e-4\n"
    (tmp_path / "args.yaml").write_text(text + "fsdp_config:\n  version: 1\n  version: 2\n")
    migrated = api.read(tmp_path / "args.yaml")
    assert not migrated.refused
    assert migrated.settings["learning_rate"] == 2e-4
    told = {entry.key: entry.text for entry in migrated.entries if "written twice" in entry.text}
    assert set(told) == {"learning_rate", "fsdp_config.version"}
    assert "in line 2 and line 4" in told["learning_rate"]
    (tmp_path / "args.yaml").write_text(text + "finetuning_type: full\n")  # OmegaConf, of LLaMA-Factory, refuses it
    with pytest.raises(ConfigurationError, match="learning_rate is said twice, in line 2 and line 4"):
        api.read(tmp_path / "args.yaml")


def test_deepspeed_and_the_trainer_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    (tmp_path / "args.yaml").write_text("output_dir: out\nfp16: true\ndeepspeed: ds.json\n")
    assert set(refused(api.read(tmp_path / "args.yaml"))) == {"fp16"}
    (tmp_path / "args.yaml").write_text("output_dir: out\nbf16: true\ndeepspeed: ds.json\nfsdp: full_shard\n")
    assert set(refused(api.read(tmp_path / "args.yaml"))) == {"fsdp"}


@pytest.mark.parametrize(
    ("deepspeed", "keys", "precision"),
    [
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, {"bf16": True}, "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, {"fp16": True}, "fp16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, {}, "fp32"),
        ({}, {"bf16": True}, "bf16"),
        ({"bf16": {"enabled": True}}, {}, "bf16"),
    ],
)
def test_what_deepspeed_leaves_open_is_completed(
    deepspeed: dict[str, Any], keys: dict[str, Any], precision: str
) -> None:
    migrated = read(**keys, deepspeed={"zero_optimization": {"stage": 2}, **deepspeed})
    assert not migrated.refused
    assert migrated.precision == precision
    assert migrated.settings.get("reduce_dtype") == ("bf16" if precision == "bf16" else None)
    auto = [entry.value for entry in migrated.entries if entry.key == "deepspeed.bf16.enabled"]
    assert auto in ([], ["auto"], ["true"])


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({"pure_bf16": True, "fsdp": "full_shard"}, "pure-bf16"),
        ({"dtype": "bfloat16", "fsdp": "full_shard"}, "pure-bf16"),
        ({"dtype": "bfloat16", "bf16": True, "fsdp": "full_shard"}, "bf16"),
        ({"dtype": "bfloat16", "bf16": True}, "pure-bf16"),
        ({"fsdp": "full_shard"}, "fp32"),
        ({"base_model": "m", "bf16": True}, "pure-bf16"),
        ({"base_model": "m", "bf16": "auto", "adapter": "lora"}, "bf16"),
        ({"base_model": "m", "bf16": True, "fsdp_config": {"version": 2}}, "bf16"),
        ({"dtype": "bfloat16", "bf16": True, "use_peft": True}, "bf16"),
    ],
)
def test_masters_are_there_where_the_trainer_has_them(keys: dict[str, Any], precision: str) -> None:
    migrated = read(**keys, output_dir="out")
    assert not migrated.refused
    assert migrated.settings["precision"] == precision
    told = [entry.text for entry in migrated.entries if entry.key in ("bf16", "dtype", "pure_bf16")]
    assert all(text.startswith(f"precision {precision}") for text in told)
    assert all(("fp32 masters" in text) == (precision != "pure-bf16" or "without fp32" in text) for text in told)


def test_beside_deepspeed_a_format_is_said_there() -> None:
    migrated = read(pure_bf16=True, output_dir="out", deepspeed={"bf16": {"enabled": "auto"}})
    assert [entry.key for entry in migrated.refused] == ["pure_bf16"]


def test_what_the_trainer_does_not_compare_is_the_trainers() -> None:
    migrated = read(output_dir="out", logging_steps=10, max_grad_norm=0.3, deepspeed={"steps_per_print": 2000})
    assert not migrated.refused
    assert (migrated.settings["logging_steps"], migrated.settings["max_grad_norm"]) == (10, 0.3)


@pytest.mark.parametrize(("value", "is_refused"), [(True, False), (False, True)])
def test_prompts_are_never_trained_on(value: bool, is_refused: bool) -> None:
    migrated = read(output_dir="out", assistant_only_loss=value)
    assert bool(migrated.refused) == is_refused
