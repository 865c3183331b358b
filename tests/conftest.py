"""What every test may ask for."""

from collections.abc import Iterator

import pytest
import torch

from tests.harness import Pool


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Pool]:
    """Real gloo ranks: `run_ranks(world, fn, *args, **kwargs)` returns what `fn` returned, by rank."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
