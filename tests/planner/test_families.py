"""Published shapes have the published numbers of parameters, and are found however they are written."""

from pathlib import Path

import pytest
import torch

from shardwise.base.errors import ConfigurationError
from shardwise.core.schedule.units import find_units
from shardwise.planner.shapes.names import IN_TREE, NAMED, PUBLISHED, shape_named, shape_of
from shardwise.planner.shapes.shape import units_of
from shardwise.trainer.model import Transformer
from shardwise.trainer.shapes import PRESETS, TransformerShape

# As the files' headers add up, tied weights once.
NUM_PARAMS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen2.5-7b": 7_615_616_512,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "yi-34b": 34_388_917_248,
    "mpt-7b": 6_649_286_656,
}


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_the_parameters_of_a_published_model(name: str) -> None:
    assert PUBLISHED[name].num_params == NUM_PARAMS[name]


def test_models_that_were_measured_and_not_published() -> None:
    assert round(shape_named("gpt-175b").num_params / 1e9, 1) == 174.6
    assert round(shape_named("gpt-1t").num_params / 1e9, 1) == 1008.0
    assert shape_named("mpt-1b").num_params == 1_315_950_592
    assert shape_named("mpt-70b").num_params == 64_862_437_376


@pytest.mark.parametrize("name", PRESETS)
def test_the_trainers_shapes_are_what_it_builds(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(TransformerShape(vocab=PRESETS[name].vocab, **PRESETS[name].shape))
    assert units_of(IN_TREE[name]) == find_units(model)
    assert set(IN_TREE) == set(PRESETS)


@pytest.mark.parametrize(
    ("said", "name", "code"),
    [
        ("llama-3-8b", "llama-3-8b", "in-tree"),
        ("Llama_3_8B", "llama-3-8b", "in-tree"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b", "hf"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b", "hf"),
        ("Llama-3.1-70B-Instruct", "llama-3.1-70b", "hf"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b", "hf"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b", "hf"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b", "hf"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3", "hf"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b", "hf"),
        ("openai-community/gpt2-xl", "gpt2-xl", "hf"),
        ("GPT-2", "gpt2", "hf"),
        ("gpt-3", "gpt-175b", "hf"),
        ("mosaicml/mpt-7b", "mpt-7b", "hf"),
    ],
)
def test_one_model_under_many_names(said: str, name: str, code: str) -> None:
    shape = shape_named(said)
    expected = PUBLISHED if "/" in said else NAMED
    assert shape.code == code
    assert shape.num_params == expected[name].num_params


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(
        ConfigurationError, match=r"model 'llama-3-9b': no shape has this name.*did you mean 'llama-3-8b',"
    ):
        shape_of("llama-3-9b")
    with pytest.raises(ConfigurationError, match=r"model 'nobody/tiny': no shape has this name"):
        shape_of("nobody/tiny")


def test_a_model_is_a_name_a_file_or_a_folder(tmp_path: Path) -> None:
    text = '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, '
    (tmp_path / "config.json").write_text(text + '"intermediate_size": 160, "vocab_size": 1000}')
    assert shape_of(str(tmp_path)).num_params == shape_of(str(tmp_path / "config.json")).num_params
    assert shape_of("tiny") == IN_TREE["tiny"]
    with pytest.raises(ConfigurationError, match="there is no such file"):
        shape_of(str(tmp_path / "other.json"))


def test_a_name_that_is_empty() -> None:
    with pytest.raises(ConfigurationError, match="model: its name is empty"):
        shape_of(" ")


@pytest.mark.parametrize("name", ["long" * 100, "~nobody-of-this-name/x", "a\0b"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no shape has this name"):
        shape_of(name)
    with pytest.raises(ConfigurationError, match="there is no such file"):
        shape_of(f"{name}.json")
