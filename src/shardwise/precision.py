"""In which number format a model computes, is updated, and sends its gradients.

`compute` is what forward and backward read, `master` what the optimizer updates, `reduce` what gradients
travel as, rest as and are summed in. Frozen parameters have no master: they rest in the dtype they
were given in, so that nothing is lost, and are cast when gathered.
"""

from dataclasses import dataclass, replace

import torch

from .errors import ConfigurationError, did_you_mean


@dataclass(frozen=True, slots=True)
class Precision:
    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    loss_scaling: bool = False
    # Names of modules (patterns) that compute in fp32, with casts at their borders.
    keep_fp32: tuple[str, ...] = ()


PRECISIONS: dict[str, Precision] = {
    #                           compute         master          reduce
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.float32, torch.float32),
    "fp16": Precision(torch.float16, torch.float32, torch.float32, loss_scaling=True),
    "pure-bf16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
}

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def precision_of(precision: str | Precision, reduce_dtype: str | torch.dtype | None) -> Precision:
    """A precision by name or as a value, with the reduce dtype replaced when one is given."""
    if isinstance(precision, str):
        name = precision.lower().replace("_", "-")
        if name not in PRECISIONS:
            raise ConfigurationError(f"unknown precision {precision!r}; {did_you_mean(name, PRECISIONS)}")
        precision = PRECISIONS[name]
    if not isinstance(precision, Precision):
        raise ConfigurationError(f"precision={precision!r}: give one of {', '.join(PRECISIONS)}, or a Precision")
    if reduce_dtype is None:
        return precision
    if isinstance(reduce_dtype, str):
        if reduce_dtype not in DTYPES:
            raise ConfigurationError(f"unknown reduce_dtype {reduce_dtype!r}; {did_you_mean(reduce_dtype, DTYPES)}")
        reduce_dtype = DTYPES[reduce_dtype]
    if reduce_dtype not in DTYPES.values():
        raise ConfigurationError(f"reduce_dtype {reduce_dtype} cannot be summed; use one of {', '.join(DTYPES)}")
    return replace(precision, reduce=reduce_dtype)
