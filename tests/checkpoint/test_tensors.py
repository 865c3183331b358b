"""The files are safetensors, as everybody else reads and writes them; broken ones are found before they are read."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import tensor_files
from shardwise.checkpoint.index import NAMES
from shardwise.checkpoint.opened import Reader
from shardwise.checkpoint.tensor_files import Source, lay_out, read_header, write_file
from tests.checkpoint.by_hand import read_whole, source_of

BLOCK = 4096


def some_of_each() -> dict[str, Tensor]:
    found = {f"{name}/0": torch.arange(-3, 4000).to(dtype) for dtype, name in NAMES.items()}
    return found | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "matrix": torch.rand(50, 70).t()}


def entries(given: dict[str, Tensor]) -> list[Source]:
    return [source_of(key, value) for key, value in given.items()]


def same(seen: Tensor, expected: Tensor) -> bool:
    is_alike = (seen.dtype, seen.shape) == (expected.dtype, expected.shape)
    return is_alike and torch.equal(seen.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_the_library_reads_what_we_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", BLOCK)  # and so a checksum's
    given, path = some_of_each(), tmp_path / "file"
    layout = lay_out(entries(given), {"by": "us"})
    file = write_file(path, layout)
    assert path.stat().st_size == file.num_bytes == layout.num_bytes
    seen = load_file(path)
    assert set(seen) == set(given)
    assert all(same(seen[key], value) for key, value in given.items())
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"by": "us"}


def test_every_block_is_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", BLOCK)
    file = write_file(tmp_path / "file", lay_out(entries(some_of_each())))
    content = (tmp_path / "file").read_bytes()
    assert [check.offset for check in file.checks] == list(range(0, len(content), BLOCK))
    for check in file.checks:
        assert check.crc32 == zlib.crc32(content[check.offset : check.offset + check.num_bytes])


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    given, path = some_of_each(), tmp_path / "file"
    given["matrix"] = given["matrix"].contiguous()
    save_file(given, path, metadata={"by": "the library"})
    found = read_header(path, 3)
    assert set(found) == set(given)
    for key, value in given.items():
        assert (found[key].shape, found[key].torch_dtype) == (tuple(value.shape), value.dtype)
        assert all(piece.file == 3 for piece in found[key].pieces)


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    odd = {f"{name}/{n}": torch.zeros(n).to(dtype) for dtype, name in NAMES.items() for n in (1, 3)}
    layout = lay_out(entries(odd))
    for source in layout.sources:
        assert layout.offsets[source.name] % source.dtype.itemsize == 0
    write_file(tmp_path / "file", layout)
    assert {key: stored.pieces[0].offset for key, stored in read_header(tmp_path / "file").items()} == layout.offsets


def test_tensors_are_made_when_their_turn_comes(tmp_path: Path) -> None:
    asked: list[str] = []

    def source(name: str) -> Source:
        return Source(name, torch.float32, (2,), lambda: asked.append(name) or [torch.ones(2)])  # type: ignore[func-returns-value]

    layout = lay_out([source("a"), source("b")])
    assert asked == []
    write_file(tmp_path / "file", layout)
    assert asked == ["a", "b"]


def test_empty_files_are_files(tmp_path: Path) -> None:
    write_file(tmp_path / "file", lay_out([]))
    assert read_header(tmp_path / "file") == {}
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
        broken(b"[" * 50_000),
        broken([1]),
        broken({"a": 1}),
        broken({"a": ONE | {"dtype": "F31"}}),
        broken({"a": ONE | {"dtype": ["F32"]}}),
        broken({"a": ONE | {"data_offsets": [0, 9]}}),
        broken({"a": ONE | {"data_offsets": [0, 8, 16]}}),
        broken({"a": ONE | {"data_offsets": [0.0, 8.0]}}),
        broken({"a": ONE | {"data_offsets": [-8, 0]}}),
        broken({"a": ONE | {"data_offsets": [8, 16]}}),
        broken({"a": ONE | {"shape": [3]}}),
        broken({"a": ONE | {"shape": [-1, -2]}}),
        broken({"a": ONE | {"shape": [1 << 62, 1 << 62]}}),
        broken({"a": ONE | {"shape": "2"}}),
        broken({"a": {"dtype": "F32"}}),
    ],
    ids=range(20),
)
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        read_header(path)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*other: No such file"):
        read_header(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"cannot write .*deeper/file: No such file"):
        write_file(tmp_path / "deeper" / "file", lay_out([]))


def test_what_a_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'a' is torch.complex128, which a file cannot hold"):
        lay_out([source_of("a", torch.zeros(1, dtype=torch.complex128))])
    with pytest.raises(CheckpointError, match="two tensors would be called 'a'"):
        lay_out([source_of("a", torch.zeros(1)), source_of("a", torch.zeros(1))])
    with pytest.raises(CheckpointError, match="two tensors would be called '__metadata__'"):
        lay_out([source_of("__metadata__", torch.zeros(1))], {"a": "b"})
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(CheckpointError, match=r"'a' was announced"):
            write_file(tmp_path / "file", lay_out([Source("a", torch.float32, (2,), lambda wrong=wrong: [wrong])]))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    given = some_of_each()
    file = write_file(tmp_path / "file", lay_out(entries(given)))
    found = read_header(tmp_path / "file")
    with Reader(tmp_path, [file]) as reader:
        assert all(same(read_whole(reader, found[key]), value) for key, value in given.items())
