"""The Hugging Face Trainer and its subclasses (TRL's SFTTrainer, ...), with any strategy.

    from shardwise.integrations.transformers import sharded

    trainer = sharded(SFTTrainer, strategy="zero3")(model=model, args=args, train_dataset=dataset)

`sharded` returns a subclass that uses shardwise's Accelerator. The Trainer still runs the loop, logs, schedules,
callbacks and evaluation. A checkpoint is the Trainer's folder with a checkpoint of `sw.save` in it, so that another
strategy and another number of ranks can resume; `save_model` writes a folder for `from_pretrained`.
"""

import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..api.full_weights import whole_weights
from ..base.errors import SaveError
from ..checkpoint.folder import INSIDE
from ..checkpoint.interop import dcp, deepspeed
from ..checkpoint.loading import load
from ..checkpoint.saving import save, together
from ..core.engine.guards import find_engine
from ..core.mesh import init, is_first, patient_hosts
from .accelerate import Accelerator
from .arguments import OF_DDP, refuse_arguments
from .prepare import refuse_unknown

logger = logging.getLogger("shardwise")


def sharded(trainer: type[Trainer], /, **words: Any) -> type[Any]:
    """A subclass of a Trainer that shards its model and optimizer with `sw.shard(model, optimizer, **words)`.

    The default `precision` comes from bf16= and fp16= of the arguments, else from the model.
    """
    refuse_unknown(f"sharded({trainer.__name__}, ...)", words)
    return type(f"Sharded{trainer.__name__}", (_ShardedTrainer, trainer), {"_words": words})


class _ShardedTrainer(Trainer):
    _words: dict[str, Any]
    # Declared without None: the Trainer has set them when the methods below run.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    # preparing

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()
        init(device=self.args.device, timeout_s=self.args.ddp_timeout)
        self.accelerator = Accelerator(**self._accelerator_args, **self._words)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        idle = [f"{name}={value}" for name in OF_DDP if (value := getattr(self.args, name)) is not None]
        if idle and is_first():
            logger.warning("%s: for DistributedDataParallel, no effect here", ", ".join(idle))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `sw.shard` moves the model shard by shard, because the whole model may not fit."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if find_engine(self.model) is None:
            _keep_model_methods(self.model)
            place = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
            if place is not None and _sharded_in(place) is None and (place / OPTIMIZER_NAME).is_file():
                # Written by an unsharded Trainer: load it before the optimizer is sharded.
                state = torch.load(place / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
                self.create_optimizer().load_state_dict(state)
        parent: Any = super()
        return parent._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm of a step. With early updates there is none: updates run before all gradients exist."""
        if grad_norm is None and self._words.get("early_update"):
            return None
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]

    # saving and resuming

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face folder, or the adapter of a PEFT model. Every rank calls it, the first one writes."""
        if find_engine(self.model) is None:
            super().save_model(output_dir, _internal_call)
            return
        place = output_dir or self.args.output_dir or "."
        weights = whole_weights(self.model)
        together(patient_hosts(), lambda: self._save(place, weights) if self.args.should_save else None, SaveError)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / INSIDE, self.model, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load whole weights before the model is sharded. Sharded checkpoints are loaded afterwards."""
        if _sharded_in(Path(resume_from_checkpoint)) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        place = Path(checkpoint)
        source = _sharded_in(place)
        if source is not None:
            load(source, self.model, self.optimizer.optimizer, keep_groups=source == place)
        if (place / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(torch.load(place / SCHEDULER_NAME, weights_only=True))
            # The new scheduler has set its own initial learning rates.
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        load(_sharded_in(best) or best, self.model)


def _sharded_in(place: Path) -> Path | None:
    """The sharded checkpoint in a Trainer's folder: one of `sw.save` inside it, or the folder of DeepSpeed or FSDP."""
    if (place / INSIDE).is_dir():
        return place / INSIDE
    marks = (deepspeed.LATEST, dcp.MODEL_PART)
    return place if any((place / mark).exists() for mark in marks) else None


def _keep_model_methods(model: nn.Module) -> None:
    """Make `num_parameters` return the counts from before sharding, and `generate` run until all ranks are done."""
    module: Any
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            counts = {
                (trainable, inner): module.num_parameters(only_trainable=trainable, exclude_embeddings=inner)
                for trainable in (False, True)
                for inner in (False, True)
            }
            vars(module)["num_parameters"] = functools.partial(_count, counts)
        if isinstance(module, GenerationMixin):
            vars(module)["generate"] = functools.partial(_generate_together, module)


def _count(counts: dict[tuple[bool, bool], int], only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    return counts[only_trainable, exclude_embeddings]


def _generate_together(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})
