"""Hugging Face Accelerate: an `Accelerator` that also takes the keywords of `sw.shard`.

    from shardwise.integrations.accelerate import Accelerator

    accelerator = Accelerator(strategy="zero3", gradient_accumulation_steps=2)

A script changes its import, and nothing else. `prepare` shards a model and its optimizer, which must be passed in one
call. Both keep the types that Accelerate expects, so its data loaders, schedulers, metrics and trackers work with them.
There is no autocast: mixed_precision becomes the `precision` of `sw.shard`.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn

from ..api.full_weights import full_state_dict
from ..api.sharded_model import accumulate
from ..base.errors import ConfigurationError, StateError
from ..checkpoint.folder import INSIDE
from ..checkpoint.loading import load
from ..checkpoint.saving import save
from ..core.engine.guards import engine_of, find_engine
from ..core.mesh import everyone, init
from ..core.optim.sharded_optimizer import ShardedOptimizer
from ..core.precision import DTYPES, precision_of
from .arguments import refuse_keywords, refuse_surroundings
from .prepare import WORDS, refuse_unknown, shard_for_script


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # Accelerate has no annotations
    """Accelerate's wrapper around a sharded optimizer. It also tells Accelerate which steps were skipped."""

    def step(self, closure: Any = None) -> None:
        before = self.optimizer.num_skipped_steps
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._is_overflow = self.optimizer.num_skipped_steps > before


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no annotations
    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Take the keywords of `accelerate.Accelerator` and those of `sw.shard`."""
        own = inspect.signature(accelerate.Accelerator)
        refuse_unknown("Accelerator", keywords, {*WORDS, *own.parameters})
        self._words = {word: keywords.pop(word) for word in sorted(WORDS & keywords.keys())}
        refuse_keywords(own.bind(*args, **keywords).arguments)
        super().__init__(*args, **keywords)
        refuse_surroundings(self.distributed_type, self.state.dynamo_plugin)
        precision, mixed = self._words.get("precision"), self.state.mixed_precision
        if precision is not None and mixed != "no" and precision_of(precision, None).products != DTYPES[mixed]:
            both = f"precision={precision!r} and mixed_precision={mixed!r} (or bf16=, fp16=, `accelerate launch`)"
            raise ConfigurationError(f"{both} contradict each other: leave one of them out")
        timeout = None if self.init_handler is None else self.init_handler.timeout.total_seconds()
        init(device=self.device, timeout_s=timeout)
        if everyone().num_ranks != self.num_processes:
            both = f"{everyone().num_ranks} processes were started, but Accelerate sees {self.num_processes}"
            raise ConfigurationError(f"{both}: on CPUs set cpu=True (use_cpu=True of TrainingArguments)")
        # The engine does the casting and loss scaling.
        self.native_amp, self.scaler = False, None

    # preparing

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard each model with its optimizer; Accelerate prepares everything else."""
        if device_placement is not None:
            raise ConfigurationError("prepare(device_placement=...): a sharded model is placed already; leave it out")
        if any(isinstance(thing, (DummyOptim, DummyScheduler)) for thing in objects):
            raise ConfigurationError("prepare(DummyOptim or DummyScheduler): build a torch optimizer and scheduler")
        models = [thing for thing in objects if isinstance(thing, nn.Module)]
        optimizers = [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
        prepared = {id(optimizer): self._prepare_pair(models, optimizer) for optimizer in optimizers}
        return super().prepare(*(prepared.get(id(thing), thing) for thing in objects))

    def _prepare_pair(self, models: list[nn.Module], optimizer: torch.optim.Optimizer) -> Any:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        held = {param for group in optimizer.param_groups for param in group["params"]}
        trained = [model for model in models if not held.isdisjoint(model.parameters())]
        if len(trained) != 1 or find_engine(trained[0]) is not None:
            what = f"prepare({type(optimizer).__name__}) with {len(trained)} models that it trains"
            fix = "give one model that is not prepared yet and its one optimizer to the same call"
            raise ConfigurationError(f"{what}: {fix}, model, optimizer = accelerator.prepare(model, optimizer)")
        return self._shard(trained[0], optimizer)

    def _shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> PreparedOptimizer | None:
        if getattr(optimizer, "train", None) is not None:
            what = f"{type(optimizer).__name__} changes the weights between train() and eval()"
            raise ConfigurationError(f"{what}, which sharded models do not support: use another optimizer")
        sharded = shard_for_script(model, optimizer, self._words, self.state.mixed_precision)
        precision = engine_of(model).precision
        if precision.products != precision.master:
            # Outputs become fp32, as in Accelerate with autocast, so that losses are not computed in 16 bits.
            model.register_forward_hook(lambda module, args, output: convert_to_fp32(output))
        vars(model)["_is_accelerate_prepared"] = True
        if sharded is None:
            return None
        prepared = PreparedOptimizer(sharded, device_placement=False)
        prepared._is_accelerate_prepared = True
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model without an optimizer: sharded, or whole on the device in evaluation mode."""
        if not evaluation_mode and find_engine(model) is None:
            self._shard(model, None)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        return super().prepare_optimizer(self._prepare_pair([], optimizer), device_placement)

    # the step

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if find_engine(model) is None else accumulate(model)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip by the norm over all shards. Return the norm before clipping, the same on every rank."""
        return self._optimizer_of("clip_grad_norm_", parameters).clip_grad_norm(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        self._optimizer_of("clip_grad_value_", parameters).clip_grad_value(clip_value)

    def _optimizer_of(self, verb: str, parameters: Tensor | Iterable[Tensor]) -> ShardedOptimizer:
        """Return the optimizer of the model whose trainable parameters are exactly these."""
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        if not self.sync_gradients:
            raise StateError(f"{verb} before the last micro-batch: write `if accelerator.sync_gradients:` above it")
        for model, optimizer in self._sharded():
            trained = {param for param in model.parameters() if param.requires_grad}
            if optimizer is not None and trained == {param for param in given if param.requires_grad}:
                return optimizer
        what = f"{verb} of {len(given)} parameters that are not those of one prepared model"
        raise ConfigurationError(f"{what}: pass model.parameters() of the model that `prepare` returned")

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        why = "every rank must run every batch of a sharded model"
        raise ConfigurationError(f"join_uneven_inputs: {why}; leave it out, even_batches=True is the default")

    # the state

    def _sharded(self) -> list[tuple[nn.Module, ShardedOptimizer | None]]:
        """Return the sharded models, each with its optimizer or None."""
        optimizers = [prepared.optimizer for prepared in self._optimizers]
        return [
            (model, next((optimizer for optimizer in optimizers if optimizer.belongs_to(engine)), None))
            for model in self._models
            if (engine := find_engine(model)) is not None
        ]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return whole tensors in host memory, on rank 0 only. Every rank must call it; others get an empty dict."""
        if find_engine(model) is None:
            return super().get_state_dict(model, unwrap)
        return full_state_dict(model, rank0_only=True)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Write Accelerate's folder, with a checkpoint of each sharded model, which any layout can load."""
        with self._without_sharded() as sharded:
            place = super().save_state(output_dir, safe_serialization, **options)
        for number, (model, optimizer) in enumerate(sharded):
            save(_folder(place, number), model, optimizer)
        return place

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Load a folder written by `save_state`, or by Accelerate itself with one model and one optimizer."""
        places: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, place: places.append(place))
        try:
            with self._without_sharded() as sharded:
                super().load_state(input_dir, load_kwargs, **options)
        finally:
            hook.remove()
        for number, (model, optimizer) in enumerate(sharded):
            own = _folder(places[0], number)
            is_ours = any(own.parent.glob(f"{own.name}*"))  # an interrupted save may have another name
            load(own if number or is_ours else places[0], model, optimizer)

    @contextmanager
    def _without_sharded(self) -> Iterator[list[tuple[nn.Module, ShardedOptimizer | None]]]:
        """Hide sharded models and all optimizers from Accelerate, which cannot save them."""
        sharded = self._sharded()
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if find_engine(model) is None]
        self._optimizers = []
        try:
            yield sharded
        finally:
            self._models, self._optimizers = models, optimizers


def _folder(place: str | Path, number: int) -> Path:
    return Path(place) / (INSIDE if number == 0 else f"{INSIDE}_{number}")
