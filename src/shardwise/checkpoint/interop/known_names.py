"""The names that a pickle of tensors may hold, and the inert value that each of them stands for.

A tensor becomes a description of bytes in a file. Containers become plain ones. The classes that torch and DeepSpeed
write around tensors become records of their arguments and state. A name that is not in this table is refused.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...base.errors import CheckpointError
from ..index import MAX_NAME, counts, shape_from

_MAX_KEY_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Maker:
    """A name in a pickle from which values are made. `make` gets the arguments of the pickle, and must check them."""

    name: str
    make: Callable[..., Any]
    item_bytes: int = 0  # the memory that each item of the first argument takes in the value


@dataclass(slots=True, eq=False)
class Record:
    """An object that is only described: its arguments and the state that it was given."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute, where the state is a mapping."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


def require_keys(keys: Iterable[Any]) -> Iterable[Any]:
    """Refuse keys whose hash would recurse deeply: tuples of tuples."""
    for key in keys:
        parts = key if type(key) is tuple and len(key) <= _MAX_KEY_LENGTH else [key]
        if not all(isinstance(part, (str, int, float, bytes, Record, type(None))) for part in parts):
            raise ValueError(f"a {type(key).__name__} as a key")
    return keys


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
    """Return the value that a name stands for; raise CheckpointError where it is unknown."""
    full = f"{module}.{name}"
    if full not in _KNOWN:
        raise CheckpointError(
            f"a pickle names {full[:200]}, which is neither a tensor nor a plain container: it is not loaded"
        )
    return _KNOWN[full]


def version_text(value: Any) -> str:
    """Return a version or a count for display."""
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


def _tensor_with_attributes(maker: Any, kind: Any, args: Any, state: Any) -> Strided:
    if not isinstance(maker, Maker) or maker.make not in (_tensor, _tensor_of_dtype) or type(args) is not tuple:
        raise ValueError("a tensor that is made in an unknown way")
    return _parameter(maker.make(*args))


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    items = [(key, value) for key, value in pairs]
    require_keys(key for key, _ in items)
    return dict(items)


def _default_dict(kind: Any = None) -> dict[Any, Any]:
    return {}


def _set(items: Any = ()) -> set[Any]:
    return set(require_keys(items))


def _bytes(text: Any = "", encoding: Any = "latin1") -> bytes:
    """Decode bytes as protocol 2 writes them."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes in an unknown encoding")
    return text.encode("latin1")


_NUMPY_TYPES = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "u1": "B", "b1": "?"}


def _numpy_scalar(kind: Any, content: Any) -> float | int | bool:
    code = kind.args[0] if isinstance(kind, Record) and kind.args else None
    if type(code) is not str or code not in _NUMPY_TYPES or type(content) is not bytes:
        raise ValueError("a number of an unknown type")
    value: float | int | bool = struct.unpack(f"<{_NUMPY_TYPES[code]}", content)[0]
    return value


def _record(full: str) -> Maker:
    return Maker(full, lambda *args: Record(full, args))


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
_DCP_CLASSES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta "
    "TensorProperties _MEM_FORMAT_ENCODING"
)
_PATHS = "Path PosixPath PurePosixPath WindowsPath PureWindowsPath"
_RECORDS = {
    "torch": f"device Tensor {' '.join(_STORAGES)}",
    "torch.storage": "UntypedStorage",
    "torch.nn.parameter": "Parameter",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": _DCP_CLASSES,
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "argparse": "Namespace",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "numpy": "dtype",
    "builtins": "list dict int float str bool",
    "__builtin__": "list dict int float str bool",
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _default_dict,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "__builtin__.set": _set,
    "__builtin__.frozenset": _set,
    "_codecs.encode": _bytes,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}
_ITEM_BYTES: dict[Callable[..., Any], int] = {_dict: 120, _set: 60, _bytes: 1}
_KNOWN: dict[str, Any] = {
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{f"{module}.{name}": _record(f"{module}.{name}") for module, names in _RECORDS.items() for name in names.split()},
    **{full: Maker(full, make, _ITEM_BYTES.get(make, 0)) for full, make in _MAKERS.items()},
}
