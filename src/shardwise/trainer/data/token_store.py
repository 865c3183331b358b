"""The token store: a folder with the tokens of all documents, one after the other, each followed by the end token.

    tokens.bin     the tokens, uint16 or uint32; missing if the user's .bin files are used in place
    documents.bin  the start of each document, and the end of the last, int64
    trained.bin    a byte for each token: whether it is trained on; missing if all are
    store.json     a description, and the names of the token files

A store is written once. A reader loads only the part that it needs, and the ranks of a machine share the page cache. If
a file changes while it is used, the reader raises an error that names it. Numbers are in the machine's byte order,
which is little-endian wherever torch runs.

The digest of a store is a hash of its tokens, documents and mask alone. Stores of the same data have the same digest,
on every machine, in every folder.
"""

import hashlib
import json
import os
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import torch
from torch import Tensor

from ...base.documents import read_object
from ...base.errors import ConfigurationError, StoreError
from ...base.files import open_regular, read_at

_DTYPES = {"uint16": torch.uint16, "uint32": torch.uint32}
_CODES: dict[str, Literal["H", "I"]] = {"uint16": "H", "uint32": "I"}
_KEYS = ("tokens", "dtype", "num_tokens", "num_documents", "largest", "digest")  # of store.json; others are `facts`
_BLOCK, _SEARCH_BLOCK = 2**22, 2**9  # numbers to read at a time: from a whole file, and in a binary search
_MAX_OPEN = 256  # token files; if a store has more of them, each read opens its file and closes it
_FIX = "do not change data during a training; restore the file, and resume from the last checkpoint"
_MIN_TO_GUESS = 64  # numbers that are needed to notice a wrong dtype


class _NumberFile:
    """A file of numbers, read on demand.

    The file is not memory-mapped: if a mapped file is truncated, SIGBUS kills the processes that read it.
    """

    def __init__(self, path: Path, dtype: torch.dtype, stays_open: bool = True) -> None:
        self.path = path
        self._dtype = dtype
        file = open_regular(path)
        self._num_bytes = os.fstat(file).st_size
        self._file = file if stays_open else None
        if stays_open:
            weakref.finalize(self, os.close, file)
        else:
            os.close(file)
        if self._num_bytes == 0:
            raise ConfigurationError(f"{path}: is empty")
        if self._num_bytes % dtype.itemsize:
            raise ConfigurationError(
                f"{path}: {self._num_bytes} bytes are not a whole number of {dtype.itemsize}-byte numbers; it is cut "
                "off, or token_dtype is wrong"
            )

    def __len__(self) -> int:
        return self._num_bytes // self._dtype.itemsize

    def read(self, first: int, count: int) -> Tensor:
        return torch.frombuffer(self.read_bytes(first, count), dtype=self._dtype)

    def read_bytes(self, first: int, count: int) -> bytearray:
        """Return the bytes of `count` numbers from `first` on. Raise StoreError if the file has become too short."""
        content = bytearray(count * self._dtype.itemsize)
        try:
            file = open_regular(self.path) if self._file is None else self._file
            try:
                num_read = read_at(file, memoryview(content), first * self._dtype.itemsize)
                num_bytes = os.fstat(file).st_size
            finally:
                if self._file is None:
                    os.close(file)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot read training data: {error.strerror or error}") from error
        if num_read < len(content):
            why = f"it has {num_bytes} bytes, but had {self._num_bytes} when it was opened"
            raise StoreError(f"{self.path} is in use as training data: {why}: {_FIX}")
        return content


