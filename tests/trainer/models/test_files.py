"""From files into a model and out again: names, ties, conversions, adapters, and files that do not fit."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shardwise as sw
from shardwise.trainer.models import export as export_module
from shardwise.trainer.models.build import build
from shardwise.trainer.models.export import export
from shardwise.trainer.models.facts import check
from shardwise.trainer.models.headloss import loss_sum
from shardwise.trainer.settings import Lora, Settings
from tests.harness import Pool
from tests.trainer.models.architectures import VOCAB, batch, saved

CPU = torch.device("cpu")


def filled(settings: Settings, strategy: str) -> tuple[Any, Any]:
    sw.init()
    built = build(settings, 257, CPU)
    sw.shard(built.model, None, strategy, precision="fp32", seed=settings.seed)
    if built.weights is not None:
        sw.load_full_state_dict(built.model, built.weights)
    return built, built.model


def carried(settings: Settings, folder: Path, max_bytes: int, strategy: str) -> float:
    """Loaded, trained a little, exported; the loss of what was exported."""
    sw.init()
    built = build(settings, 257, CPU)
    model = built.model
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    model, optimizer = sw.shard(model, optimizer, strategy, precision="fp32", seed=settings.seed)
    if built.weights is not None:
        sw.load_full_state_dict(model, built.weights)
    (loss_sum(model, batch()) / 32).backward()
    optimizer.step()
    optimizer.zero_grad()
    with patch.object(export_module, "MAX_FILE_BYTES", max_bytes):
        export(model, built, settings, folder)
    with torch.no_grad():
        return float(loss_sum(model, batch()))


def carried_all(cases: list[tuple[Settings, Path, int, str]]) -> list[float]:
    return [carried(*case) for case in cases]


def own_loss(model: Any) -> float:
    with torch.no_grad():
        logits = model(input_ids=batch().tokens).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch().targets.flatten(), reduction="sum"))


@pytest.mark.slow
def test_what_is_exported_is_opened_by_others(run_ranks: Pool, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = ["llama", "qwen3", "gpt2", "qwen3_moe"]
    before = {name: own_loss(saved(name, tmp_path / name).eval()) for name in names}
    (tmp_path / "llama" / "tokenizer_config.json").write_text('{"a": 1}')
    fresh = Settings(model=str(tmp_path / "qwen3" / "config.json"), lora=Lora(r=4, targets=("q_proj",)), seed=5)
    in_tree = Settings(model="tiny", shape={"hidden": 24, "layers": 2, "heads": 4, "ffn": 40, "vocab": VOCAB})
    lora = Settings(model=str(tmp_path / "llama"), tokenizer="bytes", lora=Lora(r=4, alpha=16))
    settings = {name: Settings(model=str(tmp_path / name), tokenizer="bytes") for name in names}
    tied = replace(lora, model=str(tmp_path / "qwen3"))
    settings |= {
        "lora": lora,
        "tied lora": tied,
        "fresh": fresh,
        "in-tree": in_tree,
        "in-tree lora": replace(in_tree, lora=Lora(r=4)),
    }
    cases = [(each, tmp_path / f"{name}-out", 10**9, "zero3") for name, each in settings.items()]
    cases.append((Settings(model=str(tmp_path / "llama")), tmp_path / "sharded-out", 20_000, "ddp"))
    losses = dict(zip([*settings, "sharded"], run_ranks(2, carried_all, cases)[0], strict=True))
    for name in [*names, "sharded"]:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-out")
        assert own_loss(model) == pytest.approx(losses[name], rel=1e-5), name
        assert losses[name] < before["llama" if name == "sharded" else name] - 0.1
        assert model.config.use_cache
    stored = {name: set(load_file(tmp_path / name / "model.safetensors")) for name in names}
    for name in names:
        assert set(load_file(tmp_path / f"{name}-out" / "model.safetensors")) == stored[name], name
    assert any(".experts.0." in name for name in stored["qwen3_moe"])

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    adapted = PeftModel.from_pretrained(base, tmp_path / "lora-out")
    assert own_loss(adapted) == pytest.approx(losses["lora"], rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3")
    of_tied = PeftModel.from_pretrained(base, tmp_path / "tied lora-out")
    assert own_loss(of_tied) == pytest.approx(losses["tied lora"], rel=1e-5)
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "llama")
    assert sorted(path.name for path in (tmp_path / "lora-out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "shardwise.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    # Adapters on weights that were drawn take them along.
    whole = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "fresh-out")
    assert own_loss(whole) == pytest.approx(losses["fresh"], rel=1e-5)

    index = json.loads((tmp_path / "sharded-out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "sharded-out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"]) == stored["llama"]
    assert (tmp_path / "sharded-out" / "tokenizer_config.json").is_file()
    assert not list(tmp_path.glob("*.partial"))

    about = json.loads((tmp_path / "in-tree-out" / "config.json").read_text())
    assert (about["shardwise_shape"]["layers"], about["shardwise_tokenizer"]) == (2, "bytes")
    # To others it is a Llama, also under adapters.
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "in-tree-out")
    assert own_loss(llama) == pytest.approx(losses["in-tree"], rel=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "in-tree-out")("Hi")["input_ids"] == [72, 105]
    of_in_tree = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "in-tree lora-out")
    assert own_loss(of_in_tree) == pytest.approx(losses["in-tree lora"], rel=1e-5)
    again = Settings(model=str(tmp_path / "in-tree-out"))
    built = build(again, 257, CPU)
    assert built.facts.kind == "in-tree"
    built.model.to_empty(device="cpu").load_state_dict(dict(built.weights or {}))
    with torch.no_grad():
        assert float(loss_sum(built.model, batch())) == pytest.approx(losses["in-tree"], rel=1e-5)


def failing_export(settings: Settings, folder: Path) -> None:
    built, model = filled(settings, "zero3")
    export(model, built, settings, folder)


def test_a_failing_export_is_an_error_on_every_rank_and_keeps_the_old(run_ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file, where a folder should be made")
    settings = Settings(model="tiny", shape={"hidden": 24, "layers": 2, "heads": 4, "ffn": 40})
    for error in run_ranks.errors(2, failing_export, settings, tmp_path / "out" / "export"):
        assert error is not None
        assert error.startswith("ShardwiseError: export to")
    assert (tmp_path / "out").read_text().startswith("a file")


# ---------------------------------------------------------------------------------------------------------
# into a model


def whole(settings: Settings) -> dict[str, Tensor]:
    _, model = filled(settings, "ddp")
    return sw.full_state_dict(model)


def test_every_value_arrives_in_any_form_of_a_folder(run_ranks: Pool, tmp_path: Path) -> None:
    """Tied weights once, a missing prefix, several files, 16 bits, what old versions saved beside the weights."""
    gpt2 = saved("gpt2", tmp_path / "gpt2")
    stored = load_file(tmp_path / "gpt2" / "model.safetensors")
    assert "lm_head.weight" not in stored
    bare = {name.removeprefix("transformer."): value for name, value in stored.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(bare, tmp_path / "gpt2" / "model.safetensors")
    llama = saved("llama", tmp_path / "llama").bfloat16()
    llama.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    for name, model in (("gpt2", gpt2), ("llama", llama)):
        found = run_ranks(2, whole, Settings(model=str(tmp_path / name), tokenizer="bytes"))[0]
        assert list(found) == list(model.state_dict())
        for key, value in model.state_dict().items():
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value), key


def without(stored: dict[str, Tensor]) -> None:
    del stored["model.norm.weight"]


def with_more(stored: dict[str, Tensor]) -> None:
    stored["model.norm.extra"] = torch.zeros(3)


def reshaped(stored: dict[str, Tensor]) -> None:
    stored["lm_head.weight"] = torch.zeros(VOCAB, 15)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without, "lack 1 of the model's 30 tensors, first 'model.norm.weight'"),
        (with_more, "LlamaForCausalLM, first 'model.norm.extra'"),
        (reshaped, f"'lm_head.weight' is ({VOCAB}, 15) in its files, ({VOCAB}, 16) by its config.json"),
    ],
)
def test_weights_of_another_model_are_refused(
    change: Callable[[dict[str, Tensor]], None], words: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(sw.ConfigurationError) as error:
        build(Settings(model=str(tmp_path), tokenizer="bytes"), 257, CPU)
    assert words in str(error.value)


def test_files_that_are_broken_or_unknown_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678901")
    with pytest.raises(sw.ConfigurationError, match="cannot be read as safetensors"):
        build(Settings(model=str(tmp_path), tokenizer="bytes"), 257, CPU)
    about = json.loads((tmp_path / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**about, "model_type": "unheard-of", "auto_map": auto_map}))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a model was run')")
    with pytest.raises(sw.ConfigurationError, match="transformers cannot build it"):
        build(Settings(model=str(tmp_path), random_weights=True), 257, CPU)


def test_adapters_are_drawn_from_the_seed_alone(tmp_path: Path) -> None:
    saved("llama", tmp_path)

    def adapters(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed + 100)
        built = build(Settings(model=str(tmp_path), tokenizer="bytes", lora=Lora(r=4), seed=seed), 257, CPU)
        assert built.num_trainable == sum(p.numel() for p in built.model.parameters() if not p.is_meta)
        assert built.num_trainable < built.num_params / 10
        assert not any(param.requires_grad and param.is_meta for param in built.model.parameters())
        return {name: param for name, param in built.model.named_parameters() if param.requires_grad}

    first, again, other = adapters(0), adapters(0), adapters(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, value in first.items():
        assert bool(value.any()) == ("lora_A" in name)
        assert torch.equal(value, other[name]) == ("lora_B" in name)
    assert len({float(value.sum().detach()) for name, value in first.items() if "lora_A" in name}) == len(first) / 2


def test_targets_that_are_not_there_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(sw.ConfigurationError, match=r"lora: .*did you mean 'q_proj'"):
        build(Settings(model=str(tmp_path), tokenizer="bytes", lora=Lora(targets=("q_porj",))), 257, CPU)


def test_adapters_name_the_model_as_others_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    saved("llama", tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot"))
    for model in ("org/model", str(tmp_path / "snapshot")):
        settings = Settings(model=model, tokenizer="bytes", lora=Lora(r=4))
        built = build(settings, 257, CPU, facts=check(settings))
        adapted: Any = built.model
        assert adapted.peft_config["default"].base_model_name_or_path == model


def test_operations_of_a_token(tmp_path: Path) -> None:
    """Against the numbers of the shapes, written out."""
    built = build(Settings(model="llama-3.2-1b"), 128256, CPU)
    per_layer = 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    multiplying = 16 * per_layer + 2048 + 128256 * 2048
    assert built.num_params == built.num_trainable == multiplying
    assert built.flops_per_token(4096) == 6 * multiplying + 12 * 16 * 2048 * 4096
    saved("qwen3_moe", tmp_path)
    moe = build(Settings(model=str(tmp_path), tokenizer="bytes"), 257, CPU)
    experts = 3 * 4 * 3 * 16 * 24
    assert moe.num_matmul_params == moe.num_params - VOCAB * 16 - experts // 2
    saved("llama", tmp_path / "llama")
    plain = Settings(model=str(tmp_path / "llama"), tokenizer="bytes")
    full, lora = (build(replace(plain, lora=each), 257, CPU) for each in (None, Lora(r=2)))
    frozen = full.num_params - VOCAB * 16
    assert lora.num_matmul_params == pytest.approx(lora.num_trainable + frozen * 2 / 3, abs=1)
    assert math.isclose(full.flops_per_token(8), 6 * frozen + 12 * 3 * 16 * 8)


def test_random_weights_that_are_frozen_have_the_dtype_of_the_config(tmp_path: Path) -> None:
    saved("llama", tmp_path, dtype="bfloat16")
    plain = Settings(model=str(tmp_path), tokenizer="bytes", random_weights=True)
    trained, frozen = (build(replace(plain, lora=each), 257, CPU).model for each in (None, Lora(r=2)))
    assert {param.dtype for param in trained.parameters()} == {torch.float32}
    assert {param.dtype for param in frozen.parameters() if not param.requires_grad} == {torch.bfloat16}
    assert {param.dtype for param in frozen.parameters() if param.requires_grad} == {torch.float32}
