"""A plan on a terminal."""

import json
import re
import subprocess
import sys

import pytest

from shardwise.report.plan_facts import Plan
from shardwise.report.table import explain, noted, show
from tests.report.sample import plan
from tests.support.tables import table


def test_the_first_line_says_what_to_take_and_why() -> None:
    assert table(plan()).splitlines()[0].startswith("Take mixed: it is the fastest that fits")


def test_strategies_are_in_order_and_the_recommended_one_is_marked() -> None:
    lines = table(plan()).splitlines()
    names = [strategy["name"] for strategy in plan()["strategies"]]
    first = next(at for at, line in enumerate(lines) if line.startswith("> "))
    order = [
        "mixed",
        "zero3",
        "zero3, half of Adam on the host",
        "zero3, all state on disk",
        "zeropp*",
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
    assert "hpz     96.3 GB a GPU, 11.3 GB more than it has. -> 3 nodes, or the optimizer on the host" in refusals


def test_what_is_not_exact_is_marked() -> None:
    text = table(plan())
    assert "* rounds what is sent: chosen only on request" in text
    assert [line.split()[0] for line in text.splitlines() if "* " in line[:20]] == ["zeropp*", "*"]
    exact = plan()
    exact["strategies"] = [strategy for strategy in exact["strategies"] if strategy["exact"]]
    assert "rounds" not in table(exact)


def test_what_was_asked_for_is_taken_though_it_rounds() -> None:
    asked = plan() | {"recommended": "zeropp", "why": "the fastest that fits, 2 s a step"}
    asked["strategies"] = [strategy | {"fits": True} for strategy in asked["strategies"] if not strategy["exact"]]
    assert table(asked).startswith("Take zeropp: the fastest that fits")


def test_columns_of_what_nobody_uses_are_left_out() -> None:
    few = plan() | {"why": ""}
    few["strategies"] = [strategy for strategy in few["strategies"] if strategy["exact"] and not strategy["host_bytes"]]
    text = table(few)
    assert "between" in text
    for title in ("host GB", "disk GB", "free", "*"):
        assert title not in text.replace('"*": "zero3"', "")


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
    assert lines[-1].startswith("At once: peak 79.1 GB at the loss: optimizer 52.9 GB, ")
    assert explain({}) == "This plan explains no terms."


def test_names_from_files_cannot_move_the_cursor() -> None:
    bad = plan()
    bad["model"]["name"] = "llama\x1b[2J\n70b"
    assert "\x1b" not in table(bad)
    assert "llama?[2J?70b" in table(bad)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_rows_are_never_wider_than_the_terminal(width: int) -> None:
    lines = table(plan(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("> mixed ") and " 81.8 " in line and "4.98 s" in line for line in lines)
    assert ("disk GB" in table(plan(), width)) == (width == 200)


def test_what_strategies_differ_in_has_a_column() -> None:
    assert " with " not in table(plan())
    differ = plan()
    differ["strategies"][-2]["checkpointing"] = "none"
    assert "with  " in table(differ)
    differ["strategies"][-2] |= {"micro_batch": 4, "num_micro_batches": 2}
    assert "zero3, all state on disk         mb 4 x 2    yes" in table(differ)
    assert "> mixed                            mb 1, full  yes" in table(differ)


def test_days_are_in_the_headline_and_in_a_column() -> None:
    long = plan()
    for at, strategy in enumerate(long["strategies"]):
        strategy["days"] = 1.26 * 10**at
    text = table(long, 200)
    assert " 126,000 days in all" in " ".join(text.split())
    assert {"1.3", "126,000"} <= {*text.split()}
    assert " 126,000 days in all" in " ".join(table(long | {"engine": "FSDP2"}, 200).split())


def test_no_line_is_wider_than_the_terminal() -> None:
    many = plan()
    many["strategies"] += [
        {"name": f"strategy_{number}", "fits": False, "why_not": f"needs {number} GB on each"} for number in range(9)
    ]
    many["explain"] = [{"term": "params", "bytes": 1, "formula": "2 B a parameter " * 9, "source": "a file " * 20}]
    lines = [*table(many, 80).split("\n"), *explain(many, 80).split("\n"), *noted(["a note " * 30], 80)]
    assert max(len(line) for line in lines if "'" not in line) <= 80


def test_what_comes_to_the_same_is_one_row() -> None:
    twice = plan()
    zero3 = next(one for one in twice["strategies"] if one["name"] == "zero3")
    twice["strategies"] += [zero3 | {"name": "hsdp2"}, zero3 | {"name": "slower", "step_seconds": 5.5}]
    rows = [line[2:] for line in table(twice, 200).splitlines()]
    assert any(row.startswith("zero3 (hsdp2)  ") for row in rows)
    assert any(row.startswith("slower  ") for row in rows)


def test_refusals_of_one_sentence_are_told_together() -> None:
    full = plan()
    for one, needs in zip([one for one in full["strategies"] if not one["fits"]], (400, 300, 100, 90, 80), strict=True):
        one |= {"why_not": f"needs {needs} GB on each H100, which has 85.0 GB", "nearest": "a smaller model"}
    text = " ".join(table(full).split())
    assert "zeropp, hpz, hsdp, zero2, ddp needs 80 to 400 GB on each H100, which has 85.0 GB -> a smaller model" in text


def test_the_machine_is_told_of() -> None:
    text = " ".join(table(plan()).split())
    assert "85.0 GB (79.2 GiB) a GPU, 450 GB/s in a node, 50 GB/s between nodes" in text
    alone = plan()
    alone["cluster"] |= {"num_nodes": 1}
    assert "between nodes" not in table(alone)


def test_a_log_file_gets_the_plain_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    show(plan())
    assert capsys.readouterr().out == table(plan()) + "\n"
    monkeypatch.setenv("COLUMNS", "80")
    show(plan())
    assert capsys.readouterr().out == table(plan(), 80) + "\n"


def test_nothing_here_imports_torch() -> None:
    script = "import sys, shardwise.report.page, shardwise.report.run; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_a_mapping_of_many_units_can_be_copied() -> None:
    many = plan()
    best = next(strategy for strategy in many["strategies"] if strategy["name"] == "mixed")
    best["strategy"] = {**{f"blocks.{at}": "hpz" for at in (3, 4, 5, 9)}, "head": "hpz", "*": "zero3"}
    many["strategies"] = [best]
    text = " ".join(table(many).split())
    mapping = re.search(r"--strategy '({.*})'; micro-batch 1", text)
    assert mapping is not None
    assert json.loads(mapping[1]) == best["strategy"]
    assert Plan(many).strategies[0].layout == "blocks.3-5, blocks.9, head: hpz; *: zero3"


def test_the_reason_does_not_say_the_name_again() -> None:
    assert table(plan() | {"why": "mixed is the fastest"}).startswith("Take mixed: it is the fastest")


def test_what_fits_only_with_luck_is_tight() -> None:
    tight = plan()
    best = next(strategy for strategy in tight["strategies"] if strategy["name"] == "mixed")
    best["per_gpu_bytes"]["peak_reserved_high"] = 90_000_000_000
    lines = table(tight).splitlines()
    assert next(line for line in lines if line.startswith("> ")).split()[:3] == [">", "mixed", "tight"]
    assert "  tight: less stays free than the plan may be wrong by" in lines
    assert "tight" not in table(plan())
    best["tight"] = False  # as the planner says
    assert "tight" not in table(tight)
