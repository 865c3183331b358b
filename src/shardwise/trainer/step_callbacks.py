"""A run on one rank, and what it does beside its steps: evaluate, save, finish. All ranks do it together."""

import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.background import Saving
from ..checkpoint.opened import looks_whole
from ..checkpoint.saving import save, start_save
from ..checkpoint.steps import CHECKPOINTS, point_to, prune, step_folder
from ..core.engine.guards import engine_of
from ..core.engine.memory_report import Memory, memory
from ..core.wire.collectives import Channel
from .checks import Checked
from .data.prepare import Prepared
from .data.samples import Samples
from .evaluation import Evaluation, evaluate
from .host_exchange import Rounds
from .learning_rate import learning_rate
from .loop import Between, Job
from .metrics import Metrics, memory_row
from .models.build import Built
from .models.export import export
from .models.sample import sample
from .progress import Progress
from .run_folder import EXPORT
from .run_plan import RunPlan, write_traffic
from .saves import Saves
from .settings import Settings
from .step_records import Book, Row

DEFAULT_PROMPT = "The "
STEADY = 2  # steps after which traffic is that of every further one
RNG_POLICY = (
    "nothing is kept between steps: dropout of a step is seeded from the seed, the step and the rank, the order of "
    "samples from the seed and their number, weights from the seed and their names"
)


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
    planned: RunPlan
    saves: Saves
    free_host_bytes: int
    book: Book = field(init=False)
    rounds: Rounds = field(init=False)
    between: Between = field(init=False)
    saved_step: int | None = None  # also while it is being written
    saving: Saving | None = None  # in the background, of that step
    removing: threading.Thread | None = None  # of older checkpoints
    evaluation: Evaluation | None = None
    generated: str = ""
    exported: str = ""
    highest: Memory | None = None  # class by class, over the rows written
    step: int = 0  # so many are done
    doing: str = ""  # beside steps
    num_steady: int = 0  # steps after each other, with an update and nothing in between
    num_updates: int = 0

    @property
    def is_first(self) -> bool:
        return self.job.rank == 0

    def wait(self) -> None:
        """Until every collective under way is over."""
        engine_of(self.job.model).gathers.settle()

    def wait_for_host(self) -> None:
        """Until the host has nothing left to update."""
        engine_of(self.job.model).finish_updates()

    def write(self, row: Row) -> None:
        self.metrics.log(row)
        self.progress.update(row)

    def memory_row(self) -> Row:
        now = memory(self.job.model, self.job.optimizer)
        self.highest = now if self.highest is None else self.highest.highest(now)
        return dict(memory_row(now, self.planned_peak))

    @property
    def planned_peak(self) -> int | None:
        """Of what the allocator lends; None where activations are not known."""
        return None if self.planned.note else self.planned.entry.memory.peak.total

    def evaluate(self, step: int) -> None:
        if self.eval_samples is None:
            return
        settings, job = self.settings, self.job
        self.doing, self.num_steady = "the evaluation", 0
        num = min(self.eval_samples.num_samples, settings.max_eval_samples)
        size = settings.per_device_eval_batch_size or job.batching.micro_size
        self.evaluation = evaluate(job.model, self.eval_samples, num, size, self.hosts, job.device)
        self.doing = ""
        self.write({"step": step, "eval_loss": self.evaluation.loss, "eval_perplexity": self.evaluation.perplexity})

    def save(self, step: int) -> None:
        if self.saved_step == step:
            return
        self.finish_saving()
        self.doing = "the save"
        path, model, optimizer = step_folder(self.folder / CHECKPOINTS, step), self.job.model, self.job.optimizer
        began = time.perf_counter()
        if self.saves.in_background:
            self.saving = start_save(path, model, optimizer, extra=self.extra(step))
            self.saved_step = step
        else:
            save(path, model, optimizer, extra=self.extra(step))
            self.saved_step = step
            self._is_saved(f"in {time.perf_counter() - began:.1f} s")
        self.doing = ""

    def show(self, step: int) -> None:
        """So many steps are done. A save in the background that is complete by now is told of, on each rank alone."""
        self.progress.advance(step)
        self.step = step
        self._look_at_traffic()
        if self.saving is not None and self.saving.is_complete:
            self.finish_saving()

    def _look_at_traffic(self) -> None:
        """Written down once, of a step that began where one before it had ended: it is like all that follow."""
        num_updates = engine_of(self.job.model).gathers.num_updates
        self.num_steady = self.num_steady + 1 if num_updates == self.num_updates + 1 else 0
        self.num_updates = num_updates
        if self.num_steady == STEADY and self.is_first:
            write_traffic(self.folder, self.job.model, self.planned)

    def finish_saving(self) -> None:
        """Wait for the save in the background, if there is one."""
        if self.saving is not None:
            self.saving.finish()
            seconds, self.saving = self.saving.seconds, None
            self._is_saved(f"in {seconds:.1f} s, in the background")

    def _is_saved(self, how: str) -> None:
        """The checkpoint of `saved_step` is complete: now older ones may go."""
        assert self.saved_step is not None
        root, limit = self.folder / CHECKPOINTS, self.settings.save_total_limit
        self.progress.say(f"saved {step_folder(root, self.saved_step)} {how}")
        if self.is_first:
            point_to(root, self.saved_step)
            if limit is not None:
                self.finish_removing()
                # A disk may take seconds to remove what it took seconds to write.
                self.removing = threading.Thread(target=self._remove_older, args=(root, limit), name="shardwise-remove")
                self.removing.start()

    def _remove_older(self, root: Path, limit: int) -> None:
        try:
            prune(root, limit, looks_whole)
        except OSError as error:
            self.progress.say(f"older checkpoints cannot be removed: {error}")

    def finish_removing(self) -> None:
        if self.removing is not None:
            self.removing.join()
            self.removing = None

    def extra(self, step: int) -> dict[str, Any]:
        """What a checkpoint of the trainer says beside weights and optimizer."""
        return {
            "step": step,
            "learning_rate": learning_rate(self.settings, step - 1, self.job.num_steps) if step else None,
            "num_tokens_seen": self.book.num_tokens_after(step),
            "num_samples_seen": self.job.num_samples_before(step),
            "global_batch_size": self.job.batching.global_size,
            "rng": {"seed": self.settings.seed, "policy": RNG_POLICY},
            "data": data_identity(self.settings, self.prepared, self.checked),
            "book": self.book.to_extra(),
            "configuration": asdict(self.settings),
        }

    def finish(self, step: int) -> None:
        """The run is complete."""
        self.save(step)
        self.finish_saving()
        self.evaluate(step)
        settings, job = self.settings, self.job
        self.doing = "the end of the run"
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


def data_identity(settings: Settings, prepared: Prepared, checked: Checked) -> dict[str, Any]:
    """Of the samples and their order: a run that finds the same goes on in them, any other begins with them."""
    return {
        "digest": prepared.digest,
        "seq_length": checked.seq_length,
        "packing": "packed whole" if settings.packing == "packed" and prepared.is_rows else settings.packing,
        "seed": settings.seed,
        "eval_fraction": None if settings.eval_file else settings.eval_fraction,
    }
