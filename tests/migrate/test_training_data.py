"""Data, chat templates and losses in files of Axolotl, LLaMA-Factory and TRL, as settings of the trainer."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardwise.migrate.api as api
from shardwise.cli.convert import convert
from shardwise.migrate.migrated import Migrated
from shardwise.migrate.tables import table
from shardwise.migrate.training_data import jinja_of
from shardwise.trainer.config import resolve
from tests.migrate.told import assert_all_told

MODEL = {"base_model": "some/model", "output_dir": "out"}
LORA = {"finetuning_type": "lora", "model_name_or_path": "some/model", "stage": "sft", "output_dir": "out"}


def read(**keys: Any) -> Migrated:
    migrated = api.read(keys, "hugging-face")
    assert_all_told(keys, migrated)
    if not migrated.refused:
        resolve([], {}, {}, others={"file": migrated.settings})
    return migrated


def refused(migrated: Migrated) -> set[str]:
    return {entry.key for entry in migrated.refused}


@pytest.mark.parametrize(
    ("entry", "settings"),
    [
        ({"path": "a/b", "type": "chat_template"}, {"dataset": ("a/b",), "dataset_split": "train"}),
        ({"path": "a/b", "name": "c", "split": "test", "type": "sharegpt"},
         {"dataset": ("a/b:c",), "dataset_split": "test"}),
        ({"path": "rows.jsonl", "type": "completion", "field": "story"},
         {"train_file": ("rows.jsonl",), "columns": {"text": "story"}}),
        ({"path": "json", "data_files": ["a.json", "b.json"], "type": "alpaca"}, {"train_file": ("a.json", "b.json")}),
        ({"path": "a/b", "type": "completion:body"}, {"columns": {"text": "body"}}),
        ({"path": "a/b", "type": {"field_instruction": "q", "field_output": "a"}},
         {"columns": {"instruction": "q", "output": "a"}}),
        ({"path": "a/b", "type": "chat_template", "roles_to_train": ["gpt", "human"], "field_messages": "turns"},
         {"train_roles": ("assistant", "user"), "columns": {"messages": "turns"}}),
        ({"path": "a/b", "type": "chat_template", "chat_template": "chatml"}, {"chat_template": "chat_template.jinja"}),
        ({"ds_type": "json", "data_files": "a.jsonl", "type": "chatml.intel"}, {"train_file": ("a.jsonl",)}),
        ("a/b", {"dataset": ("a/b",)}),
    ],
)  # fmt: skip
def test_an_entry_of_axolotl(entry: Any, settings: dict[str, Any]) -> None:
    migrated = read(**MODEL, datasets=[entry])
    assert not migrated.refused, migrated.refused
    assert {key: migrated.settings[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("entries", "key"),
    [
        ([{"path": "a/b", "type": "jeopardy"}], "datasets.0.type"),
        ([{"path": "a/b", "shards": 10}], "datasets.0.shards"),
        ([{"path": "a/b", "tipe": "alpaca"}], "datasets.0.tipe"),
        ([{"path": "s3://a/b"}], "datasets.0.path"),
        ([{"path": "json"}], "datasets.0.path"),
        ([{"type": "alpaca"}], "datasets.0.type"),
        ([{"path": "a/b", "revision": "v2"}], "datasets.0.revision"),
        ([{"path": "a/b", "roles": {"user": ["visitor"]}}], "datasets.0.roles.user"),
        (
            [{"path": "a/b", "message_property_mappings": {"weight": "w"}}],
            "datasets.0.message_property_mappings.weight",
        ),
        ([{"path": "a/b"}, {"path": "c.jsonl"}], "datasets.1.path"),
        ([{"path": "a/b", "field": "x"}, {"path": "c/d", "field": "y"}], "datasets.1.field"),
        ([{"path": "a/b"}, {"path": "c/d", "split": "test"}], "datasets"),
        ([{"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "chat_template"}], "datasets.1.type"),
        ([{"path": "c/d", "type": "chat_template"}, {"path": "a/b", "type": "alpaca"}], "datasets.1.type"),
        ([{"path": "a/b", "chat_template": "nobodys"}], "datasets.0.chat_template"),
        ([{"path": "a/b", "train_on_inputs": True}], "datasets.0.train_on_inputs"),
        ([{"path": "a/b", "weight": 0.5}], "datasets.0.weight"),
    ],
)
def test_an_entry_that_is_refused(entries: Any, key: str) -> None:
    assert refused(api.read({**MODEL, "datasets": entries}, "hugging-face")) == {key}


def llama_factory(folder: Path, info: dict[str, Any], **keys: Any) -> Migrated:
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    (folder / "data" / "mine.json").write_text(json.dumps([{"q": "1 + 1?", "a": "2"}] * 9))
    (folder / "run.yaml").write_text(yaml.safe_dump({**LORA, **keys}))
    return api.read(folder / "run.yaml")


def test_names_of_llama_factory_are_looked_up(tmp_path: Path) -> None:
    info = {
        "mine": {"file_name": "mine.json", "columns": {"prompt": "q", "response": "a"}},
        "other": {"file_name": "o.csv"},
    }
    keys = {"dataset": "mine", "max_samples": 10, "template": "qwen", "mask_history": True, "cutoff_len": 64}
    migrated = llama_factory(tmp_path, info, **keys)
    assert not migrated.refused, migrated.refused
    expected = {
        "train_file": (str(tmp_path / "data" / "mine.json"),), "columns": {"instruction": "q", "output": "a"},
        "train_roles": ("last",), "chat_template": "chat_template.jinja", "seq_length": 64,
        "lora": {"r": 8, "alpha": 16.0, "dropout": 0.0, "targets": ["all-linear"]},
    }  # fmt: skip
    assert {key: migrated.settings[key] for key in expected} == expected
    assert "You are Qwen" in migrated.files["chat_template.jinja"]
    resolve([], {}, {}, others={"file": migrated.settings})


@pytest.mark.parametrize(
    ("info", "keys", "key"),
    [
        ({"mine": {"file_name": "mine.json"}}, {"max_samples": 8}, "max_samples"),
        ({"mine": {"file_name": "mine.parquet"}}, {"max_samples": 8}, "max_samples"),
        ({"mine": {"file_name": "mine.json", "num_samples": 3}}, {}, "dataset.mine.num_samples"),
        ({"mine": {"script_url": "x"}}, {}, "dataset.mine.script_url"),
        ({"mine": {"file_name": "mine.json", "columns": {"images": "i"}}}, {}, "dataset.mine.columns.images"),
        ({"mine": {"file_name": "mine.json", "tags": {"user_tag": "visitor"}}}, {}, "dataset.mine.tags.user_tag"),
        ({"others": {"file_name": "mine.json"}}, {}, "dataset"),
    ],
)
def test_a_name_of_llama_factory_that_is_refused(
    tmp_path: Path, info: dict[str, Any], keys: dict[str, Any], key: str
) -> None:
    assert key in refused(llama_factory(tmp_path, info, dataset="mine", **keys))


def test_datasets_of_the_hub_are_cut_where_files_are_not(tmp_path: Path) -> None:
    info = {"mine": {"hf_hub_url": "a/b", "ms_hub_url": "c/d", "formatting": "sharegpt", "subset": "s"}}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info["mine"] |= {"columns": {"messages": "turns"}, "tags": tags}
    migrated = llama_factory(tmp_path, info, dataset=["mine"], max_samples=1000)
    assert not migrated.refused, migrated.refused
    assert migrated.settings["dataset"] == ("a/b:s",)
    assert migrated.settings["dataset_split"] == "train[:1000]"
    assert migrated.settings["columns"] == {"messages": "turns"}


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi {}"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {}<|im_end|>\n<|im_start|>assistant\nHello"
    "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi {}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi {}<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi {} [/INST]Hello</s><s>[INST] Bye [/INST]",
    "alpaca": "Be brief.\n\n### Instruction:\nHi {}\n\n### Response:\nHello</s>\n\n### Instruction:\nBye\n\n"
    "### Response:\n",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
}


def render(name: str, messages: list[dict[str, Any]], **words: Any) -> str:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    words = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **words}
    tools = words.pop("tools", None)
    made, _ = chat_template_utils.render_jinja_template([messages], tools, chat_template=jinja_of(name), **words)
    return str(made[0])


@pytest.mark.parametrize("name", RENDERED)
def test_a_template_renders_a_chat(name: str) -> None:
    assert render(name, CHAT) == RENDERED[name]


@pytest.mark.parametrize("name", table("templates")["templates"])
def test_every_template_renders_each_message_once_and_begins_with_its_beginning(name: str) -> None:
    jinja2 = pytest.importorskip("jinja2")
    whole = render(name, CHAT)
    assert [whole.count(message["content"]) for message in CHAT] == [1, 1, 1, 1]
    assert whole.startswith(render(name, CHAT[:3], add_generation_prompt=False))
    assert render(name, CHAT[:2]) in whole or name == "qwen3"
    for messages, words in ((CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
                            ([*CHAT, {"role": "critic", "content": "x"}], {})):  # fmt: skip
        with pytest.raises(jinja2.TemplateError, match="give another one"):
            render(name, messages, **words)


def test_a_template_by_name_by_family_and_in_the_file() -> None:
    assert "chat_template" not in read(base_model="Qwen/Qwen3-8B", chat_template="qwen3").settings
    assert refused(read(base_model="some/model", chat_template="qwen3")) == {"chat_template"}
    text = "{% for m in messages %}\n{{ m.content }}{% endfor %}"
    migrated = read(**MODEL, chat_template="jinja", chat_template_jinja=text)
    assert migrated.files == {migrated.settings["chat_template"]: text}
    assert "chat_template" not in read(**MODEL, chat_template="tokenizer_default").settings


def test_special_tokens_that_a_model_has_already() -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD]"}
    assert not read(base_model="NousResearch/Llama-2-7b-hf", special_tokens=tokens).refused
    assert refused(read(base_model="some/model", special_tokens=tokens)) == {"special_tokens"}


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"stage": "dpo", "pref_beta": 0.3}, {"objective": "dpo", "dpo_beta": 0.3}),
        ({"stage": "dpo", "pref_loss": "orpo"}, {"objective": "orpo"}),
        ({"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.7}, {"objective": "simpo", "simpo_gamma": 0.7}),
        ({"rl": "ipo", "dpo_label_smoothing": 0.0}, {"objective": "ipo"}),
        ({"rl": "orpo", "orpo_alpha": 0.1}, {"objective": "orpo", "dpo_beta": 0.1}),
        ({"beta": 0.01, "max_prompt_length": 9}, {"objective": "dpo", "dpo_beta": 0.01}),
        ({"loss_type": "hinge", "simpo_gamma": 0.5, "label_smoothing": 0.1}, {"objective": "hinge"}),
        ({"stage": "sft", "pref_loss": "sigmoid"}, {}),
        ({"quantization_bit": 8}, {"quantize": "int8"}),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}, {"quantize": "nf4"}),
        ({"load_in_4bit": True, "bf16": True, "dtype": "float16"}, {"quantize": "nf4", "precision": "bf16"}),
    ],
)
def test_objectives_and_bits(keys: dict[str, Any], settings: dict[str, Any]) -> None:
    migrated = read(**keys, use_peft=True, lora_target_modules=["q_proj"], output_dir="out")
    assert not migrated.refused, migrated.refused
    assert {key: migrated.settings[key] for key in settings} == settings
    assert ("objective" in migrated.settings) == ("objective" in settings)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"rl": "dpo"}, "rl"),
        ({"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["lm_head"]}, "lora_target_modules"),
        ({"rl": "dpo", "adapter": "lora", "lora_model_dir": "a"}, "rl"),
        ({"load_in_4bit": True, "load_in_8bit": True, "adapter": "lora"}, "load_in_8bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "adapter": "lora"}, "bnb_4bit_quant_type"),
        ({"quantization_bit": 4, "quantization_method": "hqq", "finetuning_type": "lora"}, "quantization_method"),
        ({"adapter": "lora", "lora_model_dir": "a", "create_new_adapter": True}, "lora_model_dir"),
    ],
)
def test_objectives_and_bits_that_are_refused(keys: dict[str, Any], key: str) -> None:
    assert key in refused(read(**keys, output_dir="out"))


VALUES = (
    None,
    True,
    0,
    -1,
    1e300,
    "",
    "x",
    "a/b",
    "all",
    "qlora",
    "dpo",
    "{{ x }}",
    [],
    {},
    [[1]],
    [{}],
    {"a": {"b": [1]}},
)
INNER = (
    "path",
    "name",
    "split",
    "type",
    "data_files",
    "field",
    "message_property_mappings",
    "roles",
    "columns",
    "tags",
)


@pytest.mark.parametrize("seed", range(60))
def test_hostile_values_are_refused_and_never_crash(seed: int) -> None:
    chance = random.Random(seed)
    known = table("hugging_face")
    names = [*(key for keys in known["settings"].values() for key in keys), *known["objective_keys"],
             "dataset", "dataset_mixture", "dataset_mixer", "chat_template", "special_tokens", "tokens", "max_samples",
             "adapter", "lora_target", "load_in_4bit", "quantization_bit", "rl", "stage", "plugins"]  # fmt: skip
    for _ in range(10):
        keys: dict[str, Any] = {name: chance.choice(VALUES) for name in chance.sample(names, 6)}
        keys["datasets"] = [{name: chance.choice(VALUES) for name in chance.sample(INNER, 3)}]
        migrated = api.read(keys, "hugging-face")
        assert len({entry.key for entry in migrated.entries}) == len(migrated.entries)
        assert all(entry.text for entry in migrated.entries)


def test_each_configuration_has_its_own_template(tmp_path: Path) -> None:
    """Two configurations in one folder do not share a template."""
    for name, template in (("a", "chatml"), ("b", "llama3")):
        text = yaml.safe_dump({**MODEL, "chat_template": template, "datasets": [{"path": "x/y"}]})
        (tmp_path / f"{name}.yml").write_text(text)
        convert(tmp_path / f"{name}.yml", None, output=tmp_path / f"{name}-ours.yaml")
        ours = yaml.safe_load((tmp_path / f"{name}-ours.yaml").read_text())
        assert ours["chat_template"] == str(tmp_path / f"{name}-ours-chat_template.jinja")
        assert Path(ours["chat_template"]).read_text() == jinja_of(template)


def test_adapters_that_exist_are_continued() -> None:
    migrated = api.read({"adapter": "lora", "lora_r": 8, "lora_model_dir": "old", "output_dir": "o"}, "hugging-face")
    assert migrated.settings["lora_from"] == "old"
    assert "lora" not in migrated.settings


@pytest.mark.parametrize(
    ("keys", "packing"),
    [
        ({"dataset_name": "a/b"}, "padded"),
        ({"base_model": "m", "datasets": [{"path": "a/b", "type": "alpaca"}]}, "padded"),
        ({"base_model": "m", "datasets": [{"path": "a/b", "type": "completion"}]}, "packed"),
        ({"base_model": "m", "pretraining_dataset": [{"path": "a/b"}]}, "packed"),
        ({"base_model": "m", "pretraining_dataset": [{"path": "a/b"}], "sample_packing": False}, "padded"),
    ],
)
def test_samples_are_packed_only_where_the_other_program_does_it(keys: dict[str, Any], packing: str) -> None:
    assert read(**keys, output_dir="out").settings["packing"] == packing


def test_a_file_of_trl_says_that_only_answers_are_trained() -> None:
    def row(**keys: Any) -> str:
        return next(entry.text for entry in read(dataset_name="a/b", **keys).entries if entry.key == "dataset_name")

    assert row(output_dir="out").endswith("TRL trains all of it: for that add train_roles: all")
    assert row(output_dir="out", assistant_only_loss=True) == "dataset a/b, dataset_split train"
