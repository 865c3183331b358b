"""What every test may ask for."""

from collections.abc import Iterator

import pytest
import torch

from tests.harness import Pool
from tests.support.deepspeed import DeepSpeed


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Pool]:
    """Real gloo ranks: `run_ranks(world, fn, *args, **kwargs)` returns what `fn` returned, by rank."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def on_deepspeed() -> Iterator[DeepSpeed]:
    """Two ranks on which DeepSpeed is set up: `on_deepspeed(fn, *args)` returns what the first of them returned."""
    ranks = DeepSpeed()
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
