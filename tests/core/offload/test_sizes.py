"""What a plan reserves is what the store takes."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.schedule.state_bytes import padded_bytes

SIZES = st.lists(st.integers(0, 1 << 40), max_size=9)


@given(SIZES)
def test_every_piece_has_whole_pages(sizes: list[int]) -> None:
    assert padded_bytes(sizes) == sum((size + 4095) // 4096 * 4096 for size in sizes)


def test_a_planner_needs_no_torch() -> None:
    program = "import sys, shardwise.core.schedule.state_bytes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
