"""What every test may ask for."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.harness import Pool
from tests.support.deepspeed import DeepSpeed

os.environ.pop("COLUMNS", None)  # workers of xdist are told that terminals have 80


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


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """What a test leaves in the environment would make ranks of the runs after it."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
