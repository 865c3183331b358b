"""A small autograd of byte counts: it predicts what torch's eager autograd allocates and frees, without real tensors.

A forward is written like the torch code that it stands for, with the methods of `Tape` in place of operations. A
`Tensor` here is one reference to a storage. As in torch, a temporary lives as long as a Python variable refers to it,
and a saved tensor as long as the graph does. The backward runs nodes in torch's order, the last recorded first, and
frees what a node saved once it has run. Like torch, it adds gradients in place if nothing else refers to the storage.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ..training import Checkpointing
from .work import Kind, Meter, Product, Work, rounded


class Storage:
    __slots__ = ("meter", "num_bytes", "uses")

    def __init__(self, meter: Meter, num_bytes: int) -> None:
        self.meter, self.num_bytes, self.uses = meter, rounded(num_bytes), 0
        meter.take(self.num_bytes)


class Tensor:
    """A reference to a storage. `node` receives its gradient, at index `slot`; None: it has no gradient."""

    __slots__ = ("itemsize", "node", "num_elems", "slot", "storage")

    def __init__(self, storage: Storage, num_elems: int, itemsize: int, node: "Node | None" = None, slot: int = 0):
        self.storage, self.num_elems, self.itemsize, self.node, self.slot = storage, num_elems, itemsize, node, slot
        storage.uses += 1

    def __del__(self) -> None:
        self.storage.uses -= 1
        if not self.storage.uses:
            self.storage.meter.live -= self.storage.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_elems * self.itemsize

    def alias(self, num_elems: int | None = None) -> "Tensor":
        """Return another reference to the memory, without a gradient."""
        return Tensor(self.storage, self.num_elems if num_elems is None else num_elems, self.itemsize)


Gradients = list[Tensor | None]


@dataclass(slots=True, eq=False)
class Node:
    """A node of the graph. `backward` takes the gradients of the results out of the list that it gets, so that they can
    be freed, and returns the gradients of the inputs. `inputs`: the node and slot that each of these goes to."""

    sequence: int
    inputs: "list[tuple[Node, int] | None]"
    num_outputs: int = 1
    saved: list[Tensor] = field(default_factory=list)
    backward: Callable[[Gradients], Iterable[Tensor | None]] | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight. `is_direct`: its gradient is written into a buffer of the engine; autograd does not allocate it."""

    num_elems: int
    trainable: bool = True
    is_direct: bool = False


