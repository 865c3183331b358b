"""Which folder a run gets, and which checkpoint it goes on from."""

from pathlib import Path

import pytest

from shardwise.errors import CheckpointError, ConfigurationError
from shardwise.train.folder import choose, claim, config_to_go_on_with
from shardwise.train.settings import Settings, settings_from_json


def complete(folder: Path) -> Path:
    """What passes for a complete checkpoint until it is read."""
    folder.mkdir(parents=True)
    (folder / "complete").write_text("")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_without_a_name_gets_one(here: Path) -> None:
    chosen = choose(Settings(model="some/where/model-7b"))
    assert str(chosen.output_dir).startswith("runs/model-7b-2")
    assert not (here / "runs").exists(), "choosing writes nothing"


def test_the_settings_are_written_down(here: Path) -> None:
    """As a file to train with again: without the folder, which is taken now."""
    folder = claim(choose(Settings(output_dir="mine", seed=7)))
    assert settings_from_json((folder / "config.json").read_text()) == Settings(seed=7)


def test_a_folder_that_holds_another_run_is_refused(here: Path) -> None:
    claim(choose(Settings(output_dir="mine")))
    with pytest.raises(ConfigurationError, match=r"mine holds another run.*--resume-from-checkpoint latest"):
        choose(Settings(output_dir="mine"))


def test_a_file_is_no_folder(here: Path) -> None:
    (here / "mine").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        choose(Settings(output_dir="mine"))


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


@pytest.mark.parametrize("asked", ["latest", "mine/checkpoints/step-000010", "nowhere"])
def test_what_is_not_there_cannot_be_resumed(here: Path, asked: str) -> None:
    claim(choose(Settings(output_dir="mine")))
    (here / "mine/checkpoints/step-000010").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        choose(Settings(output_dir="mine", resume_from_checkpoint=asked))


def test_auto_goes_on_where_there_is_something(here: Path) -> None:
    settings = Settings(output_dir="mine", resume_from_checkpoint="auto")
    claim(choose(settings))
    assert choose(settings).resume_from_checkpoint is None
    own = complete(here / "mine/checkpoints/step-000010")
    assert choose(settings).resume_from_checkpoint == str(own.relative_to(here))
    with pytest.raises(ConfigurationError, match="--output-dir"):
        choose(Settings(resume_from_checkpoint="auto"))


def test_ranks_that_are_started_again_go_on_with_their_own_run(here: Path) -> None:
    settings = choose(Settings(output_dir="mine"))
    claim(settings)
    assert choose(settings, num_restarts=1).resume_from_checkpoint is None
    own = complete(here / "mine/checkpoints/step-000010")
    assert choose(settings, num_restarts=1).resume_from_checkpoint == str(own.relative_to(here))


def test_a_run_that_goes_on_knows_its_settings(here: Path) -> None:
    assert config_to_go_on_with(Settings(output_dir="mine")) is None
    claim(choose(Settings(output_dir="runs/mine")))
    named = complete(here / "runs/mine/checkpoints/step-000010")
    for asked in ({"output_dir": "runs/mine", "resume_from_checkpoint": "auto"}, {"resume_from_checkpoint": "latest"}):
        assert config_to_go_on_with(Settings(**asked)) == Path("runs/mine/config.json")
    for place in (named, here / "runs/mine"):
        found = config_to_go_on_with(Settings(resume_from_checkpoint=str(place)))
        assert found == here / "runs/mine/config.json"
    assert choose(Settings(resume_from_checkpoint="runs/mine")).resume_from_checkpoint == str(named.relative_to(here))
