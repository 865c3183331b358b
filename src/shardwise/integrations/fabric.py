"""Lightning Fabric: a strategy that takes the keywords of `sw.shard`.

    from shardwise.integrations.fabric import ShardwiseStrategy

    fabric = Fabric(strategy=ShardwiseStrategy(strategy="zero3", precision="bf16"), devices=8)
    model, optimizer = fabric.setup(model, optimizer)

Fabric launches the ranks, makes the process group and runs the user's collectives, as with its DDP strategy.
`fabric.save` and `fabric.load` use checkpoints of `sw.save`: any strategy and any number of ranks can load them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning_fabric.plugins.precision import Precision
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from lightning_fabric.utilities.types import _Stateful
from torch import Tensor, nn

from ..api.full_weights import full_state_dict, load_full_state_dict
from ..api.sharded_model import accumulate
from ..base.errors import ConfigurationError
from ..checkpoint.loading import load
from ..checkpoint.saving import save
from ..core.mesh import init
from .prepare import refuse_unknown, shard_for_script


class ShardwiseStrategy(DDPStrategy):
    def __init__(self, **words: Any) -> None:
        """Take the keywords of `sw.shard`. The default `precision` is the model's."""
        refuse_unknown("ShardwiseStrategy", words)
        super().__init__()
        self._words = words
        self._backward_sync_control = _SyncControl()

    def setup_environment(self) -> None:
        if type(self.precision) is not Precision:
            fix = "leave it out, and write ShardwiseStrategy(precision='bf16') (or 'fp16', 'pure-bf16')"
            raise ConfigurationError(f"Fabric(precision={self.precision.precision!r}) casts around the engine: {fix}")
        super().setup_environment()
        init(device=self.root_device)

    # setting up

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `sw.shard` moves the model shard by shard, because the whole model may not fit."""

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> Any:
        if len(optimizers) != 1:
            raise ConfigurationError(f"fabric.setup with {len(optimizers)} optimizers: pass all groups to one")
        return module, [shard_for_script(module, optimizers[0], self._words, "no")], scheduler

    def setup_module(self, module: nn.Module) -> Any:
        shard_for_script(module, None, self._words, "no")
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        raise ConfigurationError("fabric.setup_optimizers: write model, optimizer = fabric.setup(model, optimizer)")

    # the step

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Any, max_norm: float, norm_type: float = 2, error_if_nonfinite: bool = True
    ) -> Tensor:
        return optimizer.clip_grad_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        optimizer.clip_grad_value(clip_val)

    # the state

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
        load_full_state_dict(module, state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002
    ) -> None:
        """Save the model and its optimizer. Other values are saved as JSON; a stateful object by its state dict."""
        if storage_options is not None or filter:
            raise ConfigurationError("fabric.save(storage_options=, filter=): leave these out; it writes a folder")
        model, optimizer, others = _parts(state)
        extra = {key: value.state_dict() if isinstance(value, _Stateful) else value for key, value in others.items()}
        save(path, model, optimizer, extra=extra)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        model, optimizer, others = _parts({"model": state} if isinstance(state, nn.Module) else state or {})
        extra = load(path, model, optimizer)
        missing = sorted(others.keys() - extra.keys())
        if missing and strict:
            raise ConfigurationError(f"fabric.load: {path} has no {missing[0]!r}; leave it out, or set strict=False")
        for key in others.keys() & extra.keys():
            if isinstance(others[key], _Stateful):
                others[key].load_state_dict(extra.pop(key))
            else:
                state[key] = extra.pop(key)
        return extra


class _SyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return accumulate(module) if enabled else nullcontext()


def _parts(state: Mapping[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer | None, dict[str, Any]]:
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        both = f"{len(models)} models and {len(optimizers)} optimizers"
        raise ConfigurationError(f"a state of {both}: a checkpoint has one model and its optimizer; save one for each")
    others = {key: value for key, value in state.items() if not isinstance(value, (nn.Module, torch.optim.Optimizer))}
    return models[0], next(iter(optimizers), None), others
