"""Which folder a run gets, and which checkpoint it goes on from."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError, ConfigurationError
from shardwise.trainer.config import resolve
from shardwise.trainer.run_folder import (
    choose,
    claim,
    config_of_resumed_run,
    failed_write,
    next_steps,
    resume_candidates,
)
from shardwise.trainer.settings import Settings, settings_from_json


def complete(folder: Path) -> Path:
    """What passes for a complete checkpoint until it is read."""
    folder.mkdir(parents=True)
    (folder / "complete").write_text("")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_full_disk_names_the_folder_and_the_way_on(here: Path) -> None:
    told = failed_write(here, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert told is not None
    assert "No space left on device" in str(told)
    assert f"--output-dir {here} --resume-from-checkpoint auto" in str(told)
    assert failed_write(here, OSError(errno.ECONNRESET, "reset")) is None
    assert failed_write(here, FileNotFoundError(errno.ENOENT, "gone", "/elsewhere/file")) is None


def test_a_run_without_a_name_gets_one(here: Path) -> None:
    chosen = choose(Settings(model="some/where/model-7b"))
    assert str(chosen.output_dir).startswith("runs/model-7b-2")
    assert not (here / "runs").exists(), "choosing writes nothing"


def test_the_settings_are_written_down(here: Path) -> None:
    """As a file to train with again: without the folder, which is taken now."""
    claim(choose(Settings(output_dir="mine", seed=7)))
    folder = Path("mine")
    assert settings_from_json((folder / "config.json").read_text()) == Settings(seed=7)


def test_a_folder_that_holds_another_run_is_refused(here: Path) -> None:
    claim(choose(Settings(output_dir="mine")))
    with pytest.raises(ConfigurationError, match=r"mine holds another run.*--resume-from-checkpoint latest"):
        choose(Settings(output_dir="mine"))


def test_a_file_is_no_folder(here: Path) -> None:
    (here / "mine").write_text("")
    with pytest.raises(ConfigurationError, match="mine is no folder"):
        choose(Settings(output_dir="mine"))


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("name", ["checkpoints", "logs", "metrics.jsonl/", "traffic.json/"])
def test_what_is_in_the_way_is_named_before_a_run(here: Path, name: str, resume: str | None) -> None:
    """A folder's name ends in a slash."""
    (here / "mine").mkdir()
    (here / "mine" / name).mkdir() if name.endswith("/") else (here / "mine" / name).write_text("")
    with pytest.raises(ConfigurationError, match=f"mine: mine/{name.removesuffix('/')} is no (file|folder); move it"):
        choose(Settings(output_dir="mine", resume_from_checkpoint=resume))


def test_latest_is_the_newest_complete_one(here: Path) -> None:
    claim(choose(Settings(output_dir="mine")))
    complete(here / "mine/checkpoints/step-000010")
    newest = complete(here / "mine/checkpoints/step-000020")
    (here / "mine/checkpoints/step-000030").mkdir()
    chosen = choose(Settings(output_dir="mine", resume_from_checkpoint="latest"))
    assert chosen.resume_from_checkpoint == str(newest.relative_to(here))


def test_latest_without_a_folder_is_that_of_the_newest_run(here: Path) -> None:
    for name in ("old", "new"):
        claim(choose(Settings(output_dir=f"runs/{name}")))
        complete(here / f"runs/{name}/checkpoints/step-000010")
    chosen = choose(Settings(resume_from_checkpoint="latest"))
    assert chosen.output_dir == "runs/new"


def test_a_named_checkpoint_goes_on_in_its_own_run(here: Path) -> None:
    claim(choose(Settings(output_dir="mine")))
    named = complete(here / "mine/checkpoints/step-000010")
    chosen = choose(Settings(resume_from_checkpoint=str(named)))
    assert Path(str(chosen.output_dir)) == here / "mine"
    elsewhere = choose(Settings(resume_from_checkpoint=str(named), output_dir="other"))
    assert elsewhere.output_dir == "other"


def test_checkpoints_may_lie_on_another_disk(here: Path) -> None:
    claim(choose(Settings(output_dir="mine")))
    (here / "large").mkdir()
    (here / "mine/checkpoints").symlink_to(here / "large")
    named = complete(here / "mine/checkpoints/step-000010")
    chosen = choose(Settings(resume_from_checkpoint=str(named), output_dir="mine"))
    assert chosen.output_dir == "mine"


def test_a_home_is_a_home(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert choose(Settings(output_dir="~/mine")).output_dir == str(here / "mine")


def test_another_runs_folder_is_not_taken_for_a_named_checkpoint(here: Path) -> None:
    for name in ("mine", "other"):
        claim(choose(Settings(output_dir=name)))
    named = complete(here / "mine/checkpoints/step-000010")
    with pytest.raises(ConfigurationError, match="other holds another run"):
        choose(Settings(resume_from_checkpoint=str(named), output_dir="other"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("latest", "holds no complete checkpoint"),
        ("mine/checkpoints/step-000010", "it holds no checkpoint"),
        ("nowhere", "there is no checkpoint"),
    ],
)
def test_what_is_not_there_cannot_be_resumed(here: Path, asked: str, words: str) -> None:
    claim(choose(Settings(output_dir="mine")))
    (here / "mine/checkpoints/step-000010").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=words):
        choose(Settings(output_dir="mine", resume_from_checkpoint=asked))