@dataclass(frozen=True, slots=True)
class Habits:
    """How a model is run. `writes_directly`: plain linear layers write their gradients into buffers of the engine.
    `is_late`: they do so after the unit's backward, and hold what these are computed from until then.
    `is_fused`: the code is compiled; then it fuses elementwise chains, and writes no gradients directly. `rank`: of the
    LoRA adapters on `targets`, which alone are trained; 0: no adapters, all weights are trained. `drops_inputs`: of
    adapters, by a dropout; `upcasts`: they compute in fp32. `keeps_every_second`: selective checkpointing saves every
    second product, as in torchtitan, instead of those that our rule selects."""

    writes_directly: bool = True
    is_late: bool = False
    is_fused: bool = False
    rank: int = 0
    targets: tuple[str, ...] = ()
    drops_inputs: bool = False
    upcasts: bool = False
    keeps_every_second: bool = False
    batch: int = 1
    seq: int = 1

    @property
    def is_direct(self) -> bool:
        return self.writes_directly and not self.is_fused

    def weight(self, num_elems: int) -> Weight:
        """Return a weight outside of plain linear layers. LoRA does not train it."""
        return Weight(num_elems, self.rank == 0)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Memory that an operation needs in addition to its inputs and its result, and its FLOP.

    `extra_bytes` are saved for the backward (statistics of a norm), `scratch_bytes` live while its backward runs.
    `is_kept`: selective checkpointing saves the result.
    """

    saves_result: bool = False
    extra_bytes: int = 0
    scratch_bytes: int = 0
    product: Product | None = None
    attention_flops: float = 0.0
    is_kept: bool = False


PLAIN = Kernel()
USUAL_HABITS = Habits()

Block = Callable[["Tape", Tensor], Tensor]


class Tape(Meter):
    """Records operations and their memory. `itemsize`: of the compute dtype."""

    def __init__(self, itemsize: int, habits: Habits = USUAL_HABITS) -> None:
        super().__init__()
        self.itemsize, self.habits = itemsize, habits
        self.grads: list[Tensor] = []
        self.late: list[Tensor] = []
        # Results that a selective checkpoint saves: its forward fills the list, its recompute empties it.
        self.kept: list[list[Tensor]] | None = None
        # Length of `kept` when the last tensor was saved for the backward. Compiled code does not save later results.
        self.num_read = 0
        self.is_replaying = False  # True in the recompute of a checkpoint
        self.drops_saved = False  # True in its forward
        self.num_wide = 0  # number of products of which selective checkpointing saves every second one
        # Number of saved tensors. A recompute stops after `last_saved` of them: later operations cost nothing.
        self.num_saved = 0
        self.last_saved = -1
        self._sequence = 0

    def new(self, num_elems: int, itemsize: int | None = None) -> Tensor:
        itemsize = self.itemsize if itemsize is None else itemsize
        return Tensor(Storage(self, 0 if self.is_over else num_elems * itemsize), num_elems, itemsize)

    @property
    def is_over(self) -> bool:
        return self.num_saved == self.last_saved

    def node(self, inputs: Sequence[Tensor], num_outputs: int = 1) -> Node:
        self._sequence += 1
        sources = [None if tensor.node is None else (tensor.node, tensor.slot) for tensor in inputs]
        return Node(self._sequence, sources, num_outputs)

    def op(
        self,
        inputs: Sequence[Tensor],
        num_elems: int | None = None,
        *,
        itemsize: int | None = None,
        saves: Sequence[Tensor] = (),
        num_passed: int = 0,
        weights: Sequence[Weight] = (),
        kernel: Kernel = PLAIN,
    ) -> Tensor:
        """Run an operation. Its result has the size of the first input, unless another one is given.

        The backward gives the first `num_passed` inputs the gradient of the result itself, or a view of it. It
        allocates a gradient for every other input and for each trained weight that is not direct.
        """
        num_elems = inputs[0].num_elems if num_elems is None else num_elems
        itemsize = inputs[0].itemsize if itemsize is None else itemsize
        needs_grad = any(x.node for x in inputs) or any(w.trainable for w in weights)
        node = self.node(inputs) if needs_grad else None
        saved = [tensor.alias() for tensor in saves] if node else []
        self._count_saved(len(saved))
        if kernel.is_kept and self.is_replaying and self.kept:
            out, *beside = [tensor.alias() for tensor in self.kept.pop(0)]
        else:
            if not self.is_over:
                self.num_kernels += 1
                self.attention_flops += kernel.attention_flops
                if kernel.product is not None:
                    self.products.append(kernel.product)
                elif not kernel.attention_flops:
                    self.moved_bytes += num_elems * itemsize + sum(x.num_bytes for x in inputs)
            beside = [self.new(kernel.extra_bytes, 1)] if kernel.extra_bytes else []
            out = self.new(num_elems, itemsize)
            if kernel.is_kept and self.kept is not None:
                self.kept.append([out.alias(), *(tensor.alias() for tensor in beside)])
        if node is None:
            return out
        if beside or kernel.saves_result:
            saved += [*beside, *([out.alias()] if kernel.saves_result else [])]
            self._count_saved(len(beside) + kernel.saves_result)
        sizes = [(x.num_elems, x.itemsize) if x.node else None for x in inputs]
        held = node.saved = [] if self.drops_saved else saved
        is_elementwise = kernel.product is None and not kernel.attention_flops
        read_bytes = [tensor.num_bytes for tensor in saves]

        def backward(grads: Gradients) -> list[Tensor | None]:
            grad = grads.pop()
            assert grad is not None
            scratch = self.new(kernel.scratch_bytes, 1)
            if self.habits.is_late and any(weight.is_direct and weight.trainable for weight in weights):
                self.late += [grad.alias(), *(tensor.alias() for tensor in held)]
            found: list[Tensor | None] = []
            num_grads = len(self.grads)
            for weight in weights:
                if weight.trainable and not weight.is_direct:
                    self.grads.append(self.new(weight.num_elems))
            for index, size in enumerate(sizes):
                is_passed = index < num_passed
                found.append(None if size is None else grad.alias(size[0]) if is_passed else self.new(*size))
            del scratch
            written = [tensor for tensor in found[num_passed:] if tensor is not None]
            of_weights = self.grads[num_grads:]
            if is_elementwise and (written or of_weights):
                # Each gradient is computed by a kernel of its own, from one saved tensor. Compiled code has one kernel
                # for all inputs, and one for all weights, whose sums go over the tokens.
                reads = grad.num_bytes + (sum(read_bytes) if self.habits.is_fused else max(read_bytes, default=0))
                kernels = [min(len(each), 1) if self.habits.is_fused else len(each) for each in (written, of_weights)]
                self.moved_bytes += sum(kernels) * reads + sum(tensor.num_bytes for tensor in written + of_weights)
                self.moved_bytes += 2 * kernel.scratch_bytes
            return found

        node.backward, out.node = backward, node
        return out

    def _count_saved(self, num_tensors: int) -> None:
        if num_tensors and not self.is_over:
            self.num_saved += num_tensors
            self.num_read = len(self.kept or ())

    def split(self, x: Tensor, shares: Sequence[int]) -> list[Tensor]:
        """Return views of a tensor, in the ratio of `shares`. Their gradients are concatenated in new memory."""
        parts = [x.alias(x.num_elems * share // sum(shares)) for share in shares]
        if x.node:
            node = self.node((x,), len(parts))
            num_elems, itemsize = x.num_elems, x.itemsize
            node.backward = lambda grads: [self._copied(num_elems, itemsize)]
            for slot, part in enumerate(parts):
                part.node, part.slot = node, slot
        return parts

    def view(self, x: Tensor, num_elems: int | None = None, is_copied_back: bool = False) -> Tensor:
        """Return a view of all or the first elements. `is_copied_back`: the memory layout of its gradient is not the
        input's, so the backward copies the gradient. The gradient of a part always gets new memory."""
        out = x.alias(num_elems)
        if x.node:
            node = out.node = self.node((x,))
            size = (x.num_elems, x.itemsize) if is_copied_back or num_elems is not None else None
            node.backward = lambda grads: [grads.pop() if size is None else self._copied(*size)]
        return out

    def _copied(self, num_elems: int, itemsize: int) -> Tensor:
        self.moved_bytes += 2 * num_elems * itemsize
        return self.new(num_elems, itemsize)

    def cat(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate in new memory. The gradients of the parts are views of the result's gradient."""
        return self.op(parts, sum(part.num_elems for part in parts), num_passed=len(parts))

    def backward(self, out: Tensor, grads: Gradients) -> dict[Node, Tensor]:
        """Run the backward from `out`, whose gradient it removes from `grads`. Return the gradients of the inputs."""
        assert out.node is not None
        root, slot = out.node, out.slot
        del out
        waiting: Counter[Node] = Counter()
        found = [root]
        while found:
            for source, _ in filter(None, found.pop().inputs):
                if source not in waiting:
                    found.append(source)
                waiting[source] += 1
        buffers: dict[Node, Gradients] = {root: [None] * root.num_outputs}
        buffers[root][slot] = grads.pop()
        ready = [(-root.sequence, root)]
        reached: dict[Node, Tensor] = {}
        while ready:
            _, node = heappop(ready)
            buffer = buffers.pop(node, [None])
            if node.backward is None:
                grad = buffer.pop()
                if grad is not None:
                    reached[node] = grad
                    del grad
                continue
            arrived = list(node.backward(buffer))
            buffer.clear()
            node.saved.clear()
            node.backward = None
            for edge in node.inputs:
                grad = arrived.pop(0)
                if edge is None:
                    continue
                other, slot = edge
                if grad is not None:
                    self._add(buffers.setdefault(other, [None] * other.num_outputs), slot, grad)
                del grad
                waiting[other] -= 1
                if not waiting[other]:
                    heappush(ready, (-other.sequence, other))
        return reached

    def _add(self, buffer: Gradients, slot: int, grad: Tensor) -> None:
        old = buffer[slot]
        if old is None:
            buffer[slot] = grad
            return
        # Compiled code adds in the kernel that reads the sum.
        self.moved_bytes += grad.num_bytes if self.habits.is_fused else 3 * grad.num_bytes
        if old.storage.uses > 1:
            buffer[slot] = self.new(old.num_elems, old.itemsize)

    def checkpoint(self, block: Block, x: Tensor, selects: bool) -> Tensor:
        """Run a block that saves only its input and, if `selects`, some results. The backward runs it again."""
        kept: list[list[Tensor]] = []
        self.num_saved, self.num_wide, self.drops_saved, self.kept = 0, 0, True, kept if selects else None
        out = block(self, x)
        num_saved, self.drops_saved, self.kept = self.num_saved, False, None
        if self.habits.is_fused:
            del kept[self.num_read :]
        node = self.node((x,))
        node.saved = [x.alias(), *(tensor for result in kept for tensor in result)]
        needs_grad = x.node is not None

        def backward(grads: Gradients) -> list[Tensor | None]:
            again = node.saved[0].alias()
            again.node = leaf = self.node(()) if needs_grad else None
            # From here on, saved results live as long as the recompute refers to them.
            del node.saved[1:]
            self.num_saved, self.num_wide, self.last_saved = 0, 0, num_saved
            self.kept, self.is_replaying = kept if selects else None, True
            recomputed = block(self, again)
            del again
            self.last_saved, self.kept, self.is_replaying = -1, None, False
            reached = self.backward(recomputed, grads)
            return [reached.pop(leaf) if leaf is not None else None]

        out.node, node.backward = node, backward
        return out


def measure(
    block: Block,
    num_elems: int,
    itemsize: int,
    habits: Habits = USUAL_HABITS,
    *,
    checkpointing: Checkpointing = "none",
    needs_input_grad: bool = True,
    kind: Kind = "activations",
) -> Work:
    """Run a block forward and backward on a tape, with an input of `num_elems`, and return its work."""
    tape = Tape(itemsize, habits)
    x = tape.new(num_elems)
    x.node = tape.node(()) if needs_input_grad else None
    tape.begin()
    out = block(tape, x) if checkpointing == "none" else tape.checkpoint(block, x, checkpointing == "selective")
    del x
    forward = tape.end_forward(out.storage.num_bytes, kind)
    if out.node is None:
        return forward
    grads: Gradients = [tape.new(out.num_elems, out.itemsize)]
    last = Tensor(Storage(tape, 0), 0, 0, out.node, out.slot)
    del out
    tape.begin()
    reached = tape.backward(last, grads)
    grad_bytes = tape.live - sum(grad.storage.num_bytes for grad in reached.values())
    return tape.end_backward(forward, grad_bytes)
