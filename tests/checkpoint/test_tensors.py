"""The files are safetensors, as everybody else reads and writes them; broken ones are found before they are read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.checkpoint import tensors
from shardwise.checkpoint.tensors import Entry, open_file, write_file
from shardwise.errors import CheckpointError


def some_of_each() -> dict[str, Tensor]:
    found = {f"{name}/0": torch.arange(-3, 40).to(dtype) for dtype, name in tensors.NAMES.items()}
    return found | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "matrix": torch.rand(5, 7).t()}


def entries(given: dict[str, Tensor]) -> list[Entry]:
    return [Entry(key, value.dtype, tuple(value.shape), lambda value=value: value) for key, value in given.items()]


def same(seen: Tensor, expected: Tensor) -> bool:
    return seen.dtype == expected.dtype and torch.equal(seen.double(), expected.double())


def test_the_library_reads_what_we_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 16)
    given, path = some_of_each(), tmp_path / "file"
    num_bytes = write_file(path, entries(given))
    assert path.stat().st_size == num_bytes
    seen = load_file(path)
    assert set(seen) == set(given)
    assert all(same(seen[key], value) for key, value in given.items())


def test_we_read_what_the_library_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 16)
    given, path = some_of_each(), tmp_path / "file"
    given["matrix"] = given["matrix"].contiguous()
    save_file(given, path, metadata={"by": "the library"})
    file = open_file(path, path.stat().st_size)
    for key, value in given.items():
        for first in (0, value.numel() // 2):
            row = torch.empty(value.numel() - first, dtype=value.dtype)
            file.read(key, first, row)
            assert same(row, value.reshape(-1)[first:]), key
    row = torch.empty(5, dtype=torch.float64)
    file.read("BF16/0", 1, row)
    assert row.tolist() == [-2.0, -1.0, 0.0, 1.0, 2.0]


def test_empty_files_are_files(tmp_path: Path) -> None:
    num_bytes = write_file(tmp_path / "file", [])
    assert open_file(tmp_path / "file", num_bytes).places == {}
    assert load_file(tmp_path / "file") == {}


def broken(header: object, num_data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_data)


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00",
        (1 << 62).to_bytes(8, "little") + b"{}",
        broken(b"no json"),
        broken(b"\xff\xfe"),
        broken([1]),
        broken({"a": 1}),
        broken({"a": ONE | {"dtype": "F31"}}),
        broken({"a": ONE | {"data_offsets": [0, 9]}}),
        broken({"a": ONE | {"data_offsets": [-8, 0]}}),
        broken({"a": ONE | {"data_offsets": [8, 16]}}),
        broken({"a": ONE | {"shape": [3]}}),
        broken({"a": ONE | {"shape": "2"}}),
        broken({"a": {"dtype": "F32"}}),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        open_file(path, len(content))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    num_bytes = write_file(path, entries({"a": torch.zeros(4)}))
    with pytest.raises(CheckpointError, match="was written with"):
        open_file(path, num_bytes + 1)
    with pytest.raises(CheckpointError, match="No such file"):
        open_file(tmp_path / "other", 8)
    file = open_file(path, num_bytes)
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        file.read("b", 0, torch.empty(1))
    with pytest.raises(CheckpointError, match="holds 4 elements"):
        file.read("a", 2, torch.empty(3))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        file.read("a", 0, torch.empty(4))
    with pytest.raises(CheckpointError, match=r"complex64, which a checkpoint cannot hold"):
        write_file(path, entries({"a": torch.zeros(1, dtype=torch.complex64)}))
