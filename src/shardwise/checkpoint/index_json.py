"""Encode an `Index` as `index.json`, and decode it. docs/checkpoint-format.md describes every key.

The file is not trusted: every value is checked before it is used.
"""

import json
from dataclasses import asdict, astuple
from typing import Any

from ..base.errors import CheckpointError, DamageError
from ..base.json_file import parse
from .index import (
    DTYPES,
    MAX_COUNT,
    Check,
    File,
    Index,
    Optimizer,
    Piece,
    Plain,
    Saved,
    Stored,
    require_sound,
    shape_from,
)

FORMAT, FORMAT_VERSION = "shardwise checkpoint", 2


def to_json(index: Index) -> str:
    body = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "origin": index.origin,
        "files": [
            {"name": file.name, "num_bytes": file.num_bytes, "checks": [astuple(check) for check in file.checks]}
            for file in index.files
        ],
        "optimizer": None if index.optimizer is None else asdict(index.optimizer),
        "extra": index.extra,
    }
    # One by one: a million tensors are a gigabyte of lists and objects.
    tensors = ",".join(f"{_dumps(name)}:{_dumps(_saved_to_json(saved))}" for name, saved in index.tensors.items())
    return f'{_dumps(body)[:-1]},"tensors":{{{tensors}}}}}'


_dumps = json.JSONEncoder(separators=(",", ":")).encode


def _saved_to_json(saved: Saved) -> dict[str, Any]:
    return {
        **_stored_to_json(saved.stored),
        "kind": saved.kind,
        "is_trained": saved.is_trained,
        "tied": saved.tied,
        "group": saved.group,
        "state": {
            key: _stored_to_json(item) if isinstance(item, Stored) else item for key, item in saved.state.items()
        },
    }


def _stored_to_json(stored: Stored) -> dict[str, Any]:
    return {"shape": stored.shape, "dtype": stored.dtype, "pieces": [astuple(piece) for piece in stored.pieces]}


def from_json(text: str | bytes) -> Index:
    """Raises CheckpointError where the text is no index, of another format, or leads out of its folder or files."""
    try:
        given = parse(text)
        if (given["format"], given["version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"the index is {given['format']!r} version {given['version']!r}, and this shardwise reads {FORMAT!r} "
                f"version {FORMAT_VERSION}: load it with the shardwise that wrote it"
            )
        index = Index(
            tuple(_file(entry) for entry in given["files"]),
            {_text(name): _saved(entry) for name, entry in given["tensors"].items()},
            None if given["optimizer"] is None else _optimizer(given["optimizer"]),
            dict(given["extra"]),
            {str(key): str(value) for key, value in given["origin"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise DamageError(f"the index cannot be understood: {in_words(error)}") from error
    try:
        require_sound(index)
    except CheckpointError as error:
        raise DamageError(str(error)) from error
    return index


def in_words(error: Exception) -> str:
    """Describe for people why JSON could not be decoded."""
    match error:
        case json.JSONDecodeError():
            return f"it is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        case UnicodeDecodeError():
            return f"it is no text: byte {error.start} is none of UTF-8"
        case KeyError():
            return f"it has no {error.args[0]!r}"
        case TypeError() | AttributeError():
            return f"a value in it is of another kind than it should be ({error})"
    return str(error)


def _file(entry: Any) -> File:
    checks = tuple(Check(*(_count(number) for number in check)) for check in entry["checks"])
    return File(_text(entry["name"]), _count(entry["num_bytes"]), checks)


def _saved(entry: Any) -> Saved:
    kind = entry["kind"]
    if kind not in ("parameter", "buffer", "unknown"):
        raise ValueError(f"a tensor of kind {kind!r}")
    return Saved(
        _stored(entry),
        kind,
        None if entry["is_trained"] is None else bool(entry["is_trained"]),
        tuple(_text(name) for name in entry["tied"]),
        None if entry["group"] is None else _count(entry["group"]),
        {_text(key): _stored(item) if isinstance(item, dict) else _plain(item) for key, item in entry["state"].items()},
    )


def _stored(entry: Any) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r}")
    shape = shape_from(entry["shape"])
    return Stored(shape, entry["dtype"], tuple(Piece(*(_count(number) for number in p)) for p in entry["pieces"]))


def _optimizer(entry: Any) -> Optimizer:
    scaler = None if entry["scaler"] is None else {key: float(value) for key, value in entry["scaler"].items()}
    return Optimizer(_text(entry["name"]), tuple(dict(group) for group in entry["groups"]), scaler)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where a name is expected")
    value.encode()  # JSON can hold halves of characters, which no file's name and no terminal can
    return value


def _plain(value: Any) -> Plain:
    if not isinstance(value, Plain):
        raise ValueError(f"{value!r} where a plain value is expected")
    return value


def _count(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_COUNT:
        raise ValueError(f"{number!r} where a number of things is expected")
    return number
