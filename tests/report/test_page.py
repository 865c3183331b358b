"""The page as text: complete, escaped and without anything from outside."""

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.report.page import render
from shardwise.report.run import read_run
from tests.report.runs import trained
from tests.report.sample import plan

VOID = {"meta", "link", "input", "br"}


class Outline(HTMLParser):
    """Fails on tags that are not closed; notes what there is."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_every_part() -> None:
    page = render(plan())
    tags = Outline(page).tags
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert headings == [
        "Take mixed",
        "Memory of a GPU, by strategy",
        "What does not fit, and what would make it",
        "One step of mixed",
        "Traffic of a step and GPU",
        "Conditions",
    ]
    assert sum(attrs.get("class") == "bar" for tag, attrs in tags if tag == "svg") == len(plan()["strategies"])
    assert "peak 79.1 GB, loss" in page
    assert page.count('<span class="tag">rounds what is sent</span>') == 1
    for lane in ("compute", "gather", "reduce"):
        assert f"l-{lane}" in page


def test_the_page_needs_nothing_from_outside() -> None:
    tags = Outline(render(plan())).tags
    assert not [tag for tag, _ in tags if tag in {"script", "img", "iframe", "object", "embed", "a"}]
    references = [value for _, attrs in tags for name, value in attrs.items() if name in {"src", "href", "xlink:href"}]
    assert references == ["data:,"]
    assert "url(" not in render(plan())
    (policy,) = (attrs["content"] for tag, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_every_drawing_has_words_or_is_decoration() -> None:
    for tag, attrs in Outline(render(plan())).tags:
        if tag == "svg" and "viewbox" not in attrs:
            assert attrs.get("aria-label") or attrs.get("aria-hidden") == "true", attrs


def test_what_comes_from_files_is_escaped(tmp_path: Path) -> None:
    evil = "</title><script>alert(1)</script>\"'&"
    run, _ = read_run(trained(tmp_path / "run"))
    run |= {"name": evil, "model": evil, "notes": [evil]}
    page = render(_poisoned(plan(), evil), run)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    Outline(page)
    Outline(render(_poisoned(plan(), evil)))


def _poisoned(value: Any, evil: str) -> Any:
    """The same, with every text and every name of a condition made evil."""
    if isinstance(value, dict):
        return {key: _poisoned(each, evil) for key, each in value.items()} | {evil: evil}
    if isinstance(value, list):
        return [_poisoned(each, evil) for each in value]
    return evil if isinstance(value, str) and value not in ("compute", "mixed") else value


def test_a_run_has_its_curve_and_the_plan_beside_it(tmp_path: Path) -> None:
    run, its_plan = read_run(trained(tmp_path / "run"))
    page = render(its_plan, run)
    Outline(page)
    assert page.count('class="ring"') == 3
    assert page.count('class="left"') == 1
    assert "given up when the run went on" in page
    for words in (
        "<title>run: tiny</title>",
        "tiny, ddp (auto) on 2 x H100-80GB",
        "One step of ddp, as planned",
        "world all-reduce float32",
        "evaluation 2.1000",
    ):
        assert words in page, words


def test_bars_have_the_time_of_a_step_and_the_days() -> None:
    long = plan()
    for strategy in long["strategies"]:
        strategy["days"] = 41.96
    page = render(long)
    assert '<span class="detail">4.98 s a step</span>' in page
    assert "<dd>42 days</dd>" in page


def test_what_comes_to_the_same_is_one_row() -> None:
    twice = plan()
    twice["strategies"].append(next(one for one in plan()["strategies"] if one["name"] == "zero3") | {"name": "hsdp2"})
    page = render(twice)
    assert "<strong>zero3 (hsdp2)</strong>" in page
    assert page.count('class="bar" ') == len(plan()["strategies"])


def test_a_run_without_a_plan_is_a_page_too(tmp_path: Path) -> None:
    page = render(*reversed(read_run(trained(tmp_path / "run", with_plan=False))))
    Outline(page)
    assert "There is no plan.json" in page
    assert "by strategy" not in page


def test_pages_of_long_steps_stay_small() -> None:
    long = plan()
    best = next(strategy for strategy in long["strategies"] if strategy["name"] == "mixed")
    best["instants"] = [
        {**one, "at_s": one["at_s"] / 40 + at * best["step_seconds"] / 40}
        for at in range(40)
        for one in best["instants"]
    ]
    best["timeline"] = [
        {**one, **{key: one[key] / 40 + at * best["step_seconds"] / 40 for key in ("begin_s", "end_s")}}
        for at in range(40)
        for one in best["timeline"]
    ]
    assert len(best["timeline"]) > 12_000
    page = render(long)
    assert len(page) < 1_500_000
    assert "peak 79.1 GB, loss" in page


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=8),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [{}]),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_plans_with_anything_anywhere_are_rendered(data: st.DataObject) -> None:
    broken = copy.deepcopy(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        place: Any = broken
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = data.draw(JUNK)
            break
    Outline(render(broken))


SMALL = plan()
SMALL["strategies"] = [one for one in SMALL["strategies"] if one["name"] in ("mixed", "ddp")]
for _one in SMALL["strategies"]:
    _one["instants"], _one["timeline"] = _one["instants"][:3], _one["timeline"][:3]
