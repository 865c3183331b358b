"""Work of the units of any module, found by running a copy of it on the meta device, where nothing is computed.

The model runs forward once. Then one unit of each kind is run by itself, forward and backward: every operation passes
through `Counting`, which tracks the storages of results until they are freed. `StandIns` replaces operations that run
differently on a GPU or under our engine. Attention is one kernel that saves its inputs, its result and a number per
row; an RMS norm saves its input and a number per row; dropout saves a byte per element; a plain linear layer writes its
weight's gradient directly into the buffer for reductions. The loss is not run: for the last projection of a language
model and everything after it, `activations.Head` is used.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...core.saved_tensors import keep, kept
from ...core.schedule.model import ROOT
from ...core.schedule.units import Units, find_units
from ..training import Training
from .activations import LOSS, Head, assign_to_units
from .tape import Habits, measure
from .work import AttentionShape, Meter, Product, Work, chain, embedding_scratch_bytes, rounded


def tensors_in(values: Any) -> list[Tensor]:
    return [part for part in tree_leaves(values) if isinstance(part, Tensor)]


def attention_shape(query: Tensor, key: Tensor) -> AttentionShape:
    batch, heads, seq, head_dim = query.shape
    return AttentionShape(batch, seq, heads, key.shape[1], head_dim, query.element_size())


class StandIns(TorchFunctionMode):
    """Replaces operations by ones that use memory as on a GPU. `direct`: weights with directly written gradients."""

    def __init__(self, direct: frozenset[Tensor]) -> None:
        super().__init__()
        self._direct = direct

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            if attention_shape(query, key).kernel != "math":
                # Narrower values (latent attention) are padded, as the kernel requires.
                narrower = query.shape[-1] - value.shape[-1]
                value = F.pad(value, (0, narrower)) if narrower else value
                mixed = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
                return mixed[..., :-narrower] if narrower else mixed
        if func in (F.rms_norm, torch.rms_norm):
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            return _RmsNorm.apply(args[0], weight)  # type: ignore[no-untyped-call]
        if func is F.linear and torch.is_grad_enabled() and args[1] in self._direct:
            return _Linear.apply(*args, *(kwargs.get("bias"),) * (len(args) < 3))  # type: ignore[no-untyped-call]
        if func is F.dropout:
            p, training = (*args[1:], kwargs.get("p", 0.5), True)[:2] if len(args) < 3 else args[1:3]
            if p and kwargs.get("training", training):
                return torch.native_dropout(args[0], p, True)[0]
        if func is torch._grouped_mm and args[0].dtype != torch.bfloat16:
            return _GroupedProduct.apply(*args[:2], kwargs.get("offs"))  # type: ignore[no-untyped-call]
        if func is Tensor.__bool__ and args[0].is_meta:
            return True  # models read a value only to check whether a mask hides nothing
        return func(*args, **kwargs)


class _Kernel(torch.autograd.Function):
    """An operation whose backward allocates the gradients of its saved inputs."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return tuple(torch.empty_like(tensor) if is_needed else None for tensor, is_needed in needed)


class _RmsNorm(_Kernel):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rows = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)


class _GroupedProduct(_Kernel):
    """Rows (tokens, width), each times the matrix of its expert (experts, width, new width)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        num_experts, width, new_width = weight.shape
        # The same number of operations: the rows of one expert times the matrices of all.
        of_one = rows[: -(-rows.shape[0] // num_experts)]
        beside = weight.as_strided((width, num_experts * new_width), (num_experts * new_width, 1))
        return torch.mm(of_one, beside).view(-1)[: rows.shape[0] * new_width].view(-1, new_width)


class _Linear(torch.autograd.Function):
    """A linear layer like the engine's (core/engine/direct_gradients.py)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        keep(ctx, x, weight if x.requires_grad else None)
        out = F.linear(x, weight, bias)
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = kept(ctx)
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            None if weight is None else rows.mm(weight).view(x.shape),
            None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1, torch.ops.aten.mm.dtype: 0}
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
# Reference counts of a gradient (tensor, storage) inside a dispatch mode, if only autograd's buffer holds it.
_NUM_OWN_REFERENCES = (4, 2)


