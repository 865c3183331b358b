"""A run on one rank, and its work between the steps: evaluate, save, finish. All ranks do it together."""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..api.memory_report import Memory, memory
from ..checkpoint.folder import CHECKPOINTS, point_to, prune, step_folder
from ..checkpoint.loading import load
from ..checkpoint.opened import has_all_files
from ..checkpoint.saving import Saving, save, start_save
from ..core.engine.guards import engine_of
from ..core.wire.collectives import Channel, exchange
from .checks import Checked
from .data.prepare import Prepared
from .data.samples import Batch, Samples
from .metrics import Evaluations, Metrics, Progress, Row, StepRecords, memory_row
from .models.build import Built
from .models.export import export
from .models.generation import Sampling
from .models.generation import samples as generated_texts
from .objectives import sums
from .optimizers import learning_rate
from .run_checkpoints import Saves
from .run_folder import EXPORT
from .run_plan import RunPlan, write_traffic
from .settings import Batching, Settings
from .signals import Requests

DEFAULT_PROMPT = "The "
NUM_STEADY = 2  # consecutive steps after which the traffic of a step is typical
RNG_POLICY = (
    "nothing is kept between steps: dropout of a step is seeded from the seed, the step and the rank, the order of "
    "samples from the seed and their number, weights from the seed and their names"
)


