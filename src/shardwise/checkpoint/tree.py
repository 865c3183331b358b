"""Summarize the content of a checkpoint: totals by class, and a tree by module.

In the tree, modules that are alike and differ only in their number are one line: `layers.0-31`. Two are alike when
everything under them has the same names, shapes, dtypes and state.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .index import Index, Saved, Stored

_MAX_DEPTH = 32  # no model is deeper
_NUMBER = re.compile(r"^[0-9]{1,18}(?![0-9])")


def totals_of(index: Index) -> dict[str, Any]:
    """Return bytes by class, and counts. A value is None if the files of another library do not have it.

    A tensor that may be a buffer counts as a weight. `dtypes`: number of elements of the model's tensors, by dtype.
    """
    tensors = index.tensors.values()
    params = [saved for saved in tensors if saved.kind != "buffer"]
    buffers = [saved for saved in tensors if saved.kind == "buffer"]
    state = [item for saved in tensors for item in saved.stored_state.values()]
    knows_trained = any(saved.is_trained is not None for saved in params) or not params
    knows_frozen = all(saved.is_trained is not None for saved in params)
    knows_buffers = all(saved.kind != "unknown" for saved in params)
    return {
        "num_tensors": len(tensors),
        "num_params": sum(saved.num_elems for saved in params),
        "num_trained": sum(saved.num_elems for saved in params if saved.is_trained) if knows_trained else None,
        "num_frozen": sum(saved.num_elems for saved in params if not saved.is_trained) if knows_frozen else None,
        "num_buffers": len(buffers) if knows_buffers else None,
        "weights_bytes": sum(saved.num_bytes for saved in params),
        "buffers_bytes": sum(saved.num_bytes for saved in buffers) if knows_buffers else None,
        "state_bytes": sum(item.num_bytes for item in state),
        "dtypes": _by_dtype(tensors),
        "state_dtypes": _by_dtype(state),
    }


def _by_dtype(tensors: Iterable[Stored]) -> dict[str, int]:
    elements = Counter[str]()
    for stored in tensors:
        elements[stored.dtype] += stored.num_elems
    return dict(elements.most_common())


@dataclass(slots=True)
class Node:
    """A module, or a tensor if `saved` is set. `times`: the number of alike modules that it represents."""

    name: str
    children: list["Node"] = field(default_factory=list)
    saved: Saved | None = None
    times: int = 1

    def total(self, measure: Callable[[Saved], int]) -> int:
        """Return the sum over the tensors of one of the alike modules."""
        own = 0 if self.saved is None else measure(self.saved)
        return own + sum(child.times * child.total(measure) for child in self.children)

    @property
    def num_elems(self) -> int:
        return self.total(lambda saved: saved.num_elems)

    @property
    def num_bytes(self) -> int:
        return self.total(lambda saved: saved.num_bytes)

    @property
    def state_bytes(self) -> int:
        return self.total(lambda saved: sum(item.num_bytes for item in saved.stored_state.values()))


def tree_of(tensors: Mapping[str, Saved]) -> Node:
    """Build the tree. A module with a single child is on one line with it: `model.norm.weight`."""
    root: dict[str, Any] = {}
    for name, saved in tensors.items():
        place = root
        *path, last = name.split(".", _MAX_DEPTH)
        for part in path:
            below = place.setdefault(part, {})
            # The name of a tensor may also be the beginning of another name: `a` and `a.b`.
            place = below if isinstance(below, dict) else place.setdefault(f"{part}.", {})
        place[f"{last} " if isinstance(place.get(last), dict) else last] = saved
    return _node("", root)


def _node(name: str, content: dict[str, Any] | Saved) -> Node:
    """Build a node, and merge neighbours that are alike, from the leaves up."""
    if isinstance(content, Saved):
        return Node(name, saved=content)
    children: list[Node] = []
    first, last, last_form = 0, 0, None
    for key, value in content.items():
        child = _node(key.strip(" ."), value)
        match = _NUMBER.match(child.name)
        number = int(match[0]) if match else 0
        form = (child.name[match.end() :], _form(child)) if match else None
        if form is not None and form == last_form and number == last + 1:
            children[-1].name = f"{first}-{number}{form[0]}"
            children[-1].times += child.times
        else:
            children.append(child)
            first = number
        last, last_form = number, form
    # A module with one line under it is merged with that line.
    if len(children) == 1 and name:
        children[0].name = f"{name}.{children[0].name}"
        return children[0]
    return Node(name, children)


def _form(node: Node) -> Any:
    """Return a value that is equal for alike modules."""
    saved = node.saved
    own = saved and (saved.shape, saved.dtype, saved.kind, saved.is_trained, bool(saved.tied), saved.group)
    state = saved and [(key, item.shape, item.dtype) for key, item in sorted(saved.stored_state.items())]
    return own, state, [(child.name, child.times, _form(child)) for child in node.children]


def walk(node: Node, depth: int | None = None, level: int = 0) -> Iterator[tuple[int, Node]]:
    """Yield the lines below a node, each with its level; no deeper than `depth`."""
    for child in node.children:
        yield level, child
        if depth is None or level + 1 < depth:
            yield from walk(child, depth, level + 1)
