"""Disks that are full, read-only or gone, and files that are not what they were: one error everywhere, and no harm."""

import hashlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.base.errors import DamageError, SaveError
from shardwise.checkpoint import folder
from shardwise.checkpoint import saving as save
from shardwise.checkpoint.opened import open_checkpoint
from tests.checkpoint.by_hand import require_good
from tests.checkpoint.test_refusals import built, refused, step
from tests.harness import Pool

Write = Callable[[Path, Any, Any, int], None]


def save_now(path: Path, model: Any, optimizer: Any, number: int) -> None:
    sw.save(path, model, optimizer, extra={"step": number})


def save_beside(path: Path, model: Any, optimizer: Any, number: int) -> None:
    sw.start_save(path, model, optimizer, extra={"step": number}).finish()


WAYS = [save_now, save_beside]
PAGE = 4096  # a tmpfs gives memory away in these


def loads_as(path: Path, number: int, weights: dict[str, Tensor]) -> None:
    """Under another layout, from other weights: what was saved then is all there."""
    model, optimizer = built("ddp", seed=1)
    assert sw.load(path, model, optimizer) == {"step": number}
    assert all(torch.equal(value, weights[name]) for name, value in sw.full_state_dict(model).items())


# ---------------------------------------------------------------------------------------------------------
# disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """512 kB: enough for two checkpoints of 140 kB, and their blocks, not for more."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(place)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small tmpfs needs root: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, num_left: int) -> None:
    """So many bytes are left, in whole pages."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    space = os.statvfs(disk)
    with filler.open("wb") as file:
        file.write(bytes(max(space.f_bavail * space.f_frsize - num_left, 0)))


def save_on_a_full_disk(disk: Path, write: Write) -> None:
    model, optimizer = built()
    step(model, optimizer)
    path = disk / "step-000001"
    write(path, model, optimizer, 1)
    saved = sw.full_state_dict(model)
    names = (folder.rank_file(0), folder.rank_file(1), folder.INDEX)
    first, second, index = (-(-(path / name).stat().st_size // PAGE) * PAGE for name in names)
    # Nothing fits; a file; both, and no index; all but the marker.
    for num_left in (0, first, first + second, first + second + index):
        step(model, optimizer, num_left)
        if dist.get_rank() == 0:
            fill(disk, num_left)
        dist.barrier()
        for place in (path, disk / "step-000002"):
            refused(lambda place=place: write(place, model, optimizer, 2), "No space left on device", SaveError)
        dist.barrier()
        assert {entry.name for entry in disk.iterdir()} == {"step-000001", "filler"}
        loads_as(path, 1, saved)
    dist.barrier()
    if dist.get_rank() == 0:
        (disk / "filler").unlink()
    dist.barrier()
    write(path, model, optimizer, 3)
    loads_as(path, 3, sw.full_state_dict(model))


@pytest.mark.quick("save_beside")
@pytest.mark.parametrize("write", WAYS)
def test_a_full_disk(run_ranks: Pool, small_disk: Path, write: Write) -> None:
    run_ranks(2, save_on_a_full_disk, small_disk, write)


def remount(disk: Path, how: str) -> None:
    if dist.get_rank() == 0:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)
    dist.barrier()


def save_on_a_read_only_disk(disk: Path, write: Write) -> None:
    model, optimizer = built()
    step(model, optimizer)
    path = disk / "step-000001"
    write(path, model, optimizer, 1)
    saved = sw.full_state_dict(model)
    step(model, optimizer, 1)
    remount(disk, "ro")
    for place in (path, disk / "step-000002"):
        refused(lambda place=place: write(place, model, optimizer, 2), "Read-only file system", SaveError)
    loads_as(path, 1, saved)
    dist.barrier()
    remount(disk, "rw")
    write(path, model, optimizer, 3)
    loads_as(path, 3, sw.full_state_dict(model))


@pytest.mark.parametrize("write", WAYS)
def test_a_read_only_folder(run_ranks: Pool, small_disk: Path, write: Write) -> None:
    run_ranks(2, save_on_a_read_only_disk, small_disk, write)


def save_while_it_vanishes(root: Path, write: Write) -> None:
    """The folder of the run goes when the first or the last of a save's phases begins."""
    model, optimizer = built()
    step(model, optimizer)
    safe = root / "elsewhere" / "step-000001"
    write(safe, model, optimizer, 1)
    saved = sw.full_state_dict(model)
    for name in ("_write_own_file", "_complete"):
        before = getattr(save, name)

        def vanish(*args: Any, before: Any = before) -> Any:
            shutil.rmtree(root / "run", ignore_errors=True)
            return before(*args)

        setattr(save, name, vanish)
        try:
            refused(
                lambda: write(root / "run" / "step-000002", model, optimizer, 2),
                r"rank \d: .*(No such file or directory|is not there as it was written)",
                SaveError,
            )
        finally:
            setattr(save, name, before)
        dist.barrier()
        assert not list((root / "run").glob("*"))
        loads_as(safe, 1, saved)
        dist.barrier()
    write(root / "run" / "step-000002", model, optimizer, 2)
    loads_as(root / "run" / "step-000002", 2, sw.full_state_dict(model))


