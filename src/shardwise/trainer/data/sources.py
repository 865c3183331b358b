"""Documents from files and Hugging Face datasets, read one at a time.

Memory does not grow with a file: a text file is one document that is read in pieces, and rows are read one by one, from
Parquet a row group at a time. Compressed files are decompressed as they are read. A row that cannot be used is yielded
with its place and the problem; `rows` has the formats of rows.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from glob import glob
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, BinaryIO, cast

from ...base.errors import ConfigurationError, import_library
from .rows import Document, Reading, Row, from_rows

BYTE_ORDER_MARK = "\ufeff"
PIECE_BYTES = 2**16  # small, so that a batch has many pieces for the cores to share
MAX_ROW_BYTES = 64 * 2**20  # a longer line means that the file is of another kind
MAX_GROUP_BYTES = 4 * 2**30  # of a row group of Parquet, which is decoded as a whole
# Text shrinks to a fifth or a tenth. A file that grows far more was made to fill a disk.
MAX_GROWTH, FREE_GROWTH_BYTES = 200, 2**26


def read(path: Path, reading: Reading) -> Iterator[Document]:
    kind, _ = kind_of(path)
    try:
        yield from read_text(path) if kind in TEXTS else from_rows(READERS[kind](path), reading)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 text ({error.reason}); convert it with iconv") from error


def kind_of(path: Path) -> tuple[str, str]:
    """Return the suffixes of the kind and of the compression; each may be empty."""
    suffix = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), suffix) if suffix in OPENERS else (suffix, "")


def is_known(path: Path) -> bool:
    kind, compression = kind_of(path)
    return kind in TEXTS or (kind in READERS or kind == TOKENS) and not (compression and kind in (PARQUET, TOKENS))


def find_files(name: str) -> list[Path]:
    """Return the files that a file's name, a folder or a pattern stands for. ValueError says why there are none."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            raise ValueError("a dataset as `datasets` saves it: name it with --dataset")
        found = sorted(file for file in path.rglob("[!.]*") if file.is_file() and is_known(file))
        if any(kind_of(file)[0] in TEXTS for file in found) and any(kind_of(file)[0] not in TEXTS for file in found):
            raise ValueError("has both text and other files: choose with a pattern, as in 'FOLDER/*.jsonl'")
    elif path.exists() or not any(sign in name for sign in "*?["):
        found = [path]
    else:
        found = sorted(file for file in map(Path, glob(str(path), recursive=True)) if file.is_file())
    for file in found:
        if not file.is_file():
            raise ValueError("not a file" if file.exists() else "no such file")
        if not is_known(file):
            known = ", ".join((*TEXTS, *READERS, TOKENS))
            raise ValueError(f"{file.name} is of an unknown kind; known: {known}, all but the last two also compressed")
        if file.stat().st_size == 0:
            raise ValueError(f"{file.name if file != path else ''} is empty".strip())
    if not found:
        raise ValueError("no file of a known kind is there" if path.is_dir() else "no file matches")
    return found


