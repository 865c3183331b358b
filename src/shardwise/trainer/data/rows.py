"""Rows of training data as documents: the formats in which people write them, recognised by their columns.

FORMATS is a table from columns to the function that reads such rows; the first entry of which a row has a column
counts. The first usable row of a file fixes the format of the file, and a row of another format is an error. A value
that is None is missing: Parquet files and datasets have every column in every row.

Chats become messages as chat templates expect them: roles by their usual names, contents as strings, the arguments of
tool calls as objects. `train` in a message says whether it is trained on; without it, answers are.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...base.errors import ConfigurationError

ANSWERING = "assistant"
ROLES: dict[str, tuple[str, ...]] = {  # and their names in files
    "user": ("user", "human"),
    ANSWERING: (ANSWERING, "gpt", "chatgpt", "model", "bot", "function_call"),
    "system": ("system", "developer"),
    "tool": ("tool", "observation", "function", "function_response"),
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
PREFERENCE = "preference (chosen, rejected)"
CHATS = ("messages", "conversations", "conversation")
COLUMNS = (
    "text", "messages", "tools", "prompt", "completion", "instruction", "input", "output", "system", "history",
    "chosen", "rejected", "role", "content",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or a piece of one; or a row that cannot be used, because of a problem."""

    where: str
    texts: tuple[tuple[str, bool], ...] = ()  # (text, whether it is trained on)
    messages: Sequence[Mapping[str, Any]] = ()  # of a chat (then no texts): role and content; some are trained on
    is_last: bool = True  # False: more pieces of the document follow
    problem: str = ""
    tools: Sequence[Mapping[str, Any]] = ()  # that a chat may call
    rejected: "Document | None" = None  # of a preference row: this document has the chosen answer, that one the other
    form: str = field(default="text", compare=False)  # name of the format

    @property
    def is_row(self) -> bool:
        """True for a prompt with its completion, and for a chat."""
        return bool(self.messages) or len(self.texts) > 1

    @property
    def sides(self) -> list["Document"]:
        """The document or, of a preference row, both."""
        return [self] if self.rejected is None else [self, self.rejected]

    @property
    def all_texts(self) -> list[str]:
        said = [str(message[key]) for message in self.messages for key in ("role", "content")]
        return said or [text for text, _ in self.texts]


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read."""

    columns: Mapping[str, str] = field(default_factory=dict)  # our names, and the names in the files
    roles: Sequence[str] = (ANSWERING,)  # that are trained on
    renamed: set[str] = field(default_factory=set)  # our names of the columns that were there

    def rename(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        given = {ours: row[theirs] for ours, theirs in self.columns.items() if theirs in row}
        self.renamed.update(given)
        return {**{key: row[key] for key in row if key not in self.columns.values()}, **given} if given else row


class Row(NamedTuple):
    where: str
    value: Any
    problem: str = ""


class Format(NamedTuple):
    name: str
    columns: tuple[str, ...]  # a row with one of them has this format
    read: Callable[[Mapping[str, Any], Reading, str], Document]


def from_rows(rows: Iterable[Row], reading: Reading) -> Iterator[Document]:
    """Yield the documents of one file. Raise if a usable row has another format than the first one."""
    first = None
    for where, row, problem in rows:
        document = Document(where, problem=problem) if problem else _read(row, reading, where)
        if not document.problem:
            first = first or document
            if document.form != first.form:
                raise ConfigurationError(
                    f"{where}: a row of the format {document.form}, but {first.where} is of the format {first.form}: "
                    "make one file of each format"
                )
        yield document


def _read(row: Any, reading: Reading, where: str) -> Document:
    try:
        if not isinstance(row, Mapping):
            raise ValueError(f"a JSON {type(row).__name__}, but a row must be an object")
        row = reading.rename(row)
        form = next((form for form in FORMATS if any(row.get(key) is not None for key in form.columns)), None)
        if form is None:
            keys = ", ".join(map(str, row)) or "none"
            wanted = "text, prompt and completion, messages, instruction and output, or chosen and rejected"
            raise ValueError(f"has the keys {keys}, but needs {wanted} (--columns gives other names)")
        document = form.read(row, reading, where)
        "".join(text for side in document.sides for text in side.all_texts).encode()
    except UnicodeEncodeError:  # JSON can express a lone surrogate, but no tokenizer accepts it
        return Document(where, problem="half a surrogate pair, which is not a character")
    except ValueError as error:
        return Document(where, problem=str(error))
    return replace(document, form=form.name)


# Formats


def _completion(row: Mapping[str, Any], reading: Reading, where: str) -> Document:
    """Strings are text without a chat template, as in TRL; lists of messages are a chat."""
    prompt, completion, roles = row.get("prompt"), row["completion"], {*reading.roles}
    if isinstance(prompt, list) or isinstance(completion, list):
        question = _messages(prompt, "prompt", reading, "user") if prompt else []
        question = question if roles & {"user", "system", "all"} else _untrained(question)
        return _chat([*question, *_messages(completion, "completion", reading, ANSWERING)], row, reading, where)
    parts = ((_string(row, "prompt", True), {"user", "all"}), (_string(row, "completion"), {ANSWERING, "last", "all"}))
    if not roles & {"user", ANSWERING, "last", "all"}:
        raise ValueError(f"has a prompt and a completion, but nothing of {' or '.join(reading.roles)}")
    return Document(where, tuple((text, bool(roles & of)) for text, of in parts))


def _instruction(row: Mapping[str, Any], reading: Reading, where: str) -> Document:
    answer = {"role": ANSWERING, "content": _string(row, "output")}
    return _chat([*_question(row, reading), answer], row, reading, where)


def _preference(row: Mapping[str, Any], reading: Reading, where: str) -> Document:
    """Two answers to one prompt. Only they are compared, so `roles` of the reading do not matter."""
    for name in ("chosen", "rejected"):
        if not row.get(name):
            raise ValueError(f"a preference row needs a chosen and a rejected answer, but its {name} is missing")
    is_chat = any(row.get(name) for name in (*CHATS, "instruction", "system")) or isinstance(row.get("prompt"), list)
    if isinstance(row["chosen"], str) and isinstance(row["rejected"], str) and not is_chat:
        return _texts_compared(row["chosen"], row["rejected"], row, where)
    prompt = _question(row, reading)
    sides = [_messages(row[name], name, reading, ANSWERING) for name in ("chosen", "rejected")]
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    if (begins := sides[0][0]["role"]) in ("system", "user"):  # both sides repeat the prompt
        prompt = [message for message in prompt[:1] if message["role"] == "system" != begins]
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if not any(message["role"] == ANSWERING for message in side[shared:]):
            raise ValueError(f"{name} has no message of the assistant after the prompt")
    documents = []
    for side in sides:
        answer = [{**message, "train": message["role"] == ANSWERING} for message in side[shared:]]
        documents.append(Document(where, (), [*_untrained([*prompt, *side[:shared]]), *answer], tools=_tools(row)))
    return replace(documents[0], rejected=documents[1])


def _texts_compared(chosen: str, rejected: str, row: Mapping[str, Any], where: str) -> Document:
    """Texts without a chat template. Without a prompt it is what both begin with, up to the last whole word."""
    if row.get("prompt") is not None:
        prompt = _string(row, "prompt", may_be_empty=True)
    else:
        if chosen == rejected:
            raise ValueError("chosen and rejected are equal, so it is unknown where the answers begin")
        shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071  of texts, not of paths
        prompt = shared[: max(shared.rfind(" "), shared.rfind("\n") + 1, 0)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not chosen.strip() or not rejected.strip():
        raise ValueError("chosen or rejected is empty")
    other = Document(where, ((prompt, False), (rejected, True)))
    return Document(where, ((prompt, False), (chosen, True)), rejected=other)


FORMATS = (
    Format(PREFERENCE, ("chosen", "rejected"), _preference),
    Format("messages", CHATS, lambda row, reading, where: _chat(_question(row, reading), row, reading, where)),
    Format("instruction, output", ("instruction",), _instruction),
    Format("prompt, completion", ("completion",), _completion),
    Format("text", ("text",), lambda row, _, where: Document(where, ((_string(row, "text"), True),))),
)


# Parts of rows


def _string(row: Mapping[str, Any], name: str, may_be_empty: bool = False) -> str:
    text = row.get(name)
    if text is None:
        raise ValueError(f"has the keys {', '.join(map(str, row))}, but needs {name}, too")
    if not isinstance(text, str):
        raise ValueError(f"{name} is of type {type(text).__name__}, but must be a string")
    if not may_be_empty and not text.strip():
        raise ValueError(f"{name} is empty")
    return text


def _question(row: Mapping[str, Any], reading: Reading) -> list[dict[str, Any]]:
    """The messages of a row before its answer, from any of the formats for chats."""
    named = next((name for name in (*CHATS, "instruction", "prompt") if row.get(name) is not None), None)
    found: list[dict[str, Any]] = []
    if named == "instruction":
        for pair in row.get("history") or []:
            if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise ValueError("history must be a list of pairs of strings: a question and its answer")
            found += [{"role": "user", "content": pair[0]}, {"role": ANSWERING, "content": pair[1]}]
        parts = [_string(row, name, may_be_empty=True) for name in ("instruction", "input") if row.get(name)]
        found.append({"role": "user", "content": "\n".join(parts)})
    elif named is not None:
        found = _messages(row[named], named, reading, "user")
    if row.get("system") and not (found and found[0]["role"] == "system"):
        found.insert(0, {"role": "system", "content": _string(row, "system")})
    return found


def _chat(messages: list[dict[str, Any]], row: Mapping[str, Any], reading: Reading, where: str) -> Document:
    """Mark the messages that are trained on: those with a mark of their own, else those of the roles."""
    answers = [index for index, message in enumerate(messages) if message["role"] == ANSWERING]
    roles, has_targets = reading.roles, False
    for index, message in enumerate(messages):
        by_role = message["role"] in roles or "all" in roles or ("last" in roles and index in answers[-1:])
        is_trained = message.pop("train", by_role)
        has_targets |= is_trained and (message["content"].strip() != "" or "tool_calls" in message)
        if is_trained != (message["role"] == ANSWERING):
            message["train"] = is_trained
    if not has_targets:
        who = "the assistant" if {*roles} <= {ANSWERING, "last"} else " or ".join(roles)
        raise ValueError(f"no message of {who}, so there is nothing to train on")
    return Document(where, (), messages, tools=_tools(row))


def _untrained(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "train": False} for message in messages]


def _messages(value: Any, name: str, reading: Reading, role: str) -> list[dict[str, Any]]:
    """Return the messages of a column. A string is one message of this role, unless it is JSON of a list."""
    if isinstance(value, str):
        if name not in CHATS:
            return [{"role": role, "content": value}]
        value = _from_json(value)
    value = [value] if isinstance(value, Mapping) and name not in CHATS else value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of at least one message")
    return [_message(message, number, reading) for number, message in enumerate(value, 1)]


def _message(given: Any, number: int, reading: Reading) -> dict[str, Any]:
    row = reading.rename(given) if isinstance(given, Mapping) else {}
    role, content = (row.get(ours, row.get(theirs)) for ours, theirs in (("role", "from"), ("content", "value")))
    message = {key: _whole(value) for key, value in row.items() if value is not None and key not in _READ}
    calls = [*_calls(row.get("tool_calls") or []), *_calls([row["function_call"]] if row.get("function_call") else [])]
    if role == "function_call":
        found = _from_json(content)
        calls, content = _calls(found if isinstance(found, list) else [found]), ""
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        if other := [str(part.get("type")) for part in parts if not isinstance(part.get("text"), str)]:
            raise ValueError(f"message {number} has a part of type {other[0]}, but only text can be used")
        content = "".join(part["text"] for part in parts)
    content = "" if content is None and calls else content
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"message {number} must have a role and a content that are strings")
    marks = [row[name] for name in _MARKS if row.get(name) is not None]
    if any(mark not in (0, 1) for mark in marks):
        raise ValueError(f"message {number}: weight, train or training is {marks[0]!r}, but must be 0 or 1")
    message = {"role": _ROLE_OF.get(role.lower(), role), "content": content, **message}
    return {**message, **({"tool_calls": calls} if calls else {}), **({"train": all(marks)} if marks else {})}


_MARKS = ("weight", "train", "training")
_READ = {"role", "from", "content", "value", "tool_calls", "function_call", *_MARKS}


def _calls(given: Any) -> list[dict[str, Any]]:
    """Return tool calls as chat templates expect them: arguments are an object, also if they were written as JSON."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        call = call if isinstance(call, Mapping) else {}
        function = _whole(call.get("function") or {key: call[key] for key in ("name", "arguments") if key in call})
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call needs the name of a function")
        arguments = function.get("arguments")
        function["arguments"] = (_from_json(arguments) if isinstance(arguments, str) else arguments) or {}
        calls.append({"type": "function", "function": function, **({"id": call["id"]} if call.get("id") else {})})
    return calls


def _tools(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = row.get("tools") or []
    tools = _from_json(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("tools must be a list of objects")
    return tuple(_whole(tool) for tool in tools)


def _from_json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(text)[:40]!r} is not JSON ({error})") from None


def _whole(value: Any) -> Any:
    """Leave out what is None: in Parquet files and datasets every object has the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _whole(part) for key, part in value.items() if part is not None}
    return [_whole(part) for part in value] if isinstance(value, list) else value