def test_a_folder_that_only_looks_like_a_runs_is_not_one(here: Path) -> None:
    """A Hugging Face folder beside others has a config.json two levels up, too."""
    for name in ("config.json", "checkpoints/last/config.json", "checkpoints/last/model.safetensors"):
        (here / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "model" / name).write_text("{}")
    (here / "model/checkpoints/last/model.safetensors").write_bytes(one_tensor())
    asked = Settings(resume_from_checkpoint="model/checkpoints/last")
    assert config_of_resumed_run(asked) is None
    chosen = choose(asked)
    assert str(chosen.output_dir).startswith("runs/")
    assert resume_candidates(asked, chosen) == ["model/checkpoints/last"]


def one_tensor() -> bytes:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def test_auto_goes_on_where_there_is_something(here: Path) -> None:
    settings = Settings(output_dir="mine", resume_from_checkpoint="auto")
    claim(choose(settings))
    assert choose(settings).resume_from_checkpoint is None
    own = complete(here / "mine/checkpoints/step-000010")
    assert choose(settings).resume_from_checkpoint == str(own.relative_to(here))
    with pytest.raises(ConfigurationError, match="--output-dir"):
        choose(Settings(resume_from_checkpoint="auto"))


def test_auto_begins_only_where_no_save_has_ever_finished(here: Path) -> None:
    settings = Settings(output_dir="mine", resume_from_checkpoint="auto")
    claim(choose(settings))
    (here / "mine/checkpoints/step-000010.partial").mkdir(parents=True)
    assert choose(settings).resume_from_checkpoint is None
    (here / "mine/checkpoints/step-000005").mkdir()
    for num_restarts in (0, 1):
        with pytest.raises(CheckpointError, match="no complete checkpoint, but what is left of step-000005"):
            choose(settings, num_restarts)


def test_what_is_tried_in_order(here: Path) -> None:
    claim(choose(Settings(output_dir="mine")))
    names = [f"mine/checkpoints/step-0000{number}0" for number in (1, 2, 3)]
    for name in names[:2]:
        complete(here / name)
    (here / f"{names[2]}.partial").mkdir()
    (here / "mine/checkpoints/latest").symlink_to("step-000020")
    for asked, tried in {
        None: [],
        "auto": names[::-1],
        "latest": names[::-1],
        "mine": names[::-1],
        names[0]: [names[0]],
        "mine/checkpoints/latest": ["mine/checkpoints/latest"],
    }.items():
        settings = Settings(output_dir="mine" if asked else "other", resume_from_checkpoint=asked)
        assert resume_candidates(settings, choose(settings)) == tried
    begun = Settings(output_dir="mine")
    assert resume_candidates(begun, choose(begun, num_restarts=1)) == names[::-1]


def test_ranks_that_are_started_again_go_on_with_their_own_run(here: Path) -> None:
    settings = choose(Settings(output_dir="mine"))
    claim(settings)
    assert choose(settings, num_restarts=1).resume_from_checkpoint is None
    own = complete(here / "mine/checkpoints/step-000010")
    assert choose(settings, num_restarts=1).resume_from_checkpoint == str(own.relative_to(here))


def test_a_run_that_goes_on_knows_its_settings(here: Path) -> None:
    assert config_of_resumed_run(Settings(output_dir="mine")) is None
    claim(choose(Settings(output_dir="runs/mine")))
    named = complete(here / "runs/mine/checkpoints/step-000010")
    for asked in ({"output_dir": "runs/mine", "resume_from_checkpoint": "auto"}, {"resume_from_checkpoint": "latest"}):
        text = (here / "runs/mine/config.json").read_text()
        assert config_of_resumed_run(Settings(**asked)) == ("runs/mine/config.json", text)
    for place in (named, here / "runs/mine"):
        found = config_of_resumed_run(Settings(resume_from_checkpoint=str(place)))
        assert found == (str(here / "runs/mine/config.json"), text)
    assert choose(Settings(resume_from_checkpoint="runs/mine")).resume_from_checkpoint == str(named.relative_to(here))


def test_a_checkpoint_that_left_its_run_knows_its_settings(here: Path) -> None:
    noted = {"global_batch_size": 4, "max_steps": 12, "output_dir": "runs/gone", "resume_from_checkpoint": None}
    index = json.dumps({"extra": {"configuration": noted}})
    moved = complete(here / "moved")
    (moved / "index.json").write_text(index)
    (moved / "complete").write_text(hashlib.sha256(index.encode()).hexdigest())
    found = config_of_resumed_run(Settings(resume_from_checkpoint="moved"))
    assert found == ("moved/index.json", json.dumps({"global_batch_size": 4, "max_steps": 12}))
    resolved = resolve([], {"max_steps": "20"}, {}, found)
    assert (resolved.settings.global_batch_size, resolved.settings.max_steps) == (4, 20)
    (moved / "index.json").write_text(json.dumps({"extra": {}}))
    assert config_of_resumed_run(Settings(resume_from_checkpoint="moved")) is None


def test_the_next_steps_are_commands_for_what_is_there(here: Path) -> None:
    folder = Path("my run")
    assert next_steps(folder, 1) == {}, "it has not begun"
    claim(choose(Settings(output_dir=str(folder))))
    again = "shardwise train --output-dir 'my run' --resume-from-checkpoint auto"
    assert next_steps(folder, 1) == {"resume": again, "report": "shardwise report 'my run'"}
    assert next_steps(folder, 3)["memory"] == "shardwise doctor oom 'my run'"
    assert next_steps(folder, 2) == {}, "it was refused"
    complete(folder / "checkpoints/step-000003")
    assert list(next_steps(folder, 130)) == ["resume", "generate", "report", "export"]
    assert next_steps(folder, 5)["verify"] == "shardwise verify 'my run'"
    (folder / "export").mkdir()
    assert list(next_steps(folder, 0)) == ["generate", "report"]
