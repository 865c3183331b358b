"""Trials of an optimizer on small matrices: can it work on shards, and what does it keep for each parameter?

A shard has consecutive elements of a parameter. An optimizer works on shards if two copies, each with one half of
every parameter, compute the same as one copy with all parameters whole. Adam, SGD and Lion do. Muon, Adafactor and LAMB
do not, nor do optimizers that clip inside their step or learn a step size from all gradients (D-Adaptation, Prodigy).
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigurationError
from ..precision import Precision

# Elementwise by construction (block-wise for 8 bits, with blocks that never cross a shard); compiling some of
# them for the trial would take minutes.
KNOWN_PACKAGES = ("torchao.optim", "torchao.prototype.low_bit_optim")
# Shapes of the trial's matrices: several, to detect optimizers that mix parameters.
_SHAPES = ((64, 128), (32, 64))
# Scales of its gradients: a large one, to detect clipping inside a step.
_GRAD_SCALES = (1.0, 1e3, 1.0)
# Bytes per element of a moment in fewer bits, with its blocks' scales, by the end of the optimizer's name.
_SMALL_MOMENTS = {"8bit": 1 + 4 / 256, "Fp8": 1 + 4 / 256, "4bit": 0.5 + 4 / 128}


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    if type(optimizer).__module__.startswith(KNOWN_PACKAGES):
        return
    # One of each kind of group. Parameters and learning rates do not count, because the trial sets them.
    different: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        same = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr", "initial_lr")}
        different.setdefault(repr(sorted(same.items())), group)
    name, groups = type(optimizer).__name__, list(different.values())
    generator = torch.Generator().manual_seed(0)

    def matrices(scale: float = 1.0) -> list[list[Tensor]]:
        return [[torch.randn(shape, generator=generator).mul_(scale).to(device) for shape in _SHAPES] for _ in groups]

    weights, grads = matrices(), [matrices(scale) for scale in _GRAD_SCALES]
    try:
        with torch.random.fork_rng(devices=[]):
            whole, *halves = [_train(optimizer, groups, weights, grads, half) for half in (None, 0, 1)]
    except Exception as error:
        raise _refusal(name, f"it fails on a one-dimensional shard: {error}") from error
    for param, *parts in zip(_params(whole), *map(_params, halves), strict=True):
        if not torch.allclose(param.reshape(-1), torch.cat(parts), rtol=1e-5, atol=1e-7):
            raise _refusal(name, "updating halves of two matrices apart gives another result than updating the wholes")
    for half in halves:
        for (key, number), (_, other) in zip(_numbers(whole), _numbers(half), strict=True):
            if not math.isclose(number, other, rel_tol=1e-4):
                raise _refusal(
                    name, f"it learns {key} from all gradients: {number:g} from two matrices, {other:g} from halves"
                )


def _params(optimizer: Any) -> list[Tensor]:
    return [param.detach() for group in optimizer.param_groups for param in group["params"]]


def _numbers(trial: Any) -> Iterator[tuple[str, float]]:
    """Numbers that an optimizer holds apart from the state of its parameters: in its groups, and as attributes."""
    for group in (*trial.param_groups, vars(trial)):
        for key, value in sorted(group.items()):
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                yield key, float(value)


def state_tensor_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the tensors that one of torch's own optimizers keeps for each parameter, found by a trial step."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return ()
    names: dict[str, None] = {}
    ones = torch.ones(2, 3)
    for group in optimizer.param_groups:
        try:
            with torch.random.fork_rng(devices=[]):
                trial = _train(optimizer, [group], [[ones]], [[[ones]]])
        except Exception as error:
            raise ConfigurationError(
                f"optimizer {type(optimizer).__name__} fails on a trial step, so the host cannot update with it "
                f"({error}): leave the optimizer on the device, or use an elementwise one such as AdamW"
            ) from error
        for state in trial.state.values():
            names |= {key: None for key, value in state.items() if getattr(value, "shape", None) == ones.shape}
    return tuple(names)


def num_moments(optimizer: torch.optim.Optimizer | None, precision: Precision) -> float:
    """Number of tensors of the master's size that an optimizer will keep: two as in Adam, unless known to differ."""
    if optimizer is None:
        return 0
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if name == "SGD":
        return max(float(group["momentum"] != 0) for group in groups)
    moments = 2 + max(float(group.get("amsgrad", False)) for group in groups)
    for ending, num_bytes in _SMALL_MOMENTS.items():
        if name.endswith(ending):
            return moments * num_bytes / precision.master.itemsize
    return moments


