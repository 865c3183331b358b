"""What the Trainer logs without us."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.harness import Pool
from tests.integrations.training import HALF, Logs, train_and_tell


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    """One process without us."""
    return train_and_tell(tmp_path_factory.mktemp("alone"), None, 1)


@pytest.fixture(scope="session")
def beside(run_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Logs:
    """Two processes without us: the Trainer's evaluation is not quite the same on more of them."""
    folder = tmp_path_factory.mktemp("beside")
    return run_ranks(
        2, train_and_tell, folder, None, 2, eval_strategy="steps", eval_steps=HALF, ddp_find_unused_parameters=False
    )[0]


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """In this process; other tests make groups of their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
