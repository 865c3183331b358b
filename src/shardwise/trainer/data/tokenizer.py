"""Tokenizers: one value with functions in it, so that no other code depends on the kind.

"bytes" needs no files and no library: ids 0 to 255 are bytes, 256 ends a document. Every other name is a Hugging Face
tokenizer, from a folder or by its id; transformers is imported only then. No special tokens are added to text; a chat
has those of its template.

A chat becomes segments of tokens. A segment is trained on, or not. A tokenizer with a chat template renders the chat to
text. To find the answers, it also renders prefixes of the chat: the text that message i adds after the generation
prompt is its answer. Some templates write an earlier message differently from a last one. Then the chat is rendered
with other contents of the message, which shows where its content is; if that is not clear, it is an error. If a
template has `generation` tags around its answers, those count. A tokenizer without a chat template uses the plain one:

    user:
    What is 2 + 2?

    assistant:
    4<end>

This is the role, a colon, the content, and a blank line between two messages; an answer ends with the end token.
Segments are encoded one by one, as in generation, where the prompt is encoded before there is an answer.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from ...base.documents import read_text
from ...base.errors import ConfigurationError, import_library
from .rows import ANSWERING

Message = Mapping[str, Any]
Segments = list[tuple[list[int], bool]]
# Messages, whether to add a generation prompt, and tools -> text.
Template = Callable[..., str]
Span = tuple[int, int]

ANY_ANSWER = "answer"  # rendered to see which token a template writes after an answer


@dataclass(frozen=True, slots=True)
class Tokenizer:
    name: str
    vocab_size: int
    end_id: int  # ends a document
    encode_batch: Callable[[list[str]], list[list[int]]]
    decode: Callable[[Sequence[int]], str]  # without special tokens
    template: Template | None  # None: the plain template
    fingerprint: Callable[[], str]  # hash of everything that affects the tokens; slow, so computed on demand
    show: Callable[[Sequence[int]], str]  # decode with special tokens
    tagged: Callable[..., list[Span]] = lambda *_: []  # messages, tools -> the parts of the text in `generation` tags

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Segments:
        """Return a chat as segments: (tokens, whether they are trained on). ConfigurationError if the template fails.

        Messages with `train` say so themselves; of the others, answers are trained on.
        """
        trained = [bool(message.get("train", message["role"] == ANSWERING)) for message in messages]
        plain = [{key: value for key, value in message.items() if key != "train"} for message in messages]
        is_all = all(trained) and any(message["role"] != ANSWERING for message in messages)
        if self.template is not None:
            whole = self.template(plain, False, tools)
            silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in plain]
            if (tools and whole == self.template(plain, False)) or (
                silent != plain and whole == self.template(silent, False, tools)
            ):
                raise ConfigurationError("the chat template leaves out tools or their calls: give one that writes them")
            spans = [(0, len(whole))] if is_all else self._spans(plain, trained, whole, tools)
            return _cut(whole, spans, self.encode)
        if tools or any("tool_calls" in message for message in messages):
            raise ConfigurationError(f"tokenizer {self.name} has no chat template, so tool calls cannot be written")
        segments: Segments = []
        pending = ""
        for message, is_trained in zip(plain, trained, strict=True):
            pending += f"{message['role']}:\n"
            is_answer = message["role"] == ANSWERING
            if is_answer or is_trained:
                ids = [*self.encode(message["content"]), *([self.end_id] if is_answer else [])]
                segments += [(self.encode(pending), is_all), (ids, is_trained)]
                pending = "\n\n"
            else:
                pending += f"{message['content']}\n\n"
        # Blanks after the last answer would teach the model that something follows the end.
        return [*segments, (self.encode(pending), False)] if pending.strip() else segments

    def _spans(
        self, messages: Sequence[Message], trained: Sequence[bool], whole: str, tools: Sequence[Message]
    ) -> list[Span]:
        """Return the parts of the text that are trained on: those in tags, or found by rendering."""
        assert self.template is not None
        tagged = self.tagged(messages, tools)
        answers = [index for index, message in enumerate(messages) if message["role"] == ANSWERING]
        chosen = [index for index, is_trained in enumerate(trained) if is_trained]
        if tagged and len(tagged) == len(answers) and {*chosen} <= {*answers}:
            return [span for span, index in zip(tagged, answers, strict=True) if trained[index]]
        return [_span(messages, index, whole, partial(self.template, tools=tools)) for index in chosen]

    def question(self, prompt: str) -> tuple[str, int]:
        """Return the text of a chat up to where the answer to `prompt` begins, and the token that ends the answer."""
        if self.template is None:
            return f"user:\n{prompt}\n\n{ANSWERING}:\n", self.end_id
        messages: list[Message] = [{"role": "user", "content": prompt}]
        answered = self.template([*messages, {"role": ANSWERING, "content": ANY_ANSWER}], False)
        first = self.encode(answered.rpartition(ANY_ANSWER)[2])[:1]
        # A template may end an answer with a token other than end_id. It counts only if special: it decodes to "".
        return self.template(messages, True), first[0] if first and not self.decode(first) else self.end_id


def tokenizer_for(name: str, chat_template: str | None = None) -> Tokenizer:
    """Load a tokenizer: `name` is "bytes", a folder, or an id on the hub. A file may replace its chat template."""
    if name != BYTES.name:
        return _hugging_face(name, chat_template)
    if chat_template is not None:
        raise ConfigurationError(
            f"chat_template {chat_template}: tokenizer bytes has its own; give another --tokenizer"
        )
    return BYTES


_BYTES_END = 256

BYTES = Tokenizer(
    name="bytes",
    vocab_size=_BYTES_END + 1,
    end_id=_BYTES_END,
    encode_batch=lambda texts: [list(text.encode()) for text in texts],
    decode=lambda ids: bytes(token for token in ids if token < _BYTES_END).decode(errors="replace"),
    template=None,
    fingerprint=lambda: "bytes",
    show=lambda ids: b"".join(b"<end>" if token == _BYTES_END else bytes([token]) for token in ids).decode(
        errors="replace"
    ),
)


def _hugging_face(name: str, chat_template: str | None = None) -> Tokenizer:
    """Load a tokenizer of transformers. Code in the folder is never executed."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith(("/", ".", "~")) or folder.exists()):
        raise ConfigurationError(f"tokenizer {name}: no such folder; give one with a tokenizer.json in it, or 'bytes'")
    loader = import_library("transformers", f"tokenizer {name} (not 'bytes')").AutoTokenizer
    try:
        made = loader.from_pretrained(str(folder) if folder.is_dir() else name, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(f"tokenizer {name}: neither a tokenizer's folder nor a known id: {reason}") from error
    if chat_template is not None:
        made.chat_template = read_text(Path(chat_template).expanduser())
    made.model_max_length = 2**62  # samples are cut later; this avoids warnings about long documents
    if made.eos_token_id is None:
        raise ConfigurationError(
            f"tokenizer {name}: it has no end-of-text token, which must separate documents; "
            "set eos_token in its tokenizer_config.json"
        )

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return list(made(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"])

    def decode(ids: Sequence[int]) -> str:
        return str(made.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def template(messages: Sequence[Message], asks: bool, tools: Sequence[Message] = ()) -> str:
        from jinja2 import TemplateError

        words = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": asks}
        try:
            return str(made.apply_chat_template(list(messages), **words))
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"the chat template of {chat_template or name} failed: {error}") from error

    def tagged(messages: Sequence[Message], tools: Sequence[Message]) -> list[Span]:
        render: Any = import_library("transformers.utils.chat_template_utils", name).render_jinja_template
        text = made.get_chat_template(tools=list(tools) or None)
        if not re.search(r"{%-?\s*generation\s*-?%}", text):
            return []
        words = {"return_assistant_tokens_mask": True, **made.special_tokens_map}
        return list(render([list(messages)], list(tools) or None, chat_template=text, **words)[1][0])

    def fingerprint() -> str:
        plain = [type(made).__name__, sorted(made.get_vocab().items())]
        rules = made.backend_tokenizer.to_str() if made.is_fast else json.dumps(plain)
        return hashlib.sha256(json.dumps([rules, made.chat_template, made.eos_token_id]).encode()).hexdigest()

    return Tokenizer(
        name=name,
        vocab_size=max(made.get_vocab().values()) + 1,
        end_id=made.eos_token_id,
        encode_batch=encode_batch,
        decode=decode,
        template=template if made.chat_template else None,
        fingerprint=fingerprint,
        show=lambda ids: str(made.decode(list(ids), clean_up_tokenization_spaces=False)),
        tagged=tagged,
    )


def write_byte_tokenizer(folder: Path, max_seq: int) -> None:
    """Write the byte tokenizer as files for Hugging Face libraries.

    byte_tokenizer.json is a BPE without merges. As in other byte-level vocabularies, a byte is written as
    its own character if that is printable, else as a character from code 256 on.
    """
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "model_max_length": max_seq,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer = resources.files(__package__).joinpath("byte_tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


# Chats


def _cut(whole: str, spans: Sequence[Span], encode: Callable[[str], list[int]]) -> Segments:
    segments: Segments = []
    done = 0
    for start, end in spans:
        segments += [(encode(whole[done:start]), False), (encode(whole[start:end]), True)]
        done = end
    return [(ids, trained) for ids, trained in [*segments, (encode(whole[done:]), False)] if ids]


def _span(messages: Sequence[Message], index: int, whole: str, render: Template) -> Span:
    """The start and end of what message `index` says, with the end of its turn, in the text of all messages."""
    before = render(messages[:index], False) if index else ""
    until = render(messages[: index + 1], False)
    # If the generation prompt ends with words that the finished text lacks (an opening <think>), start before them.
    prompt = render(messages[:index], True) if index else ""
    start = _num_common(prompt, whole)
    is_asked = messages[index]["role"] == ANSWERING and start >= len(before)
    said = str(messages[index]["content"]).rpartition("</think>")[2].strip()  # this part is in every rendering
    alone = said + until.rpartition(said)[2] if said else ""
    if is_asked and whole.startswith(until):
        end = len(until)
    elif is_asked and alone and whole.startswith(alone, start):
        end = start + len(alone)
    else:
        start, content_end = _place(messages, index, render)
        ending = until[_place(messages[: index + 1], index, render)[1] :]
        end = content_end + len(ending)
        if messages[index]["role"] == ANSWERING and index:
            # Not all of the text before the content is given when the model answers.
            after = _place(messages, index - 1, render)[1]
            asked = prompt[_place(messages[:index], index - 1, partial(_asking, render))[1] :]
            start = after + _num_common(asked, whole[after:start])
        if not whole.startswith(ending, content_end):
            raise _unclear(index, "ends")
    if said not in whole[start:end]:
        raise _unclear(index, "contains")
    return start, end


def _asking(render: Template, messages: Sequence[Message], _: bool) -> str:
    return render(messages, True)


def _place(messages: Sequence[Message], index: int, render: Template) -> Span:
    """The start and end of the content (with tool calls) of a message, in the text of all messages.

    Everything else in the text is the same if the content is another one. Thoughts stay: templates look for them.
    """
    message = {key: value for key, value in messages[index].items() if key != "tool_calls"}
    head, tag, _ = str(message["content"]).rpartition("</think>")
    others = [
        render([*messages[:index], {**message, "content": head + tag + mark}, *messages[index + 1 :]], False)
        for mark in ("1a2", "3b4")
    ]
    whole = render(messages, False)
    start = _num_common(*others)
    num_after = _num_common(*(text[::-1] for text in others))
    end = len(whole) - num_after
    is_same = whole[:start] == others[0][:start] and whole[end:] == others[0][len(others[0]) - num_after :]
    if others[0] == others[1] or not is_same or start > end:
        raise _unclear(index, "is")
    return start, end


def _num_common(one: str, other: str) -> int:
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071  of texts, not of paths


def _unclear(index: int, verb: str) -> ConfigurationError:
    return ConfigurationError(
        f"the chat template renders message {index + 1} differently when more messages follow, so it is unclear where "
        f"its answer {verb}; make one row of each answer with the messages before it"
    )
