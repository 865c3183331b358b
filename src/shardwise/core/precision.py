"""Number formats of computation, master weights and gradients.

`compute` is the dtype that forward and backward read, `master` the dtype that the optimizer updates, `reduce` the dtype
in which gradients are sent, stored and summed. Frozen parameters have no master: they are stored in their original
dtype, so that nothing is lost, and are cast when gathered.

With `autocast` the model runs under `torch.autocast`: parameters are gathered in `compute` (fp32 in the preset), and
each operation casts its inputs, matrix products to the dtype of `autocast`. That suits models which mix dtypes.
"""

from dataclasses import dataclass, replace

from ..base.dtypes import BF16, FP16, FP32, DType, DTypeLike, dtype_of
from ..base.errors import ConfigurationError, did_you_mean


@dataclass(frozen=True, slots=True, init=False)
class Precision:
    """The dtypes of a training run, given as torch's dtypes or by name."""

    compute: DType
    master: DType
    reduce: DType
    loss_scaling: bool
    # Patterns for names of modules that compute in fp32. Their inputs and outputs are cast.
    keep_fp32: tuple[str, ...]
    autocast: DType | None

    def __init__(
        self,
        compute: DTypeLike,
        master: DTypeLike,
        reduce: DTypeLike,
        loss_scaling: bool = False,
        keep_fp32: tuple[str, ...] = (),
        autocast: DTypeLike | None = None,
    ) -> None:
        for field, value in (("compute", compute), ("master", master), ("reduce", reduce)):
            object.__setattr__(self, field, dtype_of(value))
        object.__setattr__(self, "loss_scaling", loss_scaling)
        object.__setattr__(self, "keep_fp32", keep_fp32)
        object.__setattr__(self, "autocast", None if autocast is None else dtype_of(autocast))

    @property
    def products(self) -> DType:
        """Dtype of matrix products."""
        return self.compute if self.autocast is None else self.autocast


PRECISIONS: dict[str, Precision] = {
    #                     compute master reduce
    "fp32": Precision(FP32, FP32, FP32),
    "bf16": Precision(BF16, FP32, FP32),
    "bf16-autocast": Precision(FP32, FP32, FP32, autocast=BF16),
    "fp16": Precision(FP16, FP32, FP32, loss_scaling=True),
    "pure-bf16": Precision(BF16, BF16, BF16),
}

DTYPES: dict[str, DType] = {"fp32": FP32, "bf16": BF16, "fp16": FP16}


def precision_of(precision: str | Precision, reduce_dtype: DTypeLike | None) -> Precision:
    """Return a precision given by name or as a value, with another reduce dtype if one is given."""
    if isinstance(precision, str):
        name = precision.lower().replace("_", "-")
        if name not in PRECISIONS:
            raise ConfigurationError(f"unknown precision {precision!r}; {did_you_mean(name, PRECISIONS)}")
        precision = PRECISIONS[name]
    if not isinstance(precision, Precision):
        raise ConfigurationError(f"precision={precision!r}: give one of {', '.join(PRECISIONS)}, or a Precision")
    if reduce_dtype is None:
        return precision
    chosen = DTYPES.get(reduce_dtype) if isinstance(reduce_dtype, str) else dtype_of(reduce_dtype)
    if chosen is None or chosen not in DTYPES.values():
        raise ConfigurationError(f"unknown reduce_dtype {reduce_dtype!r}; {did_you_mean(str(reduce_dtype), DTYPES)}")
    return replace(precision, reduce=chosen)
