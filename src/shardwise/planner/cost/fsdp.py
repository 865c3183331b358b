"""Memory of a rank under torch's FSDP2 (`fully_shard`) and FSDP1 at every instant of a step, to compare with ours.

Under FSDP2 a gathered unit exists twice: in the output of the all-gather, and in the parameters that are copied out of
it. In the forward the output lives until the next unit's output exists, in the backward until it is copied. FSDP1 uses
the output itself, and the backward of its `FlatParameter` concatenates the gradients of a unit. The backward prefetches
one unit. Autograd holds the gradients of a unit until its backward ends. Then they are copied into the input of the
reduce-scatter, which lives until the next reduce-scatter begins. The root stays gathered from the first forward to the
end of the backward. Gradients are dropped before the next forward.

Three streams allocate, and none reuses memory that another has freed: `Memory.pools` has the peak of each.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...base.errors import ConfigurationError
from ...core.schedule.state_bytes import off_device
from ...core.schedule.step_schedule import Schedule, UnitPlan
from ..training import MOMENTS, Training
from ..work.work import Work
from .compute import Copies
from .peak import ACTIVATIONS, GATHERED, GRADS, LOSS, OPTIMIZER, PARAMS, REDUCE, WORKSPACE_BYTES, Memory, MemoryWalk


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """Options of an FSDP training that change its memory. Defaults: torchtitan since the middle of 2025.

    `ends_apart`: the embedding is a unit, and so is the head with the last norm; otherwise they belong to the root, as
    in older torchtitan and in accelerate. `keeps_last`: the last unit stays gathered from its forward to its backward.
    `root_stays`: so does the root. `kept_logit_bytes`: bytes per logit (2, or 4 in fp32) if a variable of the training
    loop holds the logits of the previous step until the next ones replace them; else 0.
    `is_foreach`: the optimizer allocates a temporary copy of everything that it updates; a fused one does not.
    `is_flat`: FSDP1, whose units are a `FlatParameter` each.
    """

    ends_apart: bool = True
    keeps_last: bool = True
    root_stays: bool = True
    kept_logit_bytes: int = 0
    is_foreach: bool = False
    is_flat: bool = False


# `auto_wrap_policy` has the blocks; the root holds the ends. torch's AdamW is foreach on a GPU unless told otherwise.
WRAPPINGS = {
    "fsdp1": Wrapping(ends_apart=False, keeps_last=False, is_foreach=True, is_flat=True),
    "fsdp2": Wrapping(),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are gathered together. `collected_bytes`: output of the all-gather (0 on a single rank, and where
    nothing is copied out of it). `gathered_bytes`: parameters. `part_bytes`: its input, if the shard has to be cast."""

    gathered_bytes: int
    collected_bytes: int
    part_bytes: int
    rest_bytes: int  # the shard that stays after the forward, if the backward gathers only within a node
    summed_bytes: int  # input of the reduction
    grad_bytes: int  # output of the reduction
    stays: bool  # stays gathered from its forward to its backward


def grouped(
    schedule: Schedule, works: Mapping[str, Work], wrapping: Wrapping
) -> tuple[str, list[str], dict[str, Group]]:
    """Return the root's name, the names of the other units in the order of their forwards, and the group of each."""
    units = {unit.name: unit for unit in schedule.units}
    root = next((unit.name for unit in schedule.units if unit.holds_units), schedule.units[0].name)
    names = [name for name in works if name != root]
    if not names:
        raise ConfigurationError(f"engine: all of the model is one unit, {root!r}; FSDP is planned for blocks")
    last = names[-1]
    ends = [name for name in names if name in units and (works[name].kind == "loss" or not units[name].backward_reads)]
    plans_of: dict[str, list[UnitPlan]] = {name: [units[name]] for name in (root, *names) if name in units}
    if not wrapping.ends_apart:
        for name in ends:
            plans_of[root] += plans_of.pop(name)
    elif last in plans_of:
        plans_of[last] += plans_of[root]
        plans_of[root] = []
    groups = {name: _group(plans, wrapping.is_flat) for name, plans in plans_of.items()}
    return root, names, {name: groups.get(name, groups[root]) for name in (root, *names)}


