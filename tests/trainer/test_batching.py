"""The global batch is the contract: it is solved, shared without overlap, or refused with the whole equation."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.trainer.settings import Batching, Settings, batching_of


@pytest.mark.parametrize(
    ("said", "num_ranks", "expected"),
    [
        ({}, 2, Batching(2, 1, 8)),
        ({"global_batch_size": 24}, 3, Batching(3, 1, 8)),
        ({"global_batch_size": 24, "per_device_train_batch_size": 2}, 3, Batching(3, 4, 2)),
        ({"global_batch_size": 24, "gradient_accumulation_steps": 4}, 3, Batching(3, 4, 2)),
        ({"per_device_train_batch_size": 5}, 4, Batching(4, 1, 5)),
        ({"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2}, 4, Batching(4, 2, 5)),
        ({"gradient_accumulation_steps": 2}, 4, Batching(4, 2, 1)),
        # Until the planner has chosen.
        ({"per_device_train_batch_size": "auto"}, 2, Batching(2, 1, 8)),
        (
            {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 4, "global_batch_size": 24},
            3,
            Batching(3, 4, 2),
        ),
    ],
)
def test_what_was_not_said_follows(said: dict[str, Any], num_ranks: int, expected: Batching) -> None:
    assert batching_of(Settings(**said), num_ranks) == expected


@pytest.mark.parametrize(
    ("said", "num_ranks", "message"),
    [
        (
            {"global_batch_size": 10},
            4,
            "global_batch_size 10 is not 4 ranks x 1 .* x 2 .* = 8; make it a multiple of 4",
        ),
        ({"global_batch_size": 2}, 4, "= 4; make it a multiple of 4"),
        ({"global_batch_size": 16, "per_device_train_batch_size": 3}, 2, "multiple of 6"),
        (
            {"global_batch_size": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            2,
            "2 ranks x 2 .* x 2 .* = 8; make it a multiple of 8",
        ),
        (
            {"global_batch_size": 16, "per_device_train_batch_size": "auto", "gradient_accumulation_steps": 3},
            2,
            "make it a multiple of 6",
        ),
        (
            {"per_device_train_batch_size": "auto", "gradient_accumulation_steps": 3},
            2,
            "unknown beside gradient_accumulation_steps 3: give global_batch_size",
        ),
    ],
)
def test_an_equation_without_solution_is_shown(said: dict[str, Any], num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        batching_of(Settings(**said), num_ranks)


def test_ranks_and_micro_batches_share_the_samples_in_order() -> None:
    samples = list(range(24))
    for batching in (Batching(1, 1, 24), Batching(2, 3, 4), Batching(4, 2, 3), Batching(24, 1, 1)):
        shares = [batching.share(samples, rank) for rank in range(batching.num_ranks)]
        assert all(len(share) == batching.num_micro for share in shares)
        assert [index for share in shares for micro in share for index in micro] == samples
