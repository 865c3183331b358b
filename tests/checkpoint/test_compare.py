"""Groups of an optimizer that is not ours: what is frozen may be counted among its parameters, or not."""

import pytest
import torch

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.index import Saved, Stored
from shardwise.checkpoint.loading import require_same_groups

STORED = Stored((4,), "F32", ())
TRAINED, FROZEN = torch.zeros(4, requires_grad=True), torch.zeros(4)


def test_a_frozen_parameter_may_be_in_a_group_or_in_none() -> None:
    require_same_groups([("w", Saved((4,), "F32", (), group=0), FROZEN, None)], keep_groups=False)


@pytest.mark.parametrize(
    ("saved", "resting", "group"),
    [
        (Saved((4,), "F32", (), group=0), TRAINED, 1),
        (Saved((4,), "F32", (), group=0), TRAINED, None),
        (Saved((4,), "F32", (), group=0, state={"exp_avg": STORED}), FROZEN, None),
    ],
)
def test_anything_else_is_told_with_both_ways_out(saved: Saved, resting: torch.Tensor, group: int | None) -> None:
    with pytest.raises(CheckpointError, match=r"build the same groups, or load with keep_groups=True \(1 difference"):
        require_same_groups([("w", saved, resting, group)], keep_groups=False)
