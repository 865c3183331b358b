"""Tokenizers: one value with functions in it, so that no other code depends on the kind.

"bytes" needs no files and no library: ids 0 to 255 are bytes, 256 ends a document. Every other name is a Hugging Face
tokenizer, from a folder or by its id; transformers is imported only then. No special tokens are added to text; a chat
has those of its template.

A chat becomes segments of tokens. A segment is an answer, which is trained on, or not. A tokenizer with a chat template
renders the chat to text. To find the answers, it also renders prefixes of the chat: the text that message i adds after
the generation prompt is its answer. A tokenizer without a chat template uses the plain template:

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...base.errors import ConfigurationError, import_library

Message = Mapping[str, Any]
Segments = list[tuple[list[int], bool]]
Template = Callable[[Sequence[Message], bool], str]  # messages, whether to add a generation prompt -> text

ANSWERING = "assistant"
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

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def render(self, messages: Sequence[Message]) -> Segments:
        """Return a chat as segments: (tokens, whether they are an answer). ConfigurationError if the template fails."""
        if self.template is not None:
            return _templated(messages, self.template, self.encode)
        segments: Segments = []
        pending = ""
        for message in messages:
            pending += f"{message['role']}:\n"
            if message["role"] == ANSWERING:
                answer = [*self.encode(message["content"]), self.end_id]
                segments += [(self.encode(pending), False), (answer, True)]
                pending = "\n\n"
            else:
                pending += f"{message['content']}\n\n"
        # Blanks after the last answer would teach the model that something follows the end.
        return [*segments, (self.encode(pending), False)] if pending.strip() else segments

    def question(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """Return the tokens of a chat up to where the next answer begins, and the token that ends the answer."""
        if self.template is None:
            answered = self.render([*messages, {"role": ANSWERING, "content": ""}])
            return [token for ids, _ in answered[:-1] for token in ids], self.end_id
        answer = self.template([*messages, {"role": ANSWERING, "content": ANY_ANSWER}], False)
        first = self.encode(answer.rpartition(ANY_ANSWER)[2])[:1]
        # A template may end an answer with a token other than end_id. It counts only if special: it decodes to "".
        ends = first[0] if first and not self.decode(first) else self.end_id
        return self.encode(self.template(messages, True)), ends


def tokenizer_for(name: str) -> Tokenizer:
    """Load a tokenizer: `name` is "bytes", a folder, or an id on the hub."""
    return BYTES if name == BYTES.name else _hugging_face(name)


_BYTES_END = 256

BYTES = Tokenizer(
    name="bytes",
    vocab_size=_BYTES_END + 1,
    end_id=_BYTES_END,
    encode_batch=lambda texts: [list(text.encode()) for text in texts],
    decode=lambda ids: bytes(token for token in ids if token < _BYTES_END).decode(errors="replace"),
    template=None,
    fingerprint=lambda: "bytes",
)


def _hugging_face(name: str) -> Tokenizer:
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

    def template(messages: Sequence[Message], asks: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(made.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks))
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"the chat template of {name} failed: {error}") from error

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


def _templated(messages: Sequence[Message], template: Template, encode: Callable[[str], list[int]]) -> Segments:
    whole = template(messages, False)
    segments: Segments = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] == ANSWERING:
            start, end = _answer(messages, index, whole, template)
            segments += [(encode(whole[done:start]), False), (encode(whole[start:end]), True)]
            done = end
    return [(ids, trained) for ids, trained in [*segments, (encode(whole[done:]), False)] if ids]


def _answer(messages: Sequence[Message], index: int, whole: str, template: Template) -> tuple[int, int]:
    """The start and end of the answer in message `index`, in the text of all messages."""
    before = template(messages[:index], False) if index else ""
    # If the generation prompt ends with words that the finished text lacks (an opening <think>), start before them.
    prompt = template(messages[:index], True) if index else ""
    start = len(os.path.commonprefix([prompt, whole]))  # noqa: RUF071  of texts, not of paths
    until = template(messages[: index + 1], False)
    if start >= len(before) and whole.startswith(until):
        return start, len(until)
    # Some templates render an earlier answer differently from a last one (without its reasoning). Then the answer is
    # its content and the text that the template writes after the content of a last answer.
    content = str(messages[index]["content"]).rpartition("</think>")[2].strip()  # this part is in every rendering
    at = whole.find(content, start) if content and start >= len(before) else -1
    ending = until.rpartition(content)[2] if content else ""
    if at == -1 or not whole.startswith(ending, at + len(content)):
        raise ConfigurationError(
            f"the chat template renders message {index + 1} differently when more messages follow, so it is unclear "
            "which tokens are its answer; make one row of each answer with the messages before it"
        )
    return start, at + len(content) + len(ending)