class Writer:
    """Writes documents piece by piece. `finish` writes store.json, which makes the folder a store."""

    def __init__(self, folder: Path, dtype: str, end_id: int) -> None:
        self.num_tokens = 0
        self.num_documents = 0
        self._folder = folder
        self._dtype = dtype
        self._end_id = end_id
        self._largest = 0
        self._last = (-1, True)  # the last token of the current document, and whether it is trained on
        self._tokens = (folder / "tokens.bin").open("wb")
        self._documents = (folder / "documents.bin").open("wb")
        self._trained: BinaryIO | None = None
        self._documents.write(array("q", [0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens, self._documents, self._trained):
            if file is not None:
                file.close()

    def add(self, ids: Sequence[int], trained: bool) -> None:
        if not ids:
            return
        self._tokens.write(array(_CODES[self._dtype], ids))
        if not trained and self._trained is None:
            self._trained = (self._folder / "trained.bin").open("wb")
            for first in range(0, self.num_tokens, _BLOCK):
                self._trained.write(b"\1" * min(_BLOCK, self.num_tokens - first))
        if self._trained is not None:
            self._trained.write((b"\1" if trained else b"\0") * len(ids))
        self.num_tokens += len(ids)
        self._largest = max(self._largest, *ids)
        self._last = (ids[-1], trained)

    def end_document(self) -> None:
        """Add the end token, unless a chat template has added it. It is trained on if the token before it is."""
        last, trained = self._last
        if last != self._end_id:
            self.add([self._end_id], trained)
        self._documents.write(array("q", [self.num_tokens]))
        self.num_documents += 1
        self._last = (-1, True)

    def finish(self, facts: dict[str, Any]) -> None:
        self.__exit__()
        values = [["tokens.bin"], self._dtype, self.num_tokens, self.num_documents, self._largest]
        _write_description(self._folder, values, facts)


def adopt(folder: Path, files: Sequence[Path], dtype: str, vocab_size: int, end_id: int, facts: dict[str, Any]) -> None:
    """Make `folder` a store of token files that stay where they are, and check all of their tokens.

    A document ends after each end token, and at the end of a file. Ids must be below `vocab_size`.
    """
    num_tokens = num_documents = largest = 0
    hashed = hashlib.sha256()
    with (folder / "documents.bin").open("wb") as documents:
        documents.write(array("q", [0]))
        for path in files:
            tokens = _NumberFile(path, _DTYPES[dtype])
            for first in range(0, len(tokens), _BLOCK):
                stored = tokens.read_bytes(first, min(_BLOCK, len(tokens) - first))
                hashed.update(stored)
                block = torch.frombuffer(stored, dtype=_DTYPES[dtype]).long()
                if first == 0 and dtype == "uint16" and block.numel() >= _MIN_TO_GUESS and not bool(block[1::2].any()):
                    raise ConfigurationError(
                        f"{path}: every second number is 0, as if uint32 were read as uint16: set --token-dtype uint32"
                    )
                largest = max(largest, int(block.max()))
                if largest >= vocab_size:
                    at = int((block >= vocab_size).nonzero()[0])
                    raise ConfigurationError(
                        f"{path}: token {first + at} is {int(block[at])}, but the model's ids are below {vocab_size}: "
                        f"give the --tokenizer that wrote the file, raise shape.vocab, or, if the file is not {dtype}, "
                        "set token_dtype"
                    )
                is_end = block == end_id
                if first + block.numel() == len(tokens):
                    is_end[-1] = True
                ends = is_end.nonzero().flatten() + (num_tokens + first + 1)
                documents.write(array("q", ends.tolist()))
                num_documents += ends.numel()
            num_tokens += len(tokens)
    values = [[str(path.resolve()) for path in files], dtype, num_tokens, num_documents, largest]
    _write_description(folder, values, facts, [hashed.hexdigest()])


def _write_description(
    folder: Path, values: Sequence[Any], facts: dict[str, Any], token_hashes: Sequence[str] = ()
) -> None:
    """Flush the other files to disk, then write store.json. `values` belong to `_KEYS`, without the digest.

    The digest is a hash of the hashes of tokens, documents and mask. `token_hashes`: for tokens outside `folder`.
    """
    hashes = [*token_hashes]
    for path in (folder / "tokens.bin", folder / "documents.bin", folder / "trained.bin"):
        if path.exists():
            with path.open("r+b") as file:  # some file systems flush only files that are open for writing
                os.fsync(file.fileno())
                hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    digest = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    description = {**dict(zip(_KEYS, [*values, digest], strict=True)), **facts}
    with (folder / "store.json").open("w") as file:
        file.write(json.dumps(description, indent=1))
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class Store:
    """An open store. `facts` are the entries of store.json that have no field here. One of them, `is_rows`, is True if
    some documents are prompts with completions, or chats."""

    num_tokens: int
    num_documents: int
    digest: str  # hash of the content
    facts: dict[str, Any]
    _largest: int = field(repr=False)  # largest token id
    _parts: tuple[_NumberFile, ...] = field(repr=False)  # one per token file
    _ends: tuple[int, ...] = field(repr=False)  # end of each part, in tokens
    _starts: _NumberFile = field(repr=False)  # start of each document, and the end of the last
    _trained: _NumberFile | None = field(repr=False)

    def tokens(self, first: int, count: int) -> Tensor:
        """Return `count` tokens from `first` on, as int64."""
        pieces = []
        index = bisect_right(self._ends, first)
        while count > 0:
            part = self._parts[index]
            at = first - (self._ends[index] - len(part))
            piece = part.read(at, min(count, len(part) - at)).long()
            if int(piece.max()) > self._largest:
                wrong = int((piece > self._largest).nonzero()[0])
                raise StoreError(
                    f"{part.path} is in use as training data: token {at + wrong} is {int(piece[wrong])}, but the "
                    f"largest was {self._largest} when it was checked: {_FIX}"
                )
            pieces.append(piece)
            first += piece.numel()
            count -= piece.numel()
            index += 1
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def trained(self, first: int, count: int) -> Tensor | None:
        """Return a bool mask of the tokens that are trained on, or None if all are."""
        return None if self._trained is None else self._trained.read(first, count)

    def document(self, index: int) -> tuple[int, int]:
        """Return the start of a document and its number of tokens, including the end token."""
        start, stop = self._starts.read(index, 2).tolist()
        self._require_increasing([start, stop], -1, self.num_tokens + 1)
        return start, stop - start

    def starts_within(self, first: int, count: int) -> list[int]:
        """Return the starts of all documents that start after token `first` and before `first + count`."""
        low, high = 0, len(self._starts)
        while high - low > _SEARCH_BLOCK:
            middle = (low + high) // 2
            low, high = (middle, high) if int(self._starts.read(middle, 1)) <= first else (low, middle)
        starts: list[int] = []
        for at in range(low, len(self._starts), _SEARCH_BLOCK):
            block = self._starts.read(at, min(_SEARCH_BLOCK, len(self._starts) - at)).tolist()
            starts += block[bisect_right(block, first) : bisect_left(block, first + count)]
            if block[-1] >= first + count:
                break
        self._require_increasing(starts, first, first + count)
        return starts

    def document_lengths(self) -> Iterator[Tensor]:
        """Yield the lengths of all documents in order, in blocks that fit into memory."""
        for first in range(0, self.num_documents, _BLOCK):
            count = min(_BLOCK, self.num_documents - first) + 1
            yield self._starts.read(first, count).diff()

    def _require_increasing(self, starts: Sequence[int], above: int, below: int) -> None:
        if not all(low < high for low, high in pairwise([above, *starts, below])):
            why = f"has documents at the tokens {list(starts)[:4]}, which must rise from {above} to {below}"
            raise StoreError(f"{self._starts.path} {why}: {_FIX}")


def is_store(folder: Path) -> bool:
    return (folder / "store.json").is_file()


def open_store(folder: Path) -> Store:
    try:
        facts = read_object(folder / "store.json", "store.json")
        names, dtype, num_tokens, num_documents, largest, digest = (facts.pop(key) for key in _KEYS)
        parts = tuple(_NumberFile(folder / name, _DTYPES[dtype], len(names) <= _MAX_OPEN) for name in names)
        starts = _NumberFile(folder / "documents.bin", torch.int64)
        trained = _NumberFile(folder / "trained.bin", torch.bool) if (folder / "trained.bin").exists() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{folder}: a damaged token store ({error}); delete the folder") from error
    ends = tuple(accumulate(len(part) for part in parts))
    for name, num, written in (
        ("tokens", ends[-1], num_tokens),
        ("documents", len(starts) - 1, num_documents),
        ("trained", num_tokens if trained is None else len(trained), num_tokens),
    ):
        if num != written:
            why = f"{num} {name}, but {written} were written"
            raise ConfigurationError(f"{folder}: a damaged token store: {why}; delete the folder")
    return Store(num_tokens, num_documents, digest, facts, largest, parts, ends, starts, trained)