def _group(units: Sequence[UnitPlan], is_flat: bool) -> Group:
    flats = [flat for unit in units for flat in unit.flats]
    gathered = [flat for flat in flats if not flat.master_is_whole]
    sharded = [flat for flat in gathered if flat.num_master < flat.num_elems]
    cast = [flat for flat in sharded if flat.master != flat.compute]
    trained = [flat for flat in flats if flat.trainable]
    return Group(
        gathered_bytes=sum(flat.num_elems * flat.compute.itemsize for flat in gathered),
        collected_bytes=0 if is_flat else sum(flat.num_elems * flat.compute.itemsize for flat in sharded),
        part_bytes=sum(flat.num_master * flat.compute.itemsize for flat in cast),
        rest_bytes=sum(flat.num_rest * flat.compute.itemsize for flat in sharded if flat.rest_on),
        summed_bytes=sum(flat.num_elems * flat.reduce.itemsize for flat in trained),
        grad_bytes=sum(flat.num_master * flat.master.itemsize for flat in trained),
        stays=any(unit.layout.gathered_until == "backward" for unit in units),
    )


COMPUTE_STREAM, GATHER_STREAM, REDUCE_STREAM = range(3)
FP32_BYTES = 4
# Bytes that AdamW's foreach operations read and write per fp32 element (`_multi_tensor_adamw` in torch/optim/adam.py):
# mul of the weight 8, lerp 12, mul 8, addcmul 12, sqrt 8, div 8, add 8, addcdiv 16. A fused update: 28.
FOREACH_BYTES = 80


def fsdp_memory_of(
    schedule: Schedule, works: Mapping[str, Work], training: Training, wrapping: Wrapping | None = None
) -> Memory:
    step = _Step(schedule, works, training, wrapping or WRAPPINGS[training.engine])
    for index in range(min(training.num_micro_batches, 2)):
        step.forward()
        step.backward(is_first=index == 0)
    step.note("update", OPTIMIZER, step.shard_bytes if step.wrapping.is_foreach else 0)
    away = off_device([unit.flats for unit in schedule.units], training.num_moments)
    return Memory(tuple(step.instants), away, pools=tuple(step.pool_peaks))


