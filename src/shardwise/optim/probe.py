"""Whether an optimizer can work on shards: found out by trying it, once, on a small matrix.

A shard is a run of elements of a parameter. An optimizer is right on shards when updating the halves of a parameter
gives what updating the whole gives: Adam, SGD and Lion do, Muon, Adafactor and LAMB do not.
"""

from collections import OrderedDict, defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError

# Elementwise by construction (block-wise for 8 bits, with blocks that never cross a shard); compiling some of
# them for the trial would take minutes.
KNOWN_PACKAGES = ("torchao.optim", "torchao.prototype.low_bit_optim")


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith(KNOWN_PACKAGES):
        return
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(64, 128, generator=generator).to(device)
    grads = [torch.randn(64, 128, generator=generator).to(device) for _ in range(2)]
    for group in optimizer.param_groups:
        try:
            with torch.random.fork_rng(devices=[]):
                whole = _train(optimizer, group, [weights], [[grad] for grad in grads])
                halves = _train(optimizer, group, _halves(weights), [_halves(grad) for grad in grads])
            same = torch.allclose(whole, halves, rtol=1e-5, atol=1e-7)
        except Exception as error:
            raise _refusal(name, f"it fails on a one-dimensional shard: {error}") from error
        if not same:
            raise _refusal(name, "updating two halves of a matrix apart gives another result than updating the whole")


def rows_kept(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of what one of torch's own optimizers keeps for each element of a parameter, found out by a trial."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return ()
    names: dict[str, None] = {}
    for group in optimizer.param_groups:
        with torch.random.fork_rng(devices=[]):
            trial = _trial(optimizer, group, [nn.Parameter(torch.ones(2, 3))])
            _take_step(optimizer, trial, [torch.ones(2, 3)])
        for state in trial.state.values():
            names |= {key: None for key, value in state.items() if isinstance(value, Tensor) and value.shape == (2, 3)}
    return tuple(names)


def refuse_unless_rows(optimizer: torch.optim.Optimizer) -> None:
    """What rests on disk is brought to the optimizer in parts, with all that it keeps for them."""
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim."):
        raise ConfigurationError(
            f"optimizer {name} keeps its state in its own way, which cannot rest on disk: put it on the host "
            "(optimizer=host), or use one of torch's, such as AdamW"
        )


def _halves(matrix: Tensor) -> list[Tensor]:
    return list(matrix.reshape(-1).chunk(2))


def _refusal(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"optimizer {name} needs whole matrices and this layout gives it shards ({why}); "
        "use a layout whose optimizer is 'whole', or an elementwise optimizer such as AdamW"
    )


def _train(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], tensors: list[Tensor], grads: list[list[Tensor]]
) -> Tensor:
    """Two steps of a copy of the optimizer with the hyper-parameters of one group, on other tensors."""
    params = [nn.Parameter(tensor.clone()) for tensor in tensors]
    trial = _trial(optimizer, group, params)
    for step_grads in grads:
        _take_step(optimizer, trial, step_grads)
    return torch.cat([param.detach().reshape(-1) for param in params])


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[nn.Parameter]) -> Any:
    trial = shadow_of(optimizer)
    trial.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    trial.param_groups = [{**group, "params": params}]
    if "lr" in group:
        # A warm-up may have set it to zero, and then every optimizer looks elementwise.
        trial.param_groups[0]["lr"] = 0.01
    first = next(iter(group["params"]), None)
    if first is not None and first in optimizer.state:
        for param in params:
            trial.state[param] = {key: _like(value, first, param) for key, value in optimizer.state[first].items()}
    return trial


def _take_step(optimizer: torch.optim.Optimizer, trial: Any, grads: list[Tensor]) -> None:
    for param, grad in zip(trial.param_groups[0]["params"], grads, strict=True):
        param.grad = grad.clone()
    type(optimizer).step(trial)


def shadow_of(optimizer: torch.optim.Optimizer) -> Any:
    """A copy of the same class, without state, that may be given other parameters, also in another thread."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    # A scheduler patches the instance's step to count on the original.
    shadow.__dict__.pop("step", None)
    shadow.state = defaultdict(dict)
    return shadow


def _like(value: Any, original: Tensor, param: Tensor) -> Any:
    """State as the constructor made it for `original`, for `param`."""
    if isinstance(value, Tensor) and value.shape == original.shape and value.ndim and value.numel():
        return torch.full_like(param, float(value.reshape(-1)[0]))
    return deepcopy(value)
