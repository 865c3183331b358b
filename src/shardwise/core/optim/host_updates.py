"""Updates on the host of master weights on the host or on disk, flat by flat.

AdamW and Adam, also torchao's with 8-bit moments, take one pass over memory (`native/adamw.py`). Every other optimizer
of torch runs its own code, on views of the rows. The optimizer's `state` has its usual entries: views of rows on the
host, and stand-ins (`OnDisk`) for rows on disk.

An update may also run ahead of the step, into spare memory (`FlatUpdate.run`). If the step turns out to be the
same update, the memory takes the place of the old rows (`accept`). Otherwise nothing has changed.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...base.dtypes import FP32
from ...base.errors import ConfigurationError
from ...base.files import ALIGNMENT
from ...base.intervals import Interval, round_up
from ..native.adamw import FUSED_LANES, AdamSettings, AdamUpdate, Moment8, adamw
from ..offload.host_memory import MASTER, Moves, Rows, Spare
from ..unit.state import FlatState, OnDisk
from .groups import shard_groups
from .probe import KNOWN_PACKAGES, shadow_of, state_tensor_names

ADAMS = (torch.optim.AdamW, torch.optim.Adam)
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class UpdatedPart:
    """A parameter of a flat, of which this rank updates a part."""

    index: int
    resting: nn.Parameter
    where: Interval  # in the rows
    group: int  # of the optimizer


class ChunkOfUpdate(NamedTuple):
    """One piece of an update. `new` are the rows to be written: `rows` themselves, or spare ones."""

    where: Interval
    rows: dict[str, Tensor]
    new: dict[str, Tensor]
    grad: Tensor
    out: Tensor | None  # for new weights in the compute dtype
    factor: float  # of the gradient


Settings = dict[str, Any]  # a group of the optimizer at the time of the step
# Updates a chunk; returns a function that sets the optimizer's state outside the rows.
ChunkUpdate = Callable[[ChunkOfUpdate], Callable[[], None]]


def is_eight_bit(optimizer: torch.optim.Optimizer) -> bool:
    """True for torchao's optimizers with 8-bit moments."""
    return type(optimizer).__module__.startswith(KNOWN_PACKAGES) and type(optimizer).__name__.endswith("8bit")


def may_run_ahead(optimizer: torch.optim.Optimizer) -> bool:
    """True if updates of rows on the host can be computed before the step: by torch's own optimizers."""
    return type(optimizer).__module__.startswith("torch.optim.")


