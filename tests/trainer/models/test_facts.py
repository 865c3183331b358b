"""What is said about a model, and refused, before anything is built."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.models.facts import NO_LIMIT, check, in_tree_shape, require_vocabulary
from shardwise.trainer.settings import Settings

LLAMA = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 64}


def folder(path: Path, config: Any = LLAMA, *files: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name in files:
        (path / name).touch()
    return path


def test_a_shape_by_name() -> None:
    facts = check(Settings(model="tiny"))
    assert (facts.kind, facts.max_seq, facts.vocab_size, facts.tokenizer) == ("in-tree", 512, None, "bytes")
    assert not facts.has_weights
    changed = Settings(model="tiny", shape={"layers": 2, "max_seq": 99, "vocab": 1000})
    assert (check(changed).max_seq, check(changed).vocab_size) == (99, 1000)
    assert in_tree_shape(changed, 257).vocab == 1000
    assert in_tree_shape(Settings(model="tiny"), 257).vocab == 257


def test_a_folder_and_its_tokenizer(tmp_path: Path) -> None:
    place = folder(tmp_path / "m", LLAMA, "model.safetensors")
    facts = check(Settings(model=str(place), tokenizer="bytes"))
    assert (facts.kind, facts.max_seq, facts.vocab_size, facts.tokenizer) == ("hf", 64, 300, "bytes")
    assert facts.has_weights
    # Weights that are drawn can learn any tokens, those that were trained know some already.
    for drawn in (Settings(model=str(place), random_weights=True), Settings(model=str(place / "config.json"))):
        assert (check(drawn).has_weights, check(drawn).tokenizer) == (False, "bytes")
    with pytest.raises(ConfigurationError, match=r"has weights but no tokenizer files.* or --tokenizer bytes"):
        check(Settings(model=str(place)))
    (place / "config.json").write_text(json.dumps({**LLAMA, "shardwise_tokenizer": "bytes"}))
    assert check(Settings(model=str(place))).tokenizer == "bytes"
    (place / "tokenizer.json").touch()
    assert check(Settings(model=str(place))).tokenizer == "bytes"  # known without the files that are for others
    (place / "config.json").write_text(json.dumps(LLAMA))
    assert check(Settings(model=str(place))).tokenizer == str(place)
    assert check(Settings(model=str(place), tokenizer="bytes")).tokenizer == "bytes"


def test_lengths_and_vocabularies_are_found_where_architectures_keep_them(tmp_path: Path) -> None:
    def limit(config: dict[str, Any]) -> tuple[int, int | None]:
        place = folder(tmp_path / "m", {"model_type": "x", **config}, "model.safetensors")
        facts = check(Settings(model=str(place), tokenizer="bytes"))
        return facts.max_seq, facts.vocab_size

    assert limit({"n_positions": 32, "vocab_size": 400}) == (32, 400)
    assert limit({"text_config": {"max_position_embeddings": 16, "vocab_size": 500}}) == (16, 500)
    assert limit({"vocab_size": 400}) == (NO_LIMIT, 400)


REFUSALS: list[tuple[dict[str, Any], list[str], dict[str, Any], str]] = [
    (LLAMA, [], {}, "no model.safetensors; for fresh weights use --random-weights"),
    (LLAMA, ["pytorch_model.bin"], {}, "pickled weights only (pytorch_model.bin)"),
    (LLAMA, ["model.safetensors"], {"shape": {"layers": 2}}, "shape.layers is for in-tree shapes by name"),
    ({"vocab_size": 300}, ["model.safetensors"], {}, "no model_type"),
    ({**LLAMA, "quantization_config": {}}, ["model.safetensors"], {}, "quantised"),
    (
        {**LLAMA, "vocab_size": 256},
        ["model.safetensors"],
        {"tokenizer": "bytes"},
        "has 257 tokens, but the model's vocabulary is 256",
    ),
    ({"model_type": "llama", "shardwise_shape": {"hidden": 8}}, ["model.safetensors"], {}, "no complete shape"),
]


@pytest.mark.parametrize(("config", "files", "changes", "words"), REFUSALS)
def test_folders_that_will_not_do(
    config: dict[str, Any], files: list[str], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    place = folder(tmp_path / "m", config, *files)
    with pytest.raises(ConfigurationError) as error:
        check(Settings(model=str(place), **changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_names_that_will_not_do(tmp_path: Path) -> None:
    def refusal(name: str, **changes: Any) -> str:
        with pytest.raises(ConfigurationError) as error:
            check(Settings(model=name, **changes))
        return str(error.value)

    assert "there is no such folder" in refusal("./nowhere")
    assert "there is no such folder" in refusal("nowhere/config.json")
    assert "the folder has no config.json" in refusal(str(tmp_path))
    (tmp_path / "weights.bin").touch()
    assert "config.json" in refusal(str(tmp_path / "weights.bin"))
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in refusal(str(tmp_path))
    assert "did you mean 'layers'" in refusal("tiny", shape={"layer": 2})
    assert "[257, 1, 2" not in refusal("tiny", shape={"heads": 5})
    assert "vocabulary is 100" in refusal("tiny", shape={"vocab": 100})


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    place = folder(tmp_path / "m")
    for name in ("model-00001-of-00002.safetensors", "../secret.safetensors"):
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigurationError, match="which is not in the folder"):
            check(Settings(model=str(place)))
    for weight_map in (["model.safetensors"], {"a": 3}):
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigurationError, match="does not contain file names"):
            check(Settings(model=str(place)))


def test_an_id_is_fetched_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    place = folder(tmp_path / "m", LLAMA, "model.safetensors", "tokenizer.json")
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/none":
            raise OSError("no network\nand more")
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    facts = check(Settings(model="org/model"))
    assert (facts.folder, facts.origin, facts.tokenizer) == (place, "org/model", str(place))
    assert check(Settings(model=str(place))).origin == str(place)
    check(Settings(model="org/model", random_weights=True))
    assert ["*.safetensors" in patterns for _, patterns in asked] == [True, False]
    assert not any(pattern.endswith((".py", ".bin", "*")) for _, patterns in asked for pattern in patterns)
    with pytest.raises(ConfigurationError, match=r"the download failed: no network$"):
        check(Settings(model="org/none"))


def test_a_tokenizer_may_have_fewer_tokens_but_not_more(tmp_path: Path) -> None:
    facts = check(Settings(model=str(folder(tmp_path / "m", LLAMA, "model.safetensors")), tokenizer="bytes"))
    require_vocabulary(facts, 300)
    with pytest.raises(ConfigurationError, match="301 tokens, but the model's vocabulary is 300"):
        require_vocabulary(facts, 301)


def test_facts_come_without_torch() -> None:
    code = (
        "import sys\n"
        "from shardwise.trainer.models.facts import check\n"
        "from shardwise.trainer.settings import Settings\n"
        "check(Settings())\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stderr
