"""Whether an optimizer can work on shards: found out by trying it, once, on a small matrix.

A shard is a run of elements of a parameter. An optimizer is right on shards when updating the halves of a parameter
gives what updating the whole gives: Adam, SGD and Lion do, Muon, Adafactor and LAMB do not.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError

# Elementwise by construction (block-wise for 8 bits, with blocks that never cross a shard); compiling some of
# them for the trial would take minutes.
KNOWN_PACKAGES = ("torchao.optim", "torchao.prototype.low_bit_optim")


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith(KNOWN_PACKAGES):
        return
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(64, 128, generator=generator)
    grads = [torch.randn(64, 128, generator=generator) for _ in range(2)]
    try:
        with torch.random.fork_rng(devices=[]):
            whole = torch.cat([part.reshape(-1) for part in _train(optimizer, [weights], [[grad] for grad in grads])])
            halves = torch.cat(
                _train(
                    optimizer,
                    list(weights.reshape(-1).chunk(2)),
                    [list(grad.reshape(-1).chunk(2)) for grad in grads],
                )
            )
        same = torch.allclose(whole, halves, rtol=1e-5, atol=1e-7)
    except Exception as error:
        raise _refusal(name, f"it fails on a one-dimensional shard: {error}") from error
    if not same:
        raise _refusal(name, "updating two halves of a matrix apart gives another result than updating the whole")


def _refusal(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"optimizer {name} needs whole matrices and this layout gives it shards ({why}); "
        "use a layout whose optimizer is 'whole', or an elementwise optimizer such as AdamW"
    )


def _train(optimizer: torch.optim.Optimizer, tensors: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    """Two steps of a copy of the optimizer with the hyper-parameters of its first group."""
    params = [nn.Parameter(tensor.clone()) for tensor in tensors]
    group = {**optimizer.param_groups[0], "params": params}
    if "lr" in group:
        # A warm-up may have set it to zero, and then every optimizer looks elementwise.
        group["lr"] = 0.01
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.param_groups = [group]
    trial.state = defaultdict(dict)
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        trial.step()
    return [param.detach() for param in params]
