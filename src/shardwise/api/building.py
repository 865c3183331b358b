"""Building units: the weights of a model are copied into flats, one unit at a time.

A model on the meta device is also initialised here. Only the parameters of one unit get real memory at a time. All
others stay on the meta device, where writes do nothing. Then the model's own initialisation runs for each module that
may set these parameters. Each call has a random seed made of the seed and the module's name, so the weights depend
neither on the layout nor on the number of ranks. No rank ever holds more than its shards and one unit.
"""

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import ConfigurationError
from ..core.offload.arena import temporary_zeros
from ..core.offload.host_memory import HostMemory
from ..core.schedule.model import UnitSpec
from ..core.schedule.step_schedule import Schedule
from ..core.unit.state import FlatState, Unit
from ..core.unit.user_parameter import Place, adopt, place_of


def build_units(
    model: nn.Module, specs: list[UnitSpec], schedule: Schedule, where: torch.device, seed: int | None, host: HostMemory
) -> tuple[list[Unit], list[tuple[nn.Parameter, Place]]]:
    """Copy the weights into flats, and free the memory of the user's parameters, which then stand for the flats."""
    modules = dict(model.named_modules())
    meta = _MetaModel(model, seed or 0, where)
    built = []
    places: list[tuple[nn.Parameter, Place]] = []
    for index, (unit_spec, unit_plan) in enumerate(zip(specs, schedule.units, strict=True)):
        states = [FlatState(flat, where, unit_spec.name, host) for flat in unit_plan.flats]
        sites = [site for param in unit_spec.params for site in param.sites]
        originals: list[Any] = [modules[site.module]._parameters[site.attribute] for site in sites]
        by_name = {site.name: original for site, original in zip(sites, originals, strict=True)}
        meta.fill(unit_spec)
        for state in states:
            values: dict[int, Any] = {}
            for position, spec in enumerate(state.flat.params):
                original, site = by_name[spec.name], spec.sites[0]
                values[position] = modules[site.module]._parameters[site.attribute]
                state.compute_params[position].__dict__.update(original.__dict__)
                state.user_params.append(original)
                places.append((original, Place(state, position)))
            state.write(values)
        # Put the meta parameters back: the initialisation of other units must not write to this unit's parameters.
        for site, original in zip(sites, originals, strict=True):
            modules[site.module]._parameters[site.attribute] = original
        built.append((index, unit_spec.name, modules[unit_spec.path], states))
    # Modules that own no parameters may have buffers, such as rotary tables.
    meta.reset(path for path, module in modules.items() if any(each.is_meta for each in module.buffers(recurse=False)))
    for original, place in places:
        adopt(original, place)
    for module in modules.values():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(where)
        for param in module._parameters.values():
            if param is not None and place_of(param) is None:
                param.data = param.data.to(where)
    return [Unit(*parts, modules) for parts in built], places


class _MetaModel:
    """Allocates and initialises the tensors of a model that are on the meta device."""

    def __init__(self, model: nn.Module, seed: int, device: torch.device) -> None:
        self._modules = dict(model.named_modules())
        self._seed = seed
        self._device = device
        # `_init_weights(module)` of Hugging Face models takes any module, and often sets the weights of its children.
        initialisers = (getattr(module, "_init_weights", None) for module in self._modules.values())
        self._init_weights = next(filter(callable, initialisers), None)

    def fill(self, unit: UnitSpec) -> None:
        """Give the meta parameters of a unit, and the meta buffers of the same modules, memory and initial values."""
        owners = []
        for param in unit.params:
            first = param.sites[0]
            value = self._modules[first.module]._parameters[first.attribute]
            if value is not None and value.is_meta:
                filled = _unfilled(value, self._device)
                for site in param.sites:
                    self._modules[site.module]._parameters[site.attribute] = nn.Parameter(filled, value.requires_grad)
                    owners.append(site.module)
        self.reset(owners)

    def reset(self, owners: Iterable[str]) -> None:
        """Allocate the meta buffers of some modules, and initialise these modules."""
        paths = set(owners)
        for path in paths:
            buffers = self._modules[path]._buffers
            for name, buffer in buffers.items():
                if buffer is not None and buffer.is_meta:
                    buffers[name] = _unfilled(buffer, self._device)
        if self._init_weights is not None:
            paths |= {path for path in self._modules if any(not path or o.startswith(f"{path}.") for o in paths)}
        devices = [self._device] if self._device.type == "cuda" else []
        # Children before their parents, as the models themselves do it.
        for path in sorted(paths, key=lambda path: (-path.count(".") - bool(path), path)):
            module = self._modules[path]
            resets = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
            if self._init_weights is not None:
                resets = [partial(self._init_weights, module)]
            reset = next(filter(callable, resets), None)
            if reset is None:
                raise ConfigurationError(
                    f"module {path!r} ({type(module).__name__}) is on the meta device and has no reset_parameters(): "
                    "give it one, or build the model on a real device"
                )
            digest = hashlib.sha256(f"{self._seed}:{path}".encode()).digest()
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                reset()


def _unfilled(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate a tensor of NaNs: if the initialisation forgets the tensor, the first loss is NaN. Integers are 0."""
    fill = float("nan") if tensor.is_floating_point() else 0
    if device.type == "cpu":
        return temporary_zeros(tensor.numel(), tensor.dtype).view(tensor.shape).fill_(fill)
    return torch.full(tensor.shape, fill, dtype=tensor.dtype, device=device)
