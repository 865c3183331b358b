"""What every test may ask for."""

import os
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase

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


def _mark_slow_rows(items: list[pytest.Item], is_complete: bool) -> None:
    """`quick("row", ...)` names the rows (patterns of their ids) that run in `make test`; the others become slow."""
    rows = defaultdict[str, dict[str, tuple[str, ...]]](dict)
    for item in items:
        for marker in item.iter_markers("quick"):
            test, _, row = item.nodeid.partition("[")
            rows[test][row.removesuffix("]")] = marker.args
            if not any(fnmatchcase(row.removesuffix("]"), pattern) for pattern in marker.args):
                item.add_marker(pytest.mark.slow)
    for test, found in rows.items() if is_complete else ():
        (patterns,) = set(found.values())
        for pattern in patterns:
            if not any(fnmatchcase(row, pattern) for row in found):
                raise pytest.UsageError(f"{test}: no row is called {pattern!r}; there are {sorted(found)}")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_slow_rows(items, is_complete=not any("[" in name for name in config.args))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
