"""`shardwise train` from the outside, without training: its flags, its help, its mistakes, and what it hands on."""

import json
import re
import shlex
import subprocess
import sys
import types
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shardwise.base.errors import CheckpointError, ShardwiseError
from shardwise.cli import app, main
from shardwise.cli.train import train
from shardwise.planner.auto import host_bytes_here
from shardwise.trainer.config import resolve
from shardwise.trainer.settings import Lora, Settings

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Handed:
    """What the command handed on, to the launcher or to a printer."""

    settings: Settings
    rest: Any


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """A module of the name, in place of the real one, which would start ranks."""
    module = types.ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    package, _, last = name.rpartition(".")
    monkeypatch.setattr(sys.modules[package], last, module, raising=False)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command line would train, without training it."""

    def understood(*arguments: str, code: int = 0) -> Handed:
        handed: list[Handed] = []

        def launch(settings: Settings, origin: dict[str, str]) -> int:
            handed.append(Handed(settings, origin))
            return code

        def slurm(settings: Settings, words: list[str]) -> str:
            handed.append(Handed(settings, words))
            return "#!/bin/bash"

        stand_in(monkeypatch, "shardwise.trainer.launcher", launch=launch)
        stand_in(monkeypatch, "shardwise.trainer.cluster", slurm_script=slurm, kubernetes_job=slurm)
        monkeypatch.setattr(sys, "argv", ["shardwise", "train", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        return handed[0]

    return understood


def options() -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    return {option.name: option for option in command.commands["train"].params}


def test_every_setting_is_a_flag_with_its_panel_and_help() -> None:
    flags = options()
    for entry in fields(Settings):
        flag = flags.pop(entry.name)
        assert flag.opts == [f"--{entry.name.replace('_', '-')}"]
        assert flag.rich_help_panel == entry.metadata["panel"]
        assert flag.help.startswith(entry.metadata["help"])
        assert flag.default is None
    assert list(flags) == [
        "words",
        "deepspeed",
        "accelerate_config",
        "show_config",
        "schema",
        "print_slurm",
        "print_k8s",
    ]


@pytest.mark.parametrize("arguments", ["--help", "train --help", "train --show-config", "train --schema"])
def test_help_comes_at_once(arguments: str) -> None:
    """Nothing that takes long is imported; typer may import pydantic, we do not for help."""
    code = (
        "import sys\nfrom shardwise.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    if arguments.endswith("--help"):
        code += "assert 'shardwise.trainer.config' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code, *arguments.split()], check=True, capture_output=True, cwd=ROOT)


def test_no_name_is_cut_off_in_80_columns() -> None:
    seen = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", "--help"],
        capture_output=True, text=True, check=True, env={"COLUMNS": "80", "PATH": "/usr/bin"},
    )  # fmt: skip
    assert "…" not in seen.stdout
    for name in options():
        assert name == "words" or f"--{name.replace('_', '-')}" in seen.stdout


def examples() -> list[str]:
    return re.findall(r"^ +shardwise train\b(.*)", (train.__doc__ or "").replace("\\\n", ""), re.MULTILINE)


@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_help_are_understood(ask: Any, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert ask(*shlex.split(example)).settings


def test_there_are_examples() -> None:
    assert len(examples()) == 9


def test_hyphens_and_underscores(ask: Any) -> None:
    handed = ask("--learning_rate", "1e-4", "--max-steps=7", "--no_export", "eval-steps=5", "save_steps=3")
    settings = handed.settings
    assert (settings.learning_rate, settings.max_steps, settings.export) == (1e-4, 7, False)
    assert (settings.eval_steps, settings.save_steps) == (5, 3)
    assert handed.rest["export"] == "flag --no-export"
    assert handed.rest["eval_steps"] == "override"


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ("--gradient-checkpointing", "full"),
        ("--gradient_checkpointing --compile", "full"),
        ("--gradient-checkpointing seed=1", "full"),
        ("--gradient-checkpointing selective", "selective"),
        ("--gradient-checkpointing=selective", "selective"),
        ("--gradient-checkpointing none", "none"),
        ("--no-gradient-checkpointing", "none"),
        ("", "none"),
    ],
)
def test_checkpointing_may_stand_alone(ask: Any, arguments: str, mode: str) -> None:
    assert ask(*arguments.split()).settings.gradient_checkpointing == mode


@pytest.mark.parametrize(
    ("arguments", "isolate"),
    [
        ("", None),
        ("--isolate-documents", True),
        ("--isolate-documents true", True),
        ("--isolate_documents False seed=1", False),
        ("--isolate-documents=false", False),
        ("--no-isolate-documents", False),
        ("--isolate-documents --no-isolate-documents", False),
    ],
)
def test_switches(ask: Any, arguments: str, isolate: bool | None) -> None:
    assert ask(*arguments.split()).settings.isolate_documents is isolate


def test_lists_and_mappings(ask: Any) -> None:
    settings = ask(
        *shlex.split(
            "--train-file a.txt,b.txt --train-file c.txt --lora r=8,targets=x+y --shape layers=2 --shape heads=2"
        ),
        "--strategy",
        '{"blocks.*": "zero2", "*": "zero3"}',
    ).settings
    assert settings.train_file == ("a.txt", "b.txt", "c.txt")
    assert settings.lora == Lora(r=8, targets=("x", "y"))
    assert settings.shape == {"layers": 2, "heads": 2}
    assert settings.strategy == {"blocks.*": "zero2", "*": "zero3"}


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 130, 143])
def test_the_launchers_code_is_ours(ask: Any, code: int) -> None:
    ask(code=code)


@pytest.mark.parametrize(("error", "code"), [(CheckpointError("no"), 5), (ShardwiseError("no"), 1)])
def test_errors_have_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def launch(*_: object) -> int:
        raise error

    stand_in(monkeypatch, "shardwise.trainer.launcher", launch=launch)
    monkeypatch.setattr(sys, "argv", ["shardwise", "train"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert capsys.readouterr().err == "shardwise: no\n"


@pytest.mark.parametrize("flag", ["--print-slurm", "--print_k8s"])
def test_printing_repeats_the_words(ask: Any, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    handed = ask("seed=3", flag, "--compile", "--train-file", "a b.txt", "--nnodes", "2")
    assert handed.rest == ["seed=3", "--compile", "--train-file", "a b.txt", "--nnodes", "2"]
    assert (handed.settings.seed, handed.settings.compile) == (3, "on")
    assert capsys.readouterr().out == "#!/bin/bash\n"


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["shardwise", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr().out


def test_the_schema_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(monkeypatch, capsys, "--schema"))["properties"]["seed"]["type"] == "integer"


def test_what_is_shown_trains_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = printed(monkeypatch, capsys, "seed=5", "--show-config", "--lora", "r=4")
    file = tmp_path / "shown.yaml"
    file.write_text(text)
    assert resolve([str(file)], {}, {}).settings == resolve(["seed=5", "lora.r=4"], {}, {}).settings
    assert re.search(r"^seed: 5 +# override$", text, re.MULTILINE)
    assert re.search(r"^lora: .* # flag --lora$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--learnin-rate 1", "--learning-rate"),
        ("--learning-rate", "--learning-rate"),
        ("--learning-rate x", "learning_rate: 'x' (flag --learning-rate) is not a number"),
        ("--learning-rate -1", "learning_rate: -1.0 must be at least 0 (flag --learning-rate)"),
        ("--compile=perhaps", "compile: 'perhaps' (flag --compile) is not known; known: auto, off, on"),
        ("--compile perhaps", "compile: 'perhaps' (flag --compile) is not known; known: auto, off, on"),
        ("--speculation lots", "speculation: 'lots' is no quantity"),
        ("--strategy zero2_offload --speculation 900TB", "speculation is 900,000,000,000,000 bytes"),
        pytest.param(  # free memory differs between the processes that run the tests, and an id must not
            f"--strategy zero2_offload --speculation {host_bytes_here() * 6e-10:.2f}GB",
            "left for each rank: give less",
            id="speculation-of-more-than-a-rank-has",
        ),
        ("--strategy zero2 --speculation 1GB", "no state that can be updated ahead is off the device"),
        ("--strategy auto --wire params=int8 --speculation 1GB", "no state that can be updated ahead"),
        ("--strategy zero2_offload --speculation 1GB --max-grad-norm 0", "no update waits for the norm"),
        ("--no-seed", "--no-seed"),
        ("--compile True False", "False: no such file"),
        ("missing.yaml", "missing.yaml: no such file"),
        ("learning_rat=1", "unknown key 'learning_rat' (override); did you mean 'learning_rate'?"),
        ("--strategy zero4", "did you mean 'zero3'?"),
        (
            "--max-steps 3 --num-train-epochs 2",
            "leave one out (max_steps: flag --max-steps, num_train_epochs: flag",
        ),
        ("--show-config seed=x", "seed: 'x' (override) is not a whole number"),
    ],
)
def test_mistakes_are_one_sentence_and_end_with_2(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", "train", *shlex.split(arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    seen = capsys.readouterr()
    assert message in seen.err
    assert seen.err.startswith("shardwise: ")
    assert seen.err.count("\n") == 1
    assert not seen.out


def test_the_environment_is_read(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_SEED", "9")
    handed = ask()
    assert (handed.settings.seed, handed.rest["seed"]) == (9, "environment SHARDWISE_SEED")
