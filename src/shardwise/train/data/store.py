"""The token store: a folder with the tokens of all documents, end to end, each document followed by the end token.

    tokens.bin     the tokens, uint16 or uint32; missing where .bin files of the user's are used in place
    documents.bin  where each document starts, and after the last where it ends, int64
    trained.bin    a byte for each token: whether it is trained on; missing where all are
    store.json     what is in it, and where the tokens are

Written once, then mapped into memory: a reader holds no more than it is asked for, and the pages that several ranks
read are the machine's, once. Numbers are in the machine's byte order, which is little-endian wherever torch runs.

A store has a digest: of the bytes of its tokens, documents and mask, taken while they pass, and of nothing else. Stores
of the same data have the same one, on whatever machine, in whatever folder and whenever they are made.
"""

import hashlib
import json
import mmap
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import torch
from torch import Tensor

from ...errors import ConfigurationError

_DTYPES = {"uint16": torch.uint16, "uint32": torch.uint32}
_CODES: dict[str, Literal["H", "I"]] = {"uint16": "H", "uint32": "I"}
_BLOCK = 2**22
_ENOUGH = 64  # numbers to tell by


def dtype_for(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"


class _Hashed:
    """A file that is written from its beginning to its end, and the hash of what went in."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._hash = hashlib.sha256()

    def write(self, content: "bytes | array[int]") -> None:
        self._file.write(content)
        self._hash.update(content)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def sync(self) -> None:
        _sync(self._file)

    def close(self) -> None:
        self._file.close()


class Writer:
    """Documents go in piece by piece; `finish` makes the folder a store. A folder without store.json is none."""

    def __init__(self, folder: Path, dtype: str, end_id: int) -> None:
        self.num_tokens = 0
        self.num_documents = 0
        self._folder = folder
        self._dtype = dtype
        self._end_id = end_id
        self._tokens = _Hashed(folder / "tokens.bin")
        self._documents = _Hashed(folder / "documents.bin")
        self._trained: _Hashed | None = None
        self._start = 0
        self._last: tuple[int, bool] = (-1, True)
        self._documents.write(array("q", [0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files():
            file.close()

    def add(self, ids: Sequence[int], trained: bool) -> None:
        if not ids:
            return
        self._tokens.write(array(_CODES[self._dtype], ids))
        if not trained and self._trained is None:
            self._trained = _Hashed(self._folder / "trained.bin")
            for first in range(0, self.num_tokens, _BLOCK):
                self._trained.write(b"\1" * min(_BLOCK, self.num_tokens - first))
        if self._trained is not None:
            self._trained.write((b"\1" if trained else b"\0") * len(ids))
        self.num_tokens += len(ids)
        self._last = (ids[-1], trained)

    def end_document(self) -> None:
        """The end token is trained on where what it ends is; a chat's template may have written it already."""
        last, trained = self._last if self.num_tokens > self._start else (-1, True)
        if last != self._end_id:
            self.add([self._end_id], trained)
        self._documents.write(array("q", [self.num_tokens]))
        self.num_documents += 1
        self._start = self.num_tokens

    def finish(self, facts: dict[str, Any]) -> None:
        for file in self._files():
            file.sync()
        digest = _digest(*(file.hexdigest() for file in self._files()))
        _describe(self._folder, ["tokens.bin"], self._dtype, self.num_tokens, self.num_documents, digest, facts)

    def _files(self) -> list[_Hashed]:
        return [self._tokens, self._documents, *([self._trained] if self._trained is not None else [])]


def adopt(folder: Path, files: Sequence[Path], dtype: str, vocab_size: int, end_id: int, facts: dict[str, Any]) -> None:
    """Make `folder` a store of token files that stay where they are, after reading through all of them once.

    A document ends after each end token, and at the end of a file. `vocab_size` is the model's: ids are below it.
    """
    num_tokens = num_documents = 0
    hashed = hashlib.sha256()
    with closing(_Hashed(folder / "documents.bin")) as documents:
        documents.write(array("q", [0]))
        for path in files:
            tokens = _mapped(path, dtype)
            last = end_id
            for first in range(0, len(tokens), _BLOCK):
                stored = tokens[first : first + _BLOCK]
                hashed.update(stored)
                block = _tensor(stored, dtype)
                if first == 0 and dtype == "uint16" and block.numel() >= _ENOUGH and not bool(block[1::2].any()):
                    raise ConfigurationError(
                        f"{path}: every second number is 0, as in uint32 read as uint16: set --token-dtype uint32"
                    )
                if int(block.max()) >= vocab_size:
                    at = int((block >= vocab_size).nonzero()[0])
                    raise ConfigurationError(
                        f"{path}: token {first + at} is {int(block[at])}, but the model's ids are below {vocab_size}: "
                        f"give the --tokenizer that wrote the file, raise shape.vocab, or, if the file is not {dtype}, "
                        "set token_dtype"
                    )
                ends = (block == end_id).nonzero().flatten() + (num_tokens + first + 1)
                documents.write(array("q", ends.tolist()))
                num_documents += ends.numel()
                last = int(block[-1])
            num_tokens += len(tokens)
            if last != end_id:
                documents.write(array("q", [num_tokens]))
                num_documents += 1
        documents.sync()
    digest = _digest(hashed.hexdigest(), documents.hexdigest())
    _describe(folder, [str(path.resolve()) for path in files], dtype, num_tokens, num_documents, digest, facts)


def _digest(*hashes: str) -> str:
    """Of the tokens, the documents and, where there is one, the mask."""
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _describe(
    folder: Path,
    tokens: list[str],
    dtype: str,
    num_tokens: int,
    num_documents: int,
    digest: str,
    facts: dict[str, Any],
) -> None:
    numbers = {"num_tokens": num_tokens, "num_documents": num_documents}
    known = {"tokens": tokens, "dtype": dtype, **numbers, "digest": digest, **facts}
    with (folder / "store.json").open("wb") as file:
        file.write(json.dumps(known, indent=1).encode())
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class Store:
    """A store, mapped. `facts` are what its writer noted besides."""

    num_tokens: int
    num_documents: int
    digest: str  # of its content
    facts: dict[str, Any]
    _dtype: str = field(repr=False)
    _parts: tuple[memoryview, ...] = field(repr=False)  # a token file each
    _ends: tuple[int, ...] = field(repr=False)  # of each part, in tokens of the whole
    _starts: memoryview = field(repr=False)  # of documents; one more, at the end
    _trained: memoryview | None = field(repr=False)

    def tokens(self, first: int, count: int) -> Tensor:
        """`count` tokens from `first` on, int64."""
        found = []
        index = bisect_right(self._ends, first)
        while count > 0:
            part = self._parts[index]
            at = first - (self._ends[index] - len(part))
            found.append(_tensor(part[at : at + count], self._dtype))
            first += found[-1].numel()
            count -= found[-1].numel()
            index += 1
        return found[0] if len(found) == 1 else torch.cat(found)

    def trained(self, first: int, count: int) -> Tensor | None:
        """Whether each is trained on, bool; None: all are."""
        if self._trained is None:
            return None
        return torch.frombuffer(bytearray(self._trained[first : first + count]), dtype=torch.bool)

    def is_all_trained(self, first: int, count: int) -> bool:
        return self._trained is None or b"\0" not in bytes(self._trained[first : first + count])

    def document(self, index: int) -> tuple[int, int]:
        """Where it starts, and how many tokens it has, its end token included."""
        return self._starts[index], self._starts[index + 1] - self._starts[index]

    def starts_within(self, first: int, count: int) -> list[int]:
        """Where documents start after `first` and before `first + count`."""
        low = bisect_right(self._starts, first)
        return self._starts[low : bisect_left(self._starts, first + count, low)].tolist()

    def document_lengths(self) -> Iterator[Tensor]:
        """Of all documents in order, in blocks that fit into memory."""
        for first in range(0, self.num_documents, _BLOCK):
            yield torch.frombuffer(bytearray(self._starts[first : first + _BLOCK + 1]), dtype=torch.int64).diff()


def is_store(folder: Path) -> bool:
    return (folder / "store.json").is_file()


def open_store(folder: Path) -> Store:
    try:
        facts = json.loads((folder / "store.json").read_text())
        dtype, num_tokens, num_documents, digest = (
            facts.pop(name) for name in ("dtype", "num_tokens", "num_documents", "digest")
        )
        parts = tuple(_mapped(folder / name, dtype) for name in facts.pop("tokens"))
        starts = _map(folder / "documents.bin").cast("q")
        trained = _map(folder / "trained.bin") if (folder / "trained.bin").exists() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{folder}: a damaged token store ({error}); delete the folder") from error
    ends = tuple(sum(len(part) for part in parts[: index + 1]) for index in range(len(parts)))
    seen = {
        "tokens": ends[-1],
        "documents": len(starts) - 1,
        "trained": num_tokens if trained is None else len(trained),
    }
    for name, planned in (("tokens", num_tokens), ("documents", num_documents), ("trained", num_tokens)):
        if seen[name] != planned:
            raise ConfigurationError(
                f"{folder}: a damaged token store: {seen[name]} {name}, but {planned} were written; delete the folder"
            )
    return Store(num_tokens, num_documents, digest, facts, dtype, parts, ends, starts, trained)


def _mapped(path: Path, dtype: str) -> memoryview:
    view = _map(path)
    itemsize = _DTYPES[dtype].itemsize
    if len(view) % itemsize:
        raise ConfigurationError(
            f"{path}: {len(view)} bytes are not a whole number of {dtype} tokens of {itemsize} bytes; "
            "it is cut off, or token_dtype is wrong"
        )
    return view.cast(_CODES[dtype])


def _map(path: Path) -> memoryview:
    """Read-only, so that the kernel reserves no memory for it however large it is."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ConfigurationError(f"{path}: is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _tensor(view: memoryview, dtype: str) -> Tensor:
    """A copy, int64: the mapping stays untouched by whoever writes into the tensor."""
    return torch.frombuffer(bytearray(view), dtype=_DTYPES[dtype]).long()
