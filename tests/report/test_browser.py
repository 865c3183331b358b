"""The pages in a real browser: they load, stay inside the screen, and draw what the numbers say."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from shardwise.report.page import render
from shardwise.report.run import read_run
from tests.report.runs import trained
from tests.report.sample import GPU_BYTES, plan
from tests.support import browser
from tests.support.browser import Browser

pytestmark = pytest.mark.skipif(browser.command() is None, reason=browser.NONE)

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.started() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run, its_plan = read_run(trained(folder / "run"))
    found = {"plan": render(plan()), "report": render(its_plan, run)}
    for name, page in found.items():
        (folder / f"{name}.html").write_text(page)
    return {name: folder / f"{name}.html" for name in found}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["plan", "report"])
def test_a_page_loads_quietly_and_fits_the_screen(
    chromium: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    chromium.open(pages[name], width, scheme=scheme)
    assert chromium.evaluate("innerWidth") == width
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(_OUTSIDE) == []
    assert _colours(chromium.screenshot()) > 100
    assert chromium.console == []
    # Its own file, and the icon that is nothing.
    assert {url for url in chromium.requests if not url.startswith("data:")} == {pages[name].as_uri()}


# Words of drawings that stick out of them, and drawings that stick out of the page, but for what scrolls.
_OUTSIDE = """[...document.querySelectorAll('svg text, svg.bar, svg.area, svg.curve, .levels span')].filter(element => {
  const own = element.getBoundingClientRect(), scrolls = element.closest('.scroll');
  const svg = element.closest('.axis, .area');
  const within = scrolls && !svg ? null : (svg || document.body).getBoundingClientRect();
  return own.width && within && (own.left < within.left - 1 || own.right > within.right + 1);
}).map(element => element.textContent || element.getAttribute('class'))"""


def test_planned_and_seen_are_read_without_scrolling_on_a_phone(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["report"], 390)
    hidden = (
        "[...document.querySelectorAll('.compared')].map(t => t.parentElement).map(e => e.scrollWidth - e.clientWidth)"
    )
    assert chromium.evaluate(hidden) == [0, 0]


@pytest.mark.parametrize("width", WIDTHS)
def test_bars_are_as_long_as_their_bytes(chromium: Browser, pages: dict[str, Path], width: int) -> None:
    chromium.open(pages["plan"], width)
    bars = chromium.evaluate("""[...document.querySelectorAll('.strategy')].map(row => {
      const box = row.querySelector('.bar').getBoundingClientRect(), limit = row.querySelector('path.limit');
      const pieces = [...row.querySelectorAll('.bar rect')].map(r => [+r.dataset.bytes, r.getBoundingClientRect()]);
      return {name: row.querySelector('strong').textContent, width: box.width, left: box.left,
              limit: limit.getBoundingClientRect().left - box.left,
              pieces: pieces.map(([bytes, rect]) => [bytes, rect.left - box.left, rect.width])};
    })""")
    strategies = {strategy["name"]: strategy for strategy in plan()["strategies"]}
    assert [bar["name"] for bar in bars[:2]] == ["mixed", "zero3"]
    assert len({bar["left"] for bar in bars}) == 1
    for bar in bars:
        per_pixel = GPU_BYTES / bar["limit"]
        held = strategies[bar["name"]]["per_gpu_bytes"]
        end = 0.0
        for num_bytes, left, wide in bar["pieces"]:
            assert left == pytest.approx(end, abs=1.5)
            end = left + wide
            if end < bar["width"] - 2:  # not cut
                assert wide == pytest.approx(num_bytes / per_pixel, abs=1.5)
        assert end == pytest.approx(min((held["peak_reserved"] + held["context"]) / per_pixel, bar["width"]), abs=2)


def test_the_step_is_drawn_to_scale_and_can_be_looked_at_closer(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["plan"], 1280)
    measured = """(() => {
      const lane = document.querySelector('svg.lane'), box = lane.getBoundingClientRect();
      const marks = [...document.querySelectorAll('.over-time .axis text')];
      const rects = [...lane.querySelectorAll('rect')].map(rect => rect.getBoundingClientRect());
      return {width: box.width, begins: rects.map(rect => (rect.left - box.left) / box.width),
              shown: marks.filter(text => text.getBoundingClientRect().width).length};
    })()"""
    before = chromium.evaluate(measured)
    best = next(strategy for strategy in plan()["strategies"] if strategy["name"] == "mixed")
    spans = [span for span in best["timeline"] if span["lane"] == "compute"]
    full_s = max([best["step_seconds"], *(span["end_s"] for span in best["timeline"])])
    assert before["begins"] == pytest.approx([span["begin_s"] / full_s for span in spans], abs=0.002)
    chromium.evaluate("document.querySelector('[value=\"16\"]').click()")
    after = chromium.evaluate(measured)
    assert after["width"] == pytest.approx(16 * before["width"], rel=0.01)
    assert after["shown"] > 5 * before["shown"] > 0
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 1280


def test_the_loss_curve_falls_from_left_to_right(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["report"], 1280)
    rings = chromium.evaluate(
        "[...document.querySelectorAll('.ring')].map(r => r.getBoundingClientRect()).map(r => [r.x, r.y])"
    )
    assert len(rings) == 3
    assert [x for x, _ in rings] == sorted(x for x, _ in rings)
    assert [y for _, y in rings] == sorted(y for _, y in rings)
    gaps = [right[0] - left[0] for left, right in itertools.pairwise(rings)]
    assert gaps[0] == pytest.approx(gaps[1], abs=1.5)  # every 20 steps


@pytest.mark.parametrize("scheme", SCHEMES)
def test_words_can_be_read(chromium: Browser, pages: dict[str, Path], scheme: str) -> None:
    """At least 4.5:1 between text and what is behind it, as WCAG asks."""
    for page in pages.values():
        chromium.open(page, 1280, scheme=scheme)
        assert chromium.evaluate(_FAINT) == []


_FAINT = """(() => {
  const light = colour => {
    const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = colour.match(/[\\d.]+/g).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (colour.startsWith('rgb(')) return colour;
    }
  };
  const words = 'h1,h2,h3,p,dt,dd,th,td,li,strong,small,span,summary,label,legend,code,svg.axis text';
  return [...document.querySelectorAll(words)]
    .filter(e => e.textContent.trim() && e.getBoundingClientRect().width && !e.closest('.levels')).filter(e => {
      const style = getComputedStyle(e), colour = e.tagName === 'text' ? style.fill : style.color;
      const [dim, bright] = [light(colour), light(ground(e))].sort((a, b) => a - b);
      return (bright + .05) / (dim + .05) < 4.5;
    }).map(e => e.textContent.trim().slice(0, 40));
})()"""


def _colours(png: bytes) -> int:
    """How many a picture has."""
    found = Image.open(io.BytesIO(png)).convert("RGB").getcolors(1 << 24)
    assert found is not None
    return len(found)
