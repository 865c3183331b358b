"""Folders of weights as transformers and PEFT write them, and files by themselves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise import CheckpointError
from shardwise.checkpoint.opened import Opened, open_checkpoint
from tests.checkpoint.by_hand import read_whole
from tests.support.models import MODELS


def weights(opened: Opened) -> dict[str, Tensor]:
    with opened.reader() as reader:
        return {name: read_whole(reader, saved) for name, saved in opened.index.tensors.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_a_model_that_transformers_saved(tmp_path: Path, max_shard_size: str) -> None:
    model = MODELS["llama"].fresh()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "10KB")
    opened = open_checkpoint(tmp_path)
    assert opened.index.origin["format"] == "Hugging Face folder"
    assert_same(weights(opened), model.state_dict())


def test_an_optimizer_beside_it_is_spoken_of(tmp_path: Path) -> None:
    """The trainer of transformers writes one, by number."""
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    index = open_checkpoint(tmp_path).index
    assert index.optimizer is None
    assert index.origin["left out"] == "the optimizer in optimizer.pt, whose state has no names"


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    model = MODELS["qwen3"].fresh()
    model.save_pretrained(tmp_path)
    expected = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert_same(weights(open_checkpoint(tmp_path)), expected)


def test_older_folders_of_pickles(tmp_path: Path) -> None:
    given = {"a": torch.randn(4, 3), "b": torch.randn(5).bfloat16()}
    for name, value in given.items():
        torch.save({name: value}, tmp_path / f"pytorch_model-{name}.bin")
    shards = {name: f"pytorch_model-{name}.bin" for name in given}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    assert_same(weights(open_checkpoint(tmp_path)), given)
    torch.save(given, tmp_path / "alone.bin")
    assert_same(weights(open_checkpoint(tmp_path / "alone.bin")), given)


def test_an_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(MODELS["llama"].fresh(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    assert opened.index.origin["format"] == "PEFT adapter"
    assert len(opened.index.tensors) == 6


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_an_index_that_cannot_be_right(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "model-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for text, words in {
        '{"weight_map": {"a": "../model-1.safetensors"}}': "which is not inside",
        '{"weight_map": {"a": "/etc/passwd"}}': "which is not inside",
        '{"weight_map": {"a": "model-3.safetensors"}}': "No such file",
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}': "names 'b', which is not in its",
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}': "holds 'a', which another file",
        '{"weight_map": []}': "cannot be understood",
        "[": "cannot be understood",
        "{}": "cannot be understood",
        "[" * 100_000: "cannot be understood",
    }.items():
        index.write_text(text)
        refused(tmp_path, words)


def test_pickles_that_call_something_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": print}, tmp_path / "pytorch_model.bin")
    refused(
        tmp_path, r"cannot read .*names (builtins|__builtin__).print, which is neither a tensor nor a plain container"
    )