@dataclass(slots=True)
class Run:
    settings: Settings
    folder: Path
    checked: Checked
    data: dict[str, Any]  # identity of the samples and their order
    built: Built
    model: nn.Module
    optimizer: Any
    samples: Samples
    eval_samples: Samples | None
    rank: int
    device: torch.device
    hosts: Channel  # joins all ranks in host memory
    num_steps: int
    # Units are updated inside the backward, before the norm of all gradients is known.
    updates_early: bool
    # Steps done, and samples used, before this start of the run; a resumed run has several starts.
    first_step: int
    first_sample: int
    planned: RunPlan
    saves: Saves
    free_bytes: int  # on the device, before the run
    free_host_bytes: int
    metrics: Metrics
    progress: Progress
    requests: Requests
    evaluations: Evaluations
    records: StepRecords = field(init=False)
    saved_step: int | None = None  # the step of the newest save; set as soon as the save begins
    saving: Saving | None = None  # the background save of `saved_step`
    removing: threading.Thread | None = None  # removes older checkpoints
    eval_loss: float | None = None
    generated: str = ""
    exported: str = ""
    peak_memory: Memory | None = None  # maximum of each class over all rows
    step: int = 0  # number of steps done
    activity: str = ""  # the current work between steps
    num_steady: int = 0  # consecutive steps with an update and nothing in between
    num_updates: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def batching(self) -> Batching:
        return self.checked.batching

    @property
    def prompt(self) -> str:
        return DEFAULT_PROMPT if self.settings.sample_prompt is None else self.settings.sample_prompt

    def num_samples_before(self, step: int) -> int:
        return self.first_sample + (step - self.first_step) * self.batching.global_size

    def samples_of(self, step: int) -> list[int]:
        return self.samples.order(self.num_samples_before(step), self.batching.global_size)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's part of a step, in host memory from which the device can copy without waiting."""
        if step >= self.num_steps:
            return []
        shares = self.batching.share(self.samples_of(step), self.rank)
        batches = [self.samples.batch(share).trimmed() for share in shares]
        return [batch.pinned() for batch in batches] if self.device.type == "cuda" else batches

    def write(self, row: Row) -> None:
        self.metrics.log(row)
        self.progress.update(row)

    def memory_row(self) -> Row:
        now = memory(self.model, self.optimizer)
        self.peak_memory = now if self.peak_memory is None else self.peak_memory.highest(now)
        return memory_row(now, self.planned.peak_bytes)

    def evaluate(self, step: int) -> None:
        """Evaluate, and answer the prompts. Save the weights if they are the best so far, and those are wanted."""
        if self.eval_samples is None:
            return
        row = self._evaluation(step, self.eval_samples)
        self.write(row)
        self._write_samples(step)
        if self.evaluations.add(row) and self.settings.load_best_model_at_end:
            self.save(step)

    def _write_samples(self, step: int) -> None:
        """Answer the prompts of rank 0. Samples have their own random numbers, so the losses stay the same."""
        self.activity = "the samples of the evaluation"
        prompts = exchange(self.hosts, self.checked.prompts)[0]
        # As in `shardwise generate`: a question, if the tokenizer has a chat template.
        texts = self._generate(prompts, is_chat=self.checked.tokenizer.template is not None)
        pairs = zip(prompts, texts, strict=True)
        self.metrics.log_samples([{"step": step, "prompt": prompt, "text": text} for prompt, text in pairs])
        self.activity = ""

    def _generate(self, prompts: Sequence[str], is_chat: bool = False) -> list[str]:
        settings, checked = self.settings, self.checked
        how = Sampling(seed=settings.seed, max_new_tokens=settings.sample_tokens)
        return generated_texts(self.model, checked.tokenizer, prompts, how, max_seq=checked.seq_length, is_chat=is_chat)

    @torch.no_grad()
    def _evaluation(self, step: int, samples: Samples) -> Row:
        """Return the mean loss over the targets of the evaluation samples. It does not depend on the number of ranks.

        All ranks call the model equally often: at the end, some repeat a sample without its targets.
        """
        self.activity, self.num_steady = "the evaluation", 0
        model, device, hosts = self.model, self.device, self.hosts
        num_samples = min(samples.num_samples, self.settings.max_eval_samples)
        chosen = samples.spread(num_samples)
        batch_size = self.settings.per_device_eval_batch_size or self.batching.micro_size
        was_training = model.training
        model.eval()
        measures, num_targets = self.records.measures, 0
        total = torch.zeros(1 + len(measures), dtype=torch.float64, device=device)
        for first in range(0, num_samples, batch_size * hosts.num_ranks):
            mine = range(first + hosts.index * batch_size, first + (hosts.index + 1) * batch_size)
            batch = samples.batch([chosen[min(index, num_samples - 1)] for index in mine])
            batch = batch.with_first_targets(min(max(num_samples - mine.start, 0), batch_size))
            num_targets += batch.num_targets
            total += sums(model, batch.trimmed().to(device), self.settings)
        model.train(was_training)
        parts = exchange(hosts, (total.tolist(), num_targets))
        whole = max(sum(number for _, number in parts), 1)
        self.eval_loss, *measured = (math.fsum(each) / whole for each in zip(*(part for part, _ in parts), strict=True))
        self.activity = ""
        row = {f"eval_{name}": value for name, value in zip(measures, measured, strict=True)}
        row |= {} if measures else {"eval_perplexity": math.exp(min(self.eval_loss, 700.0))}
        return {"step": step, "eval_loss": self.eval_loss, **row}

    def save(self, step: int) -> None:
        if self.saved_step == step:
            return
        self.finish_saving()
        self.activity = "the save"
        path, began = step_folder(self.folder / CHECKPOINTS, step), time.perf_counter()
        if self.saves.in_background:
            self.saving = start_save(path, self.model, self.optimizer, extra=self.extra(step))
            self.saved_step = step
        else:
            save(path, self.model, self.optimizer, extra=self.extra(step))
            self.saved_step = step
            self._complete_save(f"in {time.perf_counter() - began:.1f} s")
        self.activity = ""

    def show(self, step: int) -> None:
        """Show that `step` steps are done. Report the background save if it is complete."""
        self.progress.advance(step)
        self.step = step
        num_updates = engine_of(self.model).gathers.num_updates
        self.num_steady = self.num_steady + 1 if num_updates == self.num_updates + 1 else 0
        self.num_updates = num_updates
        # Written once, for a step that follows another step directly, as most steps do.
        if self.num_steady == NUM_STEADY and self.is_first:
            write_traffic(self.folder, self.model, self.planned)
        if self.saving is not None and self.saving.is_complete:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for the save in the background, if there is one. A failed one raises here."""
        if self.saving is not None:
            self.saving.finish()
            seconds, self.saving = self.saving.seconds, None
            self._complete_save(f"in {seconds:.1f} s, in the background")

    def _complete_save(self, how: str) -> None:
        """Point to the complete checkpoint of `saved_step`, and remove older ones."""
        assert self.saved_step is not None
        root, limit = self.folder / CHECKPOINTS, self.settings.save_total_limit
        self.progress.say(f"saved {step_folder(root, self.saved_step)} {how}")
        if self.is_first:
            point_to(root, self.saved_step)
            if limit is not None:
                self.finish_removing()
                # In a thread: a disk may take seconds to remove a checkpoint.
                self.removing = threading.Thread(target=self._remove_older, args=(root, limit), name="shardwise-remove")
                self.removing.start()

    def _remove_older(self, root: Path, limit: int) -> None:
        try:
            is_wanted = self.settings.load_best_model_at_end
            best = Evaluations.of(self.settings, self.folder, only_saved=True).step if is_wanted else None
            prune(root, limit, has_all_files, best)
        except OSError as error:
            self.progress.say(f"older checkpoints cannot be removed: {error}")

    def finish_removing(self) -> None:
        if self.removing is not None:
            self.removing.join()

    def extra(self, step: int) -> dict[str, Any]:
        """Return the trainer's values in a checkpoint, in addition to weights and optimizer state."""
        return {
            "step": step,
            "learning_rate": learning_rate(self.settings, step - 1, self.num_steps) if step else None,
            "num_tokens_seen": self.records.num_tokens_after(step),
            "num_samples_seen": self.num_samples_before(step),
            "global_batch_size": self.batching.global_size,
            "rng": {"seed": self.settings.seed, "policy": RNG_POLICY},
            "data": self.data,
            "book": self.records.to_extra(),
            "configuration": asdict(self.settings),
        }

    def finish(self, step: int) -> None:
        """Save, evaluate, take the best weights, generate a sample and export at the end of a complete run."""
        self.save(step)
        self.finish_saving()
        if self.eval_loss is None or self.evaluations.last_step != step:  # it may have stopped after an evaluation
            self.evaluate(step)
        settings = self.settings
        self.activity = "the end of the run"
        if settings.load_best_model_at_end:
            best = exchange(self.hosts, Evaluations.of(settings, self.folder, only_saved=True))[0]
            if best.step not in (0, step):
                load(step_folder(self.folder / CHECKPOINTS, best.step), self.model, allow_rounding=True)
                self.progress.say(f"the best weights are loaded: {best}")
        if settings.sample_tokens:
            [self.generated] = self._generate([self.prompt])
        if settings.export:
            export(self.model, self.built, settings, self.folder / EXPORT)
            self.exported = str(self.folder / EXPORT)


def data_identity(settings: Settings, prepared: Prepared, checked: Checked) -> dict[str, Any]:
    """Identify the samples and their order. A resumed run with the same identity continues where it stopped."""
    is_whole = settings.packing == "packed" and any(store.facts["is_rows"] for store in prepared.train)
    weights = {"data_weights": list(settings.data_weights)} if len(prepared.train) > 1 else {}
    return {
        "digest": prepared.digest,
        "seq_length": checked.seq_length,
        "packing": "packed whole" if is_whole else settings.packing,
        "seed": settings.seed,
        "eval_fraction": None if settings.eval_file else settings.eval_fraction,
        **weights,
    }
