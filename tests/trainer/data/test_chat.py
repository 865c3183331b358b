"""Loss is on the answers of a chat and on nothing else, whatever its template does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.data.tokenizer import BYTES, Tokenizer, tokenizer_for
from tests.trainer.data import templates
from tests.trainer.data.conftest import CHATML

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6"},
]

# Earlier answers lose their thoughts, and the last one has an empty one if none is given.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last and '<think>' not in message.content %}<think>\n\n</think>\n\n"
    "{{ message.content }}{% elif message.role == 'assistant' and not loop.last %}"
    "{{ message.content.split('</think>')[-1].strip() }}{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What asks for an answer has a word that finished answers lack.
OPENED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def said(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    from transformers import AutoTokenizer

    if tokenizer.name == "bytes":
        return [
            (tokenizer.decode(ids) + "<end>" * ids.count(tokenizer.end_id), trained)
            for ids, trained in tokenizer.render(messages)
        ]
    raw = AutoTokenizer.from_pretrained(tokenizer.name)
    return [(raw.decode(ids, skip_special_tokens=False), trained) for ids, trained in tokenizer.render(messages)]


def test_the_plain_template() -> None:
    assert said(tokenizer_for("bytes"), CHAT) == [
        ("system:\nBe short.\n\nuser:\nWhat is 2 + 2?\n\nassistant:\n", False),
        ("It is 4.<end>", True),
        ("\n\nuser:\nAnd 3 + 3?\n\nassistant:\n", False),
        ("6<end>", True),
    ]


def test_a_question_at_the_end_is_kept_without_loss() -> None:
    assert said(tokenizer_for("bytes"), CHAT[:4])[-1] == ("\n\nuser:\nAnd 3 + 3?\n\n", False)


def test_a_tokenizer_without_a_template_uses_the_plain_one(bpe_folder: Callable[..., Path]) -> None:
    assert said(tokenizer_for(str(bpe_folder())), CHAT)[1] == ("It is 4.<|endoftext|>", True)


def test_answers_in_a_template(bpe_folder: Callable[..., Path]) -> None:
    tokenizer = tokenizer_for(str(bpe_folder(CHATML, eos_token="<|im_end|>")))
    assert said(tokenizer, CHAT) == [
        (
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
            "<|im_start|>assistant\n",
            False,
        ),
        ("It is 4.<|im_end|>\n", True),
        ("<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\n", False),
        ("6<|im_end|>\n", True),
    ]


def test_content_that_the_template_strips(bpe_folder: Callable[..., Path]) -> None:
    tokenizer = tokenizer_for(str(bpe_folder(CHATML)))
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "  b \n"}]
    assert said(tokenizer, messages)[1] == ("b<|im_end|>\n", True)


def test_a_template_that_writes_earlier_answers_otherwise(bpe_folder: Callable[..., Path]) -> None:
    tokenizer = tokenizer_for(str(bpe_folder(THINKING)))
    answers = [text for text, trained in said(tokenizer, CHAT) if trained]
    assert answers == ["It is 4.<|im_end|>\n", "<think>\n\n</think>\n\n6<|im_end|>\n"]
    thoughtful = [*CHAT[:2], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 4."}, *CHAT[3:]]
    assert [text for text, trained in said(tokenizer, thoughtful) if trained] == answers


def test_a_template_that_opens_the_answer_when_it_asks(bpe_folder: Callable[..., Path]) -> None:
    tokenizer = tokenizer_for(str(bpe_folder(OPENED)))
    assert [text for text, trained in said(tokenizer, CHAT) if trained] == ["It is 4.<|im_end|>\n", "6<|im_end|>\n"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | reverse }}{% endfor %}",
        "{% for m in messages %}{{ m.text }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content }}{{ '.' if loop.last else ';' }}{% endfor %}",
    ],
)
def test_a_template_in_which_answers_cannot_be_found(bpe_folder: Callable[..., Path], template: str) -> None:
    tokenizer = tokenizer_for(str(bpe_folder(template)))
    with pytest.raises(ConfigurationError, match="renders message 3 differently when more messages follow"):
        tokenizer.render(CHAT)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add"}}]
CALLED: list[dict[str, Any]] = [
    CHAT[1],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    CHAT[2],
    CHAT[3],
    CHAT[4],
]
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 4."}


@pytest.mark.parametrize(
    ("template", "chat", "trained"),
    [
        (templates.CHATML, CHAT, ["It is 4.<|im_end|>\n", "6<|im_end|>\n"]),
        (templates.LLAMA3, CHAT, ["It is 4.<|eot_id|>", "6<|eot_id|>"]),
        (
            templates.LLAMA3,
            CALLED,
            ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "It is 4.<|eot_id|>", "6<|eot_id|>"],
        ),
        (templates.MISTRAL, CHAT, [" It is 4.</s>", " 6</s>"]),
        (templates.MISTRAL, CALLED[:4], ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>', " It is 4.</s>"]),
        (templates.GEMMA, CHAT, ["It is 4.<end_of_turn>\n", "6<end_of_turn>\n"]),
        (templates.QWEN3, CHAT, ["It is 4.<|im_end|>\n", "<think>\n\n</think>\n\n6<|im_end|>\n"]),
        (templates.QWEN3, [CHAT[1], THOUGHT], ["<think>\nhm\n</think>\n\nIt is 4.<|im_end|>\n"]),
        (
            templates.QWEN3,
            [CHAT[1], THOUGHT, *CHAT[3:]],
            ["It is 4.<|im_end|>\n", "<think>\n\n</think>\n\n6<|im_end|>\n"],
        ),
        (
            templates.QWEN3,
            CALLED,
            [
                '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n',
                "It is 4.<|im_end|>\n",
                "<think>\n\n</think>\n\n6<|im_end|>\n",
            ],
        ),
        (templates.TAGGED, CHAT, ["It is 4.<|end|>", "6<|return|>"]),
        (
            templates.CHATML,
            [{**message, "train": message["role"] == "user"} for message in CHAT],
            ["What is 2 + 2?<|im_end|>\n", "And 3 + 3?<|im_end|>\n"],
        ),
        (templates.QWEN3, [CHAT[1], {**THOUGHT, "train": False}, *CHAT[3:]], ["<think>\n\n</think>\n\n6<|im_end|>\n"]),
        (
            templates.QWEN3,
            [{**message, "train": message["role"] == "tool"} for message in CALLED],
            ["4\n</tool_response><|im_end|>\n"],
        ),
        (templates.TAGGED, [*CHAT[:2], {**CHAT[2], "train": False}, *CHAT[3:]], ["6<|return|>"]),
    ],
)
def test_templates_of_families(bpe_folder: Callable[..., Path], template: str, chat: Any, trained: list[str]) -> None:
    from transformers import AutoTokenizer

    folder = bpe_folder(template, bos_token="<s>")
    tokenizer = tokenizer_for(str(folder))
    raw: Any = AutoTokenizer.from_pretrained(folder)
    segments = tokenizer.render(chat, TOOLS if chat in (CALLED, CALLED[:4]) else ())
    assert [raw.decode(ids) for ids, is_trained in segments if is_trained] == trained
    plain = [{key: value for key, value in message.items() if key != "train"} for message in chat]
    tools = TOOLS if chat in (CALLED, CALLED[:4]) else None
    assert raw.decode([token for ids, _ in segments for token in ids]) == raw.apply_chat_template(
        plain, tools=tools, tokenize=False
    )


def test_everything_may_be_trained_on(bpe_folder: Callable[..., Path]) -> None:
    everything = [{**message, "train": True} for message in CHAT]
    for tokenizer in (BYTES, tokenizer_for(str(bpe_folder(templates.GEMMA)))):
        assert all(is_trained for _, is_trained in tokenizer.render(everything))


def test_tools_that_a_template_leaves_out(bpe_folder: Callable[..., Path]) -> None:
    tokenizer = tokenizer_for(str(bpe_folder(templates.CHATML)))
    cases: list[Any] = [(CALLED, ()), (CHAT, TOOLS)]
    for chat, tools in cases:
        with pytest.raises(ConfigurationError, match="the chat template leaves out tools or their calls"):
            tokenizer.render(chat, tools)
        with pytest.raises(ConfigurationError, match="tokenizer bytes has no chat template, so tool calls cannot"):
            BYTES.render(chat, tools)


def test_a_template_from_a_file(tmp_path: Path, bpe_folder: Callable[..., Path]) -> None:
    folder, file = str(bpe_folder(templates.CHATML)), tmp_path / "gemma.jinja"
    file.write_text(templates.GEMMA)
    tokenizer = tokenizer_for(folder, str(file))
    ids, _ = tokenizer.question([{"role": "user", "content": "hi"}])
    assert tokenizer.show(ids) == "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    assert tokenizer.fingerprint() != tokenizer_for(folder).fingerprint()
    with pytest.raises(ConfigurationError, match=r"none\.jinja cannot be read"):
        tokenizer_for(folder, str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigurationError, match=r"chat_template .*: tokenizer bytes has its own"):
        tokenizer_for("bytes", str(file))
    file.write_text("{% for")
    with pytest.raises(ConfigurationError, match=r"the chat template of .*gemma\.jinja failed"):
        tokenizer_for(folder, str(file)).render(CHAT)


def test_what_a_template_refuses(bpe_folder: Callable[..., Path]) -> None:
    tokenizer = tokenizer_for(str(bpe_folder("{{ raise_exception('roles must alternate') }}")))
    with pytest.raises(ConfigurationError, match="failed: roles must alternate"):
        tokenizer.render(CHAT)


def test_a_question_is_asked_as_chats_are_trained(bpe_folder: Callable[..., Path]) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    for tokenizer in (BYTES, tokenizer_for(str(bpe_folder(CHATML)))):
        ids, stop_id = tokenizer.question(messages[:1])
        (asked, is_answer), (answer, _), *_ = tokenizer.render(messages)
        assert (ids, is_answer) == (asked, False)
        assert answer[len(tokenizer.encode("4"))] == stop_id
        more, _ = tokenizer.question([*messages, messages[0]])
        assert more == [token for ids, _ in tokenizer.render([*messages, *messages])[:3] for token in ids]
    assert stop_id != tokenizer.end_id
