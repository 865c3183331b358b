"""Read a pickle without executing anything that it names.

The standard library's unpickler does the parsing, with three restrictions. Its table of opcodes is an allowlist: plain
values, containers, and names. A name is looked up in the table at the end of this file and never imported; a tensor
becomes a description of bytes in a file, and other classes become records of their arguments. The opcodes that would
call an object or set its attributes accept our own inert `Maker` and `Record` only. The memory in use is at most
proportional to the length of the pickle, even if the pickle claims large sizes or repeats values.
"""

import io
import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...base.errors import CheckpointError
from ..index import count, counts, shape_from

MAX_PICKLE_BYTES = 512 << 20
_MAX_KEY_LENGTH = 64
_MAX_INT_BITS = 128  # enough for sizes and counts
_MAX_NESTING = 1000
# A container may be one byte in a pickle; in memory it takes about this many bytes.
_CONTAINER_BYTES = 60
# A pickle may have this many containers, and one more for every six of its bytes. The densest pickles of torch, which
# are lists of chunk offsets, have one container in nine bytes.
_MANY_CONTAINERS = 1_000_000

_Load = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Maker:
    """Our function for a class or function that a pickle names. `make` must check the arguments from the pickle."""

    name: str
    make: Callable[..., Any]
    item_bytes: int = 0  # bytes of memory that the value takes for each item of the first argument


@dataclass(slots=True, eq=False)
class Record:
    """A description of an object that is not built: the name of its class, its arguments and its state."""

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
    """A tensor as torch sees it: elements from a place in a file on, with a stride for each dimension."""

    file: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _no_storage(identity: Any) -> Any:
    raise CheckpointError("a pickle asks for a storage where there is none")


def read(data: bytes, find_storage: Callable[[Any], Any] = _no_storage) -> Any:
    """Return the value of a pickle. `find_storage` maps a persistent id to data outside of the pickle."""
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"a pickle has {len(data)} bytes, and at most {MAX_PICKLE_BYTES} are read")
    try:
        return _Unpickler(data, find_storage).load()
    except RecursionError:
        raise CheckpointError("a pickle cannot be read: it is nested too deeply") from None
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError, struct.error,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        raise CheckpointError(f"a pickle cannot be read: {error}") from error


class _Memo(list[Any]):
    """The values that a pickle refers to later, by number. A dict of them would take ten times the memory."""

    def __setitem__(self, number: Any, value: Any) -> None:
        if number == len(self):
            self.append(value)
        else:
            super().__setitem__(number, value)