def refuse_unless_rows(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state cannot be on disk, because it cannot be read and updated part by part."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        raise ConfigurationError(
            f"optimizer {type(optimizer).__name__} keeps its state in its own way, which cannot be offloaded to disk: "
            "put it on the host (optimizer=host), or use one of torch's, such as AdamW"
        )


def _refusal(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"optimizer {name} needs whole matrices and this layout gives it shards ({why}); "
        "use a layout whose optimizer is 'whole', or an elementwise optimizer such as AdamW"
    )


def _train(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    weights: list[list[Tensor]],
    grads: list[list[list[Tensor]]],
    half: int | None = None,
) -> Any:
    """Run steps of a copy of the optimizer with the hyper-parameters of these groups, on these tensors or on one half
    of each. Return the copy. The original does not change."""

    def part(matrix: Tensor) -> Tensor:
        return (matrix if half is None else matrix.reshape(-1).chunk(2)[half]).clone()

    trial = shadow_of(optimizer)
    trial.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    trial.param_groups = []
    for group, matrices in zip(groups, weights, strict=True):
        row = [nn.Parameter(part(each)) for each in matrices]
        made = deepcopy({key: value for key, value in group.items() if key != "params"})
        if "lr" in group:
            # A warm-up may have set it to zero, and then every optimizer looks elementwise.
            made["lr"] = 0.01
        trial.param_groups.append({**made, "params": row})
        first: Any = next(iter(group["params"]), None)
        # State that the constructor made.
        for key, value in optimizer.state.get(first, {}).items():
            is_shaped = isinstance(value, Tensor) and value.shape == first.shape and value.ndim and value.numel()
            for param in row:
                like = torch.full_like(param, float(value.reshape(-1)[0])) if is_shaped else deepcopy(value)
                trial.state[param][key] = like
    known = {param for group in optimizer.param_groups for param in group["params"]}
    for key, value in list(vars(trial).items()):
        if key not in ("param_groups", "state", "defaults"):
            vars(trial)[key] = _attribute(value, optimizer, trial, known)
    params = [param for group in trial.param_groups for param in group["params"]]
    for step_grads in grads:
        for param, grad in zip(params, [each for row in step_grads for each in row], strict=True):
            param.grad = part(grad)
        type(optimizer).step(trial)
    return trial


def _attribute(value: Any, optimizer: torch.optim.Optimizer, trial: Any, known: set[Tensor]) -> Any:
    """Return an attribute for the trial: the trial's parameters, a copy of an inner optimizer, or a copy of numbers."""
    if isinstance(value, torch.optim.Optimizer) and value is not optimizer:
        inside = shadow_of(value)
        if value.param_groups is optimizer.param_groups:
            inside.param_groups = trial.param_groups
        if value.state is optimizer.state:
            inside.state = trial.state
        return inside
    if isinstance(value, (list, tuple, set)) and value and all(isinstance(each, Tensor) for each in value):
        params = [param for group in trial.param_groups for param in group["params"]]
        return type(value)(params) if known >= {*value} else value
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() == 1 else value
    return copy(value) if isinstance(value, (list, dict, set)) else value


def shadow_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return a copy without state. It may be given other parameters, and may run in another thread."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    # A scheduler has replaced the instance's `step` by one that counts the calls of the original.
    shadow.__dict__.pop("step", None)
    shadow.state = defaultdict(dict)
    return shadow
