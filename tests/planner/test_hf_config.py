"""A config.json gives the sizes of the model that transformers makes of it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.dtypes import BF16, FP32
from shardwise.base.errors import ConfigurationError
from shardwise.core.schedule.units import find_units
from shardwise.planner.shapes.hf_config import SHAPE_KEY, shape_of_config, why_no_shape
from shardwise.planner.shapes.shape import units_of
from shardwise.trainer.models import llama
from shardwise.trainer.shapes import TransformerShape

transformers = pytest.importorskip("transformers")
USUAL = {
    "vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "num_hidden_layers": 2,
}  # fmt: skip
OLD = {"vocab_size": 1000, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}
PLAIN = {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
USUAL_4 = {**USUAL, "num_hidden_layers": 4}
ROUTED = {**USUAL_4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
          "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
LATENT = {**ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1}  # fmt: skip
LLAMA4 = {**USUAL_4, "intermediate_size_mlp": 200, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16,
          "interleave_moe_layer_step": 2}  # fmt: skip
SHARED = {**USUAL_4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "shared_expert_intermediate_size": 48}  # fmt: skip
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16, "head_dim": 16}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", USUAL),
    ("llama", {**USUAL, "attention_bias": True}),
    ("llama", {**USUAL, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {**USUAL, "head_dim": 32}),
    ("qwen2", USUAL),
    ("qwen3", {**USUAL, "head_dim": 32}),
    ("qwen3_moe", {**USUAL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    ("mixtral", {**USUAL, "num_local_experts": 4}),
    ("gemma", {**USUAL, "head_dim": 32}),
    ("gemma2", {**USUAL, "head_dim": 32}),
    ("gemma3_text", {**USUAL, "head_dim": 32}),
    ("gpt2", OLD),
    ("gptj", OLD),
    ("gpt_neox", {**PLAIN, "intermediate_size": 256}),
    ("gpt_neox", {**PLAIN, "intermediate_size": 256, "attention_bias": False}),
    ("mpt", {"vocab_size": 1000, "d_model": 64, "n_heads": 4, "n_layers": 2}),
    ("phi", {**PLAIN, "intermediate_size": 160}),
    ("phi", {**PLAIN, "intermediate_size": 160, "qk_layernorm": True}),
    ("phi3", {**USUAL, "pad_token_id": 0}),
    ("phimoe", {**USUAL, "num_local_experts": 4}),
    ("opt", {**PLAIN, "ffn_dim": 160, "max_position_embeddings": 128, "word_embed_proj_dim": 64}),
    ("falcon", PLAIN),
    ("falcon", {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**PLAIN, "bias": True, "multi_query": False, "parallel_attn": False}),
    ("bloom", {"vocab_size": 1000, "hidden_size": 64, "n_head": 4, "n_layer": 2}),
    ("starcoder2", USUAL),
    ("stablelm", {**USUAL, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    ("cohere", {**USUAL, "use_qk_norm": True}),
    ("olmo2", USUAL),
    ("olmoe", {**USUAL, "num_experts": 4, "num_experts_per_tok": 2}),
    ("gpt_oss", {**USUAL, "num_local_experts": 4, "head_dim": 32}),
    ("glm4", {**USUAL, "head_dim": 16, "pad_token_id": 0}),
    ("granite", USUAL),
    ("smollm3", {**USUAL, "pad_token_id": 0}),
    ("nemotron", {**USUAL, "head_dim": 16}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", LATENT),
    ("glm4_moe", {**ROUTED, "n_shared_experts": 1, "head_dim": 16, "use_qk_norm": True}),
    ("llama4_text", LLAMA4),
    ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 1}),
    ("minimax_m2", {**USUAL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    ("qwen2_moe", SHARED),
    ("qwen2_moe", {key: value for key, value in SHARED.items() if key != "shared_expert_intermediate_size"}),
    (
        "glm4",
        {
            **USUAL,
            "head_dim": 16,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    ("qwen3_next", {**SHARED, **LINEAR}),
    ("glm4_moe", {**ROUTED, "n_shared_experts": 1, "head_dim": 16, "attention_bias": True}),
    ("phimoe", {**USUAL, "num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": True}),
    ("qwen2_moe", {**SHARED, "qkv_bias": False}),
]


@pytest.mark.parametrize(("kind", "values"), MODELS, ids=[f"{index}-{kind}" for index, (kind, _) in enumerate(MODELS)])
def test_every_unit_has_the_size_that_it_has_in_the_model(kind: str, values: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, use_cache=False, bos_token_id=None, eos_token_id=None, **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of_config({"model_type": kind, **values})
    assert shape.num_params == sum(param.numel() for param in model.parameters())
    assert [sum(param.num_elems for param in unit.params) for unit in units_of(shape)] == [
        sum(param.num_elems for param in unit.params) for unit in find_units(model)
    ]
    # What transformers writes says more than it has to, and the same.
    written = shape_of_config(json.loads(config.to_json_string(use_diff=False)))
    assert dataclasses.replace(written, name="", dtype=FP32) == dataclasses.replace(shape, name="", dtype=FP32)


def test_a_file_a_folder_and_what_is_in_them(tmp_path: Path) -> None:
    config = {"model_type": "llama", **USUAL, "torch_dtype": "bfloat16"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    shapes = [shape_of_config(given) for given in (file, tmp_path, str(file), config)]
    assert {dataclasses.replace(shape, name="") for shape in shapes} == {dataclasses.replace(shapes[0], name="")}
    assert shapes[0].dtype == BF16
    assert shapes[1].name == str(tmp_path)


def test_what_the_trainer_exports_is_the_in_tree_transformer_again() -> None:
    sizes = TransformerShape(vocab=300, hidden=64, layers=2, heads=4, kv_heads=2, ffn=160, max_seq=128, tied=True)
    config = llama.llama_config(sizes, "float32", None)
    assert SHAPE_KEY == llama.SHAPE_KEY
    shape = shape_of_config(config)
    assert (shape.code, shape.layers, shape.kv_heads, shape.tied) == ("in-tree", 2, 2, True)
    with pytest.raises(ConfigurationError, match="layers is None, but must be a whole number"):
        shape_of_config({SHAPE_KEY: {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "layers": 0}})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": None}, "its config.json has no hidden_size or n_embd or d_model"),
        (
            {"num_hidden_layers": None, "vocab_size": None},
            "has no num_hidden_layers or n_layer or n_layers or num_layers",
        ),
        ({"intermediate_size": None}, "has no intermediate_size or ffn_dim"),
        ({"num_experts": 8}, "has no num_experts_per_tok"),
        ({"hidden_size": "large"}, "hidden_size in its config.json is 'large', not a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in its config.json is 0"),
        ({"vocab_size": -5}, "vocab_size in its config.json is -5"),
        ({"hidden_size": 66}, "66 does not divide into 4 heads"),
        ({"num_key_value_heads": 3}, "4 heads do not divide into 3 key-value heads"),
        ({"quantization_config": {"bits": 4}}, "weights are quantised"),
        ({"kv_lora_rank": 512}, "attention keeps a latent vector"),
        ({"n_shared_experts": 2}, "some experts are shared"),
        ({"mlp_only_layers": [0]}, "some blocks have no experts"),
        ({"decoder_sparse_step": 2}, "some blocks have no experts"),
        ({"is_encoder_decoder": True}, "it has an encoder"),
        ({"torch_dtype": "int3"}, "unknown dtype 'int3'"),
        ({"torch_dtype": 16}, "dtype in its config.json is 16, not a word"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', but must be true or false"),
        ({"attention_bias": 1}, "attention_bias is 1, but must be true or false"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' is no plain attention"),
        ({"layer_types": "mixed"}, "'mixed' is no list of them"),
        ({"attn_layer_period": 8}, "some blocks have something else than attention"),
        ({"linear_num_key_heads": 16}, "some blocks have something else than attention"),
        ({"num_hidden_layers": 99999999999}, "layers is 99999999999, but must be a whole number from 1 to 1,000"),
    ],
)
def test_a_config_that_makes_no_shape_says_why(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as seen:
        shape_of_config({"model_type": "llama", **USUAL, **change})
    assert why in str(seen.value)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("opt", {"word_embed_proj_dim": 32}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"enable_bias": False}),
        ("nemotron", {"mlp_bias": True}),
        ("seed_oss", {"attention_out_bias": True}),
        ("gpt_oss", {"attention_bias": False}),
        ("qwen3_next", {"linear_conv_kernel_dim": 2}),
        ("qwen3_next", {**LINEAR, "linear_value_head_dim": 32}),
    ],
)
def test_variants_of_a_family_that_sizes_do_not_describe(family: str, change: dict[str, Any]) -> None:
    config = {"model_type": family, **(SHARED if family == "qwen3_next" else USUAL), "max_position_embeddings": 128}
    assert not why_no_shape(config)
    assert any(key in why_no_shape({**config, **change}) for key in change)


@pytest.mark.parametrize("family", ["gpt_oss", "olmoe", "phimoe", "qwen3_moe"])
def test_a_family_with_experts_needs_their_number(family: str) -> None:
    with pytest.raises(ConfigurationError, match=f"model '{family}': its config.json has no num_local_experts or"):
        shape_of_config({"model_type": family, **USUAL})


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "cannot be read as JSON"), ("[]", "holds a list"), ("", "cannot be"), ("[" * 100_000, "nested too deeply")],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=why):
        shape_of_config(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as sparse:
        sparse.truncate(10**12)
    with pytest.raises(ConfigurationError, match=r"1,000,000,000,000 bytes, and at most 64,000,000 are read"):
        shape_of_config(file)
