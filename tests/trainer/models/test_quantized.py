"""Folders in bitsandbytes' nf4, and runs on a base in few bits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import ConfigurationError
from shardwise.core.wire.nf4 import CODEC
from shardwise.core.wire.reference_codecs import encoded
from shardwise.trainer.answers import Request, prepare
from shardwise.trainer.checks import check_all
from shardwise.trainer.models.build import build
from shardwise.trainer.models.export import write_export
from shardwise.trainer.models.facts import check
from shardwise.trainer.models.generation import Sampling
from shardwise.trainer.models.quantized import rounded
from shardwise.trainer.models.restore import content_of, find_model_in
from shardwise.trainer.settings import Lora, Settings
from tests.harness import Pool
from tests.support.running import losses, rows, save_llama, settings_for, train

Change = Callable[[dict[str, Tensor]], None]
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama as it is, and written in nf4."""
    place = tmp_path_factory.mktemp("nf4")
    plain = save_llama(place / "plain", hidden=64)
    with content_of(plain, dtype="nf4") as content:
        write_export(content, place / "nf4")
    return plain, place / "nf4"


def settings_of(folder: Path, **changes: object) -> Settings:
    given = {"model": str(folder), "tokenizer": "bytes", "lora": Lora(), "quantize": "nf4", "device": "cpu", **changes}
    return Settings(**given)


def weights_of(folder: Path) -> dict[str, Tensor]:
    built = build(settings_of(folder), 256, torch.device("cpu"), facts=check(settings_of(folder)))
    assert built.weights is not None
    return {name: built.weights[name] for name in built.weights}


def test_a_folder_is_written_and_read_byte_for_byte(folders: tuple[Path, Path]) -> None:
    plain, packed = map(weights_of, folders)
    assert plain.keys() == packed.keys()
    for name, value in plain.items():
        is_packed = ".layers." in name and value.ndim == 2 and "lora" not in name
        assert torch.equal(packed[name], encoded(CODEC, value) if is_packed else value)
    about = json.loads((folders[1] / "config.json").read_text())["quantization_config"]
    assert (about["quant_method"], about["bnb_4bit_quant_type"]) == ("bitsandbytes", "nf4")


def test_norms_of_dora_begin_as_those_of_the_rounded_weights(folders: tuple[Path, Path]) -> None:
    lora = Lora(r=4, alpha=8, targets=("q_proj",), dora=True)
    path = f"base_model.model.{QUERY.removesuffix('.weight')}"
    for folder in folders:
        weights = build(settings_of(folder, lora=lora), 256, torch.device("cpu")).weights
        assert weights is not None
        values = rounded(weights[f"{path}.base_layer.weight"], "nf4", (64, 64))
        assert torch.equal(weights[f"{path}.lora_magnitude_vector.default.weight"], values.norm(dim=1))


def test_a_run_is_restored_with_its_format(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantize": "nf4"}))
    (tmp_path / "export").mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": str(folders[0])}
    (tmp_path / "export/adapter_config.json").write_text(json.dumps(about))
    assert find_model_in(tmp_path, "bytes").quantized == "nf4"
    assert find_model_in(tmp_path / "export", "bytes").quantized is None
    # The format decides the answers: those of another one are not continued.
    asked = Request(str(tmp_path / "export"), "zero3", Sampling(), tokenizer="bytes")
    both = [prepare(replace(asked, quantize=codec)).facts["quantize"] for codec in (None, "nf4")]
    assert both == [None, "nf4"]


def _blocks_of_128(tensors: dict[str, Tensor]) -> None:
    state = bytes(tensors[f"{QUERY}.quant_state.bitsandbytes__nf4"].tolist()).replace(
        b'"blocksize": 64', b'"blocksize": 128'
    )
    tensors[f"{QUERY}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)


def _another_book(tensors: dict[str, Tensor]) -> None:
    tensors[f"{QUERY}.quant_map"] = torch.linspace(-1, 1, 16)


def _not_nested(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{QUERY}.nested_absmax"]


def _one_left_out(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(QUERY)]:
        del tensors[name]
    tensors[QUERY] = torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_blocks_of_128, "blocks of 128"),
        (_another_book, "not the code book"),
        (_not_nested, "nested_absmax"),
        (_one_left_out, "not stored as nf4"),
    ],
)
def test_other_forms_are_refused(folders: tuple[Path, Path], tmp_path: Path, change: Change, why: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folders[1] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[1] / "config.json").read_text())
    with pytest.raises(ConfigurationError, match=why):
        weights_of(tmp_path)


def test_settings_that_do_not_fit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="all are trained"):
        settings_of(folders[0], lora=None)
    for asked in (None, "int8"):
        with pytest.raises(ConfigurationError, match="add --quantize nf4"):
            check_all(settings_of(folders[1], quantize=asked), 1)
    with pytest.raises(ConfigurationError, match="already"):
        check_all(settings_of(folders[0], strategy="zero3+frozen_as=int8"), 1)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(ConfigurationError, match="another way \\(gptq\\)"):
        check(settings_of(tmp_path))
    with pytest.raises(ConfigurationError, match="stored as nf4"), content_of(folders[1]):
        pass


@pytest.mark.slow
def test_a_run_goes_on_with_another_strategy(run_ranks: Pool, tmp_path: Path, folders: tuple[Path, Path]) -> None:
    base = {"lora": Lora(), "quantize": "nf4", "max_steps": 4, "save_steps": 2, "tokenizer": "bytes", "shape": {}}
    for name, folder in zip(("plain", "nf4"), folders, strict=True):
        assert train(run_ranks, 2, settings_for(tmp_path / name, model=str(folder), strategy="zero3", **base)) == 0
    assert losses(tmp_path / "plain") == losses(tmp_path / "nf4")
    resumed = {**base, "resume_from_checkpoint": str(tmp_path / "nf4/checkpoints/step-000002"), "strategy": "auto"}
    assert train(run_ranks, 1, settings_for(tmp_path / "on", model=str(folders[1]), **resumed)) == 0
    last = [row["loss"] for row in rows(tmp_path / "on") if row.get("step", 0) > 2 and "loss" in row]
    assert last == pytest.approx(losses(tmp_path / "nf4")[-2:], rel=1e-5)
    # Adapters of a checkpoint are merged into the decoded base.
    with content_of(tmp_path / "plain/checkpoints/step-000004", is_merged=True) as content:
        write_export(content, tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").stat().st_size > 64 * 64 * 4
