"""A plan on a terminal."""

import subprocess
import sys

import pytest

from shardwise.report.table import explain, show, table
from tests.report.sample import plan


def test_the_first_line_says_what_to_take_and_why() -> None:
    assert table(plan()).splitlines()[0].startswith("Take mixed: it is the fastest that fits")


def test_strategies_are_in_order_and_the_recommended_one_is_marked() -> None:
    lines = table(plan()).splitlines()
    names = [strategy["name"] for strategy in plan()["strategies"]]
    first = next(at for at, line in enumerate(lines) if line.startswith("> "))
    order = [
        "mixed",
        "zero3",
        "zero3, half of Adam on the host*",
        "zero3, all state on disk*",
        "hpz",
        "hsdp",
        "zero2",
        "ddp",
    ]
    assert len(order) == len(names)
    for line, name in zip(lines[first:], order, strict=False):
        assert line[2:].startswith(f"{name} "), line
    assert "yes   81.8 (80.8-83.8)  ###########." in lines[first]
    assert "4.98 s" in lines[first]
    assert "############!" in lines[first + 4]  # more than the GPU has


def test_refusals_come_with_their_reason_and_the_nearest_change() -> None:
    text = table(plan())
    refusals = text[text.index("does not fit") :]
    assert "hpz    96.3 GB a GPU, 11.3 GB more than it has. -> 3 nodes, or the optimizer on the host" in refusals


def test_what_does_not_run_yet_is_marked() -> None:
    assert "* planned, but not run by this version yet" in table(plan())


def test_columns_of_what_nobody_uses_are_left_out() -> None:
    few = plan()
    few["strategies"] = [strategy for strategy in few["strategies"] if strategy["runs"]]
    text = table(few)
    assert "between" in text
    for title in ("host GB", "disk GB", "*"):
        assert title not in text.replace("*: zero3", "")


def test_a_plan_where_nothing_fits_says_so() -> None:
    none = plan() | {"recommended": None, "why": ""}
    none["strategies"] = [strategy for strategy in none["strategies"] if not strategy["fits"]]
    assert table(none).startswith("Nothing fits.")
    assert "> " not in table(none).replace("-> ", "")


def test_a_plan_of_states_alone_has_dashes_for_time() -> None:
    bare = {"strategies": [{"name": "zero3", "fits": True, "per_gpu_bytes": {"params": 1e9, "optimizer": 6e9}}]}
    assert table(bare).startswith("zero3 fits.")
    assert "7.0" in table(bare)
    assert table({}) == "Nothing was planned."


def test_explain_gives_formula_and_source_of_each_term() -> None:
    lines = explain(plan()).splitlines()
    (at,) = (at for at, line in enumerate(lines) if line.startswith("  optimizer"))
    assert lines[at].split() == ["optimizer", "52.9", "GB", "12", "B", "x", "params", "/", "16", "ranks"]
    assert lines[at + 1].strip() == "Adam"
    assert lines[-1].startswith("At once: peak")
    assert explain({}) == "This plan explains no terms."


def test_names_from_files_cannot_move_the_cursor() -> None:
    bad = plan()
    bad["model"]["name"] = "llama\x1b[2J\n70b"
    assert "\x1b" not in table(bad)
    assert "llama?[2J?70b" in table(bad)


def test_a_log_file_gets_the_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    show(plan())
    assert capsys.readouterr().out == table(plan()) + "\n"


def test_nothing_here_imports_torch() -> None:
    script = "import sys, shardwise.report.page, shardwise.report.beside; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_a_mapping_of_many_units_is_written_short() -> None:
    many = plan()
    best = next(strategy for strategy in many["strategies"] if strategy["name"] == "mixed")
    best["strategy"] = {**{f"blocks.{at}": "hpz" for at in (3, 4, 5, 9)}, "head": "hpz", "*": "zero3"}
    assert "mixed: blocks.3-5, blocks.9, head: hpz; *: zero3; micro-batch 1" in table(many)


def test_the_reason_does_not_say_the_name_again() -> None:
    assert table(plan() | {"why": "mixed is the fastest"}).startswith("Take mixed: it is the fastest")


def test_what_fits_only_with_luck_is_tight() -> None:
    tight = plan()
    best = next(strategy for strategy in tight["strategies"] if strategy["name"] == "mixed")
    best["per_gpu_bytes"]["peak_reserved_high"] = 90_000_000_000
    lines = table(tight).splitlines()
    assert next(line for line in lines if line.startswith("> ")).split()[:3] == [">", "mixed", "tight"]
    assert "  tight: the upper end of what the allocator may reserve does not fit" in lines
    assert "tight" not in table(plan())
