"""Published shapes have the published numbers of parameters, and are found however they are written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import ConfigurationError
from shardwise.core.schedule.units import find_units
from shardwise.planner.shapes.names import IN_TREE, NAMED, PUBLISHED, coded, shape_named, shape_of
from shardwise.planner.shapes.shape import units_of
from shardwise.planner.training import Lora, Training
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
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # without the router's correction, which is not trained
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    # Those with images have a tower of 416,866,032 parameters, and a projection of its 1152 outputs with a norm.
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-32b": 32_234_279_936,
    "olmoe-1b-7b": 6_919_161_856,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "smollm3-3b": 3_075_098_624,
    "pythia-6.9b": 6_857_302_016,
    "gpt-neox-20b": 20_554_567_680,
    "opt-6.7b": 6_658_473_984,
    "bloom-176b": 176_247_271_424,
}
# As their reports round them: billions in total, and for a token (these without the embedding, which is looked up).
ACTIVE = {
    "deepseek-v3": (671, 37),
    "kimi-k2": (1026, 32),
    "glm-4.5": (353, 32),
    "glm-4.5-air": (107, 12),
    "qwen3-next-80b-a3b": (80, 3),
    "qwen3-235b-a22b": (235, 22),
    "gpt-oss-120b": (117, 5.1),
    "llama-4-scout": (108, 17),
    "llama-4-maverick": (401, 17),
    "minimax-m2": (229, 10),
}


@pytest.mark.parametrize("name", ACTIVE)
def test_the_experts_that_a_token_uses(name: str) -> None:
    total, active = ACTIVE[name]
    assert PUBLISHED[name].num_params / 1e9 == pytest.approx(total, rel=0.005)
    looked_up = PUBLISHED[name].vocab * PUBLISHED[name].hidden / 1e9
    assert active - 1.2 < PUBLISHED[name].num_matmul_params / 1e9 < active + 1.2 + looked_up


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
        ("mpt-7b", "mpt-7b", "mpt"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3", "hf"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.3-70b", "hf"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2", "hf"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout", "hf"),
        ("google/gemma-3-27b-it", "gemma-3-27b", "hf"),
        ("microsoft/Phi-4-mini-instruct", "phi-4-mini", "hf"),
        ("openai/gpt-oss-20b", "gpt-oss-20b", "hf"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b", "hf"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b", "hf"),
    ],
)
def test_one_model_under_many_names(said: str, name: str, code: str) -> None:
    shape = shape_named(said)
    expected = PUBLISHED if "/" in said else NAMED
    assert shape.code == code
    assert shape.num_params == expected[name].num_params


@pytest.mark.parametrize(
    ("name", "asked", "code"),
    [
        ("llama-3-8b", {}, "in-tree"),
        ("llama-3-8b", {"engine": "fsdp2"}, "titan"),
        ("llama-3-8b", {"engine": "fsdp2", "code": "hf"}, "hf"),
        ("llama-3-8b", {"code": "hf"}, "hf"),
        ("meta-llama/Llama-3.1-8B", {"engine": "fsdp2"}, "hf"),
        ("meta-llama/Llama-3.1-8B", {"code": "titan"}, "titan"),
        ("qwen3-8b", {"engine": "fsdp2"}, "titan"),
        ("gemma-2-9b", {"engine": "fsdp2"}, "hf"),
        ("mpt-7b", {"engine": "fsdp2"}, "mpt"),
        ("meta-llama/Llama-3.1-8B", {"code": "in-tree"}, "in-tree"),
    ],
)
def test_whose_code_runs(name: str, asked: dict[str, Any], code: str) -> None:
    assert coded(shape_named(name), Training(**asked)).code == code


@pytest.mark.parametrize(("name", "code"), [("gemma-2-9b", "titan"), ("gpt2", "in-tree"), ("llama-3-8b", "mpt")])
def test_code_that_has_no_such_blocks(name: str, code: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"but always .* say code=hf"):
        coded(shape_named(name), Training(code=code))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("phi-4", {"qkv_proj"}),
        ("deepseek-v2-lite", {"q_proj", "kv_b_proj"}),
        ("deepseek-v3", {"q_b_proj", "kv_b_proj"}),
        ("qwen3-next-80b-a3b", {"q_proj", "v_proj"}),
    ],
)
def test_adapters_without_targets_are_on_what_makes_queries_and_values(name: str, targets: set[str]) -> None:
    units = units_of(PUBLISHED[name], Lora(4))
    found = {param.name.split(".")[-4] for unit in units for param in unit.params if param.trainable}
    assert found == targets


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
