"""Updates on the host of master weights on the host or on disk, flat by flat.

There are three ways to update. AdamW and Adam take one pass over memory (`native/adamw.py`), and so do torchao's with
8-bit moments. Every other optimizer of torch runs its own code, on views of the rows. The optimizer's `state` has its
usual entries: views of rows on the host, and stand-ins (`OnDisk`) for rows on disk.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...base.direct_io import ALIGNMENT
from ...base.dtypes import FP32
from ...base.errors import ConfigurationError
from ...base.intervals import Interval, round_up
from ..native.adamw import FUSED_LANES, AdamSettings, AdamUpdate, Moment8, adamw
from ..offload.host_memory import MASTER, Moves, Rows
from ..schedule.flat import Flat
from ..unit.stand_ins import OnDisk
from ..unit.state import FlatState
from .probe import KNOWN_PACKAGES, shadow_of, state_tensor_names

ADAMS = (torch.optim.AdamW, torch.optim.Adam)


@dataclass(frozen=True, slots=True)
class UpdatedPart:
    """A parameter of a flat, of which this rank updates a part."""

    index: int
    resting: nn.Parameter
    where: Interval  # in the rows
    group: dict[str, Any]  # its settings at the time of the step


# Arguments: the first element of a chunk, its rows, its gradient, the output for weights, and the gradient's factor.
ChunkUpdate = Callable[[int, dict[str, Tensor], Tensor, Tensor | None, float], None]


def is_eight_bit(optimizer: torch.optim.Optimizer) -> bool:
    """True for torchao's optimizers with 8-bit moments."""
    return type(optimizer).__module__.startswith(KNOWN_PACKAGES) and type(optimizer).__name__.endswith("8bit")


