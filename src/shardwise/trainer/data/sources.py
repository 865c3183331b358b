"""Documents from text files, JSON rows and Hugging Face datasets, read one at a time.

Memory does not grow with a file: a text file is one document that is read in pieces, and rows are read one by one. A
row has `messages`, or `prompt` and `completion`, or `text`; if it has several of them, the first in this order counts.
A row that cannot be used becomes `Bad`, with its place and the reason.
"""

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, BinaryIO

from ...base.errors import ConfigurationError

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl",)
TOKEN_SUFFIXES = (".bin",)

PIECE_BYTES = 2**16  # small enough for many per batch, which cores share
MAX_ROW_BYTES = 64 * 2**20  # a longer line means that the file is of another kind


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document that is trained on completely."""

    text: str
    is_last: bool  # in its document


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: str
    completion: str  # the only part that is trained on


@dataclass(frozen=True, slots=True)
class Chat:
    where: str
    messages: list[dict[str, Any]]  # each with role and content, at least one answer


@dataclass(frozen=True, slots=True)
class Bad:
    where: str
    reason: str


Found = Piece | Pair | Chat | Bad


def read(path: Path) -> Iterator[Found]:
    return read_text(path) if path.suffix.lower() in TEXT_SUFFIXES else read_rows(path)


def read_text(path: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Read a file in pieces that split neither words nor runs of blanks. An empty file has no pieces."""
    rest = ""
    with path.open("rb") as file:
        for text in _decoded(file, path, piece_bytes):
            if rest:
                at = _cut(rest)
                yield Piece(rest[:at], is_last=False)
                rest = rest[at:]
            rest += text
    if rest:
        yield Piece(rest, is_last=True)


def _decoded(file: BinaryIO, path: Path, piece_bytes: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_read = 0
    while True:
        block = file.read(piece_bytes)
        pending = len(decoder.getstate()[0])  # the first bytes of a character that the last block split
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{path}: not UTF-8 text: byte {num_read - pending + error.start} is "
                f"0x{error.object[error.start]:02x} ({error.reason}); convert it with iconv"
            ) from error
        if not block:
            return
        yield text.removeprefix("\ufeff") if num_read == 0 else text
        num_read += len(block)


def _cut(text: str) -> int:
    """Where to cut: before the last line, else before the last word, else at the end."""
    for blank in ("\n", " "):
        at = len(text)
        while (at := text.rfind(blank, 0, at)) > 0:
            if at + 1 < len(text) and not text[at + 1].isspace() and (blank == "\n" or not text[at - 1].isspace()):
                # Most tokenizers join a space with the next word, and a newline with the line before it.
                return at + 1 if blank == "\n" else at
    return len(text)


def read_rows(path: Path, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Found]:
    """Read a file with a JSON object per line. Blank lines are skipped."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_row_bytes):
            number += 1
            where = f"{path}:{number}"
            if len(line) == max_row_bytes and not line.endswith(b"\n"):
                yield Bad(where, f"longer than {max_row_bytes} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(max_row_bytes)
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                yield Bad(where, f"not UTF-8 ({error.reason} at byte {error.start} of the line)")
            except (ValueError, RecursionError) as error:
                yield Bad(where, f"not JSON ({error})")
            else:
                yield from_row(row, where)


def from_row(row: Any, where: str) -> Found:
    if not isinstance(row, Mapping):
        return Bad(where, f"a JSON {type(row).__name__}, but a row must be an object")
    found = _from_keys(row, where)
    return found if _is_unicode(found) else Bad(where, "half a surrogate pair, which is not a character")


def _from_keys(row: Mapping[str, Any], where: str) -> Found:
    if row.get("messages") is not None:
        return _from_messages(row["messages"], where)
    given = [name for name in ("prompt", "completion", "text") if row.get(name) is not None]
    for name in given:
        if not isinstance(row[name], str):
            return Bad(where, f"{name} is of type {type(row[name]).__name__}, but must be a string")
    if "prompt" in given and "completion" in given:
        if not row["completion"].strip():
            return Bad(where, "completion is empty")
        return Pair(row["prompt"], row["completion"])
    if "text" in given:
        return Piece(row["text"], is_last=True) if row["text"].strip() else Bad(where, "text is empty")
    keys = ", ".join(map(str, row)) or "none"
    return Bad(where, f"has the keys {keys}, but needs text, or prompt and completion, or messages")


def _from_messages(messages: Any, where: str) -> Chat | Bad:
    if not isinstance(messages, list) or not messages:
        return Bad(where, "messages must be a list of at least one message")
    for number, message in enumerate(messages, 1):
        is_message = isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not is_message:
            return Bad(where, f"message {number} must have a role and a content that are strings")
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        return Bad(where, "no message of the assistant, so there is nothing to train on")
    return Chat(where, [dict(message) for message in messages])


def texts(found: Found) -> list[str]:
    """All texts of a document."""
    if isinstance(found, Chat):
        return [text for message in found.messages for text in (message["role"], message["content"])]
    if isinstance(found, Pair):
        return [found.prompt, found.completion]
    return [found.text] if isinstance(found, Piece) else []


def _is_unicode(found: Found) -> bool:
    """False for half a surrogate pair, which JSON can express but no tokenizer accepts."""
    try:
        "".join(texts(found)).encode()
    except UnicodeEncodeError:
        return False
    return True


def load_dataset(name: str, split: str) -> Any:
    """Open a folder written by `save_to_disk`, a folder of files, or an id. All are memory-mapped."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(
            f"dataset {name}: needs datasets, which is not installed: pip install 'shardwise[hf]'"
        ) from error
    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(folder))
            if split not in splits:
                raise ConfigurationError(f"dataset {name}: no split {split!r}; it has {', '.join(splits)}")
            return splits[split]
        if (folder / "state.json").is_file():
            if split != "train":
                raise ConfigurationError(
                    f"dataset {name}: was saved without splits, so dataset_split {split!r} is not in it: leave it out"
                )
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(str(folder) if folder.is_dir() else name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, ConfigurationError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(f"dataset {name}, split {split}: cannot be read: {reason}") from error


def read_dataset(dataset: Any, name: str) -> Iterator[Found]:
    for number, row in enumerate(dataset, 1):
        yield from_row(row, f"{name}:{number}")


def manual() -> list[str]:
    """The default data, in every Python: half a million characters of its manual, by topic in order of names."""
    return [topics[name].strip() for name in sorted(topics)]
