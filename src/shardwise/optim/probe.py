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
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    # A scheduler patches the instance's step to count on the original; hooks are the user's business.
    trial.__dict__.pop("step", None)
    trial.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    trial.param_groups = [{**group, "params": params}]
    if "lr" in group:
        # A warm-up may have set it to zero, and then every optimizer looks elementwise.
        trial.param_groups[0]["lr"] = 0.01
    trial.state = defaultdict(dict)
    first = next(iter(group["params"]), None)
    if first is not None and first in optimizer.state:
        for param in params:
            trial.state[param] = {key: _like(value, first, param) for key, value in optimizer.state[first].items()}
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        type(optimizer).step(trial)
    return torch.cat([param.detach().reshape(-1) for param in params])


def _like(value: Any, original: Tensor, param: Tensor) -> Any:
    """State as the constructor made it for `original`, for `param`."""
    if isinstance(value, Tensor) and value.shape == original.shape and value.ndim and value.numel():
        return torch.full_like(param, float(value.reshape(-1)[0]))
    return deepcopy(value)
