"""The names that a pickle of tensors may hold, and what each of them stands for here.

Tensors become descriptions of bytes in a file; containers become plain ones; the classes that torch and DeepSpeed write
around them become records of what they were made of. This table is the whole list: a name that is not in it is refused.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...base.errors import CheckpointError
from ..index import MAX_NAME, counts, shape_from
from .records import Maker, Record, require_key


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one or several tensors, at a place in a file."""

    file: int
    offset: int
    num_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor as torch sees it: elements of a storage, from `first` on, with a stride for each dimension."""

    storage: Storage
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elems(self) -> int:
        return prod(self.shape)


def find(module: str, name: str) -> Any:
    """What a name stands for. Raises CheckpointError where it is neither a tensor nor a plain container."""
    full = f"{module}.{name}"
    if full not in _KNOWN:
        raise CheckpointError(
            f"a pickle names {full[:200]}, which is neither a tensor nor a plain container: it is not loaded"
        )
    return _KNOWN[full]


def text(value: Any) -> str:
    """A name. What a pickle repeats a thousand times is not put together a thousand times."""
    if type(value) is not str or len(value) > MAX_NAME:
        raise ValueError("no short text where a name is expected")
    return value


def told(value: Any) -> str:
    """What is only shown: a version, a count."""
    return str(value) if type(value) is int else value if type(value) is str and len(value) < MAX_NAME else "unknown"


def _tensor(storage: Any, first: Any, shape: Any, stride: Any, *rest: Any) -> Strided:
    return _strided(storage, storage.dtype if isinstance(storage, Storage) else None, first, shape, stride)


def _tensor_of_dtype(storage: Any, first: Any, shape: Any, stride: Any, *rest: Any) -> Strided:
    return _strided(storage, rest[2], first, shape, stride)


def _strided(storage: Any, dtype: Any, first: Any, shape: Any, stride: Any) -> Strided:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a storage")
    (first,), shape, stride = counts((first,)), shape_from(shape), counts(stride)
    if len(shape) != len(stride):
        raise ValueError(f"a tensor of shape {shape} with strides {stride}")
    if prod(shape):
        last = first + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.num_bytes:
            raise ValueError(f"a tensor of {dtype} {shape} reaches beyond the {storage.num_bytes} bytes of its storage")
    return Strided(storage, dtype, first, shape, stride)


def _size(lengths: Any = ()) -> tuple[int, ...]:
    return shape_from(lengths)


def _parameter(tensor: Any, *rest: Any) -> Strided:
    if not isinstance(tensor, Strided):
        raise ValueError("a parameter without a tensor")
    return tensor


def _of_type(maker: Any, kind: Any, args: Any, state: Any) -> Strided:
    """A tensor with attributes."""
    if not isinstance(maker, Maker) or maker.make not in (_tensor, _tensor_of_dtype) or type(args) is not tuple:
        raise ValueError("a tensor that is made in an unknown way")
    return _parameter(maker.make(*args))


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    return {require_key(key): value for key, value in pairs}


def _default_dict(kind: Any = None) -> dict[Any, Any]:
    return {}


def _set(items: Any = ()) -> set[Any]:
    return {require_key(item) for item in items}


def _bytes(text: Any = "", encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes in an unknown encoding")
    return text.encode("latin1")


_NUMBERS = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "u1": "B", "b1": "?"}


def _number(kind: Any, content: Any) -> float | int | bool:
    """A number of numpy's."""
    code = kind.args[0] if isinstance(kind, Record) and kind.args else None
    if type(code) is not str or code not in _NUMBERS or type(content) is not bytes:
        raise ValueError("a number of an unknown kind")
    value: float | int | bool = struct.unpack(f"<{_NUMBERS[code]}", content)[0]
    return value


def _records(module: str, names: str) -> dict[str, Any]:
    return {f"{module}.{name}": _record(f"{module}.{name}") for name in names.split()}


def _record(full: str) -> Maker:
    return Maker(full, lambda *args: Record(full, args))


def _makers(makers: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {full: Maker(full, make) for full, make in makers}


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
STORAGE_DTYPES: dict[str, torch.dtype] = {
    **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
}

_METADATA = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta"

_KNOWN: dict[str, Any] = {
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **_records("torch", "device Tensor"),
    **_records("torch.storage", "UntypedStorage"),
    **_records("torch", " ".join(_STORAGES)),
    **_records("torch.nn.parameter", "Parameter"),
    **_records("torch.serialization", "_get_layout"),
    **_records("torch.distributed.checkpoint.metadata", f"{_METADATA} TensorProperties _MEM_FORMAT_ENCODING"),
    **_records("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties MEM_FORMAT_ENCODING"),
    **_records("torch.distributed.checkpoint.filesystem", "_StorageInfo _StoragePrefix"),
    **_records("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    **_records("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler"),
    **_records("deepspeed.utils.tensor_fragment", "fragment_address"),
    **_records("argparse", "Namespace"),
    **_records("pathlib", "Path PosixPath PurePosixPath WindowsPath PureWindowsPath"),
    **_records("pathlib._local", "Path PosixPath PurePosixPath WindowsPath PureWindowsPath"),
    **_records("numpy", "dtype"),
    **_records("builtins", "list dict int float str bool"),
    **_records("__builtin__", "list dict int float str bool"),
    **_makers(
        [
            ("torch.Size", _size),
            ("torch._utils._rebuild_tensor", _tensor),
            ("torch._utils._rebuild_tensor_v2", _tensor),
            ("torch._utils._rebuild_tensor_v3", _tensor_of_dtype),
            ("torch._utils._rebuild_parameter", _parameter),
            ("torch._utils._rebuild_parameter_with_state", _parameter),
            ("torch._tensor._rebuild_from_type_v2", _of_type),
            ("collections.OrderedDict", _dict),
            ("collections.defaultdict", _default_dict),
            ("builtins.set", _set),
            ("builtins.frozenset", _set),
            ("__builtin__.set", _set),
            ("__builtin__.frozenset", _set),
            ("_codecs.encode", _bytes),
            ("numpy.core.multiarray.scalar", _number),
            ("numpy._core.multiarray.scalar", _number),
        ]
    ),
}
