"""The emulated fabric beside real gloo ranks on a link of known speed. The whole comparison, which takes minutes:
`python -m benchmarks.fabric_against_gloo`."""

import pytest

from benchmarks.fabric_against_gloo import Steps, World, can_make_namespaces, compare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip and tc, for nodes with links of a set speed"),
]

NUM_BYTES = 1 << 20
# Gloo takes up to half as long again for an all-gather between two ranks, whose halves then wait for each other.
COMPARED = ("reduce_scatter", "all_reduce", "ddp step, blocks sleep", "zero3 step, blocks sleep")


def test_time_and_bytes_are_as_planned() -> None:
    """A quiet machine is within a few per cent. TCP/IP adds some bytes of its own."""
    found = compare(World(2, 1, 50), [NUM_BYTES], [Steps("ddp", sleeps=True), Steps("zero3", sleeps=True)], 3)
    rows = [row for row in found.rows if row.seen.what in COMPARED and row.seen.num_bytes >= NUM_BYTES]
    assert len(rows) == len(COMPARED)
    for row in rows:
        assert 0.8 < min(row.seen.seconds) / min(row.planned.seconds) < 1.5, row.cells
        assert 1.0 <= row.seen.nic_bytes / row.planned.nic_bytes < 1.15, row.cells
