"""What all contenders are made of: the model, AdamW, and the training step in torch's own words."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..trainer.checkpointing import Mode, checkpoint_blocks
from .case import Case
from .deepspeed_config import ADAMW
from .model import build, loss_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS = {"fp32": torch.float32, "bf16": torch.float32, "pure-bf16": torch.bfloat16}
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "pure-bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Run:
    """A contender that is set up. `step` takes micro-batches and returns their mean loss, left on the device.

    `host_updates` begins the names of the profiler's ranges in which the host updates weights, if it does.
    """

    step: Callable[[Sequence[Tensor]], Tensor]
    input_dtype: torch.dtype
    host_updates: str = ""
    moved_bytes: Callable[[], float | None] = lambda: None  # by this rank in the last step, if it is counted


def device_of(case: Case) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")


def adamw(params: Any, capturable: bool = False) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **ADAMW, fused=True, capturable=capturable)


def model_of(case: Case, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Not wrapped yet. Blocks are checkpointed and compiled for every contender alike."""
    model = build(case.shape, device or device_of(case), case.seed).to(dtype or WEIGHTS[case.precision])
    checkpoint_blocks(model, cast(Mode, case.checkpointing), blocks=[type(model.blocks[0])])
    if case.compile:
        for block in model.blocks:
            block.compile()
    return model


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object],
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Sequence[Tensor]], Tensor]:
    """The training step of all contenders that train with torch's own words."""

    def step(micro_batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for place, batch in enumerate(micro_batches, start=1):
            with nullcontext() if place == len(micro_batches) else before_last():
                with forward():
                    loss = loss_of(model, batch)
                (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def clipping(case: Case, clip_to: Callable[[float], object]) -> Callable[[], object]:
    return partial(clip_to, case.clip) if case.clip else lambda: None


def torch_clipping(case: Case, model: nn.Module) -> Callable[[], object]:
    return clipping(case, partial(nn.utils.clip_grad_norm_, list(model.parameters())))


def autocast(case: Case) -> Callable[[], AbstractContextManager[Any]]:
    return partial(torch.autocast, case.device, torch.bfloat16) if case.precision == "bf16" else nullcontext