class Counting(TorchDispatchMode, Meter):
    """Counts memory, products and traffic. `live` and `peak`: bytes, rounded like those of torch's GPU allocator."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        Meter.__init__(self)
        self._known: set[int] = set()
        self._not_counted: list[Any] = []
        self._frozen: set[int] = set()
        self._depth = 0

    def noting(self, forward: "Forward", stand_ins: StandIns) -> "Forward":
        """Wrap a forward so that its products and traffic are recorded, also when a backward recomputes it."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                with stand_ins:
                    return forward(*args, **kwargs)
            finally:
                self._depth -= 1

        return noted

    def leave_out(self, tensors: Any) -> None:
        """Do not count tensors that exist already: weights, inputs of the model."""
        for tensor in tensors_in(tensors):
            storage = tensor.untyped_storage()
            self._known.add(storage._cdata)
            self._not_counted.append(storage)
            if not tensor.requires_grad:
                self._frozen.add(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_in_backward = not self._depth and torch._C._current_graph_task_id() != -1
        if func is torch.ops.aten.add.Tensor and is_in_backward:
            # If nothing else holds a gradient, autograd adds to it in place.
            num_references = args[0]._use_count(), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
            if num_references == _NUM_OWN_REFERENCES:
                self.moved_bytes += 3 * args[0].nbytes
                return args[0]
        result = func(*args, **kwargs)
        if func is _ATTENTION:
            # Strides as on a GPU: those of the queries if they are dense, else token by token.
            rows = args[0].transpose(1, 2)
            is_efficient = attention_shape(args[0], args[1]).kernel == "efficient"
            like = torch.empty(rows.shape, dtype=rows.dtype, device="meta") if is_efficient else rows
            result = torch.empty_like(like).transpose(1, 2), *result[1:]
        are_new = [self._count(tensor.untyped_storage()) for tensor in tensors_in(result)]
        self.peak = max(self.peak, self.live + _scratch_bytes(func, args, result))
        if any(are_new) and (self._depth or is_in_backward):
            self._note(func, args, result)
        return result

    def _count(self, storage: Any) -> bool:
        key = storage._cdata
        if key in self._known:
            return False
        num_bytes = rounded(storage.nbytes())
        self._known.add(key)
        self.take(num_bytes)
        weakref.finalize(storage, self._free, key, num_bytes)
        return True

    def _free(self, key: int, num_bytes: int) -> None:
        self.live -= num_bytes
        self._known.discard(key)

    def _note(self, func: Any, args: Any, result: Any) -> None:
        if func is torch.ops.aten.empty.memory_format:
            return
        if not self._depth:  # a backward
            if func not in _PRODUCTS and func is not _ATTENTION_BACKWARD:
                self.moved_bytes += sum(part.nbytes for part in tensors_in((args, result)))
            return
        self.num_kernels += 1
        if func in _PRODUCTS:
            a, b = args[_PRODUCTS[func] : _PRODUCTS[func] + 2]
            trainable = b.untyped_storage()._cdata not in self._frozen
            self.products.append(Product(a.shape[0], b.shape[1], a.shape[1], trainable=trainable))
        elif func is torch.ops.aten._grouped_mm.default:
            rows, (num_experts, width, new_width) = args[0].shape[0], args[1].shape
            self.products.append(Product(rows // num_experts, new_width, width, num_experts))
        elif func is torch.ops.aten.bmm.default:
            self.attention_flops += 2.0 * args[0].numel() * args[1].shape[-1]
        elif func is _ATTENTION:
            self.attention_flops += attention_shape(args[0], args[1]).flops
        elif func is torch.ops.aten.embedding.default:
            self.moved_bytes += 2 * result.nbytes
        else:
            self.moved_bytes += sum(part.nbytes for part in tensors_in((args, result)))


def _scratch_bytes(func: Any, args: Any, result: Any) -> int:
    """Bytes that a kernel of a GPU allocates besides its result."""
    if func is _ATTENTION_BACKWARD:
        return attention_shape(args[1], args[2]).scratch_bytes
    if func is torch.ops.aten.embedding_dense_backward.default:
        return embedding_scratch_bytes(args[1].numel(), *result.shape)
    if func is torch.ops.aten._safe_softmax.default:
        return int(result.numel())
    return int(result.nbytes) if func is torch.ops.aten._softmax_backward_data.default else 0


class _Source(torch.autograd.Function):
    """Makes the module's input, to which only the module has a reference."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _Sink(torch.autograd.Function):
    """Consumes the module's output and makes its gradient, to which only the module's backward has a reference."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, begins: Callable[[], None]) -> Tensor:
        ctx.size, ctx.dtype, ctx.begins = out.shape, out.dtype, begins
        return out.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        made = torch.empty(ctx.size, dtype=ctx.dtype, device="meta")
        ctx.begins()
        return made, None


Forward = Callable[..., Any]


def measure_call(
    forward: Forward,
    around: Callable[[Forward], Forward] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: Sequence[Tensor],
    stand_ins: StandIns,
) -> Work:
    """Measure the work of a call. Its input is the first argument with a gradient, else the first floating-point one.
    Others are not counted. `around`: the wrapper that activation checkpointing puts around the forward."""
    counting = Counting()
    counting.leave_out(weights)
    floating = [part for part in tensors_in((args, kwargs)) if part.is_floating_point()]
    like = next((part for part in floating if part.requires_grad), next(iter(floating), None))
    counting.leave_out((args, kwargs))
    noted = counting.noting(forward, stand_ins)
    run = noted if around is None else around(noted)
    seed = torch.empty((), device="meta", requires_grad=True)
    with counting:
        out = _called(counting, run, args, kwargs, like, seed)
        work = counting.end_forward(rounded(out.untyped_storage().nbytes()))
        if out.grad_fn is None:
            return work
        sink = _Sink.apply(out, counting.begin)  # type: ignore[no-untyped-call]
        del out
        torch.autograd.backward((sink,))
    grad_bytes = sum(rounded(weight.grad.untyped_storage().nbytes()) for weight in weights if weight.grad is not None)
    for weight in weights:
        weight.grad = None
    return counting.end_backward(work, grad_bytes)


def _called(
    counting: Counting, run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], like: Tensor | None, seed: Tensor
) -> Tensor:
    """Return the output of a call. Afterwards no variable holds the input; autograd may have saved it."""
    made: list[Tensor] = []
    if like is not None and like.requires_grad:
        made.append(_Source.apply(seed, like.detach()))  # type: ignore[no-untyped-call]
    elif like is not None:
        made.append(torch.empty_like(like))
    counting.begin()
    args, kwargs = tree_map(lambda part: made[0] if part is like and like is not None else part, (args, kwargs))
    made.clear()
    found = tensors_in(run(*args, **kwargs))
    return next((part for part in found if part.grad_fn is not None), found[0])


@dataclass(frozen=True, slots=True)
class _Call:
    """A recorded call of a module. Calls with the same `kind` (class, sizes, inputs) need the same work."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: tuple[Any, ...]


def probe_works(
    model: nn.Module,
    training: Training,
    *,
    units: Units = "auto",
    around: Callable[[Forward], Forward] | None = None,
    writes_directly: bool = True,
) -> dict[str, Work]:
    """Return the same as `works_of`, for a language model that takes token ids (micro_batch, seq).

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
    compute = training.formats.compute.torch
    model = on_meta(model, compute)
    modules = dict(model.named_modules())
    # The engine's layers write the gradients of these weights directly (core/engine/direct_gradients.py).
    plain = [part for part in modules.values() if isinstance(part, nn.Linear) and _is_plain(part)]
    stand_ins = StandIns(frozenset(part.weight for part in plain if writes_directly and part.weight.requires_grad))
    tokens = torch.zeros(training.micro_batch, training.seq, dtype=torch.int64, device="meta")
    calls = _calls_of(model, {path: modules[path] for path in (*leaves, *owners) if path}, tokens, stand_ins)
    blocks = [index for index, call in enumerate(calls) if call.path in leaves and _is_block(call.path)]
    head = calls[-1].path if isinstance(modules[calls[-1].path], nn.Linear) else None
    held = _bytes_beside(calls, tokens)
    groups: dict[str, list[Work]] = {ROOT: [Work(held, held, 0, 0)]}
    known: dict[tuple[Any, ...], Work] = {}
    for index, call in enumerate(calls):
        module: Any = modules[call.path]
        if call.path == head and index == len(calls) - 1:
            habits = Habits(writes_directly, rank=0 if module.weight.requires_grad else 1)
            is_plain = head in leaves and _is_plain(module)
            sizes = module.in_features, module.out_features
            projection = Head(*sizes, training.loss, is_plain, training.loss_chunk)
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
        works |= assign_to_units(work, name, found) if name in cut else {name: work}
    return works


def on_meta(model: nn.Module, compute: torch.dtype) -> nn.Module:
    """Return a copy on the meta device with parameters in the compute dtype; the model itself is not changed."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for param in model.parameters():
        empty = torch.empty(param.shape, dtype=compute, device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    copied = copy.deepcopy(model, memo)
    config: Any = getattr(copied, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # as in training
    return copied


def _is_plain(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _calls_of(model: nn.Module, parts: dict[str, nn.Module], tokens: Tensor, stand_ins: StandIns) -> list[_Call]:
    """Record the calls of the parts, in order. Only the first part of each kind runs; the others return its result."""
    calls: list[_Call] = []
    results: dict[tuple[Any, ...], Any] = {}

    def run(path: str, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        sizes = tuple((param.shape, param.requires_grad) for param in module.parameters())
        inputs = tuple((part.shape, part.dtype, part.requires_grad) for part in tensors_in((args, kwargs)))
        kind = type(module), sizes, inputs
        calls.append(_Call(path, args, kwargs, kind))
        if kind not in results:
            results[kind] = forward(*args, **kwargs)
        return results[kind]

    originals = {path: module.forward for path, module in parts.items()}
    for path, module in parts.items():
        module.forward = partial(run, path, module, originals[path])
    with stand_ins:
        model(tokens)
    for path, module in parts.items():
        module.forward = originals[path]
    return calls


def _unwrapped(forward: Forward) -> tuple[Forward, Callable[[Forward], Forward] | None]:
    """Return a forward and its wrapper, or None. A checkpointed block's forward is partial(wrapper, forward, ...)."""
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
