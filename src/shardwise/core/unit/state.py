"""The weights of a unit on this rank: the tensors of each flat, and the Parameters that modules have for them.

A `StandIn` takes the place of a tensor that is stored elsewhere: reading it raises an error that says where.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import StateError
from ...base.intervals import pieces
from ..offload.arena import temporary_zeros
from ..offload.host_memory import MASTER, HostMemory, Moves, OffloadedState, Spare
from ..schedule.flat import Buffer, Copy, Flat
from ..wire.collectives import Collective, HopChain, Work
from ..wire.reference_codecs import decoder, encoded
from .carrier import Carrier, Channels
from .gradient import Gradient

_HARMLESS = {"__get__", "untyped_storage", "size", "numel", "dim", "element_size", "data_ptr", "is_floating_point"}


class StandIn(Tensor):
    """Stand-in for the gradient of a user's parameter. The gradient lies in a flat shard; using this raises."""

    why = (
        "gradients lie in flat shards, not in param.grad: step the optimizer that sw.shard returned (give it all of "
        "them), clip with optimizer.clip_grad_norm(...), read with sw.grad_norms(model) or inside "
        "`with sw.whole(model, grads=True):`, clear with optimizer.zero_grad(), and leave a GradScaler out "
        "(precision='fp16' scales by itself)"
    )
    # Functions that describe a tensor without reading it: attributes, and functions that memory tools call.
    harmless = _HARMLESS

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in cls.harmless:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise StateError(cls.why)

    @classmethod
    def like(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(cls)


class NotShown(StandIn):
    """Stand-in for a gradient inside `sw.whole`, which shows weights."""

    why = "sw.whole(model) shows weights: for gradients write `with sw.whole(model, grads=True):`"


class OnDisk(StandIn):
    """Stand-in for master weights or optimizer state on disk."""

    why = (
        "this tensor is on disk: read weights with sw.full_state_dict(model) or inside `with sw.whole(model):`, and "
        "optimizer state through a checkpoint"
    )
    harmless = _HARMLESS | {"__set__", "requires_grad_", "register_hook", "detach"}


class FlatState:
    """The tensors of one flat on this rank."""

    def __init__(self, flat: Flat, device: torch.device, unit_name: str, host: HostMemory) -> None:
        self.flat = flat
        self.unit_name = unit_name
        self.offloaded: OffloadedState | None = host.state_of(flat, unit_name)
        self._rows = None if self.offloaded is None else self.offloaded.rows  # of the master on the host or on disk
        self.carrier = Carrier(flat, unit_name, self.offloaded)
        self.device = device  # of the computation
        if self._rows is None:
            self.master = torch.zeros(flat.num_master, dtype=flat.master.torch, device=device)
        elif self._rows.on_disk:
            self.master = OnDisk.like((flat.num_master,), flat.master.torch)
        else:
            # `.data` has its own version counter, so updates by the host's thread are not taken for the user's.
            self.master = self._rows.tensors[MASTER].data
        self.rest: Tensor | None = None if self.offloaded is None else self.offloaded.rest
        if flat.copy_is_encoded:
            self.rest = torch.zeros(flat.rest_bytes, dtype=torch.uint8, device=device).view(-1, flat.row_bytes)
        elif flat.rest_on == "device":
            self.rest = torch.zeros(flat.num_rest, dtype=flat.compute.torch, device=device)
        self.whole: Tensor = (
            self.master if flat.master_is_whole else torch.empty(0, dtype=flat.compute.torch, device=device)
        )
        self.compute_params = [
            nn.Parameter(torch.empty(0, dtype=flat.compute.torch, device=device), requires_grad=flat.trainable)
            for _ in flat.params
        ]
        self._own = own = flat.spans[flat.depth_of_master]
        self.own_in_whole = slice(own.start, own.stop)
        at_rest = flat.spans[flat.depth_of_params]
        # The place of this rank's master in `rest`, and the place of `rest` in `whole`.
        self._master_in_rest = own.within(at_rest)
        self._rest_in_whole = slice(at_rest.start, at_rest.stop)
        # The parameters that lie in this rank's part of the master, all or partly, and their places in it.
        self.held = {piece.param: piece.in_flat.within(own) for piece in pieces(flat.intervals, own)}
        grads_on_host = None if self.offloaded is None else self.offloaded.grads
        self.gradient = Gradient(flat, device, self.carrier, self.held, grads_on_host)
        self.resting_params: list[nn.Parameter] = []
        for index, param in enumerate(flat.stored_params):
            held = self.held.get(index, slice(0, 0))
            shape = param.shape if flat.depth_of_master == 0 else (held.stop - held.start,)
            is_on_disk = isinstance(self.master, OnDisk)
            part = OnDisk.like(shape, flat.master.torch) if is_on_disk else self.master[held].view(shape)
            self.resting_params.append(nn.Parameter(part, requires_grad=flat.trainable))
        # The point after which no gather reads this flat's memory on the host. Before it, nothing may be written there.
        self.read_on_host: Any = None
        # Tensors in the user's hands that share memory with the master.
        self._lent: list[weakref.ref[Tensor]] = []
        # True after the user has read the optimizer's state: views of its tensors must stay valid.
        self.is_state_lent = False
        # The user's own Parameter objects: modules and optimizers have these between steps.
        self.user_params: list[nn.Parameter] = []
        # One number. The user's parameters are expanded views of it, so they need no memory.
        self.blank = torch.zeros((), dtype=flat.compute.torch, device=device)

    def note_lent(self, view: Tensor) -> None:
        """Remember a view of the master that the user gets. While it lives, the master stays where it is."""
        self._lent = [ref for ref in self._lent if ref() is not None]
        self._lent.append(weakref.ref(view))

    @property
    def may_swap(self) -> bool:
        return not self.is_state_lent and not any(ref() is not None for ref in self._lent)

    def swap(self, spare: Spare) -> None:
        """Let rows and updated weights change places with `spare`. Parameters keep their objects and versions."""
        assert self.offloaded is not None
        assert self._rows is not None
        self.offloaded.swap(spare)
        if self.flat.rest_on == "host":
            self.rest = self.offloaded.rest
        if self._rows.on_disk:
            return
        self.master.data = self._rows.tensors[MASTER]
        for index, resting in enumerate(self.resting_params):
            resting.data = self.master.data[self.held.get(index, slice(0, 0))].view(resting.shape)

    def read_master(self) -> Tensor:
        """This rank's part of the master; a copy, if it is on disk."""
        return self.master_part(slice(0, self.flat.num_master))

    def master_part(self, where: slice) -> Tensor:
        """Elements of the master: a view, or a copy if it is on disk."""
        return self.master[where] if self._rows is None else self._rows.part(MASTER, where)

    def fill_master(self, where: slice, fill: Callable[[Tensor], object]) -> None:
        """Let `fill` set elements of the master, in place if not on disk; call `publish` once all are set."""
        if self._rows is None or not self._rows.on_disk:
            fill(self.master[where])
            return
        row = torch.empty(where.stop - where.start, dtype=self._rows.dtype)
        fill(row)
        self._rows.set_part(MASTER, where, row)

    def write(self, values: Mapping[int, Tensor]) -> None:
        """Set this rank's parts of parameters from their whole values, and renew the copies of the master.

        A master on disk is written at once: parts that begin inside a block would need memory for the blocks.
        """
        master = self.read_master()
        for index in values.keys() & self.held.keys():
            master[self.held[index]].copy_(self.part_of(index, values[index]))
        if self._rows is not None and self._rows.on_disk:
            self._rows.set_part(MASTER, slice(0, self.flat.num_master), master)
        self.publish(master=master)

    def slice_of(self, index: int) -> slice:
        """The place of this rank's part in the flattened parameter."""
        interval = self.flat.intervals[index]
        return interval.overlap(self._own).within(interval)

    def part_of(self, index: int, value: Tensor) -> Tensor:
        """This rank's part, flattened, of a whole tensor that is shaped like a parameter."""
        return self.stored(value).reshape(-1)[self.slice_of(index)]

    def stored(self, value: Tensor) -> Tensor:
        """A whole tensor, shaped like a parameter, as the master has it: encoded, if that is, unless it is already."""
        codec = self.flat.stored_codec
        if codec is None or value.dtype == torch.uint8:
            return value.detach()
        return encoded(codec, value.detach().to(self.device))

    def decoded(self, whole: Tensor) -> Tensor:
        """All of the flat in its parameters' own dtype, from a whole flat of masters."""
        if self.flat.stored_codec is None:
            return whole
        out = torch.zeros(self.flat.num_whole, dtype=self.flat.params[0].dtype.torch, device=whole.device)
        for decode in self._decoders(whole, out):
            decode()
        return out

    def _decoders(self, whole: Tensor, out: Tensor) -> list[Work]:
        """Prepare to decode every parameter of a whole flat of stored bytes."""
        codec = self.flat.stored_codec
        assert codec is not None
        pairs = zip(self.flat.intervals, self.flat.whole_intervals, strict=True)
        return [decoder(codec, whole[one.start : one.stop][None], out[to.start : to.stop]) for one, to in pairs]

    def publish(self, moves: Moves | None = None, master: Tensor | None = None) -> None:
        """Renew the copies on the host or on disk after the master has changed. `moves` counts the bytes; `master` is
        its content, if the caller has it."""
        if self.offloaded is None:
            return
        if self.offloaded.updated is not None:
            self.offloaded.updated.copy_(self.read_master() if master is None else master)
        if self.offloaded.writes_weights:
            weights = temporary_zeros(self.flat.num_master, self.flat.compute.torch)
            weights.copy_(self.read_master() if master is None else master)
            self.offloaded.start_writing(weights, 0, moves or Moves()).wait()

    def take_gradients(self) -> list[Tensor | None]:
        taken = []
        for param in self.compute_params:
            taken.append(param.grad)
            param.grad = None
        return taken

    def bind(self, whole: Tensor) -> None:
        """Make the compute parameters views into `whole`."""
        self.whole = whole
        self._own_part = whole[self.own_in_whole]
        for param, interval, spec in zip(self.compute_params, self.flat.whole_intervals, self.flat.params, strict=True):
            # `.data` gives the view a version counter of its own: later gathers do not count as in-place changes.
            param.data = whole.data[interval.start : interval.stop].view(spec.shape)

    def gather(
        self, is_stale: bool, staged: Tensor | None, rows: Tensor | None, channels: Channels
    ) -> tuple[list[Work], HopChain]:
        """Prepare to gather the masters of all ranks into `whole`: return the work of this rank, and what follows.

        `staged` holds the bytes that were read from disk. If the flat is sent encoded, `rows` is memory for the encoded
        bytes. They are encoded once for all hops. Every rank computes with decoded values, also for its own part.
        """
        flat, carrier, route = self.flat, self.carrier, self.flat.route(is_stale)
        if flat.stored_codec is not None:
            return self._gather_stored(staged, rows, channels)
        at_rest, codec = self.whole[self._rest_in_whole], None if rows is None else flat.params_codec
        if rows is not None:
            rows = rows.view(-1, flat.row_bytes)
            at_rest = rows[self._rest_in_whole.start // flat.num_master : self._rest_in_whole.stop // flat.num_master]
        before = self._copies(route.before, staged, at_rest)
        steps: list[Collective | Work] = []
        if rows is not None and codec is not None and (is_stale or not flat.copy_is_encoded):
            before.append(carrier.encoding(codec, self._own_part, rows[self._own.start // flat.num_master :][:1]))
            steps += carrier.row_steps(rows, flat.refresh_hops, channels)
        elif rows is None and is_stale:
            depth = flat.depth_of_params if route.refreshed == "rest" else 0
            refreshed = self._buffer("rest", staged, at_rest) if route.refreshed == "rest" else self.whole
            steps += carrier.steps(refreshed, depth, flat.refresh_hops, channels)
        steps += self._copies(route.after, staged, at_rest)
        if rows is not None and codec is not None:
            steps += carrier.row_steps(rows, flat.gather_hops, channels)
            steps.append(decoder(codec, rows, self.whole))
        else:
            steps += carrier.steps(self.whole, 0, flat.gather_hops, channels)
        return before, HopChain(steps)

    def _gather_stored(
        self, staged: Tensor | None, rows: Tensor | None, channels: Channels
    ) -> tuple[list[Work], HopChain]:
        """The same for weights that are stored encoded: `rows` is memory for all bytes, unless this rank has them."""
        flat = self.flat
        if rows is None:
            return self._decoders(self.master, self.whole), HopChain([])
        before = self._copies(flat.route(is_stale=False).before, staged, rows[self.own_in_whole])
        steps = self.carrier.steps(rows, 0, flat.gather_hops, channels)
        return before, HopChain([*steps, *self._decoders(rows, self.whole)])

    def _copies(self, copies: Sequence[Copy], staged: Tensor | None, at_rest: Tensor) -> list[Work]:
        """Prepare the copies of a route. Offloaded state may be in other memory after an update, so its tensors are
        looked up for each copy."""
        if self.offloaded is not None:
            return [partial(self._copy, target, source, staged, at_rest) for target, source in copies]
        pairs = [[self._buffer(name, staged, at_rest) for name in copy] for copy in copies]
        return [partial(target.copy_, source, non_blocking=True) for target, source in pairs]

    def _copy(self, target: Buffer, source: Buffer, staged: Tensor | None, at_rest: Tensor) -> None:
        values = self._buffer(source, staged, at_rest)
        if target != "disk":
            self.carrier.copy(self._buffer(target, staged, at_rest), values)
            return
        # Here only if the optimizer is split further than the parameters.
        assert self.offloaded is not None
        values, moves = values.cpu(), self.offloaded.memory.moves
        moves.add("to_host", values.nbytes)
        self.offloaded.start_writing(values, 0, moves).wait()

    def _buffer(self, name: Buffer, staged: Tensor | None, at_rest: Tensor) -> Tensor:
        """The tensor that a route calls `name`."""
        if name == "own":
            return self._own_part if self.flat.stored_codec is None else at_rest
        if name == "updated":
            # This rank's newest weights, in the compute dtype if they come from the host.
            return self.master if self.offloaded is None or self.offloaded.updated is None else self.offloaded.updated
        found = {"at_rest": at_rest, "staged": staged, "rest": self.rest, "own_in_rest": self.rest}[name]
        assert found is not None
        return found[self._master_in_rest] if name == "own_in_rest" else found


class Unit:
    """The flats of one module and the places where its parameters are registered."""

    def __init__(
        self, index: int, name: str, module: nn.Module, states: list[FlatState], modules: dict[str, nn.Module]
    ):
        self.index = index
        self.name = name
        self.module = module
        self.states = states
        self.trainable_states = [state for state in states if state.flat.trainable]
        self._compute_params = tuple(param for state in states for param in state.compute_params)
        # Those whose memory is not the master, or not the only one.
        copies = [state for state in states if not state.flat.master_is_whole or state.flat.num_ranks > 1]
        self._copies = tuple(param for state in copies for param in state.compute_params)
        # Where each parameter is registered, and the two objects that may be there: the compute and the user parameter.
        self._sites: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        for state in states:
            for spec, compute, user in zip(state.flat.params, state.compute_params, state.user_params, strict=True):
                for site in spec.sites:
                    registered = modules[site.module]._parameters
                    registered[site.attribute] = user
                    self._sites.append((registered, site.attribute, compute, user))

    def show_compute(self) -> None:
        """Register the compute parameters. Other tensors that were put there (`torch.func.functional_call`) stay."""
        for registered, attribute, compute, user in self._sites:
            if registered[attribute] is user:
                registered[attribute] = compute

    def show_user_params(self, version: int | None = None) -> None:
        """Register the user's parameters. With a `version`, also `stamp` the compute parameters."""
        if version is not None:
            torch._C._autograd._unsafe_set_version_counter(self._compute_params, (version,) * len(self._compute_params))
        for registered, attribute, compute, user in self._sites:
            if registered[attribute] is compute:
                registered[attribute] = user

    def replaced(self) -> str | None:
        """The name of a parameter that was replaced in its module by another object, or None."""
        for registered, attribute, compute, user in self._sites:
            current = registered.get(attribute)
            if current is not user and current is not compute:
                return attribute
        return None

    def stamp(self, version: int) -> None:
        """Set the version of the compute parameters. A backward that would read another unit's weights, or newer ones,
        in this memory then raises an error."""
        torch._C._autograd._unsafe_set_version_counter(self._compute_params, (version,) * len(self._compute_params))

    def was_written(self, version: int) -> bool:
        """True if a forward changed the compute parameters, and the change would be lost or stay on this rank only."""
        for param in self._copies:  # noqa: SIM110, a generator would resume once for each parameter
            if param._version != version:
                return True
        return False

    def is_registered_in(self, registered: set[int]) -> bool:
        """True if one of the modules with these parameter dicts holds a parameter of this unit."""
        return any(id(site[0]) in registered for site in self._sites)

    def show(self, instead: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Register other parameters in the place of the user's."""
        for registered, attribute, _, user in self._sites:
            if user in instead:
                registered[attribute] = instead[user]

    def take_back(self) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
        """Register the user's parameters again; yields each with the object that was registered in its place."""
        for registered, attribute, _, user in self._sites:
            yield user, registered.get(attribute)
            registered[attribute] = user