@pytest.mark.parametrize("write", WAYS)
def test_a_folder_that_vanishes(run_ranks: Pool, tmp_path: Path, write: Write) -> None:
    run_ranks(2, save_while_it_vanishes, tmp_path, write)


# ---------------------------------------------------------------------------------------------------------
# files


def on_one(do: Callable[[], Any]) -> None:
    """One rank does it, the others see that it was done."""
    dist.barrier()
    if dist.get_rank() == 0:
        do()
    dist.barrier()


def require_all_good(path: Path) -> None:
    opened = open_checkpoint(path)
    with opened.reader() as reader:
        for number in range(len(opened.index.files)):
            require_good(reader, number)


def damaged_everywhere(path: Path) -> None:
    """Loading is refused on every rank with the same words; and so is reading all of it, without ranks."""
    model, optimizer = built("zero1", seed=1)
    refused(lambda: sw.load(path, model, optimizer), ".", DamageError)
    with pytest.raises(DamageError):
        require_all_good(path)


def flip(file: Path, at: int, bits: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= bits
    file.write_bytes(content)


def flip_bytes(path: Path, seed: int) -> None:
    model, optimizer = built()
    step(model, optimizer)
    sw.save(path, model, optimizer, extra={"step": 1})
    require_all_good(path)
    files = sorted(path.iterdir())
    assert len(files) == 4
    draw = random.Random(seed)
    for file in files:
        size = file.stat().st_size
        for at in (0, size - 1, *(draw.randrange(size) for _ in range(8))):
            bits = draw.randrange(1, 256)
            on_one(lambda file=file, at=at, bits=bits: flip(file, at, bits))
            try:
                damaged_everywhere(path)
            except BaseException as error:
                error.add_note(f"byte {at} of {size} of {file.name} with {bits:08b}")
                raise
            on_one(lambda file=file, at=at, bits=bits: flip(file, at, bits))
    loads_as(path, 1, sw.full_state_dict(model))


def test_a_flipped_byte_anywhere_is_found(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, flip_bytes, tmp_path / "here", 0)


def cut_files(path: Path) -> None:
    model, optimizer = built()
    step(model, optimizer)
    sw.save(path, model, optimizer, extra={"step": 1})
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for length in (0, 1, len(content) // 2, len(content) - 1):
            on_one(lambda file=file, length=length: os.truncate(file, length))
            damaged_everywhere(path)
            on_one(lambda file=file, content=content: file.write_bytes(content))
        on_one(file.unlink)
        damaged_everywhere(path)
        on_one(lambda file=file, content=content: file.write_bytes(content))
    loads_as(path, 1, sw.full_state_dict(model))


def test_a_truncated_or_missing_file_is_found(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, cut_files, tmp_path / "here")


# ---------------------------------------------------------------------------------------------------------
# indices that lie, with a marker that agrees


def seal(path: Path, text: str) -> None:
    (path / folder.INDEX).write_text(text)
    (path / folder.MARKER).write_text(hashlib.sha256(text.encode()).hexdigest())


def _first(index: Any) -> Any:
    return next(tensor for tensor in index["tensors"].values() if len(tensor["pieces"]) > 1)


LIES: dict[str, Callable[[Any], Any]] = {
    "a huge file": lambda i: i["files"][0].update(num_bytes=1 << 60, checks=[[0, 1 << 60, 0]]),
    "a file without end": lambda i: i["files"][0].update(num_bytes=1 << 80, checks=[]),
    "a huge checksum": lambda i: i["files"][0].update(checks=[[0, i["files"][0]["num_bytes"] + (1 << 50), 0]]),
    "no checksums, and a longer file": lambda i: i["files"][0].update(num_bytes=1 << 40, checks=[]),
    "too few checksums": lambda i: i["files"][1]["checks"][-1].__setitem__(1, 8),
    "a huge shape": lambda i: _first(i).update(shape=[1 << 40, 1 << 20]),
    "a shape beyond numbers": lambda i: _first(i).update(shape=[1 << 62] * 60),
    "a negative shape": lambda i: _first(i).update(shape=[-1, -16]),
    "a shape of text": lambda i: _first(i).update(shape="600x16"),
    "many dimensions": lambda i: _first(i).update(shape=[1] * 100_000),
    "overlapping pieces": lambda i: _first(i)["pieces"][1].__setitem__(2, 0),
    "a piece twice": lambda i: _first(i)["pieces"].append(_first(i)["pieces"][1]),
    "a gap": lambda i: _first(i)["pieces"].pop(0),
    "a piece backwards": lambda i: _first(i)["pieces"][0].__setitem__(3, -5),
    "a piece behind the file": lambda i: _first(i)["pieces"][0].__setitem__(1, 1 << 40),
    "a piece in no file": lambda i: _first(i)["pieces"][0].__setitem__(0, 9),
    "a fraction of a piece": lambda i: _first(i)["pieces"][0].__setitem__(1, 0.5),
    "a file above": lambda i: i["files"][0].update(name="../outside.safetensors"),
    "a file below and above": lambda i: i["files"][0].update(name="a/../../outside.safetensors"),
    "a file from the root": lambda i: i["files"][0].update(name="/etc/passwd"),
    "a file without a name": lambda i: i["files"][0].update(name=""),
    "the folder itself": lambda i: i["files"][0].update(name="."),
    "a name with a zero": lambda i: i["files"][0].update(name="a\0b"),
    "a name that is half a character": lambda i: i["files"][0].update(name="\ud800"),
    "a name that is a number": lambda i: i["files"][0].update(name=7),
    "a device": lambda i: i["files"][0].update(name="pipe", checks=[]),
    "an unknown dtype": lambda i: _first(i).update(dtype="F7"),
    "no files": lambda i: i.update(files=[]),
    "no tensors": lambda i: i.pop("tensors"),
    "tensors in a list": lambda i: i.update(tensors=[1, 2]),
    "an optimizer of text": lambda i: i.update(optimizer="adamw"),
    "state of lists": lambda i: _first(i)["state"].update(exp_avg=[1, 2]),
    "too deep": lambda i: i.update(extra="DEEP"),
}


def believe_nothing(path: Path) -> dict[str, str]:
    model, optimizer = built()
    step(model, optimizer)
    sw.save(path, model, optimizer, extra={"step": 1})
    text = (path / folder.INDEX).read_text()
    on_one(lambda: (path.parent / "outside.safetensors").write_bytes(bytes(1 << 20)))
    on_one(lambda: os.mkfifo(path / "pipe"))
    told = {}
    for name, lie in LIES.items():
        index = json.loads(text)
        lie(index)
        told_as = json.dumps(index).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
        on_one(lambda told_as=told_as: seal(path, told_as))
        other, other_optimizer = built("zero1", seed=1)
        before = sw.full_state_dict(other)
        try:
            with pytest.raises(sw.CheckpointError) as raised:
                sw.load(path, other, other_optimizer)
        except BaseException as error:
            error.add_note(name)
            raise
        found: list[Any] = [None] * 2
        dist.all_gather_object(found, str(raised.value))
        assert found[0] == found[1], name
        assert len(found[0]) < 2000, name
        told[name] = found[0]
        assert all(torch.equal(value, before[key]) for key, value in sw.full_state_dict(other).items()), name
    on_one(lambda: seal(path, text))
    loads_as(path, 1, sw.full_state_dict(model))
    return told


def test_an_index_that_lies_is_an_error_in_words(run_ranks: Pool, tmp_path: Path) -> None:
    told = run_ranks(2, believe_nothing, tmp_path / "run" / "here")[0]
    for name, words in told.items():
        assert "Traceback" not in words, name
    assert "not inside the checkpoint" in told["a file above"]
    assert "not inside the checkpoint" in told["a file from the root"]
    assert "for element" in told["overlapping pieces"]
    assert "nested too deeply" in told["too deep"]


# ---------------------------------------------------------------------------------------------------------
# and then the older one


def load_the_older_one(path: Path) -> None:
    """A load that broke off in the middle leaves a mixture; the next one leaves nothing of it."""
    model, optimizer = built()
    for number in (1, 2):
        step(model, optimizer, number)
        sw.save(path / str(number), model, optimizer, extra={"step": number})
    step(model, optimizer, 3)
    # The last byte of the last file: all other files, and this one's other tensors, are read before.
    on_one(lambda: cut_into_blocks(path / "2"))
    for strategy in ("zero3", "ddp"):
        clean, clean_optimizer = built(strategy, seed=5)
        sw.load(path / "1", clean, clean_optimizer)
        other, other_optimizer = built(strategy, seed=6)
        before = sw.full_state_dict(other)
        refused(lambda other=other, o=other_optimizer: sw.load(path / "2", other, o), "is a mixture", DamageError)
        mixed = sw.full_state_dict(other)
        assert any(not torch.equal(value, before[name]) for name, value in mixed.items())
        assert sw.load(path / "1", other, other_optimizer) == {"step": 1}
        for number in (7, 8):
            assert_alike(sw.full_state_dict(other), sw.full_state_dict(clean))
            step(other, other_optimizer, number)
            step(clean, clean_optimizer, number)


def cut_into_blocks(path: Path) -> None:
    """Checksums of 512 bytes, as if the files were large, and the last block damaged."""
    import zlib

    index = json.loads((path / folder.INDEX).read_text())
    for file in index["files"]:
        content = (path / file["name"]).read_bytes()
        parts = [(at, content[at : at + 512]) for at in range(0, len(content), 512)]
        file["checks"] = [[at, len(part), zlib.crc32(part)] for at, part in parts]
    seal(path, json.dumps(index))
    last = path / index["files"][-1]["name"]
    flip(last, last.stat().st_size - 1, 1)


def assert_alike(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, expected[name]) for name, value in seen.items())


def test_what_broke_off_is_overwritten_by_the_next_load(run_ranks: Pool, tmp_path: Path) -> None:
    run_ranks(2, load_the_older_one, tmp_path)
