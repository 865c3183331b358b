"""DeepSpeed on ranks of its own, for all tests that compare with it: its set-up takes ten seconds."""

import importlib.util
import os
from typing import Any

import pytest

from tests.harness import Job, World


class DeepSpeed:
    """Two ranks that are kept, because DeepSpeed wants processes of its own and takes long to import."""

    def __init__(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed; it is in the extra 'peers'")
        self._world: World | None = None

    def __call__(self, fn: Job, *args: Any) -> Any:
        """What `fn` returned on the first rank."""
        if self._world is None or not self._world.usable:
            self._world = World(2, join_group=False)
        return self._world.run(with_deepspeed, fn, *args, deadline=300.0)[0]

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


def with_deepspeed(fn: Job, *args: Any) -> Any:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed
    import deepspeed.ops

    # Sums in shared memory, for which it would compile for half a minute; gloo does them as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return fn(*args)
