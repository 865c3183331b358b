"""Exports from checkpoints: what transformers and peft open computes what was trained, in memory of a few blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import shardwise as sw
from shardwise.base.errors import CheckpointError, ConfigurationError
from shardwise.checkpoint.interop.dcp_write import write_dcp
from shardwise.checkpoint.opened import open_checkpoint
from shardwise.trainer.models.build import build
from shardwise.trainer.models.export import export as of_run
from shardwise.trainer.models.export import write_export
from shardwise.trainer.models.headloss import loss_sum
from shardwise.trainer.models.lora import adapters_for
from shardwise.trainer.models.restore import content_of
from shardwise.trainer.settings import Lora, Settings
from tests.checkpoint.by_hand import save_by_hand
from tests.harness import Pool
from tests.trainer.models.architectures import batch, saved


def export(path: Path, out: Path, **wish: Any) -> None:
    with content_of(path, **wish) as content:
        write_export(content, out)


def trained(settings: Settings, run: Path) -> Any:
    """A run's newest checkpoint, of weights that are not those of any folder; the model with these weights."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(settings.model)
    if settings.lora is not None:
        model = get_peft_model(model, adapters_for(settings.lora, model))
    torch.manual_seed(11)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape) * 0.1)
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    tensors = model.state_dict()
    save_by_hand(
        run / "checkpoints" / "step-000004",
        # Masters are wider than the weights that they are of.
        {
            first: tensors[first].float() if tensors[first].is_floating_point() else tensors[first]
            for first, *_ in names.values()
        },
        tied={first: tuple(tied) for first, *tied in names.values() if tied},
        frozen=tuple(name for name, param in model.named_parameters() if not param.requires_grad),
        buffers=tuple(name for name in tensors if name not in dict(model.named_parameters(remove_duplicate=False))),
        extra={"step": 4},
    )
    (run / "config.json").write_text(settings.to_json())
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out = model.eval()(input_ids=batch().tokens)
    return out.logits.float()


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("qwen3_moe", {})],
    ids=["untied", "tied", "gpt2", "experts"],
)
def test_transformers_computes_what_was_trained(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved(name, tmp_path / "base", **changes)
    (tmp_path / "base" / "tokenizer_config.json").write_text('{"a": 1}')
    run = tmp_path / "run"
    model = trained(Settings(model=str(tmp_path / "base"), tokenizer="bytes"), run)
    export(run, tmp_path / "out", max_bytes=20_000)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-6)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    # Tied weights once, experts apart: the names are those of the folder that it began with.
    assert set(index["weight_map"]) == set(load_file(tmp_path / "base" / "model.safetensors"))
    assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(
        value.nbytes for file in (tmp_path / "out").glob("*.safetensors") for value in load_file(file).values()
    )
    note = json.loads((tmp_path / "out" / "shardwise.json").read_text())
    assert note["step"] == 4


