"""Work of the units of any module, found by running a copy of it on the meta device, where nothing is computed.

The model runs forward once. Then one unit of each kind is run by itself, forward and backward (probe_meter.py). The
loss is not run: for the last projection of a language model and everything after it, `activations.Head` is used.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.schedule.model import ROOT
from ...core.schedule.units import Units, find_units
from ..training import Loss
from .activations import LOSS, Head, shared_out
from .probe_meter import Forward, StandIns, measure_call, tensors_in
from .tape import Habits, measure
from .work import Work, chain, rounded


@dataclass(frozen=True, slots=True)
class _Call:
    """A recorded call of a module. Calls with the same `kind` (class, sizes, inputs) need the same work."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: tuple[Any, ...]


def probe_works(
    model: nn.Module,
    *,
    batch: int,
    seq: int,
    compute: torch.dtype = torch.bfloat16,
    units: Units = "auto",
    around: Callable[[Forward], Forward] | None = None,
    loss: Loss = "chunked",
    writes_directly: bool = True,
) -> dict[str, Work]:
    """Return the same as `works_of`, for a language model that takes token ids (batch, seq).

    `around` wraps the forward of each block, like activation checkpointing. `writes_directly`: gradients of plain
    linear layers are written directly, as by the engine."""
    found = find_units(model, units)
    cut = [unit.path for unit in found if unit.holds_units and _is_block(unit.path)]
    cut = [path for path in cut if not _is_in(path, cut)]
    leaves = [unit.path for unit in found if unit.path and not unit.holds_units and not _is_in(unit.path, cut)] + cut
    owners = {
        site.module
        for unit in found
        if unit.path not in leaves and not _is_in(unit.path, cut)
        for param in unit.params
        for site in param.sites
    }
    model = on_meta(model, compute)
    modules = dict(model.named_modules())
    stand_ins = StandIns(_plain_weights(model) if writes_directly else frozenset())
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    calls = _calls_of(model, {path: modules[path] for path in (*leaves, *owners) if path}, tokens, stand_ins)
    blocks = [index for index, call in enumerate(calls) if call.path in leaves and _is_block(call.path)]
    head = calls[-1].path if isinstance(modules[calls[-1].path], nn.Linear) else None
    held = _bytes_beside(calls, tokens)
    groups: dict[str, list[Work]] = {ROOT: [Work(held, held, 0, 0)]}
    known: dict[tuple[Any, ...], Work] = {}
    for index, call in enumerate(calls):
        module: Any = modules[call.path]
        if call.path == head and index == len(calls) - 1:
            trains = module.weight.requires_grad
            habits = Habits(writes_directly, rank=0 if trains else 1)
            is_plain = head in leaves and type(module).forward is nn.Linear.forward
            projection = Head(module.in_features, module.out_features, loss, is_plain)
            work = measure(projection, tokens.numel() * module.in_features, compute.itemsize, habits, kind="loss")
        else:
            if call.kind not in known:
                forward, wrap = _unwrapped(module.forward)
                wrap = around if around is not None and index in blocks else wrap
                weights = list(module.parameters())
                known[call.kind] = measure_call(forward, wrap, call.args, call.kwargs, weights, stand_ins)
            work = known[call.kind]
        is_end = bool(blocks) and index > blocks[-1]
        name = (head if head in leaves else LOSS) if is_end else call.path if call.path in leaves else ROOT
        groups.setdefault(name or LOSS, []).append(work)
    input_bytes = groups[calls[blocks[-1]].path][-1].output_bytes if blocks else 0
    works: dict[str, Work] = {}
    for name, each in groups.items():
        work = chain(each, input_bytes if name in (head, LOSS) else 0)
        works |= shared_out(work, name, found) if name in cut else {name: work}
    return works


def on_meta(model: nn.Module, compute: torch.dtype) -> nn.Module:
    """Return a copy on the meta device with parameters in the compute dtype; the model itself is not changed."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.empty(param.shape, dtype=compute, device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    copied = copy.deepcopy(model, memo)
    config: Any = getattr(copied, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # as in training
    return copied


def _plain_weights(model: nn.Module) -> frozenset[Tensor]:
    """Return the weights whose gradients the engine's layers write directly (core/engine/direct_gradients.py)."""
    return frozenset(
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module.weight.requires_grad
    )


def _calls_of(model: nn.Module, parts: dict[str, nn.Module], tokens: Tensor, stand_ins: StandIns) -> list[_Call]:
    """Record the calls of the parts, in order. Only the first part of each kind runs; the others return its result."""
    calls: list[_Call] = []
    results: dict[tuple[Any, ...], Any] = {}

    def watched(path: str, module: nn.Module) -> Forward:
        forward = module.forward
        sizes = tuple((param.shape, param.requires_grad) for param in module.parameters())

        def run(*args: Any, **kwargs: Any) -> Any:
            inputs = tensors_in((args, kwargs))
            kind = type(module), sizes, tuple((part.shape, part.dtype, part.requires_grad) for part in inputs)
            calls.append(_Call(path, args, kwargs, kind))
            if kind not in results:
                results[kind] = forward(*args, **kwargs)
            return results[kind]

        return run

    originals = {path: module.forward for path, module in parts.items()}
    for path, module in parts.items():
        module.forward = watched(path, module)
    with stand_ins:
        model(tokens)
    for path, module in parts.items():
        module.forward = originals[path]
    return calls


def _unwrapped(forward: Forward) -> tuple[Forward, Callable[[Forward], Forward] | None]:
    """Return a forward and its wrapper: checkpointed blocks have partial(checkpointed, forward, ...) in its place."""
    if not isinstance(forward, partial) or not forward.args or not callable(forward.args[0]):
        return forward, None
    inner, *rest = forward.args
    return inner, lambda other: partial(forward.func, other, *rest, **forward.keywords)


def _is_block(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _is_in(path: str, blocks: Sequence[str]) -> bool:
    return any(path.startswith(f"{block}.") for block in blocks)


def _bytes_beside(calls: Sequence[_Call], tokens: Tensor) -> int:
    """Bytes of token ids and targets, and of the arguments of blocks besides their input: rotary tables, masks."""
    total = 2 * rounded(tokens.numel() * 8)
    seen: set[int] = set()
    for call in calls:
        for part in tensors_in((call.args, call.kwargs)) if _is_block(call.path) else ():
            storage = part.untyped_storage()
            if part.is_floating_point() and not part.requires_grad and storage._cdata not in seen:
                seen.add(storage._cdata)
                total += rounded(storage.nbytes())
    return total
