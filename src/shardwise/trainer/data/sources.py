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
MAX_JSON_BYTES = 2**29  # a .json file is parsed as a whole
MAX_GROUP_BYTES = 4 * 2**30  # of a row group of Parquet, which is decoded as a whole


def read(path: Path, reading: Reading) -> Iterator[Document]:
    kind, _ = kind_of(path)
    try:
        yield from read_text(path) if kind in TEXTS else from_rows(READERS[kind](path), reading)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 text ({error.reason}); convert it with iconv") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error


def kind_of(path: Path) -> tuple[str, str]:
    """Return the suffixes of the kind and of the compression; each may be empty."""
    suffix = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), suffix) if suffix in OPENERS else (suffix, "")


def is_known(path: Path) -> bool:
    kind, compression = kind_of(path)
    return kind in {*TEXTS, *READERS, TOKENS} and not (compression and kind in (PARQUET, TOKENS))


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
        found = sorted(file for file in map(Path, glob(str(path), recursive=True)) if file.is_file())  # noqa: PTH207
    for file in found:
        problem = "is empty" if file.is_file() and file.stat().st_size == 0 else ""
        if not file.is_file():
            problem = "not a file" if file.exists() else "no such file"
        elif not is_known(file):
            known = ", ".join((*TEXTS, *READERS, TOKENS))
            problem = f"an unknown kind; known: {known}, all but the last two also compressed ({', '.join(OPENERS)})"
        if problem:
            raise ValueError(problem if file == path else f"{file.name}: {problem}")
    if not found:
        raise ValueError("no file of a known kind is there" if path.is_dir() else "no file matches")
    return found


def _opened(path: Path) -> BinaryIO:
    compression = kind_of(path)[1]
    return cast("BinaryIO", OPENERS[compression](path) if compression else path.open("rb"))


def _open_zst(path: Path) -> Any:
    return io.BufferedReader(import_library("pyarrow", str(path)).input_stream(str(path), compression="zstd"))


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


def json_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Iterator[Row]:
    """Read a list of objects, or an object with one list of them; or JSON lines in a file named .json."""
    with _opened(path) as file:
        first, second = file.readline(MAX_ROW_BYTES), file.readline(MAX_ROW_BYTES)
        is_lines = first.rstrip().endswith(b"}") and second.startswith(b"{")
        text = b"" if is_lines else first + second + file.read(max_bytes)
    if is_lines:
        yield from json_lines(path)
        return
    if len(text) > max_bytes:
        raise ConfigurationError(f"{path}: more than {max_bytes:,} bytes; write one object per line, as .jsonl")
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not JSON ({error})") from error
    del text
    if isinstance(value, dict):
        lists = [part for part in value.values() if isinstance(part, list)]
        value = lists[0] if len(lists) == 1 else None
    if not isinstance(value, list):
        raise ConfigurationError(f"{path}: neither a list of objects nor an object with one list")
    for number, row in enumerate(value, 1):
        yield Row(f"{path}:{number}", row)


def table(path: Path, delimiter: str) -> Iterator[Row]:
    """Read lines of fields; the first has the names of the columns. A field in quotes may have several lines."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter)
        header: list[str] = []
        while True:
            where = f"{path}:{lines.line_num + 1}"
            try:
                fields = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                raise ConfigurationError(f"{where}: not a table ({error})") from error
            if header and fields and len(fields) != len(header):
                yield Row(where, None, f"has {len(fields)} fields, but the first line {len(header)}")
            elif header and fields:
                yield Row(where, dict(zip(header, fields, strict=True)))
            header = header or fields


def parquet(path: Path) -> Iterator[Row]:
    arrow, reader = (import_library(name, str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    number = 0
    try:
        with reader.ParquetFile(path) as file:
            size = max((file.metadata.row_group(at).total_byte_size for at in range(file.num_row_groups)), default=0)
            if size > MAX_GROUP_BYTES:
                raise ConfigurationError(f"{path}: a row group has {size:,} bytes; write groups of at most 4 GB")
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