def test_a_model_that_learned_bytes_ends_where_bytes_end(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved("llama", tmp_path / "base")
    trained(Settings(model=str(tmp_path / "base"), tokenizer="bytes"), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (256, 256)
    assert model.config.pad_token_id is None


def test_sixteen_or_thirty_two_bits(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").bfloat16()
    base.save_pretrained(tmp_path / "base")
    model = trained(Settings(model=str(tmp_path / "base"), tokenizer="bytes"), tmp_path / "run")
    expected = {
        "auto": torch.bfloat16,
        "keep": torch.float32,
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
    for dtype, wanted in expected.items():
        export(tmp_path / "run", tmp_path / dtype, dtype=dtype)
        found = load_file(tmp_path / dtype / "model.safetensors")
        assert {value.dtype for value in found.values()} == {wanted}
        for key, value in found.items():
            assert torch.equal(value, model.state_dict()[key].float().to(wanted)), key
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == str(wanted)[6:]


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    (tmp_path / "run").mkdir()
    tensors = {name: value * 0 + 1e6 for name, value in load_file(tmp_path / "base" / "model.safetensors").items()}
    save_by_hand(tmp_path / "checkpoint", tensors)
    with pytest.raises(CheckpointError, match="fp16"):
        export(tmp_path / "checkpoint", tmp_path / "out", model=str(tmp_path / "base"), dtype="fp16")
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_outside_a_run_needs_its_model(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    tensors = {name: value + 1 for name, value in load_file(tmp_path / "base" / "model.safetensors").items()}
    save_by_hand(tmp_path / "checkpoint", tensors)
    with pytest.raises(ConfigurationError, match="--model FOLDER"):
        export(tmp_path / "checkpoint", tmp_path / "out")
    export(tmp_path / "checkpoint", tmp_path / "out", model=str(tmp_path / "base"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    # An export is itself something to export: other dtypes, other files.
    export(tmp_path / "out", tmp_path / "again", dtype="bf16")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensors[name].bfloat16()) for name in tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [("lack", "it lacks 1 tensors, first 'model.norm"), ("more", "it has 1 that"), ("shape", "in it, ")],
)
def test_a_checkpoint_of_another_model_is_refused(change: str, words: str, tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    if change == "lack":
        del tensors["model.norm.weight"]
    elif change == "more":
        tensors["model.more"] = torch.ones(2)
    else:
        tensors["model.norm.weight"] = torch.ones(3)
    save_by_hand(tmp_path / "checkpoint", tensors)
    with pytest.raises(CheckpointError, match=words):
        export(tmp_path / "checkpoint", tmp_path / "out", model=str(tmp_path / "base"))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_adapters_alone_and_merged(name: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved(name, tmp_path / "base")
    targets = ("c_attn", "c_proj") if name == "gpt2" else ("q_proj", "embed_tokens" if name == "llama" else "v_proj")
    settings = Settings(model=str(tmp_path / "base"), tokenizer="bytes", lora=Lora(r=4, alpha=12, targets=targets))
    model = trained(settings, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "merged", is_merged=True)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)
    theirs = model.merge_and_unload().state_dict()
    for key, value in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-6, atol=1e-6)
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(
        load_file(tmp_path / "base" / "model.safetensors")
    )

    # The base of the adapters is what the run began with; here it is what the checkpoint has of it.
    export(tmp_path / "run", tmp_path / "adapter")
    written = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert written > {"adapter_config.json", "adapter_model.safetensors", "shardwise.json"}
    assert not any(name.startswith("model") for name in written)
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    # An adapter's folder can be merged with the model that it names.
    export(tmp_path / "adapter", tmp_path / "again", is_merged=True)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(again), logits(adapted), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    trained(Settings(model=str(tmp_path / "base"), tokenizer="bytes"), tmp_path / "run")
    with pytest.raises(ConfigurationError, match="no adapters to merge"):
        export(tmp_path / "run", tmp_path / "out", is_merged=True)


def test_a_checkpoint_that_left_its_run_knows_its_settings(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    settings = Settings(model=str(tmp_path / "base"), tokenizer="bytes")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    save_by_hand(tmp_path / "checkpoint", tensors, extra={"configuration": json.loads(settings.to_json())})
    export(tmp_path / "checkpoint", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


def test_a_run_whose_model_has_moved(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    settings = Settings(model=str(tmp_path / "base"), tokenizer="bytes", lora=Lora(r=2))
    trained(settings, tmp_path / "run")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ConfigurationError, match="--model FOLDER"):
        export(tmp_path / "run", tmp_path / "out")
    export(tmp_path / "run", tmp_path / "out", model=str(tmp_path / "moved"), is_merged=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_buffers_go_along(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved("deepseek_v3", tmp_path / "base")
    model = trained(Settings(model=str(tmp_path / "base"), tokenizer="bytes"), tmp_path / "run")
    buffers = {name: value for name, value in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    assert len(buffers) == 2
    export(tmp_path / "run", tmp_path / "out", dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in buffers.items())
    assert set(found) == set(load_file(tmp_path / "base" / "model.safetensors"))
    export(tmp_path / "run", tmp_path / "out")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_what_torch_saved_is_exported_with_the_model_that_is_named(tmp_path: Path) -> None:
    saved("qwen3", tmp_path / "base")
    model = trained(Settings(model=str(tmp_path / "base"), tokenizer="bytes"), tmp_path / "run")
    write_dcp(open_checkpoint(tmp_path / "run"), tmp_path / "dcp")
    (tmp_path / "config").mkdir()
    (tmp_path / "base" / "config.json").rename(tmp_path / "config" / "config.json")
    export(tmp_path / "dcp", tmp_path / "out", model=str(tmp_path / "config"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in found
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.items())


def carried(settings: Settings, run: Path) -> None:
    """Trained a little, saved, and exported by the run itself."""
    sw.init()
    built = build(settings, 257, torch.device("cpu"))
    optimizer = torch.optim.SGD([param for param in built.model.parameters() if param.requires_grad], lr=0.1)
    model, optimizer = sw.shard(built.model, optimizer, "zero3", precision="fp32", seed=settings.seed)
    if built.weights is not None:
        sw.load_full_state_dict(model, built.weights)
    (loss_sum(model, batch()) / 32).backward()
    optimizer.step()
    sw.save(run / "checkpoints" / "step-000001", model, optimizer)
    of_run(model, built, settings, run / "export")


def carried_all(cases: list[tuple[Settings, Path]]) -> None:
    for case in cases:
        carried(*case)


@pytest.mark.slow
def test_from_the_checkpoint_comes_what_the_run_itself_exports(run_ranks: Pool, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "experts").bfloat16().save_pretrained(tmp_path / "experts")
    saved("qwen3", tmp_path / "tied")
    shape = {"hidden": 24, "layers": 2, "heads": 4, "ffn": 40, "vocab": 300, "tied": True}
    settings = {
        "experts": Settings(model=str(tmp_path / "experts"), tokenizer="bytes"),
        "lora": Settings(model=str(tmp_path / "tied"), tokenizer="bytes", lora=Lora(r=4)),
        "drawn": Settings(model=str(tmp_path / "tied" / "config.json"), lora=Lora(r=4)),
        "in-tree": Settings(model="tiny", shape=shape),
        "in-tree lora": Settings(model="tiny", shape=shape, lora=Lora(r=4)),
    }
    run_ranks(2, carried_all, [(each, tmp_path / "runs" / name) for name, each in settings.items()])
    for name, each in settings.items():
        run = tmp_path / "runs" / name
        (run / "config.json").write_text(each.to_json())
        export(run, tmp_path / "out" / name)
        files = sorted(file.relative_to(run / "export") for file in (run / "export").rglob("*") if file.is_file())
        out = tmp_path / "out" / name
        assert files == sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())
        for file in files:
            if file.suffix == ".safetensors":
                theirs, ours = load_file(run / "export" / file), load_file(out / file)
                assert theirs.keys() == ours.keys()
                assert all(torch.equal(theirs[key], ours[key]) for key in theirs), (name, file)
            elif file.name == "config.json":
                assert json.loads((run / "export" / file).read_text()) == json.loads((out / file).read_text())
    export(tmp_path / "runs" / "in-tree lora", tmp_path / "merged", is_merged=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == load_file(tmp_path / "out" / "in-tree" / "model.safetensors").keys()
