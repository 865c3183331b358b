"""What torch.save wrote is found without torch.load: the same tensors, at their places in the file."""

import io
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise import CheckpointError
from shardwise.checkpoint.index import DTYPES
from shardwise.checkpoint.interop import archives
from shardwise.checkpoint.interop.described import Budget, stored_of
from shardwise.checkpoint.interop.pickles import Strided
from tests.checkpoint.interop.places import whole


def load(path: Path, *place: int) -> Any:
    return archives.load(archives.NumberedFile(path), *place)


def saved(path: Path, value: Any, **options: Any) -> Any:
    torch.save(value, path, **options)
    return load(path)


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * 50).to(dtype)


TENSORS = {
    "plain": filled(3, 5),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "parameter": nn.Parameter(filled(4)),
    "transposed": filled(3, 5).t(),
    "a slice of rows": filled(6, 4)[1:5],
    "a slice of columns": filled(6, 4)[:, 1:3],
    "every second": filled(8, 2, 3)[::2],
    "one row": filled(6, 4)[2:3, ::2],
    "expanded": filled(4).expand(3, 4),
    "permuted": filled(2, 3, 4).permute(2, 0, 1),
    "channels last": filled(2, 3, 4, 4).to(memory_format=torch.channels_last),
    **{f"of {name}": filled(3, 3, dtype=dtype) for name, dtype in DTYPES.items()},
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_found(tmp_path: Path, name: str) -> None:
    path, expected = tmp_path / "x.pt", TENSORS[name].detach()
    stored = stored_of(saved(path, {"t": TENSORS[name]})["t"], Budget())
    found = whole(path, stored)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8))


def test_what_lies_in_order_is_one_piece(tmp_path: Path) -> None:
    for name in ("plain", "a slice of rows", "of BF16"):
        assert len(stored_of(saved(tmp_path / "x.pt", TENSORS[name]), Budget()).pieces) == 1


def test_shared_storages_are_shared(tmp_path: Path) -> None:
    base = filled(10)
    found = saved(tmp_path / "x.pt", [base, base[5:], base.view(2, 5)])
    first = found[0].offset
    assert [tensor.offset for tensor in found] == [first, first + 5 * base.itemsize, first]
    assert torch.equal(whole(tmp_path / "x.pt", stored_of(found[1], Budget())), base[5:])


def test_values_beside_tensors_come_back(tmp_path: Path) -> None:
    value = {
        "module": OrderedDict(a=1),
        "rng": b"bytes",
        "numbers": [np.float64(0.5), np.int64(3)],
        "size": torch.Size([2]),
        "set": {1},
    }
    assert saved(tmp_path / "x.pt", value) == {**value, "size": (2,)}


def test_an_archive_inside_a_file_is_found(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(filled(3), content)
    path = tmp_path / "x.distcp"
    path.write_bytes(b"before" + content.getvalue() + b"behind")
    found = load(path, 6, len(content.getvalue()))
    content.seek(0)
    assert torch.equal(whole(path, stored_of(found, Budget())), torch.load(content))
    with pytest.raises(CheckpointError, match="no zip archive"):
        load(path)


def test_other_ways_of_saving_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(CheckpointError, match=r"cannot read .*x.pt: it is no zip archive, as torch.save writes since"):
        saved(path, filled(3), _use_new_zipfile_serialization=False)
    torch.save({"t": filled(100)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in good.namelist():
            packed.writestr(name, good.read(name))
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        load(path)
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(path, "w") as other:
        for name in good.namelist():
            other.writestr(name, b"big" if name.endswith("byteorder") else good.read(name))
    with pytest.raises(CheckpointError, match="big-endian"):
        load(path)
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("notes.txt", "hello")
    with pytest.raises(CheckpointError, match=r"no data.pkl"):
        load(path)


def test_storages_shorter_than_their_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"t": filled(100)}, tmp_path / "good.pt")
    for name, words in {
        "data/0": "should be 100 of torch.float32, and is 4 bytes long",
        "other": "has no 'data/0'",
    }.items():
        with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(path, "w") as other:
            for entry in good.namelist():
                is_storage = entry.endswith("data/0")
                other.writestr(entry.replace("data/0", name), b"1234" if is_storage else good.read(entry))
        with pytest.raises(CheckpointError, match=words):
            load(path)


def test_tensors_in_too_many_places_are_refused(tmp_path: Path) -> None:
    found = saved(tmp_path / "x.pt", filled(50, 40).t())
    assert isinstance(found, Strided)
    budget = Budget(2100)
    stored_of(found, budget)
    with pytest.raises(CheckpointError, match=r"lies in 2000 places of its file, of 100 that are left: save it contig"):
        stored_of(found, budget)


def test_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"torch.complex128, which is not known here"):
        stored_of(saved(tmp_path / "x.pt", torch.zeros(3, dtype=torch.complex128)), Budget())


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sample") / "x.pt"
    torch.save({"a": filled(5, 3).t(), "b": [nn.Parameter(filled(2)), {"c": 1}]}, path)
    return path.read_bytes()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_archives_are_refused_or_read(
    sample: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(sample)
    # Most of it is padding; what matters is at both ends.
    ends = st.one_of(st.integers(0, 400), st.integers(len(content) - 1200, len(content) - 1))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(ends)] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    with suppress(CheckpointError):
        found = load(path)
        for value in found.values() if isinstance(found, dict) else ():
            if isinstance(value, Strided):
                whole(path, stored_of(value, Budget()))