class HostUpdates:
    """Updates of one optimizer on the host, and its state there and on disk."""

    def __init__(self, optimizer: torch.optim.Optimizer, row_names: tuple[str, ...], cores: tuple[int, ...]) -> None:
        self._optimizer = optimizer
        self._row_names = row_names
        self._cores = cores
        self._is_eight_bit, self._is_adam = is_eight_bit(optimizer), False
        # By flat, made once for the parameters that the groups hold: their ids, and the group of each part.
        self._parts: dict[FlatState, list[UpdatedPart]] = {}
        self._held: list[list[int]] = []
        self._group_of: dict[Tensor, int] = {}

    def refuse_other_rows(self) -> None:
        """Refuse settings with which the optimizer keeps more tensors than when the model was sharded."""
        more = [name for name in state_tensor_names(self._optimizer) if self._row_names and name not in self._row_names]
        if more:
            raise ConfigurationError(
                f"optimizer {type(self._optimizer).__name__} would keep {more[0]!r} with these settings, and there is "
                "no room for it on the host: give them to a group before sw.shard"
            )

    def take_over(self, states: Iterable[FlatState]) -> None:
        """Copy the optimizer's state into the rows, where it is not there yet; missing state becomes zero."""
        for state in states:
            rows = rows_of(state)
            for index, held in state.held.items():
                stored = self._optimizer.state.get(state.resting_params[index], {})
                for key in self._row_names:
                    value = stored.get(key)
                    if value is None:
                        rows.set_part(key, held, torch.zeros(held.stop - held.start))
                    elif not isinstance(value, OnDisk) and value.data_ptr() != rows.address(key, held.start):
                        stored[key] = _shown(state, index, key)
                        rows.set_part(key, held, value.reshape(-1))

    def settings(self) -> list[Settings]:
        """The present settings of each group."""
        groups = self._optimizer.param_groups
        held = [list(map(id, group["params"])) for group in groups]
        if held != self._held:
            self._held, self._parts = held, {}
            shards = enumerate(shard_groups(self._optimizer))
            self._group_of = {shard: number for number, group in shards for shard in group}
        is_plain = type(self._optimizer) in ADAMS and not any(
            group.get("amsgrad") or group.get("differentiable") for group in groups
        )
        self._is_adam = self._is_eight_bit or is_plain
        # A scheduler may change a tensor, or a list of betas, in place before the update runs.
        return [
            {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in groups
        ]

    def _parts_of(self, state: FlatState) -> list[UpdatedPart]:
        if state not in self._parts:
            self._parts[state] = [
                UpdatedPart(index, resting, Interval(where.start, where.stop), self._group_of[resting])
                for index, where in sorted(state.held.items())
                if (resting := state.resting_params[index]) in self._group_of
            ]
        return self._parts[state]

    def prepare(self, state: FlatState, settings: list[Settings]) -> "FlatUpdate":
        """Make the update of a flat with its current gradients and these `settings`. It changes nothing yet."""
        held = [part for part in self._parts_of(state) if state.gradient.used[part.index]]
        assert state.offloaded is not None
        is_adam = self._is_adam and (self._is_eight_bit or state.flat.master == FP32)
        memory = state.offloaded.memory
        made = FlatUpdate(state, self, len(held) < len(state.held), memory.moves)
        if held:
            (self._one_pass if is_adam else self._its_own)(made, held, settings)
        if memory.spare_bytes and state.flat.may_update_ahead:
            made.facts = [state.master._version, *(self._facts_about(each, settings[each.group]) for each in held)]
        return made

    def _facts_about(self, each: UpdatedPart, group: Settings) -> list[Any]:
        """Everything that the update of a parameter reads besides rows and gradients. Tensors of the state count as
        changed if an operation has written to them."""
        settings = [value.tolist() if isinstance(value, Tensor) else value for value in group.values()]
        stored = self._optimizer.state.get(each.resting, {}).items()
        marks = [(key, value._version if isinstance(value, Tensor) else value) for key, value in stored]
        return [each.index, settings, marks]

    def _one_pass(self, made: "FlatUpdate", held: list[UpdatedPart], groups: list[Settings]) -> None:
        """AdamW and Adam. Moments of 8 bits are in the state of torchao's optimizers, others in the rows."""
        optimizer: Any = self._optimizer
        in_rows, decoupled = not self._is_eight_bit, type(optimizer).__name__.startswith("AdamW")
        # Neighbouring parameters with equal settings are updated together; the padding between them stays zero.
        runs: list[tuple[Interval, AdamSettings, nn.Parameter]] = []
        last: UpdatedPart | None = None
        for each in held:
            group, step = groups[each.group], int(optimizer.state.get(each.resting, {}).get("step", 0)) + 1
            numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            lr, beta1, beta2, eps, decay = map(float, numbers)
            flags = (decoupled, bool(group.get("maximize")), bool(group.get("fused")))
            settings = AdamSettings(lr, beta1, beta2, eps, decay, *flags, step)
            is_next = in_rows and last is not None and each.index == last.index + 1 and runs[-1][1] == settings
            # torch's fused update rounds the last `length % FUSED_LANES` elements differently.
            if is_next and last is not None and not (settings.fused and last.where.num_elems % FUSED_LANES):
                runs[-1] = (Interval(runs[-1][0].start, each.where.stop), settings, each.resting)
            else:
                runs.append((each.where, settings, each.resting))
            last = each

        def begin() -> None:
            for each in held:
                stored = optimizer.state[each.resting]
                if "step" not in stored:
                    stored["step"] = torch.tensor(0.0)
                    if in_rows:
                        stored |= {key: _shown(made.state, each.index, key) for key in self._row_names}
                    else:
                        stored |= {key: optimizer._new_buffer(each.resting, key == "exp_avg") for key in MOMENTS}
                stored["step"] += 1

        def update(chunk: ChunkOfUpdate) -> Callable[[], None]:
            new, out = chunk.new, chunk.out
            for where, settings, resting in runs:
                common = where.overlap(chunk.where)
                if common.num_elems:
                    cut = common.within(chunk.where)
                    moments: Any = chunk.rows if in_rows else optimizer.state[resting]
                    mean, square = (moments[key][cut] if in_rows else _small_moment(moments[key]) for key in MOMENTS)
                    into = None if new is chunk.rows else (new[MASTER][cut], new[MOMENTS[0]][cut], new[MOMENTS[1]][cut])
                    grad, part = chunk.grad[cut], None if out is None else out[cut]
                    master = chunk.rows[MASTER][cut]
                    adamw(AdamUpdate(master, mean, square, grad, part, settings, chunk.factor, into), self._cores)
            return _nothing

        made.begin, made.update = begin, update
        if in_rows:  # rows that this update does not know (amsgrad was on before) are copied
            made.written_ahead = [where for where, _, _ in runs] if self._row_names == MOMENTS else []

    def _its_own(self, made: "FlatUpdate", held: list[UpdatedPart], groups: list[Settings]) -> None:
        """Any other optimizer of torch: its own code, on a copy of it that holds views of the rows as parameters."""
        state = made.state
        # Taken now: the first chunk of a first update adds names that the other chunks do not have yet.
        before = {each.resting: dict(self._optimizer.state.get(each.resting, {})) for each in held}
        is_on_disk = rows_of(state).on_disk
        is_whole = state.flat.depth_of_master == 0 and not is_on_disk

        def update(chunk: ChunkOfUpdate) -> Callable[[], None]:
            rows = chunk.new
            shadow = shadow_of(self._optimizer)
            shadow.param_groups = []
            each_of: dict[nn.Parameter, tuple[UpdatedPart, slice]] = {}
            for each in held:
                common = each.where.overlap(chunk.where)
                if not common.num_elems:
                    continue
                cut = common.within(chunk.where)
                shape = each.resting.shape if is_whole else (common.num_elems,)
                param = nn.Parameter(rows[MASTER][cut].view(shape))
                param.grad = chunk.grad[cut].mul(chunk.factor).to(param.dtype).view(shape)
                shadow.state[param] = {
                    key: rows[key][cut].view(shape) if key in self._row_names else deepcopy(value)
                    for key, value in before[each.resting].items()
                }
                shadow.param_groups.append({**groups[each.group], "params": [param]})
                each_of[param] = (each, cut)
            type(self._optimizer).step(shadow)
            in_rows: list[tuple[UpdatedPart, str]] = []
            others: list[tuple[UpdatedPart, str, Any]] = []
            for param, (each, cut) in each_of.items():
                for key, value in shadow.state.get(param, {}).items():
                    if key in self._row_names and isinstance(value, Tensor):
                        if value.data_ptr() != rows[key][cut].data_ptr():
                            rows[key][cut].copy_(value.reshape(-1))
                        in_rows.append((each, key))
                    elif is_on_disk and isinstance(value, Tensor) and value.shape == param.shape:  # of a chunk only
                        what = f"optimizer {type(self._optimizer).__name__} keeps {key!r} with its present settings"
                        raise ConfigurationError(f"{what}, and there is no room on disk: set them before sw.shard")
                    else:
                        others.append((each, key, value))
                if chunk.out is not None:
                    chunk.out[cut].copy_(param.detach().reshape(-1))

            def finish() -> None:
                for each, key, value in others:
                    self._optimizer.state[each.resting][key] = value
                for each, key in in_rows:
                    stored = self._optimizer.state[each.resting]
                    if not isinstance(stored.get(key), Tensor):
                        stored[key] = _shown(state, each.index, key)

            return finish

        made.update = update
        made.written_ahead = []

    def swap(self, state: FlatState, spare: Spare) -> None:
        """Let the rows of a flat change places with `spare`. The optimizer's state keeps its tensors, which show the
        new rows from now on."""
        state.swap(spare)
        for index in () if rows_of(state).on_disk else state.held:
            stored = self._optimizer.state.get(state.resting_params[index], {})
            for key in self._row_names:
                if isinstance(stored.get(key), Tensor):
                    stored[key].data = _shown(state, index, key)


def _copied(setting: Any) -> Any:
    if isinstance(setting, Tensor):
        return setting.detach().clone()
    return deepcopy(setting) if isinstance(setting, (list, tuple)) else setting


def _nothing() -> None:
    pass


def _gaps(runs: Sequence[Interval], stop: int) -> list[slice]:
    """The elements before `stop` that lie in no run."""
    ends = [0, *(run.stop for run in runs)]
    starts = [*(run.start for run in runs), stop]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


@dataclass(slots=True)
class FlatUpdate:
    """One flat's update, to be run when its gradient is on the host. It may leave out some of the flat's parameters.

    `facts` are equal for equal updates of equal state. `begin` is called when the step is taken. `written_ahead`: the
    elements that an update into spare memory sets there; the others must be copied before. None if it cannot run ahead.
    """

    state: FlatState
    host: HostUpdates
    leaves_out: bool
    moves: Moves
    facts: list[Any] = field(default_factory=list)
    begin: Callable[[], None] = _nothing
    update: ChunkUpdate | None = None
    written_ahead: list[Interval] | None = None
    finish: list[Callable[[], None]] = field(default_factory=list)  # of chunks that ran ahead

    def ask(self) -> None:
        """Read the first chunks ahead."""
        for number in range(2 if self.update is not None else 0):
            rows_of(self.state).ask(number)

    def run(self, factor: float, ask_ahead: Callable[[], None], spare: Spare | None = None) -> None:
        """Update all chunks, in place or ahead of the step into `spare`, in which case nothing else changes. When it
        returns, writes to disk may still run; a later read of them waits."""
        offloaded, rows, update = self.state.offloaded, rows_of(self.state), self.update
        if update is None:
            return
        assert offloaded is not None
        windows, compute = offloaded.memory.windows, self.state.flat.compute
        updated, regions = offloaded.updated, rows.regions
        grads = self.state.gradient.final_for_optimizer
        self.finish = []
        if spare is not None:
            self._copy_gaps(spare)
            updated, regions = spare.updated, spare.regions
        for number, chunk in enumerate(rows.chunks):
            window = rows.take(number, self.moves)
            rows.ask(number + 1)
            rows.ask(number + 2)
            if number + 2 >= len(rows.chunks):
                ask_ahead()
            views = rows.views(number, window)
            new = views if spare is None or rows.on_disk else spare.rows
            out = None if updated is None else updated[chunk.start : chunk.stop]
            if offloaded.writes_weights:
                # If both go to disk, weights lie behind the chunk in its window; else they have their own window.
                start = 0 if window is None else round_up(rows.regions[number].num_bytes, ALIGNMENT)
                window = windows.take_empty() if window is None else window
                out = window[start : start + chunk.num_elems * compute.itemsize].view(compute.torch)
                if self.leaves_out:
                    out.copy_(views[MASTER])
            self.finish.append(update(ChunkOfUpdate(chunk, views, new, grads[chunk.start : chunk.stop], out, factor)))
            if spare is None:
                self.finish.pop()()
            writing = []
            if offloaded.writes_weights and out is not None:
                writing.append(offloaded.start_writing(out, chunk.start, self.moves))
            if rows.on_disk and window is not None:
                writing.append(rows.put(regions[number], window, self.moves))
            if window is not None:
                windows.give_back(window, writing)

    @property
    def may_run_ahead(self) -> bool:
        return self.written_ahead is not None and self.state.flat.may_update_ahead and self.state.may_swap

    def _copy_gaps(self, spare: Spare) -> None:
        """Copy the elements that the update leaves as they are. Those on disk come with their chunk."""
        offloaded, rows = self.state.offloaded, rows_of(self.state)
        assert offloaded is not None
        for part in _gaps(self.written_ahead or [], self.state.flat.num_master):
            for name, row in rows.tensors.items():
                spare.rows[name][part].copy_(row[part])
            if offloaded.updated is not None and spare.updated is not None:
                spare.updated[part].copy_(offloaded.updated[part])

    def accept(self, spare: Spare) -> None:
        """Use the results in `spare`, which has the memory of the old state afterwards."""
        self.host.swap(self.state, spare)
        for finish in self.finish:
            finish()


def rows_of(state: FlatState) -> Rows:
    assert state.offloaded is not None
    assert state.offloaded.rows is not None
    return state.offloaded.rows


def _shown(state: FlatState, index: int, key: str) -> Tensor:
    """The tensor that the optimizer's state shows for a part of a row."""
    resting, rows = state.resting_params[index], rows_of(state)
    if rows.on_disk:
        return OnDisk.like(resting.shape, rows.dtype)
    # `.data`: its version tells whether the user has written to it.
    return rows.tensors[key].data[state.held[index]].view(resting.shape)


def _small_moment(moment: Any) -> Tensor | Moment8:
    """A moment of a torchao optimizer: a plain tensor where the parameter is small, else 8-bit codes."""
    return moment.view(-1) if type(moment) is Tensor else Moment8(moment.codes.view(-1), moment.scale, moment.qmap)
