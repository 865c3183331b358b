"""Counts the bytes of all tensors that are alive, on a CPU, where no allocator keeps statistics.

The tracker is told of every tensor that an operation returns, and asks the living ones for their size at every
operation, because FSDP1 empties storages without freeing them. Memory of kernels and of gloo is not seen.
"""

import gc
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory behind a tensor; None for one that has none of its own, such as DTensor."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) and hasattr(tensor, "_local_tensor"):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose tensors no tracker sees."""

    def hidden(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return hidden


class StorageTracker(TorchDispatchMode):
    """Use as a context; `peak` is the most bytes that were alive at one operation, at first those that were there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def count(cls) -> int:
        """Bytes of the tensors that are alive now."""
        tracker = cls()
        tracker._find()
        return tracker.now()

    def _find(self) -> None:
        gc.collect()
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self._add(thing)

    def __enter__(self) -> "StorageTracker":
        self._find()
        self.peak = self.now()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        gc.collect()

    def _add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None and storage.device.type == "cpu":
            self._alive[storage._cdata] = weakref.ref(storage)

    def now(self) -> int:
        total = 0
        for key, reference in list(self._alive.items()):
            storage = reference()
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self.now())
        return found
