"""A fabric as a value: its text, and the arithmetic of what an operation takes on it, exactly."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import ConfigurationError
from shardwise.bench.measure import count_calls
from shardwise.core.wire.ledger import Call, Kind
from shardwise.planner.hardware.links import INTER, INTRA, Fabric, Link, Transfer, Wire, parse, plan_transfer
from tests.support.links import alone_s

WORLD = list(range(8))
NODE = [0, 1, 2, 3]
REPLICATE = [0, 4]


# ---------------------------------------------------------------------------------------------------------
# the text


def occupied_s(fabric: Fabric, kind: Kind, num_bytes: int, ranks: list[int], rank: int) -> dict[Wire, float]:
    return plan_transfer(fabric, kind, num_bytes, ranks, rank).occupied_s


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2x8,intra=400GB/s,inter=50GB/s", Fabric(2, 8, Link(400.0, 20.0), Link(50.0, 15.0))),
        ("8,intra=1TB/s", Fabric(1, 8, Link(1000.0, 20.0))),
        ("8", Fabric(1, 8, INTRA, INTER)),
        ("4x2,latency=3us", Fabric(4, 2, Link(360.0, 3.0), Link(50.0, 3.0))),
        ("2x2, latency=1ms, inter-latency=2ms", Fabric(2, 2, Link(360.0, 1000.0), Link(50.0, 2000.0))),
        ("2x1,inter=200Mbit/s", Fabric(2, 1, INTRA, Link(0.025, 15.0))),
        ("2,intra=infGB/s,intra-latency=500ns", Fabric(1, 2, Link(math.inf, 0.5))),
    ],
)
def test_parse(text: str, expected: Fabric) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


def links() -> st.SearchStrategy[Link]:
    rates = st.floats(1e-6, 1e6)
    latencies = st.floats(0, 1e6)
    return st.builds(Link, rates, latencies)


@given(st.builds(Fabric, st.integers(1, 4096), st.integers(1, 64), links(), links()))
def test_text_reads_back(value: Fabric) -> None:
    assert parse(str(value)) == value
    assert value.world_size == value.num_nodes * value.node_size


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("0x8", "'0x8'"),
        ("8x", "'8x'"),
        ("intra=400GB/s", "'intra=400GB/s'"),
        ("2x8,intra=400", "intra='400'"),
        ("2x8,intra=400Gb/s", "intra='400Gb/s'"),
        ("2x8,intra=fastGB/s", "intra='fastGB/s'"),
        ("2x8,intra=0GB/s", "intra='0GB/s'"),
        ("2x8,intra=-1GB/s", "intra='-1GB/s'"),
        ("2x8,inter", "'inter' has no value"),
        ("2x8,inter=", "'inter=' has no value"),
        ("2x8,latency=20", "latency='20'"),
        ("2x8,latency=infus", "latency='infus'"),
        ("2x8,internode=50GB/s", "unknown part 'internode=50GB/s'"),
        ("2x8,inter=50GB/s,inter=60GB/s", "'50GB/s' and '60GB/s'"),
        ("2x8,copies=on", "copies"),
    ],
)
def test_refused_text(text: str, part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    assert part in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "2x8,intra=400GB/s,inter=50GB/s" in str(caught.value)


def test_refused_values() -> None:
    with pytest.raises(ConfigurationError, match="0 nodes of 8 ranks"):
        Fabric(0, 8)
    for rate, latency in ((0.0, 1.0), (math.nan, 1.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan)):
        with pytest.raises(ConfigurationError):
            Link(rate, latency)


# ---------------------------------------------------------------------------------------------------------
# the arithmetic

# Powers of two, so that every quotient is exact: 1 GB/s in the node, a quarter of it between nodes.
EXACT = Fabric(2, 4, Link(1.0, 8.0), Link(0.25, 16.0))
BYTES = 8_000_000_000


def test_a_group_in_a_node_uses_the_intra_wire() -> None:
    assert occupied_s(EXACT, "all_gather", BYTES, NODE, 0) == {"intra": 6.0, "inter": 0.0}
    assert occupied_s(EXACT, "reduce_scatter", BYTES, [4, 5, 6, 7], 6) == {"intra": 6.0, "inter": 0.0}
    assert occupied_s(EXACT, "all_reduce", BYTES, [2, 3], 3) == {"intra": 8.0, "inter": 0.0}


def test_a_group_across_nodes_uses_the_inter_wire() -> None:
    assert occupied_s(EXACT, "all_gather", BYTES, REPLICATE, 0) == {"intra": 0.0, "inter": 16.0}
    assert occupied_s(EXACT, "all_reduce", BYTES, [3, 4], 3) == {"intra": 0.0, "inter": 32.0}


def test_the_world_uses_both_and_every_nic() -> None:
    # 7 GB through every rank; the four rings of a node leave it on a NIC each.
    assert occupied_s(EXACT, "all_gather", BYTES, WORLD, 0) == {"intra": 7.0, "inter": 7.0}
    assert occupied_s(EXACT, "all_reduce", BYTES, WORLD, 0) == {"intra": 14.0, "inter": 14.0}
    # Two ranks of each node have two NICs.
    assert occupied_s(EXACT, "all_gather", BYTES, [0, 1, 4, 5], 0) == {"intra": 6.0, "inter": 12.0}
    # The node with one rank in the group is the narrow place for all of them.
    assert occupied_s(EXACT, "all_gather", 3 * BYTES, [0, 1, 4], 0) == {"intra": 16.0, "inter": 64.0}


def test_other_operations() -> None:
    assert occupied_s(EXACT, "broadcast", BYTES, NODE, 0) == {"intra": 8.0, "inter": 0.0}
    assert occupied_s(EXACT, "broadcast", BYTES, WORLD, 0) == {"intra": 8.0, "inter": 8.0}
    # An eighth for each rank: three neighbours, four beyond the rank's own NIC.
    assert occupied_s(EXACT, "all_to_all", BYTES, WORLD, 0) == {"intra": 3.0, "inter": 16.0}
    assert occupied_s(EXACT, "all_to_all", BYTES, REPLICATE, 0) == {"intra": 0.0, "inter": 16.0}


def test_latency_is_per_kind_of_wire_and_pass() -> None:
    def latency_us(kind: str, ranks: list[int]) -> float:
        return plan_transfer(EXACT, kind, 0, ranks, ranks[0]).latency_s * 1e6

    assert latency_us("all_gather", NODE) == pytest.approx(8)
    assert latency_us("reduce_scatter", REPLICATE) == pytest.approx(16)
    assert latency_us("all_gather", WORLD) == pytest.approx(24)
    assert latency_us("all_reduce", WORLD) == pytest.approx(48)


def test_alone_the_slower_wire_decides() -> None:
    assert alone_s(plan_transfer(EXACT, "all_gather", BYTES, [0, 1, 4, 5], 0)) == 12.0 + 24e-6
    assert alone_s(plan_transfer(EXACT, "all_gather", BYTES, NODE, 0)) == 6.0 + 8e-6


def test_one_rank_moves_nothing() -> None:
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        alone = plan_transfer(EXACT, kind, BYTES, [5], 5)
        assert alone == Transfer({"intra": 0.0, "inter": 0.0}, {"intra": 0.0, "inter": 0.0}, 0.0)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("ranks", [NODE, REPLICATE, WORLD])
def test_bytes_are_those_of_the_ledger(kind: Kind, ranks: list[int]) -> None:
    """The wire that carries the ring carries what shardwise counts, to the last bit."""
    num_bytes = 4 * 8 * 12_347
    call = Call(kind, "any", "float32", num_bytes, len(ranks))
    assert max(plan_transfer(EXACT, kind, num_bytes, ranks, 0).moved_bytes.values()) == call.wire_bytes


@pytest.mark.parametrize(
    ("kind", "num_gpus", "published"),
    [("all_gather", 8, 361.4), ("reduce_scatter", 8, 362.9), ("all_reduce", 8, 367.2)],
)
def test_defaults_are_near_published_rings(kind: Kind, num_gpus: int, published: float) -> None:
    """nccl-tests' bus bandwidth of 16 GiB on 8 x H200 without NVLS."""
    num_bytes = 16 * 2**30
    seconds = alone_s(plan_transfer(Fabric(1, num_gpus), kind, num_bytes, range(num_gpus), 0))
    passes = 2 if kind == "all_reduce" else 1
    bus_bandwidth = passes * num_bytes * (num_gpus - 1) / num_gpus / seconds / 1e9
    assert bus_bandwidth == pytest.approx(published, rel=0.025)


