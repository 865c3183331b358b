"""torch's square root, where it is not the processor's.

On x86 torch takes roots of whole tensors with MKL, whose results may differ in the last bit and depend on the
processor. torch's loop of AdamW goes that way, its fused one does not. Which it is here is found by trying.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODE = 0x140102  # in which torch calls it: high accuracy, denormals as they are, no errors
NUM_TRIED = 1 << 12


@dataclass(frozen=True, slots=True)
class SquareRoot:
    """Addresses of C functions. `set_threads` keeps the root on the thread that calls it."""

    address: int | None
    set_threads: int | None


PROCESSORS_OWN = SquareRoot(None, None)


@cache
def torch_square_root() -> SquareRoot:
    tried = torch.rand(NUM_TRIED, generator=torch.Generator().manual_seed(0))
    roots = tried.sqrt()
    # Rounding a square root to double and then to single is the same as rounding it once.
    if torch.equal(roots, torch.tensor([math.sqrt(value) for value in tried.tolist()])):
        return PROCESSORS_OWN
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        function, set_threads = library.vmsSqrt, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return PROCESSORS_OWN
    if not torch.equal(roots, _roots(function, tried)):
        return PROCESSORS_OWN
    return SquareRoot(_address(function), _address(set_threads))


def _roots(function: Any, values: Tensor) -> Tensor:
    roots = torch.empty_like(values)
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, roots))
    function(ctypes.c_int(values.numel()), *addresses, ctypes.c_int64(MODE))
    return roots


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
