"""Files that somebody hostile or unlucky hands over: every command ends in a sentence, soon and in little memory."""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import folder
from tests.checkpoint.by_hand import save_by_hand
from tests.support.limited import Limited

WEIGHTS = {"a.weight": torch.ones(8, 4), "b.bias": torch.ones(4)}
SPARSE_BYTES = 30 * 10**9


@pytest.fixture(scope="module")
def run() -> Iterator[Limited]:
    with Limited(cpu_s=20, num_bytes=500_000_000) as limited:
        yield limited


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


def to_itself(path: Path) -> None:
    path.symlink_to(path.name)


KINDS = (fifo, endless, sparse, Path.mkdir, to_itself)


def own(path: Path, change: Callable[[Any], None] = lambda index: None) -> Path:
    save_by_hand(path, WEIGHTS)
    index = json.loads((path / folder.INDEX).read_bytes())
    change(index)
    text = json.dumps(index).encode()
    (path / folder.INDEX).write_bytes(text)
    (path / folder.MARKER).write_text(hashlib.sha256(text).hexdigest())
    return path


def of_dcp(path: Path) -> Path:
    dcp.save({"model": WEIGHTS}, checkpoint_id=path, no_dist=True)
    return path


def of_deepspeed(path: Path) -> Path:
    path.mkdir()
    (path / "mp_rank_00_model_states.pt").touch()
    (path / "latest").touch()
    return path


def of_hugging_face(path: Path) -> Path:
    path.mkdir()
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model-1.safetensors").touch()
    return path


PLACES = [
    (own, folder.INDEX),
    (own, folder.MARKER),
    (own, "rank-00001.safetensors"),
    (of_dcp, ".metadata"),
    (of_dcp, "__0_0.distcp"),
    (of_deepspeed, "mp_rank_00_model_states.pt"),
    (of_deepspeed, "latest"),
    (of_hugging_face, "model.safetensors.index.json"),
    (of_hugging_face, "model-1.safetensors"),
]


def require_refused(run: Limited, path: Path, *commands: str) -> None:
    for command in commands:
        ending = run(command, path, *([f"{path}-out"] if command == "convert" else []))
        assert ending.code == CheckpointError.exit_code, (command, ending)
        assert "Traceback" not in ending.text
        assert len(ending.text) < 2000


@pytest.mark.quick("own-index.json", "of_dcp-.metadata", "of_hugging_face-model-1.safetensors")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("make", "name"), PLACES, ids=[f"{make.__name__}-{name}" for make, name in PLACES])
def test_something_else_in_the_place_of_a_file(
    run: Limited, tmp_path: Path, make: Callable[[Path], Path], name: str
) -> None:
    for kind in KINDS:
        path = make(tmp_path / kind.__name__)
        (path / name).unlink()
        kind(path / name)
        # Which tensors there are is known without the files that they are in.
        is_shown = make is own and name.startswith("rank")
        require_refused(run, path, *(() if is_shown else ("inspect",)), "verify", "convert")


def header(path: Path, text: bytes, num_bytes: int = 0) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path / "model.safetensors", 8 + len(text) + num_bytes)
    return path


def pickled(path: Path, text: bytes) -> Path:
    path.mkdir()
    with zipfile.ZipFile(path / "pytorch_model.bin", "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", text)
    return path


def saved(path: Path, value: Any) -> Path:
    path.mkdir()
    torch.save(value, path / "pytorch_model.bin")
    return path


def amplify(index: Any) -> None:
    tensor = index["tensors"]["b.bias"]
    piece = {"shape": [4], "dtype": "F32", "pieces": tensor["pieces"]}
    index["files"][1] |= {"num_bytes": 4 * 10**9, "checks": []}
    index["tensors"] |= {
        f"n{number}": {**tensor, **piece, "shape": [10**9], "pieces": [[1, 0, 0, 10**9]], "state": {}}
        for number in range(1000)
    }


