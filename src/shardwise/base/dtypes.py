"""Number formats by name and size: torch's dtypes for code that must not import torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from .errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DType:
    """A number format. `name` is torch's name for it."""

    name: str
    itemsize: int

    @property
    def torch(self) -> "torch.dtype":
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found

    def __str__(self) -> str:
        return self.name


DTypeLike = Union[DType, str, "torch.dtype"]

FP32, BF16, FP16, INT32 = DType("float32", 4), DType("bfloat16", 2), DType("float16", 2), DType("int32", 4)
UINT8 = DType("uint8", 1)

_ALL = (
    FP32, BF16, FP16, INT32, DType("float64", 8), DType("int64", 8), DType("int16", 2), DType("int8", 1),
    UINT8, DType("bool", 1),
    *(DType(f"float8_{kind}", 1) for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")),
)  # fmt: skip
_BY_NAME = {dtype.name: dtype for dtype in _ALL} | {"fp32": FP32, "bf16": BF16, "fp16": FP16}


def dtype_of(value: DTypeLike) -> DType:
    """Return the `DType` for a long or short name, or for a torch dtype."""
    if isinstance(value, DType):
        return value
    name = str(value).removeprefix("torch.")
    if name not in _BY_NAME:
        raise ConfigurationError(f"unknown dtype {name!r}; {did_you_mean(name, _BY_NAME)}")
    return _BY_NAME[name]