class _Unpickler(pickle._Unpickler):
    # The standard library sets these; its type stubs leave them out.
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, data: bytes, find_storage: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.memo = _Memo()
        self._find_storage = find_storage
        self._num_left = _MANY_CONTAINERS + len(data) // 6

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _KNOWN:
            what = "neither a tensor nor a plain container"
            raise CheckpointError(f"a pickle names {full[:200]}, which is {what}: it is not loaded")
        return _KNOWN[full]

    def persistent_load(self, pid: Any) -> Any:
        return self._find_storage(pid)

    def count(self, num_containers: int = 1) -> None:
        self._num_left -= num_containers
        if self._num_left < 0:
            raise ValueError("it has too many containers for its length")

    def load_mark(self) -> None:
        if len(self.metastack) > _MAX_NESTING:
            raise ValueError(f"more than {_MAX_NESTING} containers are nested")
        _STANDARD[pickle.MARK[0]](self)

    def load_long1(self) -> None:
        _STANDARD[pickle.LONG1[0]](self)
        if self.stack[-1].bit_length() > _MAX_INT_BITS:
            raise ValueError(f"an integer has more than {_MAX_INT_BITS} bits")

    def load_frozenset(self) -> None:
        self.count()
        require_keys(self.stack)
        _STANDARD[pickle.FROZENSET[0]](self)

    def load_reduce(self) -> None:
        """Call a `Maker`. Nothing else on the stack is ever called."""
        args, maker = self.stack.pop(), self.stack.pop()
        if type(maker) is not Maker or type(args) is not tuple:
            what = maker.name if isinstance(maker, Record) else type(maker).__name__
            raise CheckpointError(f"a pickle calls a {what}, which cannot be called: it is not loaded")
        # Many calls may use one long argument again, through the memo. So its length counts in every call.
        self.count(1 + (len(args[0]) * maker.item_bytes // _CONTAINER_BYTES if maker.item_bytes and args else 0))
        self.stack.append(maker.make(*args))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Record:
            target.state = state
        elif type(target) is not dict:  # the attributes of an ordered dict are not its items: they are dropped
            raise ValueError(f"state for a {type(target).__name__}")


class _Opcodes(dict[int, _Load]):
    def __missing__(self, opcode: int) -> _Load:
        raise ValueError(f"opcode {bytes([opcode])!r} is not a plain value, a container or a name")


_STANDARD: dict[int, _Load] = pickle._Unpickler.dispatch  # type: ignore[assignment]


def _standard(names: str, check: Callable[[_Unpickler], object] | None = None) -> dict[int, _Load]:
    """Return the standard library's implementation of some opcodes. If `check` is given, it runs before each."""

    def checked(load: _Load) -> _Load:
        return load if check is None else lambda unpickler: (check(unpickler), load(unpickler))

    return {opcode: checked(_STANDARD[opcode]) for opcode in (getattr(pickle, name)[0] for name in names.split())}


_Unpickler.dispatch = _Opcodes(  # type: ignore[assignment]
    {
        **_standard("PROTO FRAME STOP POP POP_MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET BINPERSID"),
        **_standard("NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT GLOBAL STACK_GLOBAL APPEND APPENDS"),
        **_standard("BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE"),
        **_standard("EMPTY_LIST EMPTY_DICT EMPTY_SET TUPLE TUPLE1 TUPLE2 TUPLE3", _Unpickler.count),
        **_standard("SETITEM", lambda unpickler: require_keys(unpickler.stack[-2:-1])),
        **_standard("SETITEMS", lambda unpickler: require_keys(unpickler.stack[::2])),
        **_standard("ADDITEMS", lambda unpickler: require_keys(unpickler.stack)),
        pickle.MARK[0]: _Unpickler.load_mark,
        pickle.LONG1[0]: _Unpickler.load_long1,
        pickle.FROZENSET[0]: _Unpickler.load_frozenset,
        pickle.REDUCE[0]: _Unpickler.load_reduce,
        pickle.NEWOBJ[0]: _Unpickler.load_reduce,
        pickle.BUILD[0]: _Unpickler.load_build,
    }
)


def _tensor(storage: Any, first: Any, shape: Any, stride: Any, *rest: Any) -> Strided:
    return _strided(storage, storage.dtype, first, shape, stride)


def _tensor_of_dtype(storage: Any, first: Any, shape: Any, stride: Any, *rest: Any) -> Strided:
    return _strided(storage, rest[2], first, shape, stride)


def _strided(storage: Any, dtype: Any, first: Any, shape: Any, stride: Any) -> Strided:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a storage")
    first, shape, stride = count(first), shape_from(shape), counts(stride)
    if len(shape) != len(stride):
        raise ValueError(f"a tensor of shape {shape} with strides {stride}")
    if prod(shape):
        last = first + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.num_bytes:
            raise ValueError(f"a tensor of {dtype} {shape} reaches beyond the {storage.num_bytes} bytes of its storage")
    return Strided(storage.file, storage.offset + first * dtype.itemsize, dtype, shape, stride)


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


def _set(items: Any = ()) -> set[Any]:
    return set(require_keys(items))


def _bytes(text: Any = "", encoding: Any = "latin1") -> bytes:
    """Return bytes, which protocol 2 writes as latin-1 text."""
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


_KINDS_OF_STORAGE = (
    "Double:float64 Float:float32 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 Char:int8 Byte:uint8 "
    "Bool:bool ComplexFloat:complex64 ComplexDouble:complex128"
)
STORAGE_DTYPES: dict[str, torch.dtype] = {
    f"torch.{kind}Storage": getattr(torch, dtype)
    for kind, dtype in (pair.split(":") for pair in _KINDS_OF_STORAGE.split())
}
STORAGE_DTYPES["torch.storage.UntypedStorage"] = torch.uint8
_RECORDS = {
    "torch": "device Tensor",
    "torch.nn.parameter": "Parameter",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata StorageMeta "
    "ChunkStorageMetadata MetadataIndex TensorProperties _MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "argparse": "Namespace",
    "numpy": "dtype",
    **dict.fromkeys(("pathlib", "pathlib._local"), "Path PosixPath PurePosixPath WindowsPath PureWindowsPath"),
    **dict.fromkeys(("builtins", "__builtin__"), "list dict int float str bool"),
}
_NAMES_OF_RECORDS = [
    *(f"{module}.{name}" for module, names in _RECORDS.items() for name in names.split()),
    *STORAGE_DTYPES,
]
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch.Size": shape_from,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda *args: {},
    **{f"{module}.{name}": _set for module in ("builtins", "__builtin__") for name in ("set", "frozenset")},
    "_codecs.encode": _bytes,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}
_ITEM_BYTES: dict[Callable[..., Any], int] = {_dict: 120, _set: 60, _bytes: 1}
_KNOWN: dict[str, Any] = {
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{full: Maker(full, lambda *args, full=full: Record(full, args)) for full in _NAMES_OF_RECORDS},
    **{full: Maker(full, make, _ITEM_BYTES.get(make, 0)) for full, make in _MAKERS.items()},
}
