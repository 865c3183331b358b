"""Documents from text files, JSON rows and Hugging Face datasets, read one at a time.

Memory does not grow with a file: a text file is one document that is read in pieces, and rows are read one by one. A
row has `messages`, or `prompt` and `completion`, or `text`; if it has several of them, the first in this order counts.
A row that cannot be used is yielded with its place and the problem.
"""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ...base.errors import ConfigurationError, import_library

SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "rows", ".bin": "tokens"}
BYTE_ORDER_MARK = "\ufeff"
PIECE_BYTES = 2**16  # small, so that a batch has many pieces for the cores to share
MAX_ROW_BYTES = 64 * 2**20  # a longer line means that the file is of another kind


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or a piece of one; or a row that cannot be used, because of a problem."""

    where: str
    texts: tuple[tuple[str, bool], ...] = ()  # (text, whether it is trained on)
    messages: Sequence[Mapping[str, Any]] = ()  # of a chat (then no texts): role and content; some are answers
    is_last: bool = True  # False: more pieces of the document follow
    problem: str = ""

    @property
    def is_row(self) -> bool:
        """True for a prompt with its completion, and for a chat."""
        return bool(self.messages) or len(self.texts) > 1

    @property
    def all_texts(self) -> list[str]:
        said = [str(message[key]) for message in self.messages for key in ("role", "content")]
        return said or [text for text, _ in self.texts]


def read(path: Path) -> Iterator[Document]:
    return read_text(path) if SUFFIXES[path.suffix.lower()] == "text" else read_rows(path)


def read_text(path: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Document]:
    """Read a file in pieces, cut neither inside a word nor inside whitespace. An empty file has no pieces."""
    rest, is_begun = "", False
    with path.open("rb") as file:
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


def read_rows(path: Path, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Document]:
    """Read a file with a JSON object per line. Blank lines are skipped."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_row_bytes):
            number += 1
            where = f"{path}:{number}"
            if len(line) == max_row_bytes and not line.endswith(b"\n"):
                yield Document(where, problem=f"longer than {max_row_bytes} bytes")
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
                yield Document(where, problem=f"not UTF-8 ({error.reason} at byte {error.start} of the line)")
            except (ValueError, RecursionError) as error:
                yield Document(where, problem=f"not JSON ({error})")
            else:
                yield from_row(row, where)


def from_row(row: Any, where: str) -> Document:
    try:
        document = Document(where, *_content(row))
        "".join(document.all_texts).encode()
    except UnicodeEncodeError:  # JSON can express a lone surrogate, but no tokenizer accepts it
        return Document(where, problem="half a surrogate pair, which is not a character")
    except ValueError as error:
        return Document(where, problem=str(error))
    return document


def _content(row: Any) -> tuple[tuple[tuple[str, bool], ...], Sequence[Mapping[str, Any]]]:
    """Return the texts and the messages of a row. Raise ValueError with the reason if the row cannot be used."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a JSON {type(row).__name__}, but a row must be an object")
    messages = row.get("messages")
    if messages is not None:
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one message")
        for number, message in enumerate(messages, 1):
            parts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"message {number} must have a role and a content that are strings")
        if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
            raise ValueError("no message of the assistant, so there is nothing to train on")
        return (), [dict(message) for message in messages]
    texts = {name: row[name] for name in ("prompt", "completion", "text") if row.get(name) is not None}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} is of type {type(text).__name__}, but must be a string")
    trained = "completion" if "prompt" in texts and "completion" in texts else "text"
    if trained not in texts:
        keys = ", ".join(map(str, row)) or "none"
        raise ValueError(f"has the keys {keys}, but needs text, or prompt and completion, or messages")
    if not texts[trained].strip():
        raise ValueError(f"{trained} is empty")
    prompt = ((texts["prompt"], False),) if trained == "completion" else ()
    return (*prompt, (texts[trained], True)), ()


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


def read_dataset(dataset: Any, name: str) -> Iterator[Document]:
    for number, row in enumerate(dataset, 1):
        yield from_row(row, f"{name}:{number}")


def manual() -> list[str]:
    """Return the default data, which every Python contains: half a million characters of its manual, by topic."""
    return [topics[name].strip() for name in sorted(topics)]