class _Decompressed(io.RawIOBase):
    """A compressed file as it is read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._left = MAX_GROWTH * path.stat().st_size + FREE_GROWTH_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise ConfigurationError(f"{self._path}: cannot be decompressed ({error})") from error
        self._left -= len(data)
        if self._left < 0:
            raise ConfigurationError(
                f"{self._path}: grows to more than {MAX_GROWTH} times its size; if it is right, decompress it first"
            )
        buffer[: len(data)] = data
        return len(data)


def _opened(path: Path) -> BinaryIO:
    _, compression = kind_of(path)
    if not compression:
        return path.open("rb")
    return cast("BinaryIO", io.BufferedReader(_Decompressed(path, OPENERS[compression](path)), 2**16))


def _open_zst(path: Path) -> BinaryIO:
    return cast("BinaryIO", import_library("pyarrow", str(path)).input_stream(str(path), compression="zstd"))


def read_text(path: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Document]:
    """Read a file in pieces, cut neither inside a word nor inside whitespace. An empty file has no pieces."""
    rest, is_begun = "", False
    with _opened(path) as file:
        try:
            for text in codecs.iterdecode(iter(partial(file.read, piece_bytes), b""), "utf-8"):
                if rest:
                    at = _cut(rest)
                    yield Document(str(path), ((rest[:at], True),), is_last=False)
                    rest = rest[at:]
                rest += text if is_begun else text.removeprefix(BYTE_ORDER_MARK)
                is_begun = True
        except UnicodeDecodeError as error:
            at = file.tell() - len(error.object) + error.start
            raise ConfigurationError(
                f"{path}: not UTF-8 text: byte {at} is 0x{error.object[error.start]:02x} ({error.reason}); convert it "
                "with iconv"
            ) from error
    if rest:
        yield Document(str(path), ((rest, True),))


def _cut(text: str) -> int:
    """Where to cut: before the last line, else before the last word, else at the end."""
    for blank in ("\n", " "):
        at = len(text)
        while (at := text.rfind(blank, 0, at)) > 0:
            if at + 1 < len(text) and not text[at + 1].isspace() and (blank == "\n" or not text[at - 1].isspace()):
                # Most tokenizers join a space with the next word, and a newline with the line before it.
                return at + 1 if blank == "\n" else at
    return len(text)


def json_lines(path: Path, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row]:
    """Read a file with a JSON object per line. Blank lines are skipped."""
    with _opened(path) as file:
        number = 0
        while line := file.readline(max_row_bytes):
            number += 1
            where = f"{path}:{number}"
            if len(line) == max_row_bytes and not line.endswith(b"\n"):
                yield Row(where, None, f"longer than {max_row_bytes} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(max_row_bytes)
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                yield Row(where, json.loads(line.decode()))
            except UnicodeDecodeError as error:
                yield Row(where, None, f"not UTF-8 ({error.reason} at byte {error.start} of the line)")
            except (ValueError, RecursionError) as error:
                yield Row(where, None, f"not JSON ({error})")


def json_file(path: Path, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row]:
    """Read a list of objects, or an object with one list of them, one by one; or JSON lines in a file named .json."""
    with _opened(path) as file:
        first, second = file.readline(max_row_bytes), file.readline(max_row_bytes)
    if first.lstrip(codecs.BOM_UTF8).startswith(b"{") and first.rstrip().endswith(b"}") and second.startswith(b"{"):
        yield from json_lines(path, max_row_bytes)
        return
    with _opened(path) as file:
        text = _JsonText(path, io.TextIOWrapper(file, "utf-8-sig"), max_row_bytes)
        is_object, has_list = text.next_sign() == "{", False
        if is_object:
            text.take("{")
        while not is_object or text.next_sign() != "}":
            if is_object:
                name, _ = text.value(), text.take(":")
                if text.next_sign() != "[":
                    text.value()
                elif has_list:
                    raise text.error(f"a second list, {name!r}, but an object must have one list of rows")
            if text.next_sign() == "[" or not is_object:
                has_list = True
                text.take("[")
                while text.next_sign() != "]":
                    where = f"{path}:{text.line}"
                    yield Row(where, text.value())
                    if text.next_sign() != "]":
                        text.take(",")
                text.take("]")
            if not is_object:
                break
            if text.next_sign() != "}":
                text.take(",")
        if is_object:
            text.take("}")
        if text.next_sign():
            raise text.error("something follows its end")
        if not has_list:
            raise text.error("an object without a list of rows")


class _JsonText:
    """JSON of which the parts are read one after the other."""

    def __init__(self, path: Path, file: io.TextIOWrapper, most: int) -> None:
        self._path, self._file, self._most = path, file, most
        self._text, self._at, self.line = "", 0, 1
        self._decoder = json.JSONDecoder()

    def error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path}:{self.line}: {problem}")

    def next_sign(self) -> str:
        """Return the next sign that is not blank, without taking it; empty at the end of the file."""
        while True:
            while self._at < len(self._text):
                sign = self._text[self._at]
                if sign not in " \t\r\n":
                    return sign
                self.line += sign == "\n"
                self._at += 1
            self._text, self._at = self._file.read(PIECE_BYTES), 0
            if not self._text:
                return ""

    def take(self, sign: str) -> None:
        if self.next_sign() != sign:
            raise self.error(f"not JSON: {sign!r} is missing" if self._text else f"ends before {sign!r}: it is cut off")
        self._at += 1

    def value(self) -> Any:
        """Take a value. More text is read until it is whole; each time twice as much."""
        self.next_sign()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                is_whole, problem = end < len(self._text), ""
            except (ValueError, RecursionError) as error:
                is_whole, problem, end = False, getattr(error, "msg", str(error)), self._at
            size = len(self._text) - self._at
            more = "" if is_whole or size > self._most else self._file.read(max(size, PIECE_BYTES))
            if more:
                self._text, self._at = self._text[self._at :] + more, 0
                continue
            if problem:
                raise self.error(f"longer than {self._most} bytes" if size > self._most else f"not JSON ({problem})")
            self.line += self._text.count("\n", self._at, end)
            self._at = end
            return value


def table(path: Path, delimiter: str) -> Iterator[Row]:
    """Read lines of fields; the first has the names of the columns. A field in quotes may have several lines."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter)
        header: list[str] | None = None
        while True:
            where = f"{path}:{lines.line_num + 1}"
            try:
                fields = next(lines, None)
            except csv.Error as error:
                raise ConfigurationError(f"{where}: not a table ({error})") from error
            if fields is None:
                return
            if header is None:
                header = fields
            elif len(fields) != len(header):
                if fields:
                    yield Row(where, None, f"has {len(fields)} fields, but the first line {len(header)}")
            else:
                yield Row(where, dict(zip(header, fields, strict=True)))


