"""Pickles, read without executing anything.

A pickle is a program for a small machine with a stack. This one has the machine's words for plain values and containers
and nothing else: no module is imported, no object is made by its own class, and nothing that the pickle names is ever
called. A name stands for what `find` returns for it. Where that is a `Maker`, the pickle may ask for one of its
values, which are inert and ours; everything else is refused. Memory grows with the pickle's own length and no faster,
whatever it counts or repeats.
"""

import struct
from collections.abc import Callable
from typing import Any

from ...base.errors import CheckpointError
from .records import Maker, Record, require_key

MAX_PICKLE_BYTES = 512 << 20
# Whole numbers are sizes and counts; a longer one is nobody's.
_MAX_INT_BYTES = 16
# A container is one byte of a pickle and sixty of memory: there may be this many, and one more for every six bytes:
# the densest that torch writes, places of parts, has one in nine.
_MANY_CONTAINERS = 1_000_000

Find = Callable[[str, str], Any]


class _Machine:
    __slots__ = ("data", "find", "is_done", "marks", "memo", "num_left", "position", "stack", "storage")

    def __init__(self, data: bytes, find: Find, storage: Callable[[Any], Any]) -> None:
        self.data, self.position = data, 0
        self.find, self.storage = find, storage
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.num_left = _MANY_CONTAINERS + len(data) // 6
        self.is_done = False

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise ValueError("it ends too early")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.position)
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def pop(self, num: int) -> list[Any]:
        if num > len(self.stack):
            raise ValueError("it takes more than there is")
        items = self.stack[len(self.stack) - num :]
        del self.stack[len(self.stack) - num :]
        return items

    def count(self) -> None:
        """One more container."""
        self.num_left -= 1
        if self.num_left < 0:
            raise ValueError(f"it makes a container of every few of its {len(self.data)} bytes")

    def since_mark(self) -> list[Any]:
        return self.pop(max(0, len(self.stack) - self.marks.pop()))

    def run(self) -> Any:
        data, words = self.data, _WORDS
        while not self.is_done:
            word = words.get(data[self.position])
            if word is None:
                raise ValueError(f"byte {self.position} is no word for a plain value")
            self.position += 1
            word(self)
        return self.stack.pop()


