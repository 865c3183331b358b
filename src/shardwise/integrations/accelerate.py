"""Hugging Face's Accelerate: an `Accelerator` that takes the keywords of `sw.shard` beside its own.

    from shardwise.integrations.accelerate import Accelerator

    accelerator = Accelerator(strategy="zero3", gradient_accumulation_steps=2)

A script changes its import, and nothing else. `prepare` shards a model and the optimizer that trains it, which come in
one call; they stay the objects that Accelerate's own code expects, so data loaders, schedulers, metrics and trackers
are Accelerate's. There is no autocast: a mixed precision becomes the `precision` of `sw.shard`.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn

from ..api import accumulate
from ..base.errors import ConfigurationError, StateError
from ..checkpoint.loading import load
from ..checkpoint.saving import save
from ..checkpoint.steps import INSIDE
from ..core.engine.full_weights import full_state_dict
from ..core.engine.guards import engine_of, find_engine
from ..core.mesh import everyone, init
from ..core.optim.sharded_optimizer import ShardedOptimizer
from .arguments import refuse_keywords, refuse_surroundings
from .prepare import WORDS, refuse_contradiction, refuse_unknown, shard_as_asked


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # Accelerate has no annotations
    """Steps and clears when Accelerate synchronises; knows of steps that were left out."""

    def step(self, closure: Any = None) -> None:
        before = self.optimizer.num_skipped_steps
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._is_overflow = self.optimizer.num_skipped_steps > before


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no annotations
    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Takes the keywords of `accelerate.Accelerator` and those of `sw.shard`."""
        own = inspect.signature(accelerate.Accelerator)
        refuse_unknown("Accelerator", keywords, {*WORDS, *own.parameters})
        self._words = {word: keywords.pop(word) for word in sorted(WORDS & keywords.keys())}
        refuse_keywords(own.bind(*args, **keywords).arguments)
        super().__init__(*args, **keywords)
        refuse_surroundings(self.distributed_type, self.state.dynamo_plugin)
        refuse_contradiction(self._words, self.state.mixed_precision)
        timeout = None if self.init_handler is None else self.init_handler.timeout.total_seconds()
        init(device=self.device, timeout_s=timeout)
        if everyone().num_ranks != self.num_processes:
            raise ConfigurationError(
                f"{everyone().num_ranks} processes were started, and Accelerate sees {self.num_processes}: on CPUs say "
                "cpu=True (use_cpu=True of TrainingArguments), or every process would train alone"
            )
        # The engine casts and scales.
        self.native_amp, self.scaler = False, None

    # preparing

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard each model with its optimizer; everything else is prepared by Accelerate."""
        if device_placement is not None:
            raise ConfigurationError("prepare(device_placement=...): a sharded model is on its device; leave it out")
        for thing in objects:
            if isinstance(thing, (DummyOptim, DummyScheduler)):
                raise ConfigurationError(
                    f"prepare({type(thing).__name__}): that stands for what a DeepSpeed file describes; build a torch "
                    "optimizer and scheduler"
                )
        models = [thing for thing in objects if isinstance(thing, nn.Module)]
        optimizers = [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
        prepared = dict(self._prepare_pair(models, optimizer) for optimizer in optimizers)
        return super().prepare(*(prepared.get(id(thing), thing) for thing in objects))

    def _prepare_pair(self, models: list[nn.Module], optimizer: torch.optim.Optimizer) -> tuple[int, Any]:
        if isinstance(optimizer, PreparedOptimizer):
            return id(optimizer), optimizer
        held = {param for group in optimizer.param_groups for param in group["params"]}
        trained = [model for model in models if not held.isdisjoint(model.parameters())]
        if len(trained) != 1 or find_engine(trained[0]) is not None:
            raise ConfigurationError(
                f"prepare({type(optimizer).__name__}) with {len(trained)} models that it trains and that are not "
                "prepared yet: give one model and the one optimizer that has all its parameters to the same call, "
                "model, optimizer = accelerator.prepare(model, optimizer)"
            )
        return id(optimizer), self._shard(trained[0], optimizer)

    def _shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> PreparedOptimizer | None:
        if optimizer is not None and getattr(optimizer, "train", None) is not None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} changes the weights between train() and eval(), which a sharded model "
                "does not follow: use an optimizer without a schedule of its own"
            )
        sharded = shard_as_asked(model, optimizer, self._words, self.state.mixed_precision)
        precision = engine_of(model).precision
        if precision.products != precision.master:
            # As Accelerate does around its autocast, so that losses are not computed in 16 bits.
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
        """A model by itself: sharded without an optimizer, or whole on the device where it is only evaluated."""
        if not evaluation_mode and find_engine(model) is None:
            self._shard(model, None)
        found: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return found

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, PreparedOptimizer):
            self._prepare_pair([], optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    # the step

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        if find_engine(model) is None:
            yield
            return
        with accumulate(model):
            yield

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Over all shards; the norm before is the same on every rank."""
        return self._optimizer_of("clip_grad_norm_", parameters).clip_grad_norm(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        self._optimizer_of("clip_grad_value_", parameters).clip_grad_value(clip_value)

    def _optimizer_of(self, verb: str, parameters: Tensor | Iterable[Tensor]) -> ShardedOptimizer:
        """Of the model that has these parameters, all of them."""
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        if not self.sync_gradients:
            raise StateError(
                f"{verb} before the last micro-batch, whose gradients are not summed yet: write "
                "`if accelerator.sync_gradients:` above it"
            )
        for model, optimizer in self._sharded():
            trained = {param for param in model.parameters() if param.requires_grad}
            if optimizer is not None and trained == {param for param in given if param.requires_grad}:
                return optimizer
        raise ConfigurationError(
            f"{verb} of {len(given)} parameters that are not those of one prepared model: give it "
            "model.parameters() of what `prepare` gave back"
        )

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        raise ConfigurationError(
            "join_uneven_inputs: every rank must run every batch of a sharded model; leave it out, even_batches=True "
            "(the default) gives all ranks as many"
        )

    # the state

    def _sharded(self) -> list[tuple[nn.Module, ShardedOptimizer | None]]:
        """Prepared models that are sharded, each with its optimizer."""
        optimizers = [prepared.optimizer for prepared in self._optimizers]
        models = [(model, find_engine(model)) for model in self._models]
        return [
            (model, next((optimizer for optimizer in optimizers if optimizer.belongs_to(engine)), None))
            for model, engine in models
            if engine is not None
        ]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors on the first rank's host; every rank calls it, and the others get an empty dict."""
        if find_engine(model) is None:
            found: dict[str, Any] = super().get_state_dict(model, unwrap)
            return found
        return full_state_dict(model, rank0_only=True)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Accelerate's own folder, with a checkpoint of each sharded model in it: any strategy and world goes on."""
        with self._without_sharded() as sharded:
            place = super().save_state(output_dir, safe_serialization, **options)
        for number, (model, optimizer) in enumerate(sharded):
            save(_folder(place, number), model, optimizer)
        return place

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """What `save_state` wrote, or a folder of Accelerate's own with one model and optimizer."""
        places: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, place: places.append(place))
        try:
            with self._without_sharded() as sharded:
                super().load_state(input_dir, load_kwargs, **options)
        finally:
            hook.remove()
        for number, (model, optimizer) in enumerate(sharded):
            own = _folder(places[0], number)
            is_ours = any(own.parent.glob(f"{own.name}*"))  # one that was interrupted may have another name
            load(own if number or is_ours else places[0], model, optimizer)

    @contextmanager
    def _without_sharded(self) -> Iterator[list[tuple[nn.Module, ShardedOptimizer | None]]]:
        """Accelerate's code sees what it can save itself."""
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