def parquet(path: Path) -> Iterator[Row]:
    arrow, reader = (import_library(name, str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with reader.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)]
            if max(sizes, default=0) > MAX_GROUP_BYTES:
                limit = f"more than {MAX_GROUP_BYTES:,}: write smaller row groups"
                raise ConfigurationError(f"{path}: a row group has {max(sizes):,} bytes, {limit}")
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}:{number}", row)
    except (arrow.ArrowException, OSError) as error:
        raise ConfigurationError(f"{path}: cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from error


TEXTS, TOKENS, PARQUET = (".txt", ".md"), ".bin", ".parquet"
READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": json_lines,
    ".json": json_file,
    ".csv": partial(table, delimiter=","),
    ".tsv": partial(table, delimiter="\t"),
    PARQUET: parquet,
}
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}


def load_dataset(name: str, split: str) -> Any:
    """Open a folder written by `save_to_disk`, a folder of files, or a dataset by its hub id. All are memory-mapped."""
    datasets = import_library("datasets", f"dataset {name}")
    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(folder))
            if split in splits:
                return splits[split]
            problem = f"no split {split!r}; it has {', '.join(splits)}"
        elif (folder / "state.json").is_file():
            if split == "train":
                return datasets.load_from_disk(str(folder))
            problem = f"was saved without splits, so dataset_split {split!r} is not in it: leave it out"
        else:
            return datasets.load_dataset(str(folder) if folder.is_dir() else name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        problem = "cannot be read: " + str(error).strip().partition("\n")[0]
    raise ConfigurationError(f"dataset {name}, split {split}: {problem}")


def read_dataset(dataset: Any, name: str, reading: Reading) -> Iterator[Document]:
    return from_rows((Row(f"{name}:{number}", row) for number, row in enumerate(dataset, 1)), reading)


def manual() -> list[str]:
    """Return the default data, which every Python contains: half a million characters of its manual, by topic."""
    return [topics[name].strip() for name in sorted(topics)]