def read(data: bytes, find: Find, storage: Callable[[Any], Any]) -> Any:
    """The value that a pickle describes. `storage` is asked for what lies outside of it, by its id."""
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"a pickle of {len(data)} bytes, of at most {MAX_PICKLE_BYTES}: it is not loaded")
    try:
        return _Machine(data, find, storage).run()
    except RecursionError:
        raise CheckpointError("a pickle cannot be understood: it is nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"a pickle cannot be understood: {error}") from error


def _make(machine: _Machine) -> None:
    maker, args = machine.pop(2)
    if not isinstance(maker, Maker):
        what = maker.name if isinstance(maker, Record) else type(maker).__name__
        raise CheckpointError(f"a pickle calls a {what}, which cannot be called: it is not loaded")
    if type(args) is not tuple:
        raise ValueError(f"{maker.name} of a {type(args).__name__}")
    machine.count()
    machine.stack.append(maker.make(*args))


def _make_with_names(machine: _Machine) -> None:
    if machine.pop(1) != [{}]:
        raise ValueError("arguments by name")
    _make(machine)


def _build(machine: _Machine) -> None:
    target, state = machine.pop(2)
    if type(target) is Record:
        target.state = state
    # An ordered dict has attributes of its own, which say nothing about what is in it.
    elif type(target) is not dict:
        raise ValueError(f"state for a {type(target).__name__}")
    machine.stack.append(target)


def _name(machine: _Machine, module: Any, name: Any) -> None:
    if type(module) is not str or type(name) is not str:
        raise ValueError("a name that is no text")
    machine.stack.append(machine.find(module, name))


def _int(machine: _Machine, num_bytes: int) -> None:
    if num_bytes > _MAX_INT_BYTES:
        raise ValueError(f"a number of {num_bytes} bytes")
    machine.stack.append(int.from_bytes(machine.take(num_bytes), "little", signed=True))


def _set_items(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not dict or len(items) % 2:
        raise ValueError(f"items for a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[require_key(key)] = value


def _extend(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise ValueError(f"elements for a {type(target).__name__}")
    target.extend(items)


def _add(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not set:
        raise ValueError(f"members for a {type(target).__name__}")
    target.update(require_key(item) for item in items)


def _put(machine: _Machine, key: int) -> None:
    """Every pickle numbers what it remembers from 0 on."""
    if key > len(machine.memo):
        raise ValueError(f"it remembers value {key} after {len(machine.memo)} others")
    machine.memo[key : key + 1] = [machine.stack[-1]]


def _require_protocol(machine: _Machine) -> None:
    if machine.number(1) > 5:
        raise ValueError("a newer protocol than 5")


def _stop(machine: _Machine) -> None:
    machine.is_done = True


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def word(machine: _Machine) -> None:
        machine.stack.append(make(machine))

    return word


def _push_container(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def word(machine: _Machine) -> None:
        machine.count()
        machine.stack.append(make(machine))

    return word


_WORDS: dict[int, Callable[[_Machine], object]] = {
    ord("."): _stop,
    0x80: _require_protocol,
    0x95: lambda m: m.take(8),
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.since_mark(),
    # plain values
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("J"): lambda m: _int(m, 4),
    ord("K"): _push(lambda m: m.number(1)),
    ord("M"): _push(lambda m: m.number(2)),
    0x8A: lambda m: _int(m, m.number(1)),
    0x8B: lambda m: _int(m, m.number(4)),
    ord("G"): _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    ord("X"): _push(lambda m: str(m.take(m.number(4)), "utf-8")),
    0x8C: _push(lambda m: str(m.take(m.number(1)), "utf-8")),
    0x8D: _push(lambda m: str(m.take(m.number(8)), "utf-8")),
    ord("B"): _push(lambda m: m.take(m.number(4))),
    ord("C"): _push(lambda m: m.take(m.number(1))),
    0x8E: _push(lambda m: m.take(m.number(8))),
    0x96: _push(lambda m: m.take(m.number(8))),
    # containers
    ord(")"): _push(lambda m: ()),
    0x85: _push_container(lambda m: tuple(m.pop(1))),
    0x86: _push_container(lambda m: tuple(m.pop(2))),
    0x87: _push_container(lambda m: tuple(m.pop(3))),
    ord("t"): _push_container(lambda m: tuple(m.since_mark())),
    ord("]"): _push_container(lambda m: []),
    ord("a"): lambda m: _extend(m, m.pop(1)),
    ord("e"): lambda m: _extend(m, m.since_mark()),
    ord("}"): _push_container(lambda m: {}),
    ord("s"): lambda m: _set_items(m, m.pop(2)),
    ord("u"): lambda m: _set_items(m, m.since_mark()),
    0x8F: _push_container(lambda m: set()),
    0x90: lambda m: _add(m, m.since_mark()),
    0x91: _push_container(lambda m: frozenset(require_key(item) for item in m.since_mark())),
    # what was said before
    ord("q"): lambda m: _put(m, m.number(1)),
    ord("r"): lambda m: _put(m, m.number(4)),
    0x94: lambda m: _put(m, len(m.memo)),
    ord("h"): _push(lambda m: m.memo[m.number(1)]),
    ord("j"): _push(lambda m: m.memo[m.number(4)]),
    # names, and what is made of them
    ord("c"): lambda m: _name(m, m.line(), m.line()),
    0x93: lambda m: _name(m, *m.pop(2)),
    ord("R"): _make,
    0x81: _make,
    0x92: _make_with_names,
    ord("b"): _build,
    ord("Q"): _push(lambda m: m.storage(m.stack.pop())),
}
