"""Every format in which people write rows, and what is wrong with rows that cannot be used."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.data.rows import Document, Reading, Row, from_rows

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
UNTRAINED = {"train": False}


def read(*rows: Any, **reading: Any) -> list[Document]:
    return list(from_rows([Row(f"rows:{number}", row) for number, row in enumerate(rows, 1)], Reading(**reading)))


def messages(row: Any, **reading: Any) -> list[Any]:
    (document,) = read(row, **reading)
    assert not document.problem
    return list(document.messages)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "q", "output": "a"}, [Q, A]),
        ({"instruction": "q", "input": "", "output": "a", "text": "Below is"}, [Q, A]),
        (
            {"instruction": "q", "input": "more", "output": "a", "system": "s", "history": [["q", "a"]]},
            [SYSTEM, Q, A, {"role": "user", "content": "q\nmore"}, A],
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [Q, A]),
        (
            {
                "system": "s",
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "a"},
                ],
            },
            [
                SYSTEM,
                Q,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "2"},
                A,
            ],
        ),
        (  # as OpenAI's fine-tuning files, and with the keys that Parquet adds
            {
                "messages": [
                    {"role": "developer", "content": "s", "tool_calls": None},
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": "2"},
                    {"role": "assistant", "content": "a", "weight": 0},
                    {"role": "assistant", "content": "a", "weight": 1},
                ]
            },
            [
                SYSTEM,
                Q,
                {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "1"}]},
                {"role": "tool", "content": "2", "tool_call_id": "1"},
                {**A, **UNTRAINED},
                A,
            ],
        ),
        ({"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}, [Q, A]),
        ({"prompt": [Q, A, Q], "completion": [A]}, [Q, {**A, **UNTRAINED}, Q, A]),
        ({"prompt": [Q], "completion": "a"}, [Q, A]),
    ],
)
def test_formats_of_chats(row: Any, expected: Any) -> None:
    assert messages(row) == expected


def test_other_names() -> None:
    columns = {"instruction": "question", "output": "answer", "role": "who", "content": "says", "messages": "chat"}
    reading = Reading(columns)
    (document,) = from_rows([Row("rows:1", {"question": "q", "answer": "a", "output": "no"})], reading)
    assert document.messages == [Q, A]
    assert reading.renamed == {"instruction", "output"}
    assert messages({"chat": [{"who": "human", "says": "q"}, {"who": "bot", "says": "a"}]}, columns=columns) == [Q, A]


@pytest.mark.parametrize(
    ("roles", "trained"),
    [
        (["assistant"], "0010001"),
        (["tool", "assistant"], "0011001"),
        (["user"], "0100010"),
        (["last"], "0000001"),
        (["all"], "1111111"),
    ],
)
def test_roles_that_are_trained_on(roles: list[str], trained: str) -> None:
    rows = [SYSTEM, Q, A, {"role": "tool", "content": "t"}, {**A, "train": False}, Q, A]
    found = messages({"messages": rows}, roles=roles)
    marks = "".join(str(int(message.get("train", message["role"] == "assistant"))) for message in found)
    assert marks == trained[:4] + "0" + trained[5:]
    (prompt, completion) = read({"prompt": "p", "completion": "c"}, roles=roles)[0].texts
    assert (prompt, completion) == (("p", roles in (["all"], ["user"])), ("c", roles != ["user"]))


def sides(row: Any) -> Any:
    (document,) = read(row)
    assert not document.problem
    return [side.texts or side.messages for side in document.sides]


ASKED = {**Q, **UNTRAINED}
CHOSEN, REJECTED = ({"role": "assistant", "content": text, "train": True} for text in ("good", "bad"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": [Q, CHOSEN], "rejected": [Q, REJECTED], "messages": [Q, CHOSEN]},  # UltraFeedback
        {"prompt": "q", "chosen": [CHOSEN], "rejected": [REJECTED]},
        {"prompt": [Q], "chosen": "good", "rejected": "bad"},
        {"chosen": [Q, CHOSEN], "rejected": [Q, REJECTED]},
        {"instruction": "q", "input": None, "chosen": "good", "rejected": "bad"},
        {  # LLaMA-Factory
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
    ],
)
def test_preferences_as_chats(row: Any) -> None:
    assert sides(row) == [[ASKED, CHOSEN], [ASKED, REJECTED]]
    system = {**SYSTEM, **UNTRAINED}
    assert sides({**row, "system": "s"}) == [[system, ASKED, CHOSEN], [system, ASKED, REJECTED]]


def test_preferences_as_text() -> None:
    expected = [(("Q: why? A:", False), (" good", True)), (("Q: why? A:", False), (" bad", True))]
    assert sides({"prompt": "Q: why? A:", "chosen": " good", "rejected": " bad"}) == expected
    assert sides({"chosen": "Q: why? A: good", "rejected": "Q: why? A: bad"}) == expected
    # What both begin with is cut before a word, never inside one.
    assert sides({"chosen": "A: go on", "rejected": "A: good"})[0] == (("A:", False), (" go on", True))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": "p", "chosen": "c"},
            "a preference row needs a chosen and a rejected answer, but its rejected is mi",
        ),
        ({"prompt": "p", "chosen": "c", "rejected": ""}, "a preference row needs .* but its rejected is missing"),
        ({"rejected": "c"}, "a preference row needs .* but its chosen is missing"),
        ({"chosen": "same", "rejected": "same"}, "chosen and rejected are equal"),
        ({"prompt": "p", "chosen": [A], "rejected": [Q]}, "rejected has no message of the assistant"),
        ({"instruction": "q"}, "has the keys instruction, but needs output, too"),
        ({"instruction": 3, "output": "a"}, "instruction is of type int"),
        ({"instruction": "q", "output": "a", "history": ["q", "a"]}, "history must be a list of pairs"),
        ({"completion": "c"}, "has the keys completion, but needs prompt, too"),
        ({"messages": [Q, {"role": "assistant", "content": None}]}, "message 2 must have a role and a content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 1 has a part of type image_url",
        ),
        ({"messages": [Q, {**A, "weight": 0.5}]}, "message 2: weight, train or training is 0.5, but must be 0 or 1"),
        ({"messages": [Q, {**A, "weight": 0}]}, "no message of the assistant"),
        ({"messages": [Q, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "a tool call needs the name"),
        ({"messages": [Q, {"from": "function_call", "value": "add(1)"}]}, r"'add\(1\)' is not JSON"),
        ({"messages": "hello"}, "'hello' is not JSON"),
        ({"messages": [Q, A], "tools": "[1]"}, "tools must be a list of objects"),
    ],
)
def test_rows_that_cannot_be_used(row: Any, problem: str) -> None:
    (document,) = read(row)
    assert not document.messages
    with pytest.raises(ValueError, match=problem):
        raise ValueError(document.problem)


def test_rows_that_mix_formats() -> None:
    rows = [{"prompt": "p"}, {"text": "t"}, {"other": 1}, {"prompt": "p", "completion": "c"}]
    with pytest.raises(
        ConfigurationError, match="rows:4: a row of the format prompt, completion, but rows:2 is of the"
    ):
        read(*rows)
    assert [bool(document.problem) for document in read(*rows[:3])] == [True, False, True]
