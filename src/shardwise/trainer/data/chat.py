"""Chats as segments of tokens, each with whether it is an answer and thus trained on.

A tokenizer with a chat template renders the chat to text, and answers are found by rendering prefixes of the chat: the
text that message i adds, after the generation prompt, is its answer. A tokenizer without one uses the plain template:

    user:
    What is 2 + 2?

    assistant:
    4<end>

which is the role, a colon, the content, and a blank line between two messages; an answer ends with the end token.
Segments are encoded one by one, as in generation, where the prompt is encoded before there is an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...base.errors import ConfigurationError

Message = Mapping[str, Any]
Segments = list[tuple[list[int], bool]]
Encode = Callable[[str], list[int]]
Template = Callable[[Sequence[Message], bool], str]  # messages, whether to add a generation prompt -> text

ANSWERING = "assistant"
ANY_ANSWER = "answer"


def plain(messages: Sequence[Message], encode: Encode, end_id: int) -> Segments:
    segments: Segments = []
    pending = ""
    for message in messages:
        pending += f"{message['role']}:\n"
        if message["role"] == ANSWERING:
            segments += [(encode(pending), False), ([*encode(message["content"]), end_id], True)]
            pending = "\n\n"
        else:
            pending += f"{message['content']}\n\n"
    # Blanks after the last answer would teach the model that something follows the end.
    return [*segments, (encode(pending), False)] if pending.strip() else segments


def question(prompt: str, template: Template | None) -> tuple[str, str]:
    """The text with a prompt and a generation prompt, and the text that follows an answer."""
    asked: list[Message] = [{"role": "user", "content": prompt}]
    if template is None:
        return f"user:\n{prompt}\n\n{ANSWERING}:\n", ""
    answered = template([*asked, {"role": ANSWERING, "content": ANY_ANSWER}], False)
    return template(asked, True), answered.rpartition(ANY_ANSWER)[2]


def templated(messages: Sequence[Message], template: Template, encode: Encode) -> Segments:
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
    # If the generation prompt has words that the finished answer lacks (an opening <think>), the answer starts before.
    asked = template(messages[:index], True) if index else ""
    start = _num_common(asked, whole)
    until = template(messages[: index + 1], False)
    if start >= len(before) and whole.startswith(until):
        return start, len(until)
    # Some templates render an earlier answer differently from a last one (without its thoughts). Then the answer is its
    # content and the text that the template writes after the content of a last answer.
    content = _rendered_part(messages[index])
    found = whole.find(content, start) if content and start >= len(before) else -1
    ending = until.rpartition(content)[2] if content else ""
    if found == -1 or not whole.startswith(ending, found + len(content)):
        raise ConfigurationError(
            f"the chat template renders message {index + 1} differently when more messages follow, so it is unclear "
            "which tokens are its answer; make one row of each answer with the messages before it"
        )
    return start, found + len(content) + len(ending)


def _num_common(one: str, other: str) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _rendered_part(message: Message) -> str:
    """The part of a message that every template renders: blanks and thoughts of earlier answers may be stripped."""
    return str(message["content"]).rpartition("</think>")[2].strip()
