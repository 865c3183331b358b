"""The emulated fabric beside real gloo ranks on a link of known speed. The whole comparison, which takes minutes:
`python -m benchmarks.fabric_against_gloo`."""

import pytest

from benchmarks.fabric_against_gloo import Seen, Steps, World, can_make_namespaces, compare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip and tc, for nodes with links of a set speed"),
]

NUM_BYTES = 1 << 20
# Gloo takes up to half as long again for an all-gather between two ranks, whose halves then wait for each other.
COMPARED = ("reduce_scatter", "all_reduce", "ddp step, blocks sleep", "zero3 step, blocks sleep")


def test_time_and_bytes_are_as_planned() -> None:
    """A quiet machine is within a few per cent. TCP/IP adds some bytes of its own."""
    world = World(2, 1, 50)
    _, everything = compare(world, [NUM_BYTES], [Steps("ddp", sleeps=True), Steps("zero3", sleeps=True)], 3)
    planned, seen = (
        {row.key: row for row in (Seen(**row) for row in everything[side])} for side in ("planned", "seen")
    )
    rows = [key for key in planned if key[0] in COMPARED and key[2] >= NUM_BYTES]
    assert len(rows) == len(COMPARED)
    for key in rows:
        assert 0.8 < min(seen[key].seconds) / min(planned[key].seconds) < 1.5, key
        assert 1.0 <= seen[key].nic_bytes / planned[key].nic_bytes < 1.15, key
