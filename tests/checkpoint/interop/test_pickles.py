"""Pickles that would do something are refused by name, and nothing that is in one can raise anything else."""

import argparse
import os
import pickle
import struct
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from shardwise import CheckpointError
from shardwise.checkpoint.interop import pickles
from shardwise.checkpoint.interop.pickles import Record


def read(data: bytes) -> Any:
    def no_storage(identity: Any) -> Any:
        raise CheckpointError("no storage")

    return pickles.read(data, no_storage)


PLAIN = [
    None,
    True,
    {"a": [1, 2.5, "x", b"y", None, -(1 << 40)], "b": (1, (2, (3,))), 3: {4, 5}, "c": frozenset({"d"})},
    OrderedDict(a=1, b=OrderedDict()),
    list(range(3000)),
    {str(number): number for number in range(3000)},
    {("optimizer", "state", 0): "tuples are keys"},
    "é" * 300,
    float("inf"),
    [[]] * 3,
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert read(pickle.dumps(value, protocol)) == value


def test_classes_are_described_and_not_made() -> None:
    chunk = read(pickle.dumps(ChunkStorageMetadata(torch.Size([1, 2]), torch.Size([3, 4]))))
    assert type(chunk) is Record
    assert chunk.state == {"offsets": (1, 2), "sizes": (3, 4)}
    index = read(pickle.dumps(MetadataIndex("a.b", [7])))
    assert (index.get("fqn"), index.get("offset")) == ("a.b", (7,))
    named = read(pickle.dumps(argparse.Namespace(lr=0.5)))
    assert named.get("lr") == 0.5
    assert read(pickle.dumps(Path("/a/b"))).args == ("/", "a", "b")
    assert read(pickle.dumps([torch.bfloat16, torch.device("cuda:1")]))[0] is torch.bfloat16


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


MALICIOUS = {
    "posix.system": pickle.dumps({"weight": Calls(os.system, "echo hacked")}),
    "builtins.eval": pickle.dumps([Calls(eval, "1 + 1")]),
    "builtins.exec": pickle.dumps([Calls(exec, "pass")], 2).replace(b"__builtin__", b"builtins"),
    "builtins.getattr": pickle.dumps(Calls(getattr, torch, "load").__reduce__()[0]),
    "builtins.__import__": b"cbuiltins\n__import__\n(X\x02\x00\x00\x00osR.",
    "torch.serialization.load": pickle.dumps(Calls(torch.load, "x")),
    "torch.storage._load_from_bytes": b"ctorch.storage\n_load_from_bytes\n(C\x01aR.",
    "torch._utils._rebuild_wrapper_subclass": b"ctorch._utils\n_rebuild_wrapper_subclass\n.",
    "torch._utils._rebuild_tensor_v2.__code__": b"\x80\x04\x8c\x0ctorch._utils\x8c\x1b_rebuild_tensor_v2.__code__\x93.",
    "os.system": b"cos\nsystem\n(X\x02\x00\x00\x00lstR.",
    "subprocess.Popen": b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93.",
    "copyreg._reconstructor": b"ccopyreg\n_reconstructor\n.",
    "functools.partial": b"cfunctools\npartial\n.",
    "shardwise.checkpoint.interop.pickles.read": b"cshardwise.checkpoint.interop.pickles\nread\n.",
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_functions_are_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"names {name}, which is neither a tensor nor a plain container"):
        read(MALICIOUS[name])


BOMBS = {
    "a memo of its own size": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"a.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"a.",
    "a long number": b"\x80\x02\x8b" + struct.pack("<I", 1 << 20) + b"\1" * (1 << 20) + b".",
    "a deep key": b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.",
    "a deep member": b"\x80\x04\x8f()" + b"\x85" * 100_000 + b"\x90.",
    "a list as a key": b"\x80\x02}]Ns.",
    "state for a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.",
    "attributes for a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}}\x86b.",
    "a call of a dtype": b"\x80\x02ctorch\nfloat32\n)R.",
    "a call of a record": b"\x80\x02cargparse\nNamespace\n)R)R.",
    "a tensor without a storage": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\0))tR.",
    "a huge size": b"\x80\x02ctorch\nSize\n((J\xff\xff\xff\xffttR.",
    "items for a list": b"\x80\x02]NNs.",
    "a newer protocol": b"\x80\x09N.",
    "no end": b"\x80\x02]",
    "nothing": b"",
    "an old protocol": b"(dp0\nS'a'\np1\nI1\ns.",
    "an instance": b"(iargparse\nNamespace\n.",
    "a dict of pairs that are none": b"ccollections\nOrderedDict\n(]K\1atR.",
    "a storage": b"\x80\x02)Q.",
    "an object": b"\x80\x02(cargparse\nNamespace\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "marks alone": b"\x80\x02" + b"(" * 3_000_000 + b".",
    "a long argument for many calls": b"".join(
        [b"\x80\x02](", b"K\1" * 10_000, b"eq\0cbuiltins\nset\nq\1", b"h\1h\0\x85R" * 1000, b"."]
    ),
    "lists alone": b"\x80\x02" + b"]" * 3_000_000 + b".",
    "tuples of tuples": b"\x80\x02N" + b"\x85" * 3_000_000 + b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_do_nothing(name: str) -> None:
    with pytest.raises(CheckpointError):
        read(BOMBS[name])


def test_what_is_deep_can_be_read_and_forgotten() -> None:
    assert read(b"\x80\x02)" + b"\x85" * 100_000 + b"0N.") is None


SAMPLE = pickle.dumps(
    {"a": OrderedDict(b=torch.Size([1, 2])), "c": [ChunkStorageMetadata(torch.Size([1]), torch.Size([2])), {1, 2}, 0.5]}
)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_pickles_are_refused_or_read(data: st.DataObject) -> None:
    content = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for given_bytes in (bytes(content), bytes(content[:cut])):
        with suppress(CheckpointError):
            read(given_bytes)


@given(st.binary(max_size=60))
@settings(max_examples=600, deadline=None)
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x04}", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("):
        with suppress(CheckpointError):
            read(start + content)
