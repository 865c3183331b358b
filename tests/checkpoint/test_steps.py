"""A run's checkpoints on disk: which are complete, which is the newest, which go and which stay."""

from pathlib import Path

import pytest

from shardwise.checkpoint import folder


def write(root: Path, *numbers: int) -> None:
    for number in numbers:
        path = folder.step_folder(root, number)
        (folder.begin(path) / folder.rank_file(0)).write_bytes(b"tensors")
        folder.complete(path, "{}")


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir()}


def is_good(path: Path) -> bool:
    return not (path / "damaged").exists()


def damage(root: Path, *numbers: int) -> None:
    for number in numbers:
        (folder.step_folder(root, number) / "damaged").touch()


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert folder.latest(tmp_path / "nothing") is None
    write(tmp_path, 5, 100, 20, 1_000_000)
    folder.begin(folder.step_folder(tmp_path, 200))
    for name in ("step-000300", "step-x", "step-000500-mine", "step-000600.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000400").write_text("a file")
    folder.point_to(tmp_path, 100)
    assert folder.complete_steps(tmp_path) == [5, 20, 100, 1_000_000]
    assert folder.all_steps(tmp_path) == [5, 20, 100, 200, 300, 1_000_000]
    assert folder.latest(tmp_path) == tmp_path / "step-1000000"
    assert folder.step_folder(tmp_path, 100) == tmp_path / "step-000100"


def test_latest_leads_to_a_checkpoint_and_moves(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    write(root, 1, 2)
    for step in (1, 2):
        folder.point_to(root, step)
        assert (root / "latest").readlink() == Path(f"step-00000{step}")
    root.rename(tmp_path / "moved")
    assert folder.find(tmp_path / "moved/latest") is not None, "it is relative"


def test_what_stands_in_the_place_of_latest_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/mine").touch()
    folder.point_to(tmp_path, 1)
    assert names(tmp_path / "latest") == {"mine"}


def test_a_branch_that_is_left_is_out_of_the_way(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    write(root, 1, 2, 3)
    assert folder.continue_from(root, 3) is None
    assert folder.continue_from(root, 2) == tmp_path / "checkpoints-left-1"
    assert folder.continue_from(root, 1) == tmp_path / "checkpoints-left-2"
    assert names(root) == {"step-000001", "latest"}
    assert (root / "latest").readlink() == Path("step-000001")
    assert folder.complete_steps(tmp_path / "checkpoints-left-1") == [3]


def test_a_run_that_goes_on_removes_what_dead_saves_have_left(tmp_path: Path) -> None:
    """A death between two renames has left a checkpoint, and one after them the one that it replaced."""
    root = tmp_path / "checkpoints"
    write(root, 1, 2, 3, 5)
    for step, name in ((2, ".partial"), (5, ".partial"), (1, ".replaced")):
        path = folder.step_folder(root, step)
        path.rename(path.with_name(path.name + name))
    write(root, 1)
    folder.begin(folder.step_folder(root, 4))
    folder.begin(folder.step_folder(root, 6))
    assert folder.continue_from(root, 3) == tmp_path / "checkpoints-left-1"
    assert names(root) == {"step-000001", "step-000002", "step-000003", "latest"}
    assert names(tmp_path / "checkpoints-left-1") == {"step-000005"}, "it was complete"


def test_prune_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4)
    for step in (2, 9):
        folder.begin(folder.step_folder(tmp_path, step))
    (tmp_path / "notes").write_text("mine")
    folder.prune(tmp_path, 2, is_good)
    assert names(tmp_path) == {"step-000003", "step-000004", "step-000009.partial", "notes"}
    folder.prune(tmp_path / "nothing", 1, is_good)
    with pytest.raises(ValueError, match="keep at least 1"):
        folder.prune(tmp_path, 0, is_good)


def test_prune_keeps_the_newest_good_one_behind_damaged_ones(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 3, 4)
    folder.prune(tmp_path, 1, is_good)
    assert names(tmp_path) == {"step-000002", "step-000004"}
    damage(tmp_path, 2)
    folder.prune(tmp_path, 1, is_good)
    assert names(tmp_path) == {"step-000002", "step-000004"}, "nobody is good, so nobody goes"
    write(tmp_path, 5)
    folder.prune(tmp_path, 1, is_good)
    assert names(tmp_path) == {"step-000005"}


def test_of_a_link_the_link_goes(tmp_path: Path) -> None:
    write(tmp_path, 2, 3)
    (tmp_path / "step-000001").symlink_to("step-000003")
    folder.prune(tmp_path, 1, is_good)
    assert names(tmp_path) == {"step-000003"}
    assert folder.complete_steps(tmp_path) == [3]
