"""A run on one rank, and what it does beside its steps: evaluate, save, finish. All ranks do it together."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.folder import prune, step_folder
from ..checkpoint.save import save
from ..engine.guards import engine_of
from ..engine.held import Memory, memory
from ..wire.collectives import Channel
from .book import Book, Row
from .checks import Checked
from .data.prepare import Prepared
from .data.samples import Samples
from .evaluate import Evaluation, evaluate
from .folder import CHECKPOINTS, EXPORT
from .loop import Between, Job
from .metrics import Metrics, memory_row
from .models.build import Built
from .models.export import export
from .models.sample import sample
from .progress import Progress
from .rounds import Rounds
from .settings import Settings

DEFAULT_PROMPT = "The "


@dataclass(slots=True)
class Run:
    settings: Settings
    folder: Path
    checked: Checked
    prepared: Prepared
    built: Built
    job: Job
    eval_samples: Samples | None
    hosts: Channel
    metrics: Metrics
    first_step: int
    free_bytes: int
    progress: Progress
    book: Book = field(init=False)
    rounds: Rounds = field(init=False)
    between: Between = field(init=False)
    saved_step: int | None = None
    evaluation: Evaluation | None = None
    generated: str = ""
    exported: str = ""
    highest: Memory | None = None  # class by class, over the rows written

    @property
    def is_first(self) -> bool:
        return self.job.rank == 0

    def wait(self) -> None:
        """Until every collective under way is over."""
        engine_of(self.job.model).settle()

    def write(self, row: Row) -> None:
        self.metrics.log(row)
        self.progress.update(row)

    def memory_row(self) -> Row:
        now = memory(self.job.model, self.job.optimizer)
        self.highest = now if self.highest is None else self.highest.highest(now)
        return dict(memory_row(now))

    def evaluate(self, step: int) -> None:
        if self.eval_samples is None:
            return
        settings, job = self.settings, self.job
        num = min(self.eval_samples.num_samples, settings.max_eval_samples)
        size = settings.per_device_eval_batch_size or job.batching.micro_size
        self.evaluation = evaluate(job.model, self.eval_samples, num, size, self.hosts, job.device)
        self.write({"step": step, "eval_loss": self.evaluation.loss, "eval_perplexity": self.evaluation.perplexity})

    def save(self, step: int) -> None:
        if self.saved_step == step:
            return
        root = self.folder / CHECKPOINTS
        began = time.perf_counter()
        save(step_folder(root, step), self.job.model, self.job.optimizer, extra=self.extra(step))
        self.saved_step = step
        if self.is_first and self.settings.save_total_limit is not None:
            prune(root, self.settings.save_total_limit)
        self.progress.say(f"saved {step_folder(root, step)} in {time.perf_counter() - began:.1f} s")

    def extra(self, step: int) -> dict[str, Any]:
        """What a checkpoint of the trainer says beside weights and optimizer."""
        return {
            "step": step,
            "num_samples_seen": self.job.num_samples_before(step),
            "global_batch_size": self.job.batching.global_size,
            "data": data_identity(self.settings, self.prepared, self.checked),
            "book": self.book.to_extra(),
        }

    def finish(self, step: int) -> None:
        """The run is complete."""
        self.save(step)
        self.evaluate(step)
        settings, job = self.settings, self.job
        if settings.sample_tokens:
            self.generated = sample(
                job.model,
                self.checked.tokenizer,
                self.prompt,
                settings.sample_tokens,
                seed=settings.seed,
                max_seq=self.checked.seq_length,
            )
        if settings.export:
            export(job.model, self.built, settings, self.folder / EXPORT)
            self.exported = str(self.folder / EXPORT)

    @property
    def prompt(self) -> str:
        return DEFAULT_PROMPT if self.settings.sample_prompt is None else self.settings.sample_prompt


def data_identity(settings: Settings, prepared: Prepared, checked: Checked) -> list[Any]:
    """Of the samples and their order: a run that finds the same goes on in them, any other begins with them."""
    split = None if settings.eval_file else settings.eval_fraction
    return [prepared.digest, checked.seq_length, settings.packing, settings.seed, split]