ENTRY = {"dtype": "F32", "shape": [25 * 10**6], "data_offsets": [0, 10**8]}
INPUTS: dict[str, Callable[[Path], Path]] = {
    "a header of lists": lambda path: header(path, b'{"a":[' + b"[]," * 30_000_000 + b"[]]}"),
    "a header of texts": lambda path: header(path, b'{"a":[' + b'"ab",' * 18_000_000 + b"1]}"),
    "metadata of lists": lambda path: header(path, b'{"__metadata__":{"a":[' + b"[]," * 30_000_000 + b"[]]}}"),
    "a shape of large numbers": lambda path: header(
        path, b'{"a":{"dtype":"F32","shape":[' + b"9" * 3000 + b",0]," + b'"data_offsets":[0,0]}}'
    ),
    "a shape without end": lambda path: header(
        path, b'{"a":{"dtype":"F32","shape":[4611686018427387904,4611686018427387904,0],"data_offsets":[0,0]}}'
    ),
    "a name of a text": lambda path: header(
        path, b'{"' + b"a" * 89_000_000 + b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    ),
    "tensors that are all of one file": lambda path: header(
        path, json.dumps({f"n{number}": ENTRY for number in range(1000)}).encode(), 10**8
    ),
    "an index of ours that uses a file again and again": lambda path: own(path, amplify),
    "one number for a million million": lambda path: saved(path, {"w": torch.zeros(1).expand(1 << 40)}),
    "a row for terabytes": lambda path: saved(path, {"w": torch.zeros(1 << 17).expand(1 << 23, 1 << 17)}),
    "a row for half a terabyte": lambda path: saved(path, {"w": torch.zeros(1 << 17).expand(1 << 20, 1 << 17)}),
    "views of one storage": lambda path: saved(
        path, (lambda row: {f"n{number}": row[number:] for number in range(3000)})(torch.zeros(1 << 20))
    ),
    "a pickle of lists": lambda path: pickled(path, b"\x80\x02" + b"]" * 3_000_000 + b"."),
    "a pickle of tuples of tuples": lambda path: pickled(path, b"\x80\x02N" + b"\x85" * 3_000_000 + b"."),
    "a pickle that remembers": lambda path: pickled(path, b"\x80\x04N" + b"\x94" * 3_000_000 + b"."),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_a_few_bytes_that_claim_to_be_many(run: Limited, tmp_path: Path, name: str) -> None:
    require_refused(run, INPUTS[name](tmp_path / "place"), "inspect", "verify", "convert")


def test_names_that_are_strange(run: Limited, tmp_path: Path) -> None:
    def change(index: Any) -> None:
        index["tensors"][f"layers.{'9' * 5000}.w"] = index["tensors"].pop("a.weight")
        index["tensors"][f"{'a.' * 5000}w"] = index["tensors"].pop("b.bias")
        index["extra"] = {"note": "\ud800"}

    path = own(tmp_path / "place", change)
    for command in ("inspect", "verify", "convert"):
        ending = run(command, path, *([tmp_path / "out"] if command == "convert" else []))
        assert ending.code == 0, ending


@pytest.mark.slow
def test_time_grows_with_the_number_of_tensors_and_no_faster(run: Limited, tmp_path: Path) -> None:
    seconds: dict[str, list[float]] = {"inspect": [], "verify": [], "convert": []}
    for num in (4_000, 16_000):
        entries = {
            f"layers.{2 * at}.w": {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]}
            for at in range(num)
        }
        path = header(tmp_path / f"{num}", json.dumps(entries).encode(), 4 * num)
        for command, found in seconds.items():
            ending = run(command, path, *([f"{path}-out"] if command == "convert" else []))
            assert ending.code == 0, ending
            found.append(ending.cpu_s)
    assert all(many < 6 * few + 1 for few, many in seconds.values()), seconds


def test_a_tensor_without_elements_is_one_part(run: Limited, tmp_path: Path) -> None:
    path = header(tmp_path / "place", b'{"a":{"dtype":"F32","shape":[4611686018427387904,0],"data_offsets":[0,0]}}')
    ending = run("convert", path, tmp_path / "out", "--to", "dcp")
    assert ending.code == 0, ending


def test_weights_that_are_shared_are_read(run: Limited, tmp_path: Path) -> None:
    """A layer that is used again and again, and a mask of one number, are what people save."""
    layer, mask = torch.ones(64, 64), torch.ones(1).expand(1, 1, 128, 128)
    path = saved(tmp_path / "place", {**{f"layers.{at}.w": layer for at in range(48)}, "mask": mask})
    for command in ("inspect", "verify", "convert"):
        assert run(command, path, *([tmp_path / "out"] if command == "convert" else [])).code == 0
