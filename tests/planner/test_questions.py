"""The questions of docs/planner.md: plans agree with arithmetic by hand, and the page has every question."""

import pytest

from benchmarks.planner_questions import QUESTIONS, Question, checked
from tests.architecture.source import ROOT


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_answers_agree_with_arithmetic_by_hand(question: Question) -> None:
    answer, value, hand = checked(question)
    assert value == pytest.approx(hand, rel=question.tolerance, abs=0)
    assert "{" not in answer


def test_the_page_has_every_question() -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    assert len(QUESTIONS) == 20
    assert not [question.command for question in QUESTIONS if f"`{question.command}`" not in page]
