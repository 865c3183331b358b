"""Read a pickle without executing anything that it names.

The standard library's unpickler does the parsing, with three restrictions. Its table of opcodes is an allowlist: plain
values, containers, and names. A name is looked up in `known_names` and never imported. The opcodes that would call an
object or set its attributes accept our own inert `Maker` and `Record` only. Memory grows with the length of the pickle
and no faster, whatever it counts or repeats.
"""

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

from ...base.errors import CheckpointError
from .known_names import Maker, Record, find, require_keys

MAX_PICKLE_BYTES = 512 << 20
_MAX_INT_BITS = 128  # integers are sizes and counts
_MAX_NESTING = 1000
# A container takes one byte of a pickle and this many bytes of memory.
_CONTAINER_BYTES = 60
# A pickle may have this many, and one more for every six of its bytes; the densest pickles of torch, lists of chunk
# offsets, have one in nine.
_MANY_CONTAINERS = 1_000_000

_Load = Callable[[Any], object]


def read(data: bytes, find_storage: Callable[[Any], Any]) -> Any:
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
        return find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return self._find_storage(pid)

    def count(self, num_containers: int = 1) -> None:
        self._num_left -= num_containers
        if self._num_left < 0:
            raise ValueError("it has too many containers for its length")

    def require_shallow(self) -> None:
        if len(self.metastack) > _MAX_NESTING:
            raise ValueError(f"more than {_MAX_NESTING} containers are nested")

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
        # Many calls may share one long argument through the memo.
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
    """Return the standard library's implementation of some opcodes, each after a check of the stack."""

    def checked(load: _Load) -> _Load:
        return load if check is None else lambda unpickler: (check(unpickler), load(unpickler))

    return {opcode: checked(_STANDARD[opcode]) for opcode in (getattr(pickle, name)[0] for name in names.split())}


_Unpickler.dispatch = _Opcodes(  # type: ignore[assignment]
    {
        **_standard("PROTO FRAME STOP POP POP_MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET BINPERSID"),
        **_standard("NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT GLOBAL STACK_GLOBAL APPEND APPENDS"),
        **_standard("BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE"),
        **_standard("MARK", _Unpickler.require_shallow),
        **_standard("EMPTY_LIST EMPTY_DICT EMPTY_SET TUPLE TUPLE1 TUPLE2 TUPLE3", _Unpickler.count),
        **_standard("SETITEM", lambda unpickler: require_keys(unpickler.stack[-2:-1])),
        **_standard("SETITEMS", lambda unpickler: require_keys(unpickler.stack[::2])),
        **_standard("ADDITEMS", lambda unpickler: require_keys(unpickler.stack)),
        pickle.LONG1[0]: _Unpickler.load_long1,
        pickle.FROZENSET[0]: _Unpickler.load_frozenset,
        pickle.REDUCE[0]: _Unpickler.load_reduce,
        pickle.NEWOBJ[0]: _Unpickler.load_reduce,
        pickle.BUILD[0]: _Unpickler.load_build,
    }
)
