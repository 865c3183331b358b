"""`shardwise plan` and `sw.plan`: what is asked for, what is refused and how, and that no torch is needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import PRESETS
from shardwise.planner.planning import Plan
from tests.cli.asking import Asker
from tests.planner.conftest import Answer

ON = ("--gpus", "8xH100-80GB")
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "intermediate_size": 96,
}

REFUSED: list[tuple[tuple[Any, ...], str]] = [
    # What is asked for is not there.
    (("llama-3-8b", "--gpus", "8xH1000"), "did you mean 'H100"),
    (("llama-3-8b", "--compare", "8xH100,8xH1000"), "GPUs: unknown GPU 'H1000'"),
    (("lama-3-8b", *ON), "did you mean 'llama-3-8b'"),
    (("llama-3-8b", *ON, "--strategy", "zero4"), "did you mean 'zero3'"),
    (("llama-3-8b", *ON, "--optimizer", "adamm"), "did you mean 'adamw'"),
    (("llama-3-8b", *ON, "--checkpointing", "all"), "known: auto, full, none, selective"),
    (("llama-3-8b", *ON, "--precision", "bf8"), "unknown precision 'bf8'"),
    (("llama-3-8b", *ON, "--network", "ib-nrd"), "did you mean 'ib-ndr'"),
    (("llama-3-8b", "--hardware", "nowhere.json"), "there is no such file"),
    # Too little, or too much, was said.
    ((*ON,), "give a model or --shape"),
    (("llama-3-8b", "--shape", "params=7e9", *ON), "not both"),
    (("llama-3-8b",), "give --gpus 8xH100-80GB"),
    (("llama-3-8b", *ON, "--hardware", "measured"), "give one of them"),
    (("--shape", "layers=3", *ON), "it lacks hidden, heads, vocab"),
    # Sizes that nothing has.
    (("llama-3-8b", "--gpus", "0xH100-80GB"), "0 GPUs"),
    (("llama-3-8b", "--gpus=-1xH100-80GB"), "-1 GPUs"),
    (("llama-3-8b", *ON, "--nodes", "0"), "num_nodes is 0"),
    (("llama-3-8b", *ON, "--nodes", "-2"), "num_nodes is -2"),
    (("llama-3-8b", *ON, "--seq", "0"), "seq 0"),
    (("llama-3-8b", *ON, "--micro-batch", "-1"), "micro_batch -1"),
    (("llama-3-8b", *ON, "--accumulation", "0"), "num_micro_batches 0"),
    (("llama-3-8b", *ON, "--tokens", "-1"), "is not a number of tokens"),
    (("llama-3-8b", *ON, "--gpu-memory", "0GB"), "no quantity above 0"),
    (("llama-3-8b", *ON, "--host-memory", "much"), "is no quantity"),
    # Of a model's states alone.
    (("--shape", "params=7e9", *ON, "--micro-batch", 2, "--checkpointing", "full"), "micro_batch, checkpointing need"),
    (("--shape", "params=7e9", *ON, "--lora", 4, "--loss", "plain"), "lora, loss need a real shape"),
    (("--shape", "params=-1", *ON), "must be a number like 7.5e9"),
    (("--shape", "layers=0,hidden=96,heads=3,vocab=100", *ON), "a whole number from 1"),
    (("--shape", "layers=2,hidden=100,heads=3,vocab=100", *ON), "does not divide into 3 heads"),
    # Meshes and batches that do not go.
    (("llama-3-8b", *ON, "--global-batch-size", "12"), "give a multiple of 8"),
    (("llama-3-8b", *ON, "--global-batch-size", "0"), "give a multiple of 8"),
    # Adapters.
    (("llama-3-8b", *ON, "--lora", "0"), "rank 0"),
    (("llama-3-8b", *ON, "--lora", "many"), "is not a rank"),
    (("llama-3-8b", *ON, "--lora", "r=4,target=x"), "unknown word 'target'"),
    (("llama-3-8b", *ON, "--lora", "r=4,targets=nope"), "no projection is called 'nope'"),
]


@pytest.mark.parametrize(("words", "told"), REFUSED, ids=[" ".join(map(str, words)) for words, _ in REFUSED])
def test_what_cannot_be_planned_is_refused_in_one_sentence(ask: Asker, words: tuple[Any, ...], told: str) -> None:
    answer = ask("plan", *words)
    assert (answer.code, answer.out) == (2, "")
    assert told in answer.err
    assert answer.err.startswith("shardwise: ")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("missing", SIZES)
def test_a_config_without_a_size_is_refused(ask: Asker, tmp_path: Path, missing: str) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != missing}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    answer = ask("plan", tmp_path, *ON)
    assert answer.code == 2
    assert missing in answer.err
    assert answer.err.count("\n") == 1


def test_a_config_with_all_sizes_is_planned(plan: Answer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    answer = plan(tmp_path, *ON, "--no-search")
    assert [row["name"] for row in answer["strategies"]] == [*PRESETS]
    named = plan(tmp_path / "config.json", *ON, "--no-search")["model"]
    assert named | {"name": ""} == answer["model"] | {"name": ""}


@pytest.mark.quick("words0")
@pytest.mark.parametrize("words", [("llama-3-70b",), ("--shape", "params=1e12")])
def test_what_has_to_fit_and_does_not_ends_with_3(ask: Asker, words: tuple[str, ...]) -> None:
    answer = ask("plan", *words, "--gpus", "RTX-3090", "--require-fit")
    assert answer.code == 3
    assert answer.err.startswith("shardwise: --require-fit: ")
    assert ask("plan", *words, "--gpus", "RTX-3090").code == 0


def test_what_has_to_fit_and_does_ends_well(ask: Asker) -> None:
    assert ask("plan", "gpt2", *ON, "--require-fit").code == 0


def test_no_torch_is_imported() -> None:
    program = (
        "import sys\n"
        "from shardwise.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    words = ["plan", "llama-3-8b", *ON, "--nodes", "2"]
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, timeout=60)


def test_the_table_names_what_is_recommended(ask: Asker) -> None:
    answer = ask("plan", "llama-3-8b", *ON, "--explain")
    assert answer.code == 0
    assert "llama-3-8b" in answer.out
    assert "does not fit" in answer.out


def test_a_batch_of_all_gpus_is_cut_into_micro_batches(plan: Answer) -> None:
    answer = plan("gpt2", *ON, "--global-batch-size", 64, "--no-search", "--seq", 512)
    assert all(row["micro_batch"] * row["num_micro_batches"] == 8 for row in answer["strategies"])


def test_one_strategy_alone(plan: Answer) -> None:
    answer = plan("gpt2", *ON, "--strategy", "fsdp")
    assert [row["name"] for row in answer["strategies"]] == ["fsdp"]
    assert answer["strategies"][0]["strategy"] == "zero3"


# ---------------------------------------------------------------------------------------------------------
# from Python


def test_from_python_with_a_mapping() -> None:
    found = sw.plan("gpt2", "8xH100-80GB", strategy={"*.h.[0-3]": "ddp", "*": "zero3"}, seq=512)
    assert isinstance(found, Plan)
    (entry,) = found.found
    assert {layout.name for layout in entry.layouts} == {"ddp", "zero3"}
    assert str(found).startswith("gpt2 on 8 x H100-80GB: ")


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="takes a model's name"):
        sw.plan(3, "8xH100-80GB")  # type: ignore[arg-type]


def test_a_module_is_planned_as_its_shape_is() -> None:
    import torch

    from shardwise.planner.shapes.shape import ModelShape
    from shardwise.trainer.model import Transformer
    from shardwise.trainer.shapes import TransformerShape

    sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 1024}
    with torch.device("meta"):
        module = Transformer(TransformerShape(max_seq=256, **sizes))
    shape = ModelShape(name="shape", head_dim=32, code="in-tree", **sizes)
    both = [sw.plan(model, "8xH100-80GB", strategy="zero3", seq=256) for model in (module, shape)]
    (one,), (other,) = (found.found for found in both if isinstance(found, Plan))
    assert one.moved.by_call == other.moved.by_call
    assert one.memory.peak.total == pytest.approx(other.memory.peak.total, rel=0.01)
