"""What a step cannot be asked to do is refused in a sentence."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigurationError
from shardwise.planner.training import Lora, Training


@pytest.mark.parametrize(
    "asked",
    [
        {"seq": "a"}, {"seq": 10.5}, {"seq": 0}, {"seq": 10**8 + 1}, {"micro_batch": None}, {"micro_batch": True},
        {"micro_batch": 10**7}, {"num_micro_batches": -1},
    ],
)  # fmt: skip
def test_sizes_are_whole_numbers_that_can_be_counted(asked: dict[str, Any]) -> None:
    ((name, value),) = asked.items()
    with pytest.raises(ConfigurationError) as seen:
        Training(**asked)
    assert f"training: {name} {value!r}, but it must be a whole number from 1 to" in str(seen.value)


def test_a_step_has_not_too_many_sequences() -> None:
    with pytest.raises(ConfigurationError, match="1,000 micro-batches of 1,001 sequences are more than"):
        Training(micro_batch=1001, num_micro_batches=1000)


@pytest.mark.parametrize("rank", [0, "16", 1.5, True])
def test_ranks_of_adapters_are_whole_numbers(rank: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number from 1 to"):
        Lora(rank)


@pytest.mark.parametrize("asked", [{"lora": "16"}, {"lora": 16}, {"engine": "fsdp1", "speculation": "8GB"}])
def test_what_a_step_cannot_have_is_named(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"training: {list(asked)[-1]}"):
        Training(**asked)
