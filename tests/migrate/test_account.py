"""Every key has one row, and what is wrong is told at once."""

from typing import Any

import pytest

from shardwise.migrate.account import Block


def block(**values: Any) -> Block:
    return Block(values, "it")


def fates(top: Block) -> dict[str, tuple[str, str]]:
    return {entry.key: (entry.fate, entry.text) for entry in top.entries()}


def test_rows_come_in_the_order_of_the_document() -> None:
    top = block(a={"x": "1", "y": "2"}, b="3", c={}, d=None)
    inner = top.inner("a")
    top.used("b", "b here")
    inner.used("y", "y here")
    inner.ignored("x", "of x")
    top.inner("c")
    top.has("d")
    assert fates(top) == {
        "a.x": ("ignored", "of x"),
        "a.y": ("used", "y here"),
        "b": ("used", "b here"),
        "c": ("ignored", "it is empty"),
        "d": ("ignored", "it is empty"),
    }
    assert list(fates(top)) == ["a.x", "a.y", "b", "c", "d"]


def test_what_nobody_asked_for_is_refused_with_the_nearest_name() -> None:
    top = block(stag="3", other="1")
    top.whole("stage")
    assert fates(top)["stag"] == ("refused", "unknown key; did you mean 'stage'?")
    assert fates(top)["other"][0] == "refused"


def test_no_name_is_suggested_that_only_begins_alike() -> None:
    top = block(temperature="1", lr="1e-4")
    for key in ("template", "lora", *(f"other_{number}" for number in range(20))):
        top.has(key)
    assert {text for _, text in fates(top).values()} == {"unknown key; no known key is similar"}


@pytest.mark.parametrize(
    ("read", "value", "told"),
    [
        (lambda top: top.whole("key", 7), "1.5", "it is not a whole number"),
        (lambda top: top.whole("key", 7), "many", "it is not a whole number"),
        (lambda top: top.whole("key", 7), "1e400", "it is not a whole number"),
        (lambda top: top.whole("key", 7, most=3), "4", "it must be at most 3"),
        (lambda top: top.whole("key", 7), ["1"], "it is a list, not a single value"),
        (lambda top: top.whole("key", 7), {"a": "1"}, "it is a mapping, not a single value"),
        (lambda top: top.whole("key", 7), "auto", "auto is not possible; write a value, or leave it out"),
        (lambda top: top.number("key", 7, least=0), "-1", "it must be at least 0"),
        (lambda top: top.number("key", 7), "nan", "it is not a number"),
        (lambda top: top.flag("key", 7), "2", "it is not true or false"),
        (lambda top: top.word("key", ("cpu", "nvme"), 7), "gpu", "it is unknown; did you mean 'cpu'? known: cpu, nvme"),
        (lambda top: top.texts("key", 7), [["x"]], "it is not a list of names"),
    ],
)
def test_a_wrong_value_is_refused_and_the_default_taken(read: Any, value: Any, told: str) -> None:
    top = block(key=value)
    assert read(top) == 7
    top.used("key", "something")
    assert fates(top) == {"key": ("refused", told)}


def test_numbers_as_people_write_them() -> None:
    top = block(bucket="5e8", text="500000000", flag="True", word="CPU", names="a, b")
    assert top.whole("bucket") == top.whole("text") == 500_000_000
    assert top.flag("flag") is True
    assert top.word("word", ["cpu"], "") == "cpu"
    assert top.texts("names") == ["a", "b"]


def test_auto_is_asked_for() -> None:
    top = block(rate="auto")
    assert top.auto("rate", "--learning-rate")
    assert fates(top) == {"rate": ("used", "--learning-rate")}


def test_what_was_read_and_not_decided_is_refused() -> None:
    top = block(key="1")
    top.whole("key")
    assert fates(top) == {"key": ("refused", "it has no effect here; leave it out")}


def test_what_was_read_and_not_decided_because_of_a_refusal_says_so() -> None:
    top = block(key="1", other="2", file="nowhere")
    top.whole("key")
    top.refused("file", "no such file")
    assert fates(top)["key"] == ("ignored", "it is undecided because file is refused")
    assert fates(top)["other"][0] == "refused"
