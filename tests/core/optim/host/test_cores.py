"""Ranks of one machine share its processors fairly."""

import os
from pathlib import Path

import pytest

from shardwise.core.native.cores import cores_for, listed, share, sort_by_locality


@pytest.mark.parametrize("num_cores", [1, 2, 7, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_shares_are_even_and_meet_only_where_they_must(num_cores: int, num_ranks: int) -> None:
    ordered = tuple(range(100, 100 + num_cores))
    shares = [share(ordered, None, rank, num_ranks) for rank in range(num_ranks)]
    sizes = [len(ids) for ids in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if num_ranks <= num_cores:
        assert sorted(core for ids in shares for core in ids) == list(ordered)
    else:
        assert {core for ids in shares for core in ids} == set(ordered)


@pytest.mark.parametrize(
    ("quota", "num_ranks", "num_threads"),
    [(None, 4, 4), (16.0, 4, 4), (8.0, 4, 2), (9.9, 4, 2), (1.5, 4, 1), (0.5, 1, 1), (100.0, 2, 8)],
)
def test_a_quota_bounds_the_threads(quota: float | None, num_ranks: int, num_threads: int) -> None:
    shares = [share(tuple(range(16)), quota, rank, num_ranks) for rank in range(num_ranks)]
    assert {len(ids) for ids in shares} == {num_threads}
    assert len({core for ids in shares for core in ids}) == num_threads * num_ranks


def machine(folder: Path, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    """/sys/devices/system of a machine with these NUMA nodes and cores."""
    for node, text in nodes.items():
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(f"{text}\n")
    for processor, text in siblings.items():
        (folder / f"cpu/cpu{processor}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{processor}/topology/thread_siblings_list").write_text(f"{text}\n")
    return folder


def test_nodes_stay_together_and_so_do_the_threads_of_a_core(tmp_path: Path) -> None:
    """Two sockets of two cores of two threads, numbered as Linux does: 4-7 are the second threads of 0-3."""
    siblings = {processor: f"{processor % 4},{processor % 4 + 4}" for processor in range(8)}
    system = machine(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7"}, siblings)
    ordered = sort_by_locality(range(8), system)
    assert ordered == (0, 4, 1, 5, 2, 6, 3, 7)
    assert share(ordered, None, 1, 2) == (2, 6, 3, 7)
    assert [share(ordered, None, rank, 4) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_nodes_that_interleave(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0,2,4,6", 1: "1,3,5,7"}, {})
    assert sort_by_locality({1, 2, 3, 4}, system) == (2, 4, 1, 3)


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    assert sort_by_locality({5, 3, 9}, tmp_path / "missing") == (3, 5, 9)


def test_lists_of_the_kernel() -> None:
    assert listed("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert listed("\n") == set()


def test_this_machine() -> None:
    allowed = os.sched_getaffinity(0)
    assert set(cores_for(0, 1)) <= allowed
    shares = [cores_for(rank, 2) for rank in range(2)]
    assert all(set(ids) <= allowed for ids in shares)
    if len(allowed) > 1:
        assert not set(shares[0]) & set(shares[1])
