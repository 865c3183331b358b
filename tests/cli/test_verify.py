"""`shardwise verify` from the outside."""

import hashlib
import json
from pathlib import Path

import torch

from shardwise.checkpoint import folder
from tests.checkpoint.by_hand import save_by_hand
from tests.cli.asking import Asker


def saved(path: Path, value: float = 1.0) -> Path:
    save_by_hand(path, {"a": torch.full((3, 5), value)})
    return path


def damage(path: Path) -> None:
    file = path / folder.rank_file(1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_good_checkpoint_ends_with_0(ask: Asker, tmp_path: Path) -> None:
    seen = ask("verify", saved(tmp_path / "c"))
    assert (seen.code, seen.err) == (0, "")
    assert seen.out.startswith(f"{tmp_path / 'c'}: good. 3 tensors in 2 files")
    assert "2 checksums correct" in seen.out


def test_damage_ends_with_5_and_is_listed(ask: Asker, tmp_path: Path) -> None:
    place = saved(tmp_path / "c", float("nan"))
    (place / folder.rank_file(0)).unlink()
    seen = ask("verify", place)
    assert seen.code == 5
    assert "not good, 2 problems" in seen.out
    about = json.loads(ask("verify", place, "--json").out)
    (report,) = about["checkpoints"]
    assert (about["is_good"], len(report["damage"]), len(report["not_finite"])) == (False, 1, 1)


def test_of_a_run_every_checkpoint_and_the_one_to_go_on_from(ask: Asker, tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in (2, 4, 6):
        saved(root / f"step-{step:06d}")
    (root / "step-000008.partial").mkdir()
    seen = ask("verify", tmp_path / "run")
    assert seen.code == 0
    assert seen.out.count(": good.") == 3
    assert "step-000008: incomplete" in seen.out
    assert seen.out.endswith(f"would load {root / 'step-000006'}\n")
    damage(root / "step-000006")
    seen = ask("verify", root)
    assert seen.code == 5
    assert "step-000006: not good" in seen.out
    assert seen.out.endswith(f"would load {root / 'step-000004'}\n")
    assert json.loads(ask("verify", root, "--json").out)["resumes_from"] == str(root / "step-000004")


def test_a_newer_format_is_not_passed_over(ask: Asker, tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in (2, 4, 6):
        saved(root / f"step-{step:06d}")
    newer = root / "step-000004"
    text = (newer / folder.INDEX).read_text().replace('"version":2', '"version":3')
    (newer / folder.INDEX).write_text(text)
    (newer / folder.MARKER).write_text(hashlib.sha256(text.encode()).hexdigest())
    assert ask("verify", root).out.endswith(f"would load {root / 'step-000006'}\n")
    damage(root / "step-000006")
    seen = ask("verify", root)
    assert seen.code == 5
    assert f"would stop at {newer}: the index is" in seen.out
    about = json.loads(ask("verify", root, "--json").out)
    assert (about["resumes_from"], about["stops_at"]) == (None, str(newer))
    # What is not what was written is damage, whatever it says.
    (newer / folder.MARKER).write_text("0" * 64)
    assert ask("verify", root).out.endswith(f"would load {root / 'step-000002'}\n")


def test_a_run_without_a_complete_checkpoint_is_not_good(ask: Asker, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000008.partial").mkdir(parents=True)
    seen = ask("verify", tmp_path)
    assert seen.code == 5
    assert seen.out.endswith("none of them\n")


def test_what_is_not_there_is_refused_in_a_sentence(ask: Asker, tmp_path: Path) -> None:
    seen = ask("verify", tmp_path / "none")
    assert (seen.code, seen.out) == (2, "")
    assert "there is no such folder" in seen.err
