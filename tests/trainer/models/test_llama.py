"""The in-tree transformer is a Llama: with its names and its config, transformers computes the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.trainer.data.tokenizer import BYTES, write_byte_tokenizer
from shardwise.trainer.model import Transformer
from shardwise.trainer.models.llama import IN_TREE_LEAVES, LEAVES, in_tree_name, llama_config, llama_name
from shardwise.trainer.shapes import TransformerShape

SHAPE = {"vocab": 257, "hidden": 48, "layers": 2, "heads": 6, "kv_heads": 2, "ffn": 80, "max_seq": 64}


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = Transformer(TransformerShape(**SHAPE, tied=tied))
    weights = {llama_name(name): param.detach() for name, param in model.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(llama_config(model.shape, "float32", BYTES.end_id)))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, 257, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_names_come_back() -> None:
    model = Transformer(TransformerShape(**SHAPE))
    for name in [
        *dict(model.named_parameters()),
        *dict(model.named_modules()),
        "base_model.model.blocks.1.ffn.up.lora_A.weight",
    ]:
        assert in_tree_name(llama_name(name)) == name
    names = {llama_name(name) for name, _ in model.named_parameters()}
    assert len(names) == len(dict(model.named_parameters()))
    assert llama_name("base_model.model.blocks.1.attention.query.lora_A.weight") == (
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    )
    for leaf in ("query", "key", "value", "out", "gate", "up", "down"):
        assert IN_TREE_LEAVES[LEAVES[leaf]] == leaf


def test_the_byte_tokenizer_is_theirs_too(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_byte_tokenizer(tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The cat.", "Überraschung: 日本 \n\t 🙂", bytes(range(1, 128)).decode()):
        assert theirs(text)["input_ids"] == BYTES.encode(text)
        assert theirs.decode(BYTES.encode(text)) == text
    assert theirs.eos_token_id == BYTES.end_id
    assert theirs.decode([72, 105, BYTES.end_id], skip_special_tokens=True) == "Hi"