class _Step(MemoryWalk):
    """Tracks memory by class and by stream through a step, in the order in which torch's hooks run."""

    def __init__(self, schedule: Schedule, works: Mapping[str, Work], training: Training, wrapping: Wrapping) -> None:
        super().__init__()
        self.wrapping = wrapping
        self.pools, self.pool_peaks = [0, 0, 0], [0, 0, 0]
        self.root_name, self.names, self.groups = grouped(schedule, works, wrapping)
        self.root = self.groups[self.root_name]
        self.late = [unit.name for unit in schedule.units if unit.name in self.names and not unit.backward_reads]
        # Groups in the order of their forwards, without the root.
        self.chain = [self.groups[name] for name in self.names if self.groups[name] is not self.root]
        self.gathered: set[int] = set()
        self.gather_stream = GATHER_STREAM if wrapping.is_flat else COMPUTE_STREAM  # that allocates the parameters
        self.on_its_way: Group | None = None  # prefetched for the backward
        self.kept_output = 0  # bytes of the output of the forward's last all-gather
        self.kept_input = 0  # bytes of the input of the last reduce-scatter
        self.grads_of: Counter[int] = Counter()  # by group: bytes of gradients that are not yet reduced
        last = self.names[-1]
        products = works[last].products if training.loss in ("plain", "compiled") else ()
        self.num_logits = products[-1].m * products[-1].n if products else 0
        self.itemsize = training.formats.compute.itemsize
        # Bytes that the loss saves for each logit: a compiled one saves the logits, another one fp32 scores.
        self.saved_itemsize = self.itemsize if training.loss == "compiled" else FP32_BYTES
        self.works = works
        self.shard_bytes = 0
        for unit in schedule.units:
            for flat in unit.flats:
                num_bytes = flat.num_master * flat.master.itemsize
                self.hold(PARAMS, num_bytes if flat.trainable or flat.layout.params_on == "device" else 0)
                if flat.trainable:
                    self.hold(OPTIMIZER, round(num_bytes * training.num_moments))
                    self.shard_bytes += num_bytes
        self.hold(ACTIVATIONS, WORKSPACE_BYTES)
        self.hold(LOSS, self.num_logits * self.wrapping.kept_logit_bytes)

    def hold(self, kind: int, num_bytes: int, stream: int = COMPUTE_STREAM) -> None:
        self.held[kind] += num_bytes
        self.pools[stream] += num_bytes
        if stream != COMPUTE_STREAM:
            self.pool_peaks[stream] = max(self.pool_peaks[stream], self.pools[stream])

    def note(self, name: str, kind: int = ACTIVATIONS, extra: int = 0) -> None:
        super().note(name, kind, extra)
        self.pool_peaks[COMPUTE_STREAM] = max(self.pool_peaks[COMPUTE_STREAM], self.pools[COMPUTE_STREAM] + extra)

    def forward(self) -> None:
        input_bytes = 0
        for name in (self.root_name, *self.names):
            group, work = self.groups[name], self.works[name]
            if group is not self.root or name == self.root_name:
                # The output of the all-gather, and this rank's input, which is freed once it is copied in.
                self.hold(GATHERED, group.part_bytes + group.collected_bytes, GATHER_STREAM)
                self.note(f"gather {name}", ACTIVATIONS, input_bytes)
                self.hold(GATHERED, -group.part_bytes - self.kept_output, GATHER_STREAM)
                self.kept_output = group.collected_bytes
                self.hold(GATHERED, group.gathered_bytes, self.gather_stream)
                self.gathered.add(id(group))
            if name == self.names[-1]:
                # The root's forward ends before the loss, which needs only the logits.
                self._end_forward(group)
                if not self.wrapping.root_stays:
                    self._release(self.root)
                self.hold(GATHERED, -self.kept_output, GATHER_STREAM)
                self.kept_output = 0
            kind = LOSS if work.kind == "loss" else ACTIVATIONS
            ahead = self._gathered_ahead(group)
            self.hold(GATHERED, ahead, self.gather_stream)
            self.note(f"forward {name}", kind, input_bytes + work.forward_peak_bytes)
            self.hold(GATHERED, -ahead, self.gather_stream)
            self.hold(kind, work.saved_bytes)
            input_bytes = work.output_bytes
            if name != self.names[-1]:
                self._end_forward(group)

    def _gathered_ahead(self, group: Group) -> int:
        """Bytes of the next unit: FSDP1's host runs ahead of the device, with two gathers in flight."""
        following = [self.root, *self.chain]
        at = next(index for index, other in enumerate(following) if other is group) + 1
        is_next = self.wrapping.is_flat and at < len(following) and id(following[at]) not in self.gathered
        return following[at].gathered_bytes if is_next else 0

    def _end_forward(self, group: Group) -> None:
        is_last = bool(self.chain) and group is self.chain[-1]
        if group is not self.root and not group.stays and not (is_last and self.wrapping.keeps_last):
            self._release(group)
            self.hold(GATHERED, group.rest_bytes)

    def _release(self, group: Group) -> None:
        if id(group) in self.gathered:
            self.gathered.discard(id(group))
            self.hold(GATHERED, -group.gathered_bytes, self.gather_stream)

    def backward(self, is_first: bool) -> None:
        last = self.names[-1]
        loss = self.works[last]
        self.note("backward loss", LOSS, loss.output_bytes + loss.backward_peak_bytes)
        self._gather_for_backward(self.root_name, loss)
        self._prefetch(len(self.chain) - 1)
        order = [self.root_name, *self.names]
        for position in reversed(range(len(order))):
            name = order[position]
            group, work = self.groups[name], self.works[name]
            input_bytes = self.works[order[position - 1]].output_bytes
            if group is not self.root:
                self._gather_for_backward(name, work)
                self._prefetch(next(index for index, other in enumerate(self.chain) if other is group) - 1)
            if name != last:
                self.note(f"backward {name}", ACTIVATIONS, work.output_bytes + work.backward_peak_bytes)
            elif self.num_logits:
                # The gradient of the logits exists now, and the loss has freed its own tensors of that size.
                extra = (self.itemsize - self.saved_itemsize) * self.num_logits + loss.grad_bytes + input_bytes
                self.note("backward head", LOSS, extra)
            else:
                self.note("backward head", LOSS, loss.output_bytes + loss.backward_peak_bytes)
            self.hold(LOSS if name == last else ACTIVATIONS, -work.saved_bytes)
            self.hold(GRADS, work.grad_bytes)
            self.grads_of[id(group)] += work.grad_bytes
            # Token ids have no gradient, so torch reduces the unit that reads them at the end of the backward.
            if group is not self.root and name not in self.late:
                self._reduce(name, group, input_bytes, is_first)
        self._reduce(self.root_name, self.root, 0, is_first)
        for name in self.late:
            if self.groups[name] is not self.root:
                self._reduce(name, self.groups[name], 0, is_first)
        self.hold(REDUCE, -self.kept_input)
        self.kept_input = 0

    def _prefetch(self, position: int) -> None:
        if position >= 0 and id(self.chain[position]) not in self.gathered:
            group = self.on_its_way = self.chain[position]
            whole = group.gathered_bytes - group.rest_bytes if self.wrapping.is_flat else group.collected_bytes
            self.hold(GATHERED, group.part_bytes + whole, GATHER_STREAM)
            self.note("gather ahead")
            self.hold(GATHERED, -group.part_bytes, GATHER_STREAM)

    def _gather_for_backward(self, name: str, work: Work) -> None:
        group = self.groups[name]
        if id(group) in self.gathered:
            return
        if self.on_its_way is not group:
            self.hold(GATHERED, group.part_bytes + group.collected_bytes, GATHER_STREAM)
            self.hold(GATHERED, -group.part_bytes, GATHER_STREAM)
        if not self.wrapping.is_flat or self.on_its_way is not group:
            self.hold(GATHERED, group.gathered_bytes - group.rest_bytes, self.gather_stream)
        self.on_its_way = None
        self.gathered.add(id(group))
        self.note(f"gather {name} again", ACTIVATIONS, work.output_bytes)
        self.hold(GATHERED, -group.collected_bytes, GATHER_STREAM)

    def _reduce(self, name: str, group: Group, before: int, is_first: bool) -> None:
        grad_bytes = self.grads_of.pop(id(group), 0)
        if self.wrapping.is_flat:
            self._reduce_flat(name, group, before, grad_bytes)
        else:
            self._release(group)
            self.hold(REDUCE, group.summed_bytes - self.kept_input)
            self.kept_input = group.summed_bytes
            self.note(f"reduce {name}", ACTIVATIONS, before)
            self.hold(GRADS, -grad_bytes)
        self.hold(GRADS, group.grad_bytes, REDUCE_STREAM)
        if not is_first:
            self.note(f"add up {name}", ACTIVATIONS, before)
            self.hold(GRADS, -group.grad_bytes, REDUCE_STREAM)

    def _reduce_flat(self, name: str, group: Group, before: int, grad_bytes: int) -> None:
        """Gradients become one, which is cast to the reduce dtype and then reduced."""
        self.hold(REDUCE, grad_bytes)
        self.note(f"reduce {name}", ACTIVATIONS, before)
        self.hold(GRADS, -grad_bytes)
        self._release(group)
        cast_bytes = group.summed_bytes if group.summed_bytes != grad_bytes else 0
        self.hold(REDUCE, cast_bytes, REDUCE_STREAM)
        self.note(f"reduce {name}", GRADS, group.grad_bytes)
        self.hold(REDUCE, -cast_bytes, REDUCE_STREAM)
        self.hold(REDUCE, -grad_bytes)


def fsdp_copies(training: Training) -> Copies:
    wrapping, formats = WRAPPINGS[training.engine], training.formats
    compute, reduce = formats.compute.itemsize, formats.reduce.itemsize
    is_foreach = wrapping.is_foreach and training.num_moments == MOMENTS["adamw"]
    update = FOREACH_BYTES - reduce - 6 * formats.master.itemsize if is_foreach else 0
    if wrapping.is_flat:  # gradients become one, which is cast
        return Copies(0, 2 * compute + (compute + reduce if compute != reduce else 0), update)
    # Parameters are copied out of the all-gather, and gradients into the reduce-scatter.
    return Copies(2 * compute, compute + reduce, update)
