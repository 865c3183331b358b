"""`shardwise check`, `convert` and `train` with configurations of other libraries, from the outside."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.cli.asking import Asker

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "migrating"


@pytest.fixture
def ds(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": true}}')
    return path


def test_every_key_and_what_it_becomes(ask: Asker, ds: Path) -> None:
    seen = ask("check", ds)
    assert (seen.code, seen.err) == (0, "")
    lines = seen.out.splitlines()
    assert lines[0] == f"{ds}: DeepSpeed, 2 used, 1 ignored"
    assert any(line.startswith("zero_optimization.stage: 2") and line.endswith("used") for line in lines)
    assert "ignored because" in seen.out
    assert "layout" in seen.out
    assert "zero2 (params whole, grads world, optimizer world, gathered_until always)" in seen.out
    assert "memory of a rank: a billion parameters on 8 x H100-80GB" in seen.out


def test_the_plan_beside_the_original(ask: Asker, ds: Path) -> None:
    seen = ask("check", ds, "--model", "llama-3-8b", "--gpus", "8xH100-80GB", "--json")
    found = json.loads(seen.out)
    assert found["kind"] == "deepspeed"
    assert found["settings"]["strategy"] == found["shard"]["strategy"] == "zero2"
    ours, theirs = found["memory"]["needs"]
    assert ours["peak"] > ours["states"] > 0
    assert theirs["states"] == pytest.approx((2 + 18 / 8) * 8.03e9, rel=0.001)


def test_what_is_refused_ends_with_code_2(ask: Asker, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimisation": {"stage": 3}, "train_batch_size": 8, "zero_optimization": {"stag": 2}}')
    seen = ask("check", path)
    assert seen.code == 2
    told = " ".join(seen.out.split())
    assert "did you mean 'zero_optimization'?" in told
    assert "did you mean 'stage'?" in told
    assert "memory of a rank" not in seen.out
    for words in (("convert", path, "-o", tmp_path / "made.yaml"), ("train", "--deepspeed", path, "--show-config")):
        again = ask(*words)
        assert again.code == 2
        assert "zero_optimisation" in again.err
        assert "zero_optimization.stag" in again.err
    assert not (tmp_path / "made.yaml").exists()


@pytest.mark.parametrize("name", ["ds_zero3.json", "fsdp.yaml"])
def test_the_examples_are_used_whole(ask: Asker, name: str, tmp_path: Path) -> None:
    """Checked, written as a configuration of ours, and that is what the trainer takes from either."""
    assert ask("check", EXAMPLES / name).code == 0
    made = tmp_path / "made.yaml"
    assert ask("convert", EXAMPLES / name, "-o", made).code == 0
    flag = "--deepspeed" if name.endswith("json") else "--accelerate-config"
    with_file, with_ours = ask("train", flag, EXAMPLES / name, "--show-config"), ask("train", made, "--show-config")
    assert with_file.code == with_ours.code == 0, with_file.err + with_ours.err
    assert yaml.safe_load(with_file.out) == yaml.safe_load(with_ours.out)
    assert f"# file {EXAMPLES / name}" in with_file.out


def test_what_is_said_here_is_stronger(ask: Asker, ds: Path) -> None:
    seen = ask("train", "--deepspeed", ds, "--strategy", "zero1", "learning_rate=1", "--show-config")
    assert yaml.safe_load(seen.out)["strategy"] == "zero1"
    assert yaml.safe_load(seen.out)["precision"] == "bf16"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("check", "none.json"), "none.json: no such file"),
        (("check", "{ds}", "--kind", "deepsped"), "did you mean 'deepspeed'?"),
        (("check", "{ds}", "--model", "llama-9"), "llama-9"),
        (("convert", "{ds}"), "be written? give DST"),
        (("convert", "{ds}", "-o", "made.json"), "ends in .yaml"),
        (("convert", "{ds}", "a.yaml", "-o", "b.yaml"), "give one of them"),
        (("train", "--deepspeed", "{ds}", "--accelerate-config", "{ds}"), "leave one out"),
    ],
)
def test_mistakes(
    ask: Asker, ds: Path, words: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = ask(*(word.format(ds=ds) for word in words))
    assert seen.code == 2
    assert told in seen.err


def test_nothing_is_replaced_unless_asked_for(ask: Asker, ds: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.yaml"
    made.write_text("mine")
    assert ask("convert", ds, made).code == 2
    assert made.read_text() == "mine"
    assert ask("convert", ds, made, "--overwrite").code == 0
    assert "strategy: zero2" in made.read_text()


def test_what_cannot_be_planned_is_told(ask: Asker, tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_text('{"train_micro_batch_size_per_gpu": 1e12, "zero_optimization": {"stage": 1}}')
    assert "memory not planned: " in ask("check", large).out
    seen = ask("check", large, "--json")
    assert "1,000,000" in json.loads(seen.out)["memory"]["why_not"]


FILES = sorted(path for path in (ROOT / "tests/migrate/fixtures").rglob("*") if path.suffix in (".json", ".yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_of_others(ask: Asker, path: Path, tmp_path: Path) -> None:
    """Each is told whole, and what is not refused is planned, written as ours, and understood again."""
    found = json.loads(ask("check", path, "--json").out)
    is_refused = any(entry["fate"] == "refused" for entry in found["keys"])
    seen = ask("check", path)
    assert seen.code == (2 if is_refused else 0)
    assert ("memory of a rank" in seen.out) == (not is_refused)
    made = tmp_path / "made.yaml"
    assert ask("convert", path, "-o", made).code == (2 if is_refused else 0)
    if not is_refused:
        assert ask("train", made, "--show-config").code == 0


def test_a_file_that_could_be_anything(ask: Asker, tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text("colour: red\n")
    seen = ask("check", tmp_path / "it.yaml")
    assert seen.code == 2
    assert "--kind" in seen.err


def test_what_the_page_shows_is_what_is_printed(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    [(words, shown)] = re.findall(r"^\$ shardwise (check .*)\n((?:.*\n)*?)```$", page, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "118")
    printed = ask(*words.split()).out.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == ["...", "..."]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_name_is_broken_inside_a_word(
    ask: Asker, ds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {ds}}}\n")
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ask("check", file).out.splitlines()
    assert all(len(line) <= columns for line in lines if str(tmp_path) not in line)
    words = {word for line in lines for word in re.split(r"[\s._:,;()-]", line)}
    assert {"deepspeed", "zero", "optimization", "stage"} <= words


def test_no_key_becomes_a_setting_and_all_can_be_printed(ask: Asker, tmp_path: Path) -> None:
    path, made = tmp_path / "ds.json", tmp_path / "made.yaml"
    keys = {"_comment\x85max_steps: 77\x85#": 1, "_comment\u2028seed: 5": 1, "_comment\n\x1b[31m": 1, "fp16": {}}
    path.write_text(json.dumps({**keys, "zero_optimization": {"stage": 1, "_comment": "why"}}))
    seen = ask("check", path)
    assert seen.code == 0
    assert all(letter.isprintable() or letter == "\n" for letter in seen.out)
    assert ask("convert", path, "-o", made).code == 0
    settings = yaml.safe_load(ask("train", made, "--show-config").out)
    assert settings["strategy"] == "zero1"
    assert (settings["max_steps"], settings["seed"]) != (77, 5)


def test_a_precision_of_ones_own_has_its_own_sums(ask: Asker, ds: Path) -> None:
    settings = yaml.safe_load(ask("train", "--deepspeed", ds, "precision=fp32", "--show-config").out)
    assert (settings["precision"], settings["reduce_dtype"]) == ("fp32", None)
    assert yaml.safe_load(ask("train", "--deepspeed", ds, "--show-config").out)["reduce_dtype"] == "bf16"


def test_what_a_launcher_says(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert yaml.safe_load(ask("train", "--show-config").out)["precision"] == "bf16"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD")
    seen = ask("train", "--show-config").out
    assert yaml.safe_load(seen)["strategy"] == "hsdp"
    assert "# the environment of accelerate launch" in seen


@pytest.mark.parametrize(
    ("name", "text", "owner"),
    [
        ("it.yml", "base_model: some/model\nlearning_rate: 1e-4\nbf16: auto\n", "Axolotl"),
        ("it.yaml", "model_name_or_path: some/model\nfinetuning_type: lora\n", "LLaMA-Factory"),
        ("it.yaml", "output_dir: out\nlearning_rate: 1e-4\nbf16: true\nwarmup_ratio: 0.1\n", "Hugging Face"),
        ("it.json", '{"bf16": {"enabled": true}, "optimizer": {"type": "Adam"}}', "DeepSpeed"),
        ("it.yaml", "distributed_type: NO\nnum_processes: 1\n", "Accelerate"),
    ],
)
def test_a_file_of_another_library_is_to_be_converted(
    ask: Asker, tmp_path: Path, name: str, text: str, owner: str
) -> None:
    path, made = tmp_path / name, tmp_path / "run.yaml"
    path.write_text(text)
    seen = ask("train", path, "--max-steps", "5")
    assert seen.code == 2
    assert f"is a configuration of {owner} (" in seen.err
    assert f"`shardwise convert {path} -o run.yaml` first" in seen.err
    assert ask("convert", path, "-o", made).code == 0
    settings = yaml.safe_load(ask("train", made, "--max-steps", "5", "--show-config").out)
    assert (settings["max_steps"], settings["num_train_epochs"]) == (5, None)


def test_a_misspelt_file_of_ours_stays_ours(ask: Asker, tmp_path: Path) -> None:
    path = tmp_path / "it.yaml"
    path.write_text("output_dir: out\nlearning_rate: 1e-4\nmax_stps: 5\n")
    assert "did you mean 'max_steps'?" in ask("train", path).err


def test_data_that_is_not_taken_over_has_to_be_named(ask: Asker, tmp_path: Path) -> None:
    """Nobody trains on Python's manual in place of what the file says."""
    path, made = tmp_path / "it.yml", tmp_path / "run.yaml"
    path.write_text("base_model: some/model\nnum_epochs: 1\n")
    assert f"name yours as train_file in {made}" in ask("convert", path, "-o", made).out
    assert yaml.safe_load(made.read_text())["train_file"] == ["YOUR-DATA.jsonl"]
    settings = yaml.safe_load(ask("train", made, "--dataset", "some/rows", "--show-config").out)
    assert (settings["dataset"], settings["train_file"]) == (["some/rows"], [])


def test_a_file_of_another_library_is_told_so(ask: Asker) -> None:
    seen = ask("train", "--deepspeed", EXAMPLES / "fsdp.yaml")
    assert seen.code == 2
    assert "is a configuration of Accelerate, and not of DeepSpeed" in seen.err
