"""Steps on slow links: what is made of the ranks' answers, what is planned, and who may run it. The whole run, which
takes minutes and needs root: `python -m benchmarks.wire_links`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import wire_links
from benchmarks.namespaces import LOCAL, Rank, can_make_namespaces, namespaces, run_ranks
from benchmarks.wire_links import Planned, Plans, Seen, gloo_bytes, planned, rows_of, seconds_of
from shardwise.core.wire.ledger import Call
from tests.bench.cases import smoke


def test_a_step_lasts_until_its_last_rank_has_ended_it() -> None:
    assert seconds_of([[0.0, 1.0, 5.0], [0.5, 2.0, 4.0]]) == [1.5, 3.0]


def test_gloo_takes_more_across_a_border_than_it_must() -> None:
    """By one rank of two in each of two nodes."""
    assert gloo_bytes(Call("all_gather", "world", "bfloat16", 80, 4)) == 80 * 3 / 4 / 2
    assert gloo_bytes(Call("reduce_scatter", "world", "float32", 80, 4)) == 2 * 80 * 3 / 4 / 2
    assert gloo_bytes(Call("reduce_scatter", "replicate", "int4", 80, 2)) == 80 / 2
    assert gloo_bytes(Call("reduce_scatter", "replicate", "bf16", 80, 2)) == 80 / 2
    assert gloo_bytes(Call("reduce_scatter", "node", "float32", 80, 2)) == 0


def test_ratios_are_taken_within_a_repetition() -> None:
    def seen(contender: str, repetition: int, second: float) -> Seen:
        return Seen(contender, 1000, repetition, [second], 1e6, 2e6, [1.0])

    plans: Plans = dict.fromkeys(("fsdp2", "shardwise:zeropp"), Planned(1e6, 1e6))
    runs = [seen("fsdp2", 0, 4.0), seen("shardwise:zeropp", 0, 2.0), seen("fsdp2", 1, 8.0)]
    rows = rows_of([*runs, seen("shardwise:zeropp", 1, 2.0)], plans, 1000)
    assert [row["x fsdp2"] for row in rows] == ["1.00", "3.00"]
    assert [row["s / step"] for row in rows] == ["6.00", "2.00"]


def test_deepspeed_is_seen_and_not_planned() -> None:
    case = smoke("deepspeed:3+hpz", world_size=4)
    plans: Plans = {case.contender: planned(case.contender, case)}
    (row,) = rows_of([Seen(case.contender, 1000, 0, [2.0], 1e6, 2e6, [1.0])], plans, 1000)
    assert (row["s / step"], row["MB out of the node"], row["must cross"]) == ("2.00", "1.0", "")


def test_without_deepspeed_it_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_links, "can_make_namespaces", lambda: True)
    monkeypatch.setattr(wire_links, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["wire_links"])
    with pytest.raises(SystemExit, match="deepspeed is not installed"):
        wire_links.main()


def test_who_is_not_root_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["wire_links"])
    with pytest.raises(SystemExit, match="needs root"):
        wire_links.main()


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    scripts = ("import time; time.sleep(60)", "raise SystemExit('no more')")
    ranks = [
        Rank(LOCAL, [sys.executable, "-c", script], {}, tmp_path / f"{index}.log")
        for index, script in enumerate(scripts)
    ]
    with pytest.raises(RuntimeError, match="no more"):
        run_ranks(ranks, deadline_s=30)


@pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip and tc, to make namespaces")
def test_nothing_is_left_of_namespaces_after_an_error() -> None:
    def names() -> set[str]:
        listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        return {line.split()[0] for line in listed.splitlines() if f"shardwise-{os.getpid()}-" in line}

    with pytest.raises(ValueError, match="wrong"), namespaces(2, 100):  # noqa: PT012, what is there is asked for inside
        assert len(names()) == 3
        raise ValueError("wrong")
    assert not names()