def test_default_latency_is_near_a_published_one() -> None:
    """32 KiB all-reduced over 4 nodes of 8 GPUs: 0.48 GB/s of buffer, which is 68 us."""
    seconds = alone_s(plan_transfer(Fabric(4, 8), "all_reduce", 32 * 2**10, range(32), 0))
    assert seconds * 1e6 == pytest.approx(68, rel=0.1)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("node_size", [1, 3, 4, 8])
def test_evenly_spaced_ranks_are_counted_as_if_one_by_one(kind: Kind, node_size: int) -> None:
    fabric = Fabric(60, node_size)
    for ranks in (
        range(begin, end, step) for begin in (0, 5) for end in (6, 24, 59) for step in (1, 2, 3, 4, 7, 8, 20)
    ):
        for rank in (ranks[0], ranks[len(ranks) // 2], ranks[-1]):
            counted = plan_transfer(fabric, kind, 1000, list(ranks), rank)
            assert plan_transfer(fabric, kind, 1000, ranks, rank) == counted


def test_millions_of_ranks_are_not_counted_one_by_one() -> None:
    fabric = Fabric(100_000, 1024)
    calls = count_calls(lambda: plan_transfer(fabric, "all_gather", 1000, range(102_400_000), 0))
    assert sum(calls.values()) < 100
