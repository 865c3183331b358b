"""Settings from their sources: who wins, what each may say, and what is said about mistakes."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from shardwise.base.errors import ConfigurationError
from shardwise.core.layout import PRESETS as STRATEGIES
from shardwise.trainer.config import FIELDS, Resolved, explain, resolve, schema
from shardwise.trainer.settings import Lora, Settings, interval_of, settings_from_json
from shardwise.trainer.shapes import PRESETS


def said(*words: str, flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None) -> Resolved:
    return resolve(words, flags or {}, environment or {})


def in_file(tmp_path: Path, text: str, name: str = "cfg.yaml") -> str:
    file = tmp_path / name
    file.write_text(text)
    return str(file)


# Who wins


def test_nothing_said_is_the_preset_and_the_defaults() -> None:
    resolved = said()
    assert resolved.settings == Settings(**PRESETS["tiny"].settings)
    from_preset = {key for key, origin in resolved.origin.items() if origin == "preset tiny"}
    assert from_preset == set(PRESETS["tiny"].settings)
    assert list(resolved.origin) == [entry.name for entry in dataclasses.fields(Settings)]
    assert {resolved.origin[key] for key in resolved.origin.keys() - from_preset} == {"default"}


def test_the_stronger_source_wins(tmp_path: Path) -> None:
    file = in_file(tmp_path, "model: tiny\nlearning_rate: 3\n")
    sources = [
        ("preset tiny", 3e-3, {}),
        ("environment SHARDWISE_LEARNING_RATE", 4, {"environment": {"SHARDWISE_LEARNING_RATE": "4"}}),
        (f"file {file} line 2", 3, {"words": [file]}),
        ("override", 2, {"words": [file, "learning_rate=2"]}),
        ("flag --learning-rate", 1, {"flags": {"learning_rate": "1"}}),
    ]
    given: dict[str, Any] = {"words": [], "flags": {}, "environment": {}}
    for origin, value, source in sources:
        given |= source
        resolved = resolve(**given)
        assert (resolved.settings.learning_rate, resolved.origin["learning_rate"]) == (value, origin)


def test_the_preset_is_that_of_the_model_wherever_it_is_named() -> None:
    assert said("model=50m").settings.max_steps is None
    assert said(environment={"SHARDWISE_MODEL": "50m"}).settings.max_steps is None


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        (["model=some/folder"], 2e-5),
        (["model=some/folder", "lora=r=8"], 2e-4),
        (["model=some/folder", "lora=true"], 2e-4),
        (["model=some/folder", "lora=false"], 2e-5),
        (["model=some/folder", "random_weights=true"], 3e-4),
        (["model=some/config.json"], 3e-4),
        (["model=50m"], 3e-4),
        (["model=some/folder", "learning_rate=1e-3"], 1e-3),
    ],
)
def test_pretrained_weights_get_a_lower_rate(words: list[str], rate: float) -> None:
    assert resolve(words, {}, {}).settings.learning_rate == rate


def test_a_run_that_goes_on_without_a_disk_needs_no_folder(tmp_path: Path) -> None:
    before = ("run/config.json", '{"strategy": "zero3-nvme", "offload": ["disk:/nvme"]}')
    assert resolve([], {"strategy": "zero2"}, {}, before).settings.offload == ()
    assert resolve([], {"max_steps": "9"}, {}, before).settings.offload == ("disk:/nvme",)
    assert resolve([], {"strategy": "auto"}, {}, before).settings.offload == ("disk:/nvme",)
    moved = ("run/config.json", '{"strategy": "zero3", "offload": ["disk:/nvme", "optimizer=disk"]}')
    assert resolve([], {"strategy": "zero3"}, {}, moved).settings.offload == ("disk:/nvme", "optimizer=disk")
    with pytest.raises(ConfigurationError, match="puts nothing on disk"):
        resolve([], {"strategy": "zero2", "offload": "disk:/nvme"}, {}, before)


def test_a_preset_gives_way_to_what_means_the_same() -> None:
    epochs = said("num_train_epochs=2").settings
    assert (epochs.max_steps, epochs.num_train_epochs) == (None, 2)
    assert said("per_device_train_batch_size=4").settings.global_batch_size == 16
    both = said("per_device_train_batch_size=4", "gradient_accumulation_steps=3").settings
    assert both.global_batch_size is None


@pytest.mark.parametrize(
    ("in_a_file", "word", "flags", "settings"),
    [
        ("num_train_epochs: 3", "max_steps=5", {}, {"max_steps": 5, "num_train_epochs": None}),
        ("num_train_epochs: 3", "seed=1", {"max_steps": "5"}, {"max_steps": 5, "num_train_epochs": None}),
        ("max_steps: 3", "num_train_epochs=2", {}, {"max_steps": None, "num_train_epochs": 2.0}),
        ("max_steps: 3", "num_train_epochs=null", {}, {"max_steps": 3}),
        ("dataset: null", "seed=1", {"train_file": ["a.txt"]}, {"dataset": (), "train_file": ("a.txt",)}),
        ("dataset: some/rows", "seed=1", {"train_file": ["a.txt"]}, {"dataset": (), "train_file": ("a.txt",)}),
        ("train_file: a.txt", "dataset=some/rows", {}, {"dataset": ("some/rows",), "train_file": ()}),
    ],
)
def test_a_stronger_source_may_say_it_in_another_way(
    tmp_path: Path, in_a_file: str, word: str, flags: dict[str, Any], settings: dict[str, Any]
) -> None:
    resolved = said(in_file(tmp_path, in_a_file), word, flags=flags, environment={"SHARDWISE_NUM_TRAIN_EPOCHS": "9"})
    assert {key: getattr(resolved.settings, key) for key in settings} == settings
    with pytest.raises(ConfigurationError, match="both say when to stop"):
        said("max_steps=5", flags={"num_train_epochs": "2"})


def test_nothing_can_be_said() -> None:
    assert said("max_steps=null").settings.max_steps is None
    assert said(flags={"seq_length": "none"}).settings.seq_length is None


def test_mappings_are_said_part_by_part(tmp_path: Path) -> None:
    file = in_file(tmp_path, "shape: {layers: 8, hidden: 64}\nlora:\n  r: 4\n  targets: [a, b]\n")
    resolved = said(file, "shape.layers=2", "lora.alpha=8", flags={"lora": "r=2", "shape": ["kv-heads=1", "heads=2"]})
    assert resolved.settings.shape == {"layers": 2, "hidden": 64, "kv_heads": 1, "heads": 2}
    assert resolved.settings.lora == Lora(r=2, alpha=8, targets=("a", "b"))
    assert resolved.origin["shape"] == f"flag --shape; override; file {file} line 1"
    assert said(file, "lora=none").settings.lora is None
    # What is nothing in between hides what is weaker.
    hidden = in_file(tmp_path, "lora: null", "none.yaml")
    assert said(hidden, "lora.r=3", environment={"SHARDWISE_LORA": "alpha=1"}).settings.lora == Lora(r=3)


def test_the_patterns_of_a_strategy_keep_their_order(tmp_path: Path) -> None:
    file = in_file(tmp_path, 'strategy: {"blocks.0": ddp, "*": zero3}')
    resolved = said(file, "strategy.blocks.?=zero2", "strategy.*=zero1", flags={"strategy": '{"head": "zero3"}'})
    strategy = resolved.settings.strategy
    assert isinstance(strategy, dict)
    expected = {"head": "zero3", "blocks.?": "zero2", "*": "zero1", "blocks.0": "ddp"}
    assert list(strategy.items()) == list(expected.items())
    assert said(file, "strategy=zero3").settings.strategy == "zero3"


def test_the_last_override_wins() -> None:
    assert said("seed=1", "seed=2").settings.seed == 2
    assert said("lora=r=1,alpha=2", "lora.r=3").settings.lora == Lora(r=3, alpha=2)


# What may be said


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learning_rate", "1e-4", 1e-4),
        ("learning_rate", "1", 1.0),
        ("max_steps", "1_000", 1000),
        ("nnodes", "2", "2"),
        ("nnodes", "1:4", "1:4"),  # 64 in YAML 1.1
        ("rdzv_id", "no", "no"),  # false in YAML 1.1
        ("rdzv_id", "007", "007"),
        ("compile", "true", "on"),
        ("compile", "no", "off"),
        ("compile", "Auto", "auto"),
        ("gradient_checkpointing", "true", "full"),
        ("gradient_checkpointing", "false", "none"),
        ("gradient_checkpointing", "none", "none"),
        ("precision", "PURE_BF16", "pure-bf16"),
        ("train_file", "a.txt, b.txt", ("a.txt", "b.txt")),
        ("isolate_documents", "false", False),
        ("lora", "true", Lora()),
        ("lora", "{r: 8, targets: [x, y]}", Lora(r=8, targets=("x", "y"))),
        ("shape", "{layers: 2, tied: true}", {"layers": 2, "tied": True}),
        ("strategy", "FSDP", "FSDP"),
        ("offload", "grads=host, optimizer=host:0.6", ("grads=host", "optimizer=host:0.6")),
        ("offload", "optimizer=disk:/nvme", ("optimizer=disk:/nvme",)),
        ("offload", "none", ()),
    ],
)
def test_a_text_means_the_same_everywhere(tmp_path: Path, key: str, text: str, value: object) -> None:
    for resolved in (
        said(in_file(tmp_path, f"{key}: {text}\n")),
        said(f"{key.replace('_', '-')}={text}"),
        said(environment={f"SHARDWISE_{key.upper()}": text}),
        said(flags={key: text}),
    ):
        assert getattr(resolved.settings, key) == value
        assert type(getattr(resolved.settings, key)) is type(value)


def test_lora_in_one_text() -> None:
    assert said("lora=r=8,alpha=16,dropout=0.1,targets=q_proj+v_proj").settings.lora == Lora(
        r=8, alpha=16, dropout=0.1, targets=("q_proj", "v_proj")
    )


def test_lora_in_short() -> None:
    assert said("lora=8").settings.lora == Lora(r=8, alpha=16)
    assert said("lora=8,targets=all-linear,dora").settings.lora == Lora(
        r=8, alpha=16, targets=("all-linear",), dora=True
    )
    assert said("lora=8", "lora.alpha=8").settings.lora == Lora(r=8, alpha=8)


def test_a_run_from_an_adapter_has_its_values(tmp_path: Path) -> None:
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 4, "lora_dropout": 0.1, "use_rslora": True, "bias": "none",
             "target_modules": ["v_proj", "q_proj"], "modules_to_save": None}  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    given = f"lora_from={tmp_path}"
    resolved = said("model=some/folder", given, "lora.dropout=0")
    assert resolved.settings.lora == Lora(r=8, alpha=4, dropout=0, targets=("q_proj", "v_proj"), rslora=True)
    assert resolved.settings.learning_rate == 2e-4
    assert said("model=some/folder", given, "objective=simpo").settings.learning_rate == pytest.approx(1e-5)
    for word, message in {
        "lora=16": "lora.r: 16 (override), but the adapter in",
        "lora=none": "it needs lora",
        "lora_from=none.such": "it has no adapter_config.json",
    }.items():
        with pytest.raises(ConfigurationError) as refused:
            said(given, word)
        assert message in str(refused.value)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "rank_pattern": {"q_proj": 2}}))
    with pytest.raises(ConfigurationError, match=r"rank_pattern .* cannot be continued here"):
        said(given)


def test_toml_says_the_same_as_yaml(tmp_path: Path) -> None:
    toml = in_file(
        tmp_path,
        'model = "50m"\nlearning-rate = 1e-4\nmax_steps = 10\ncompile = true\nnnodes = 2\nlora = true\n'
        'train_file = ["a", "b"]\ngradient_checkpointing = true\n'
        '[shape]\nlayers = 2\n[strategy]\n"blocks.*" = "zero2"\n"*" = "zero3"\n',
        "cfg.toml",
    )
    yaml = in_file(
        tmp_path,
        "model: 50m\nlearning-rate: 1e-4\nmax_steps: 10\ncompile: true\nnnodes: 2\nlora: true\n"
        "train_file:\n- a\n- b\ngradient_checkpointing: true\n"
        "shape.layers: 2\nstrategy:\n  blocks.*: zero2\n  '*': zero3\n",
    )
    assert said(toml).settings == said(yaml).settings
    assert said(toml).origin["max_steps"] == f"file {toml}"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}"])
def test_an_empty_file_says_nothing(tmp_path: Path, text: str) -> None:
    assert said(in_file(tmp_path, text)) == said()


def test_values_of_programs_are_taken_as_they_are() -> None:
    resolved = said(flags={"max_steps": 3, "compile": True, "export": False, "train_file": ("a", "b"), "eval_steps": 0})
    assert (resolved.origin["export"], resolved.origin["eval_steps"]) == ("flag --no-export", "flag --eval-steps")
    settings = resolved.settings
    assert (settings.max_steps, settings.compile, settings.export, settings.train_file) == (3, "on", False, ("a", "b"))


@pytest.mark.parametrize(
    ("steps", "num_steps", "interval"),
    [(1 / 3, 99, 33), (0.1, 30, 3), (0.5, 7, 4), (10, 100, 10), (1, 5, 1), (0, 50, 0), (1e-4, 50, 1)],
)
def test_an_interval_below_one_is_a_part_of_all_steps(steps: float, num_steps: int, interval: int) -> None:
    assert interval_of(Settings(save_steps=steps).save_steps, num_steps) == interval


def test_a_services_variables_are_not_ours() -> None:
    of_kubernetes = [
        "SHARDWISE_SERVICE_HOST",
        "SHARDWISE_PORT",
        "SHARDWISE_PORT_29500_TCP_ADDR",
        "SHARDWISE_SERVICE_PORT",
    ]
    assert said(environment=dict.fromkeys(of_kubernetes, "x")) == said()


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "unknown key 'learning_rat' (file {file} line 1); did you mean 'learning_rate'?"),
        ("seed: 1\n\nzzz: 1", "unknown key 'zzz' (file {file} line 3); `shardwise train --help` lists them all"),
        ("seed: x", "seed: 'x' (file {file} line 1) is not a whole number"),
        (
            "per_device_train_batch_size: x",
            "per_device_train_batch_size: 'x' (file {file} line 1) is not a whole number or auto",
        ),
        ("seed: 1.5", "seed: '1.5' (file {file} line 1) is not a whole number"),
        ("seed:", "seed: nothing (file {file} line 1) is not a whole number"),
        ("seed: [1]", "seed: a list (file {file} line 1) is not a whole number"),
        ("seed: true", "seed: 'true' (file {file} line 1) is not a whole number"),
        ("seed: -1", "seed: -1 must be at least 0 (file {file} line 1)"),
        ("learning_rate: fast", "learning_rate: 'fast' (file {file} line 1) is not a number"),
        ("learning_rate: .nan", "learning_rate: '.nan' (file {file} line 1) is not a number"),
        ("learning_rate: nan", "learning_rate: nan is not a finite number (file {file} line 1)"),
        ("eval_fraction: 1", "eval_fraction: 1.0 must be below 1 (file {file} line 1)"),
        ("compile: 2", "compile: '2' (file {file} line 1) is not known; known: auto, off, on"),
        ("export: null", "export: nothing (file {file} line 1) is not true or false"),
        ("model: {a: b}", "model: a mapping (file {file} line 1) is not a text"),
        ("train_file: {a: b}", "train_file: a mapping (file {file} line 1) is not a list of texts"),
        ("train_file: [[a]]", "train_file: a list (file {file} line 1) is not a list of texts"),
        ("packing: loose", "packing: 'loose' (file {file} line 1) is not known; known: packed, padded"),
        ("precision: bf15", "precision: 'bf15' (file {file} line 1) is not known; did you mean 'bf16'? known: "),
        ("report_to: wandbb", "report_to: 'wandbb' (file {file} line 1) is not known; did you mean 'wandb'?"),
        ("shape.layers: yes", "shape.layers: 'yes' (file {file} line 1) is not a whole number"),
        ("shape: {tied: 1}", "shape.tied: '1' (file {file} line 1) is not true or false"),
        ("shape: {layer: 2}", "unknown shape key 'layer' (file {file} line 1); did you mean 'layers'?"),
        ("shape: 8", "shape: '8' (file {file} line 1) is no key=value; write layers=8,hidden=256"),
        ("shape: [8]", "shape: a list (file {file} line 1) is not a mapping"),
        ("lora: {r: many}", "lora.r: 'many' (file {file} line 1) is not a whole number"),
        ("lora: {r: 0}", "lora.r: 0 must be at least 1 (file {file} line 1)"),
        ("lora: {rank: 8}", "unknown lora key 'rank' (file {file} line 1); known: alpha, dora, dropout"),
        ("lora: r=8,v_proj", "lora: 'v_proj' (file {file} line 1) is no key=value; write r=16,"),
        ("strategy: zero4", "unknown strategy 'zero4'; did you mean 'zero3'?"),
        ("strategy: {'*': zero4}", "unknown strategy 'zero4'; did you mean 'zero3'?"),
        ("strategy: {'*': auto}", "strategy 'auto' chooses for the whole model"),
        ("strategy: {'*': auto+params_as=int8}", "strategy 'auto+params_as=int8' chooses for the whole model"),
        ("strategy: [zero3]", "strategy: a list (file {file} line 1) is not a name or a mapping"),
        ("offload: optimzer=host", "'optimzer' cannot be moved; did you mean 'optimizer'? known: activations, grads"),
        ("offload: [optimizer=hots]", "'hots' is no place; did you mean 'host'? known: device, disk, host"),
        ("offload: optimizer=host:2", "'optimizer=host:2': a part, above 0 and at most 1, goes with the optimizer"),
        ("offload: optimizer=host:/nvme", "'/nvme' is no part (optimizer=host:0.6) and no folder of a disk"),
        ("offload: disk", "offload 'disk' does not say what goes where; write optimizer=host, params=disk:/nvme"),
        ("offload: {optimizer: host}", "offload: a mapping (file {file} line 1) is not a list of texts"),
        ("offload: params=disk:/a,optimizer=disk:/b", "folders '/a' and '/b': name one, for all state on disk"),
        ("offload: optimizer=disk", "puts state on disk, and no folder is named for it: --offload disk:/nvme"),
        ("strategy: zero3-nvme", "strategy 'zero3-nvme' puts state on disk, and no folder is named for it"),
        ("strategy: zero2\noffload: disk:/nvme", "the folder '/nvme', but strategy 'zero2' puts nothing on disk"),
        ("strategy: zero3+optimizer=host\noffload: optimizer=disk:/x", "optimizer is moved to 'host' already"),
        ("strategy: ddp\noffload: params=host,optimizer=host", "parameters that are always gathered"),
        ("offload: params=host", "'auto+params=host', with what was changed (offload, wire): layout: params_on='host'"),
        ("strategy: {'*': auto}\noffload: optimizer=host", "strategy 'auto' chooses for the whole model"),
        ("seed.x: 1", "unknown key 'seed.x' (file {file} line 1); seed has no parts"),
        ("nnodes: many", "nnodes: 'many' is no number of machines; write 2, or 1:4 for 1 to 4 (file {file} line 1)"),
        ("nnodes: 4:2", "nnodes: '4:2' is no number of machines"),
        ("decay_steps: 5", "decay_steps 5 belongs to lr_scheduler_type wsd, but that is cosine (file {file} line 1)"),
        ("max_steps: 5\nnum_train_epochs: 2", "leave one out (max_steps: file {file} line 1, num_train_epochs: file "),
        ("save_steps: 2.5", "save_steps: 2.5 is no number of steps; below 1 it is a part of all of them (file {file}"),
        ("train_file: a\ndataset: b", "train_file a and dataset b: leave one out"),
        # What is not a file of settings.
        ("- seed", "file {file} holds no mapping of keys to values; write key: value"),
        ("seed", "file {file} holds no mapping"),
        ("seed: 1\nseed: 2", "file {file}: seed is said twice, in line 1 and line 2"),
        ("max-steps: 1\nmax_steps: 2", "max_steps is said twice: file {file} line 1 and file {file} line 2"),
        ("shape: {layers: 1}\nshape.layers: 2", "shape.layers is said twice"),
        ("shape: {layers: 1, layers: 2}", "layers is said twice, in line 1 and line 1"),
        ("seed: 1\n  model: x", "file {file} line 2 is not YAML: "),
        ("seed: 'x", "file {file} line 1 is not YAML: "),
        ("seed: 1\n---\nseed: 2", "file {file} line 2 is not YAML: "),
        ("seed: \x00", "file {file} is not YAML: "),
        ("seed: !!python/object/apply:os.getcwd []", "line 1: the tag tag:yaml.org,2002:python/object/apply:os.getcwd"),
        ("shape: &a {layers: *a}", "file {file} refers to itself"),
        ("a: " + "[" * 2000, "file {file} "),
        ("<<: {seed: 1}", "file {file} line 1: merging (<<) is not understood"),
        ("[1]: 2", "file {file} line 1: a key must be a plain word"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = in_file(tmp_path, text)
    with pytest.raises(ConfigurationError) as refused:
        said(file)
    assert message.format(file=file) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"words": ["a.yaml"]}, "a.yaml: no such file; give a YAML or TOML file"),
        ({"words": ["True"]}, "True: no such file"),
        ({"words": ["a.yaml", "b.yaml"]}, "a.yaml and b.yaml: give one file"),
        ({"words": ["/tmp"]}, "/tmp is no configuration: give a file that ends in .yaml, .yml, .json, .toml"),
        ({"words": [__file__]}, "test_config.py is no configuration"),
        ({"words": ["lr_=3"]}, "unknown key 'lr_' (override)"),
        ({"words": ["seed=x"]}, "seed: 'x' (override) is not a whole number"),
        (
            {"environment": {"SHARDWISE_SED": "1"}},
            "unknown key 'sed' (environment SHARDWISE_SED); did you mean 'seed'",
        ),
        ({"environment": {"SHARDWISE_SEED": ""}}, "seed: '' (environment SHARDWISE_SEED) is not a whole number"),
        ({"flags": {"seed": "x"}}, "seed: 'x' (flag --seed) is not a whole number"),
        ({"flags": {"strategy": "{a"}}, "flag --strategy line 1 is not YAML"),
        ({"flags": {"seed": "9" * 5000}}, "seed: "),
    ],
)
def test_a_mistake_elsewhere_is_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        resolve(**{"words": [], "flags": {}, "environment": {}, **given})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("cfg.toml", b"seed = ", "is not TOML: "),
        ("cfg.toml", b"seed = 1\nseed = 2", "is not TOML: "),
        ("cfg.toml", b"seed = 2026-01-01", "seed: '2026-01-01' (file "),
        ("cfg.toml", b"train_file = [{a = 1}]", "train_file: a mapping (file "),
        ("cfg.yaml", b"model: \xff", "cannot be read: "),
    ],
)
def test_other_files(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(text)
    with pytest.raises(ConfigurationError) as refused:
        said(str(file))
    assert message in str(refused.value)


KEYS = st.sampled_from([*FIELDS, "shape.layers", "lora.targets", "strategy.*"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.text(max_size=30) | st.text("rlora=,+{}[]:\"'*&!-1e. \n", max_size=20)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    key=st.sampled_from([*FIELDS, "shape.layers", "lora.targets", "strategy.*"]), value=VALUES, text=TEXTS
)
def test_anything_else_is_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any, text: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    for content in (json.dumps({key: value}), f"{key}: {text}"):
        file.write_text(content, errors="replace")
        with contextlib.suppress(ConfigurationError):
            said(str(file))
    for words, flags in (([f"{key}={text}"], {}), ([], {key: text})):
        with contextlib.suppress(ConfigurationError):
            said(*words, flags=flags)


# What is shown


def test_what_is_shown_says_the_same_again(tmp_path: Path) -> None:
    asked = said(
        "model=llama-3-8b",
        "shape.layers=2",
        "lora=r=8,targets=a+b",
        'strategy={"blocks.*": zero2, "*": zero3}',
        "train_file=a b.txt,ü.txt",
        "sample_prompt=say: \"hi\" # 'there'\n\tnow",
        "nnodes=1:4",
        "learning_rate=1e-9",
    )
    text = explain(asked)
    assert "# flag" not in text
    assert said(in_file(tmp_path, text)).settings == asked.settings
    (line,) = [line for line in text.splitlines() if line.startswith("learning_rate:")]
    assert line.split() == ["learning_rate:", "1e-09", "#", "override"]


def test_the_settings_of_a_run_are_a_file_too(tmp_path: Path) -> None:
    asked = said("lora=r=8,targets=a+b", "train_file=a,b", "shape.layers=2").settings
    assert said(in_file(tmp_path, asked.to_json(), "config.json")).settings == asked
    assert settings_from_json(asked.to_json()) == asked


def test_the_schema_has_every_field() -> None:
    described = schema()
    json.dumps(described)
    assert list(described["properties"]) == list(FIELDS)
    defaults = json.loads(Settings().to_json())
    for key, entry in FIELDS.items():
        about = described["properties"][key]
        assert about["description"] == entry.metadata["help"]
        assert about["default"] == defaults[key]
    assert described["additionalProperties"] is False
    assert described["properties"]["packing"]["enum"] == ["packed", "padded"]
    assert described["properties"]["eval_fraction"]["exclusiveMaximum"] == 1
    assert described["properties"]["max_steps"]["minimum"] == 1


def test_presets_hold_settings() -> None:
    for preset in PRESETS.values():
        Settings(**preset.settings)


@pytest.mark.parametrize("name", [*STRATEGIES, "auto", "fsdp", "shard-grad-op"])
def test_every_strategy_can_be_named(name: str) -> None:
    folder = ["offload=disk:/nvme"] if name in STRATEGIES and STRATEGIES[name].uses_disk else []
    assert said(f"strategy={name}", *folder).settings.strategy == name


def test_settings_need_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, shardwise.trainer.settings, shardwise.trainer.config\n"
        "assert not {'torch', 'pydantic', 'yaml'} & sys.modules.keys()\n"
        "shardwise.trainer.config.resolve([], {}, {})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