def can_be_cut(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer keeps only the state of each parameter, so that it can update them part by part."""
    return type(optimizer).__module__.startswith(("torch.optim.", *KNOWN_PACKAGES))


class HostUpdates:
    """Updates of one optimizer on the host, and its state there and on disk."""

    def __init__(self, optimizer: torch.optim.Optimizer, row_names: tuple[str, ...], cores: tuple[int, ...]) -> None:
        self._optimizer = optimizer
        self._row_names = row_names
        self._cores = cores

    def _way_to_update(self, flat: Flat) -> Callable[[FlatState, list[UpdatedPart]], ChunkUpdate]:
        optimizer = self._optimizer
        if is_eight_bit(optimizer):
            return self._eight_bit
        is_plain = type(optimizer) in ADAMS and not any(
            group.get("amsgrad") or group.get("differentiable") for group in optimizer.param_groups
        )
        return self._one_pass if is_plain and flat.master == FP32 else self._its_own

    def refuse_other_rows(self) -> None:
        """Refuse settings with which the optimizer keeps more than it did when the model was sharded."""
        more = [name for name in state_tensor_names(self._optimizer) if self._row_names and name not in self._row_names]
        if more:
            raise ConfigurationError(
                f"optimizer {type(self._optimizer).__name__} would keep {more[0]!r} with these settings, and there is "
                "no room for it on the host: give them to a group before sw.shard"
            )

    def take_over(self, states: Iterable[FlatState]) -> None:
        """Move state that was set from outside into the rows; missing state becomes zero."""
        for state in states:
            rows = _rows_of(state)
            for index, held in state.held.items():
                kept = self._optimizer.state.get(state.resting_params[index], {})
                for key in self._row_names:
                    value = kept.get(key)
                    if isinstance(value, OnDisk) or _is_part_of(value, rows, key):
                        continue
                    if value is None:
                        value = torch.zeros(held.stop - held.start)
                    else:
                        kept[key] = self._shown(state, index, key)
                    rows.set_part(key, held, value.reshape(-1))

    def read(self, state: FlatState, index: int, key: str) -> Tensor:
        """Read a parameter's state under a name, as a row, also from disk."""
        return _rows_of(state).part(key, state.held[index])

    def show(self, state: FlatState, index: int) -> dict[str, Any]:
        kept: dict[str, Any] = self._optimizer.state[state.resting_params[index]]
        return kept

    def _shown(self, state: FlatState, index: int, key: str) -> Tensor:
        """The tensor that the optimizer's state shows for a part of a row."""
        assert state.away is not None
        assert state.away.rows is not None
        resting, rows = state.resting_params[index], state.away.rows
        if rows.on_disk:
            return OnDisk.like(resting.shape, rows.dtype)
        return rows.tensors[key][state.held[index]].view(resting.shape)

    def prepare(self, state: FlatState, groups: dict[Tensor, dict[str, Any]]) -> "FlatUpdate":
        """Make the update of a flat with its current gradients and settings."""
        held = [
            UpdatedPart(index, resting, Interval(where.start, where.stop), groups[resting])
            for index, where in sorted(state.held.items())
            if state.gradient.used[index] and (resting := state.resting_params[index]) in groups
        ]
        assert state.away is not None
        update = self._way_to_update(state.flat)(state, held) if held else None
        return FlatUpdate(state, update, len(held) < len(state.held), state.away.memory.moves)

    # AdamW and Adam in one pass.

    def _one_pass(self, state: FlatState, held: list[UpdatedPart]) -> ChunkUpdate:
        runs = _joined([(each, self._adam_settings(state, each)) for each in held])

        def update(start: int, rows: dict[str, Tensor], grad: Tensor, out: Tensor | None, factor: float) -> None:
            for where, settings in runs:
                cut = _inside(where, start, grad.numel())
                if cut is not None:
                    master, mean, square = (rows[key][cut] for key in (MASTER, "exp_avg", "exp_avg_sq"))
                    part = None if out is None else out[cut]
                    adamw(AdamUpdate(master, mean, square, grad[cut], part, settings, factor), self._cores)

        return update

    def _adam_settings(self, state: FlatState, held: UpdatedPart) -> AdamSettings:
        """Count the step, and return its settings."""
        kept = self.show(state, held.index)
        if "step" not in kept:
            kept["step"] = torch.tensor(0.0)
            kept |= {key: self._shown(state, held.index, key) for key in self._row_names}
        kept["step"] += 1
        return _adam_settings(held.group, int(kept["step"]), isinstance(self._optimizer, torch.optim.AdamW))

    # The same with moments of 8 bits, which are in the state of torchao's optimizers.

    def _eight_bit(self, state: FlatState, held: list[UpdatedPart]) -> ChunkUpdate:
        optimizer: Any = self._optimizer
        todo: list[tuple[Interval, dict[str, Any], AdamSettings]] = []
        for each in held:
            kept = self.show(state, each.index)
            if "step" not in kept:
                kept["step"] = torch.tensor(0.0)
                kept["exp_avg"] = optimizer._new_buffer(each.resting, True)
                kept["exp_avg_sq"] = optimizer._new_buffer(each.resting, False)
            kept["step"] += 1
            decoupled = type(optimizer).__name__.startswith("AdamW")
            todo.append((each.where, kept, _adam_settings(each.group, int(kept["step"]), decoupled)))

        def update(start: int, rows: dict[str, Tensor], grad: Tensor, out: Tensor | None, factor: float) -> None:
            for where, kept, settings in todo:
                cut = slice(where.start, where.stop)
                mean, square = (_moment(kept[key]) for key in ("exp_avg", "exp_avg_sq"))
                part = None if out is None else out[cut]
                adamw(AdamUpdate(rows[MASTER][cut], mean, square, grad[cut], part, settings, factor), self._cores)

        return update

    # Any other optimizer of torch: its own code, on a copy of it that holds views of the rows as its parameters.

    def _its_own(self, state: FlatState, held: list[UpdatedPart]) -> ChunkUpdate:
        before = {each.index: self._beside_rows(self.show(state, each.index)) for each in held}
        # Taken now: the first chunk of a first update adds names that the other chunks do not have yet.
        known = {each.index: self._row_names_in(self.show(state, each.index)) for each in held}
        is_whole = state.flat.depth_of_master == 0 and state.away is not None and not _rows_of(state).on_disk

        def update(start: int, rows: dict[str, Tensor], grad: Tensor, out: Tensor | None, factor: float) -> None:
            groups: list[dict[str, Any]] = []
            each_of: dict[nn.Parameter, tuple[UpdatedPart, slice]] = {}
            shadow = shadow_of(self._optimizer)
            for each in held:
                cut = _inside(each.where, start, grad.numel())
                if cut is None:
                    continue
                shape = each.resting.shape if is_whole else (cut.stop - cut.start,)
                param = nn.Parameter(rows[MASTER][cut].view(shape))
                param.grad = grad[cut].mul(factor).to(param.dtype).view(shape)
                shadow.state[param] = deepcopy(before[each.index])
                shadow.state[param] |= {key: rows[key][cut].view(shape) for key in known[each.index]}
                groups.append({**each.group, "params": [param]})
                each_of[param] = (each, cut)
            shadow.param_groups = groups
            type(self._optimizer).step(shadow)
            for param, (each, cut) in each_of.items():
                self._keep(state, each, rows, cut, shadow.state.get(param, {}))
                if out is not None:
                    out[cut].copy_(param.detach().reshape(-1))

        return update

    def _row_names_in(self, kept: dict[str, Any]) -> list[str]:
        return [name for name in self._row_names if name in kept]

    def _beside_rows(self, kept: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in kept.items() if key not in self._row_names}

    def _keep(
        self, state: FlatState, held: UpdatedPart, rows: dict[str, Tensor], cut: slice, found: dict[str, Any]
    ) -> None:
        """Store the state that an update left, in the rows and in the optimizer's own state."""
        kept = self.show(state, held.index) if found else {}
        for key, value in found.items():
            if key in self._row_names and isinstance(value, Tensor):
                if value.data_ptr() != rows[key][cut].data_ptr():
                    rows[key][cut].copy_(value.reshape(-1))
                kept[key] = self._shown(state, held.index, key)
            else:
                kept[key] = value


@dataclass(slots=True)
class FlatUpdate:
    """One flat's update, to be run when its gradient is on the host. It may leave out some of the flat's parameters."""

    state: FlatState
    update: ChunkUpdate | None
    leaves_out: bool
    moves: Moves

    def ask(self) -> None:
        """Read the first chunks ahead."""
        for number in range(2 if self.update is not None else 0):
            self._rows.ask(number)

    @property
    def _rows(self) -> Rows:
        return _rows_of(self.state)

    def run(self, factor: float, ask_ahead: Callable[[], None]) -> None:
        """Update all chunks. When it returns, writes to disk may still run; a later read of them waits."""
        away, rows, update = self.state.away, self._rows, self.update
        if update is None:
            return
        assert away is not None
        windows, compute = away.memory.windows, self.state.flat.compute
        grads = self.state.gradient.final_at_hand
        for number, chunk in enumerate(rows.chunks):
            window = rows.take(number, self.moves)
            rows.ask(number + 1)
            rows.ask(number + 2)
            if number + 2 >= len(rows.chunks):
                ask_ahead()
            views = rows.views(number, window)
            out = None if away.updated is None else away.updated[chunk.start : chunk.stop]
            if away.writes_weights:
                # Behind the chunk in its window, if both go to disk; else weights have a window for themselves.
                start = 0 if window is None else round_up(rows.regions[number].num_bytes, ALIGNMENT)
                window = windows.take_empty() if window is None else window
                out = window[start : start + chunk.num_elems * compute.itemsize].view(compute.torch)
                if self.leaves_out:
                    out.copy_(views[MASTER])
            update(chunk.start, views, grads[chunk.start : chunk.stop], out, factor)
            writing = []
            if away.writes_weights and out is not None:
                writing.append(away.start_writing(out, chunk.start, self.moves))
            if rows.on_disk and window is not None:
                writing.append(rows.put(number, window, self.moves))
            if window is not None:
                windows.give_back(window, writing)


def _rows_of(state: FlatState) -> Rows:
    assert state.away is not None
    assert state.away.rows is not None
    return state.away.rows


def _is_part_of(value: Tensor | None, rows: Rows, key: str) -> bool:
    """True if it is a view of the row already."""
    return value is not None and not rows.on_disk and _storage(value) == _storage(rows.tensors[key])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _moment(kept: Any) -> Tensor | Moment8:
    """A moment of a torchao optimizer: a plain tensor where the parameter is small, else 8-bit codes."""
    return kept.view(-1) if type(kept) is Tensor else Moment8(kept.codes.view(-1), kept.scale, kept.qmap)


def _adam_settings(group: dict[str, Any], step: int, decoupled: bool) -> AdamSettings:
    beta1, beta2 = group["betas"]
    return AdamSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled,
        maximize=bool(group.get("maximize")),
        fused=bool(group.get("fused")),
        step=step,
    )


def _joined(runs: list[tuple[UpdatedPart, AdamSettings]]) -> list[tuple[Interval, AdamSettings]]:
    """Join neighbouring parameters with equal settings into one interval; the padding between them stays zero. They are
    not joined if a parameter between them is not updated, or if torch's fused update has a remainder after the first,
    which it rounds differently."""
    found: list[tuple[Interval, AdamSettings]] = []
    last: UpdatedPart | None = None
    for held, settings in runs:
        is_next = last is not None and held.index == last.index + 1
        has_remainder = settings.fused and last is not None and last.where.num_elems % FUSED_LANES
        if is_next and found[-1][1] == settings and not has_remainder:
            found[-1] = (Interval(found[-1][0].start, held.where.stop), settings)
        else:
            found.append((held.where, settings))
        last = held
    return found


def _inside(where: Interval, start: int, num_elems: int) -> slice | None:
    """The part of an interval of the rows that lies in a chunk, as a slice of the chunk; None if there is none."""
    common = where.overlap(Interval(start, start + num_elems))
    return slice(common.start - start, common.stop - start) if common.num_elems else None
