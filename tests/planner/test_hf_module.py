"""A config.json of any model that transformers knows is planned as the module that it makes of it, or refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.planner.plan_json import plan_as_json
from shardwise.planner.planning import Plan
from shardwise.planner.shapes.hf_config import shape_of_config, why_no_shape
from shardwise.planner.states import States
from shardwise.report.page import render
from tests.cli.asking import Asker
from tests.support.tables import table

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160,
    "num_hidden_layers": 2, "pad_token_id": 0,
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
EYE = {**SMALL, "image_size": 28, "patch_size": 14}
MOE = {**TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

# What is in the file, and the class that is built of it.
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llava", "text_config": {"model_type": "llama", **TEXT},
      "vision_config": {"model_type": "clip_vision_model", **EYE}}, "LlavaForConditionalGeneration"),
    ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **TEXT},
      "vision_config": {"model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 32, "num_heads": 2,
                        "intermediate_size": 64, "out_hidden_size": 64}}, "Qwen2_5_VLForConditionalGeneration"),
    ({"model_type": "smolvlm", "text_config": {"model_type": "llama", **TEXT},
      "vision_config": {"model_type": "smolvlm_vision", **EYE}}, "SmolVLMForConditionalGeneration"),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **TEXT, "head_dim": 16},
      "vision_config": {"model_type": "siglip_vision_model", **EYE}}, "Gemma3ForConditionalGeneration"),
    ({"model_type": "blip-2", "text_config": {"model_type": "opt", "vocab_size": 1000, "hidden_size": 64,
                                              "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 160,
                                              "word_embed_proj_dim": 64},
      "vision_config": {"model_type": "blip_2_vision_model", **EYE},
      "qformer_config": {"model_type": "blip_2_qformer", **SMALL, "encoder_hidden_size": 32}},
     "Blip2ForConditionalGeneration"),
    ({"model_type": "clip", "text_config": {"model_type": "clip_text_model", **SMALL},
      "vision_config": {"model_type": "clip_vision_model", **EYE}}, "CLIPModel"),
    ({"model_type": "vit", **EYE, "architectures": ["ViTForImageClassification"]}, "ViTForImageClassification"),
    ({"model_type": "t5", "vocab_size": 1000, "d_model": 64, "d_ff": 160, "d_kv": 16, "num_layers": 2, "num_heads": 4,
      "is_encoder_decoder": True}, "T5ForConditionalGeneration"),
    ({"model_type": "whisper", "vocab_size": 1000, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
      "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
      "pad_token_id": 0}, "WhisperForConditionalGeneration"),
    ({"model_type": "bert", "vocab_size": 1000, **SMALL, "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
    ({"model_type": "modernbert", "vocab_size": 1000, **SMALL, "pad_token_id": 0}, "ModernBertForMaskedLM"),
    ({"model_type": "mamba", "vocab_size": 1000, "hidden_size": 32, "num_hidden_layers": 2}, "MambaForCausalLM"),
    ({"model_type": "dots1", **MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
      "first_k_dense_replace": 1}, "Dots1ForCausalLM"),
    ({"model_type": "qwen3_moe", **MOE, "num_experts": 4, "decoder_sparse_step": 2}, "Qwen3MoeForCausalLM"),
    ({"model_type": "persimmon", **TEXT}, "PersimmonForCausalLM"),
    ({"model_type": "lfm2", **TEXT, "block_ff_dim": 160}, "Lfm2ForCausalLM"),
]  # fmt: skip


def real(config: dict[str, Any], architecture: str) -> int:
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(made)
    return sum(param.numel() for param in model.parameters())


def planned(config: Any, **sizes: Any) -> Plan | States:
    return sw.plan(config, "2xA100-40GB", search=False, strategy="zero3", **sizes)


@pytest.mark.quick("llava", "t5", "mamba", "dots1")
@pytest.mark.parametrize(("config", "architecture"), CONFIGS, ids=[str(config["model_type"]) for config, _ in CONFIGS])
def test_every_parameter_of_the_real_model_is_counted(config: dict[str, Any], architecture: str) -> None:
    assert why_no_shape(config)
    found = plan_as_json(planned(config, seq=32))["model"]
    assert found["num_params"] == real(config, architecture)
    assert found.get("class", architecture) == architecture
    with pytest.raises(ConfigurationError, match="not planned for by sizes alone"):
        shape_of_config(config)


def test_what_does_not_run_on_token_ids_is_said_in_table_json_and_page(tmp_path: Path) -> None:
    for index, told in ((0, "vision_tower"), (6, "ViTForImageClassification")):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[index][0]))
        answer = plan_as_json(planned(str(tmp_path)))
        assert answer["model"]["name"] == str(tmp_path)
        for text in (answer["model"]["note"], answer["why"], " ".join(table(answer).split()), render(answer)):
            assert told in text


def test_blocks_of_such_a_model_are_checkpointed_if_that_is_needed() -> None:
    config = CONFIGS[14][0]
    most, least = (planned(config, checkpointing=mode, seq=512) for mode in ("none", "full"))
    assert isinstance(most, Plan)
    assert isinstance(least, Plan)
    assert least.found[0].needed_bytes < most.found[0].needed_bytes
    assert least.found[0].step_s > most.found[0].step_s
    for changed in ({"checkpointing": "selective"}, {"lora": 8}, {"compile": True}):
        with pytest.raises(ConfigurationError, match="'persimmon': its module is counted, without lora, compile"):
            planned(config, **changed)


def test_a_config_of_transformers_is_planned_like_its_file() -> None:
    config = transformers.CONFIG_MAPPING["persimmon"].from_dict(CONFIGS[14][0])
    found = planned(config)
    assert isinstance(found, Plan)
    assert found.subject.facts["num_params"] == real(*CONFIGS[14])
    known = planned({"model_type": "llama", **TEXT})
    assert isinstance(known, Plan)
    assert known.subject.facts["layers"] == 2


def test_a_sequence_is_as_long_as_the_model_has_positions_for() -> None:
    found = planned(CONFIGS[9][0])
    assert isinstance(found, Plan)
    assert found.training.seq == 512


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "nobodys", **TEXT}, "does not know it either"),
        ({**TEXT}, "its model_type '' is none of those"),
        ({"model_type": "clip_vision_model", **EYE, "num_hidden_layers": 10**9}, "1 to 1,000 are planned for"),
        ({"model_type": "bert", **TEXT, "num_hidden_layers": 0}, "num_hidden_layers is 0, but 1 to"),
        ({"model_type": "persimmon", **TEXT, "hidden_size": "large"}, "transformers cannot build it"),
        ({"model_type": "persimmon", **TEXT, "quantization_config": {"bits": 4}}, "weights are quantised"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_sentence(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as seen:
        planned(config)
    assert why in str(seen.value)
    assert "\n" not in str(seen.value)


def test_without_transformers_the_fix_is_named_and_known_families_need_none(
    monkeypatch: pytest.MonkeyPatch, ask: Asker, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[0][0]))
    refused = ask("plan", str(file), "--gpus", "8xA100-40GB")
    assert refused.code == 2
    assert "install shardwise[hf]" in " ".join(refused.err.split())
    file.write_text(json.dumps({"model_type": "llama", **TEXT}))
    assert ask("plan", str(file), "--gpus", "8xA100-40GB").code == 0
