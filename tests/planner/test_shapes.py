"""Units of a shape are the units of its module, with and without adapters; and shapes from words."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.base.dtypes import BF16, dtype_of
from shardwise.base.errors import ConfigurationError
from shardwise.bench.measure import count_calls
from shardwise.core.schedule import model as limits
from shardwise.core.schedule.units import find_units
from shardwise.planner.shapes import shape as shapes
from shardwise.planner.shapes.hf_config import shape_of_config
from shardwise.planner.shapes.names import parse_shape
from shardwise.planner.shapes.shape import ModelShape, StatesOnly, units_of
from shardwise.planner.training import Lora, Training
from shardwise.planner.work import activations
from shardwise.planner.work.activations import works_of
from shardwise.trainer import settings
from shardwise.trainer.model import Transformer
from shardwise.trainer.models.lora import adapters_for, with_adapters
from shardwise.trainer.shapes import TransformerShape

transformers = pytest.importorskip("transformers")
SIZES = {"vocab": 1000, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 160}
HF_SIZES = {
    "vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "num_hidden_layers": 3,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_head": 4, "n_layer": 3}
# Of Llama's names, a vocabulary that makes units of embedding and head, and one that leaves them in the root.
CONFIGS = {
    "llama": {"model_type": "llama", **HF_SIZES},
    "llama, tied": {"model_type": "llama", **HF_SIZES, "tie_word_embeddings": True},
    "llama, few words": {"model_type": "llama", **HF_SIZES, "vocab_size": 100},
    "qwen3": {"model_type": "qwen3", **HF_SIZES, "head_dim": 32},
    "qwen3, tied": {"model_type": "qwen3", **HF_SIZES, "head_dim": 32, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **HF_SIZES},
    "mistral, one block": {"model_type": "mistral", **HF_SIZES, "num_hidden_layers": 1},
    "gpt2": {**GPT2, "n_positions": 128},
    "gpt2, long": {**GPT2, "n_positions": 900},
    "mixtral": {"model_type": "mixtral", **HF_SIZES, "num_local_experts": 4},
}  # fmt: skip
TARGETS = {"gpt2": ("c_fc", "attn.c_proj"), "gpt2, long": ("lm_head",)}


def in_tree(layers: int = 3, tied: bool = False, vocab: int = 1000) -> tuple[ModelShape, nn.Module]:
    sizes = {**SIZES, "vocab": vocab}
    shape = ModelShape(name="x", layers=layers, head_dim=16, tied=tied, code="in-tree", **sizes)
    with torch.device("meta"):
        return shape, Transformer(TransformerShape(layers=layers, max_seq=64, tied=tied, **sizes))


def hugging_face(name: str, dtype: torch.dtype = torch.float32) -> tuple[ModelShape, nn.Module]:
    values = {**CONFIGS[name], "use_cache": False, "bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return replace(shape_of_config(values), dtype=dtype_of(dtype)), model


def adapted(model: nn.Module, r: int, targets: tuple[str, ...], **changes: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = adapters_for(settings.Lora(r=r, targets=targets, **changes), model)
        return with_adapters(model, config, 0, torch.device("cpu"))


@pytest.mark.parametrize("vocab", [100, 1000])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_units_of_the_in_tree_transformer(layers: int, tied: bool, vocab: int) -> None:
    shape, model = in_tree(layers, tied, vocab)
    assert units_of(shape) == find_units(model)
    assert shape.num_params == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_units_of_models_of_transformers(name: str) -> None:
    shape, model = hugging_face(name)
    assert units_of(shape) == find_units(model)
    assert shape.num_params == sum(param.numel() for param in model.parameters())


@pytest.fixture
def afresh() -> Iterator[None]:
    """What was found with other limits is forgotten."""
    for known in (shapes._units, activations._works):
        known.cache_clear()
    yield
    for known in (shapes._units, activations._works):
        known.cache_clear()


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("limit", [(1000, 300), (20_000, 5_000), (20_000, 12_000), (40_000, 200)])
@pytest.mark.parametrize("name", ["llama", "llama, few words", "mixtral", "gpt2, long"])
def test_units_of_blocks_that_are_cut(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: tuple[int, int], lora: bool
) -> None:
    monkeypatch.setattr(limits, "LARGE_BLOCK", limit[0])
    monkeypatch.setattr(limits, "LARGE_PART", limit[1])
    shape, model = hugging_face(name)
    if lora and name != "mixtral":
        model = adapted(model, 4, TARGETS.get(name, ("k_proj",)))
        assert units_of(shape, Lora(4, TARGETS.get(name, ("k_proj",)))) == find_units(model)
    else:
        assert units_of(shape) == find_units(model)
        works = works_of(shape, Training(seq=32))
        assert set(works) - {"loss"} == {unit.name for unit in units_of(shape)}


@pytest.mark.parametrize("targets", [(), ("out", "down"), ("head",)])
@pytest.mark.parametrize("tied", [False, True])
def test_units_with_adapters_in_the_in_tree_transformer(tied: bool, targets: tuple[str, ...]) -> None:
    shape, model = in_tree(tied=tied)
    assert units_of(shape, Lora(4, targets)) == find_units(adapted(model, 4, targets))


@pytest.mark.parametrize("name", ["llama", "qwen3, tied", "mistral", "gpt2", "gpt2, long"])
@pytest.mark.parametrize("default", [True, False])
def test_units_with_adapters_in_models_of_transformers(name: str, default: bool) -> None:
    targets = () if default else TARGETS.get(name, ("k_proj", "down_proj", "lm_head"))
    shape, model = hugging_face(name)
    assert units_of(shape, Lora(8, targets)) == find_units(adapted(model, 8, targets))


@pytest.mark.parametrize("copied", [(), ("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head", "norm")])
@pytest.mark.parametrize("name", ["llama", "qwen3, tied"])
def test_units_with_norms_and_copies(name: str, copied: tuple[str, ...]) -> None:
    shape, model = hugging_face(name)
    lora = Lora(8, ("all-linear",), dora=True, modules_to_save=copied)
    assert units_of(shape, lora) == find_units(adapted(model, 8, ("all-linear",), dora=True, modules_to_save=copied))
    found = [unit.name for unit in units_of(shape, lora)]
    assert set(found) == set(works_of(shape, Training(seq=32, lora=lora))) - {"loss"}


def test_units_of_an_in_tree_transformer_with_a_copy() -> None:
    shape, model = in_tree(tied=False)
    changed = adapted(model, 4, ("all-linear",), dora=True, modules_to_save=("lm_head",))
    assert units_of(shape, Lora(4, ("all-linear",), dora=True, modules_to_save=("lm_head",))) == find_units(changed)


def test_adapters_are_kept_in_fp32_beside_weights_in_16_bits() -> None:
    shape, model = hugging_face("llama", torch.bfloat16)
    units = units_of(shape, Lora(8))
    assert units == find_units(adapted(model, 8, ()))
    assert {param.dtype for unit in units for param in unit.params if not param.trainable} == {BF16}


def test_llamas_words_for_targets_work_in_the_in_tree_transformer() -> None:
    shape, _ = in_tree()
    assert units_of(shape, Lora(4, ("q_proj", "up_proj"))) == units_of(shape, Lora(4, ("query", "up")))


def test_a_target_that_no_projection_has() -> None:
    with pytest.raises(ConfigurationError, match=r"lora: no projection is called 'q_prj'; did you mean 'q_proj'\?"):
        units_of(hugging_face("llama")[0], Lora(4, ("q_prj",)))


def test_units_of_eighty_blocks_take_few_calls() -> None:
    shape = parse_shape("layers=80,hidden=8192,heads=64,kv-heads=8,ffn=28672,vocab=128256")
    shapes._units.cache_clear()
    assert sum(count_calls(lambda: units_of(shape)).values()) < 4000


def test_parameters_that_multiply_a_token() -> None:
    plain = parse_shape("layers=2,hidden=64,heads=4,ffn=160,vocab=1000")
    experts = parse_shape("layers=2,hidden=64,heads=4,ffn=160,vocab=1000,experts=8,active-experts=2")
    assert isinstance(plain, ModelShape)
    assert isinstance(experts, ModelShape)
    assert plain.num_matmul_params == plain.num_params - 1000 * 64
    assert replace(plain, tied=True).num_matmul_params == plain.num_matmul_params
    # Twice the feed-forward, and a router of 8 x 64.
    assert experts.num_matmul_params == plain.num_matmul_params + 2 * (3 * 64 * 160 + 8 * 64)


def test_a_shape_from_words_is_in_tree_where_it_can_be() -> None:
    shape = parse_shape("layers=2, hidden=64, heads=4, vocab=100")
    assert shape == ModelShape(
        name="layers=2, hidden=64, heads=4, vocab=100", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256,
        vocab=100, code="in-tree",
    )  # fmt: skip
    other = parse_shape(
        "LAYERS=2,hidden=64,heads=4,kv_heads=2,vocab=100,gated=no,bias,norm=layer,positions=128,tied=yes"
    )
    assert isinstance(other, ModelShape)
    assert (other.code, other.ffn, other.qkv_bias, other.kv_heads, other.tied) == ("hf", 256, True, 2, True)


@pytest.mark.parametrize(("text", "num_params"), [("params=7.5e9", 7_500_000_000), ("params=70b", 70_000_000_000)])
def test_a_shape_of_which_only_the_parameters_are_known(text: str, num_params: int) -> None:
    shape = parse_shape(text)
    assert shape == StatesOnly(num_params)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("layers=2", "it lacks hidden, heads, vocab"),
        ("layer=2", "unknown part 'layer=2'; did you mean 'layers'?"),
        ("", "unknown part ''"),
        ("layers=0,hidden=64,heads=4,vocab=100", "layers=0, but it must be a whole number from 1 to 1,000,000,000"),
        ("layers=2,hidden=-64,heads=4,vocab=100", "hidden=-64, but it must be"),
        ("layers=2,hidden=64,heads=4,vocab=1.5", "vocab=1.5, but it must be"),
        ("layers=2,layers=3,hidden=64,heads=4,vocab=1", "layers is given twice"),
        ("layers=2,hidden=64,heads=,vocab=1", "'heads=' has no value"),
        ("layers=2,hidden=65,heads=4,vocab=100", "hidden 65 does not divide into 4 heads; give the size of a head"),
        ("layers=2,hidden=64,heads=4,kv-heads=3,vocab=100", "4 heads do not divide into 3 key-value heads"),
        ("layers=2,hidden=64,heads=4,vocab=100,tied=maybe", "tied=maybe is neither yes nor no"),
        ("layers=2,hidden=64,heads=4,vocab=100,norm=root", "norm 'root'; known: layer, rms"),
        ("layers=2,hidden=64,heads=4,vocab=100,experts=2,active-experts=4", "4 active experts, but there are 2"),
        ("layers=2,hidden=64,heads=4,vocab=100,bias,code=in-tree", "bias is True, but always False in the in-tree"),
        ("layers=10001,hidden=64,heads=4,vocab=100", "layers is 10001, but must be a whole number from 1 to 1,000"),
        ("layers=2,hidden=64,heads=4,vocab=" + "9" * 5000, "but it must be a whole number from 1 to 1,000,000,000"),
        ("params=0", "params=0, but it must be a number like 7.5e9"),
        ("params=-7e9", "params=-7e9, but it must be"),
        ("params=7e9,layers=2", "params= stands alone"),
    ],
)
def test_words_that_make_no_shape(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as seen:
        parse_shape(text)
    assert why in str(seen.value)
    assert "\n" not in str(seen.value)
