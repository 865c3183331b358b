"""Everything a rank needs before its first step, and what it does beside the steps: evaluate, save, finish.

1. the ranks choose the run folder, and check the settings against the model, the tokenizer and the data
2. the model is built on the meta device, sharded, and gets its weights: drawn, read, or from a checkpoint
3. the book, the metrics and the requests are opened
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import mesh
from ..checkpoint.folder import prune, set_aside, step_folder
from ..checkpoint.load import load
from ..checkpoint.save import save
from ..engine.agree import all_or_none, require_agreement
from ..engine.api import free_bytes_here, shard
from ..engine.guards import engine_of
from ..engine.held import Memory, memory
from ..engine.whole import load_full_state_dict
from ..errors import CheckpointError, ConfigurationError
from ..optim.sharded import plain_settings
from ..plan.flops import peak_flops
from ..plan.model import find_blocks
from ..precision import precision_of
from ..wire.collectives import Channel, exchange
from .banner import End, Start
from .batching import Batching
from .book import Book, Row
from .checkpointing import checkpoint_blocks
from .checks import Checked, check_all
from .data.prepare import Prepared, prepare
from .data.samples import Samples, open_samples, unigram_entropy
from .divergence import Divergence
from .evaluate import Evaluation, evaluate
from .folder import CHECKPOINTS, DATA, EXPORT, choose, claim, run_folder
from .loop import Between, Ending, Job
from .metrics import Metrics, memory_row
from .models.build import Built, build
from .models.export import export
from .models.sample import sample
from .optimizers import optimizer_for
from .progress import Progress
from .rounds import Rounds
from .settings import Settings
from .signals import Requests, has_launcher

DEFAULT_PROMPT = "The "
TOKENISING_S = 24 * 3600  # the others wait for the rank that does it
PROBE_BYTES = 8 << 20  # written once, to know how long a checkpoint will take


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

    # -----------------------------------------------------------------------------------------------------
    # between steps

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

    # -----------------------------------------------------------------------------------------------------
    # what the user is told

    def start(self) -> Start:
        settings, job, built, batching = self.settings, self.job, self.built, self.job.batching
        engine = engine_of(job.model)
        planned = memory(job.model, job.optimizer)
        precision = engine.precision
        frozen = built.num_params - built.num_trainable
        num_bytes = built.num_trainable * precision.master.itemsize * 3 + frozen * precision.compute.itemsize
        layouts = list(dict.fromkeys(plan.layout.name for plan in engine.schedule.units))
        asked = settings.strategy if isinstance(settings.strategy, str) else "a mapping"
        warmup = f", {settings.warmup_steps} warm-up steps" if settings.warmup_steps else ""
        num_samples = job.num_samples_before(job.num_steps)
        return Start(
            folder=str(self.folder),
            model=settings.model,
            num_params=built.num_params,
            num_trainable=built.num_trainable,
            strategy_asked=asked,
            strategy_runs=", ".join(layouts),
            world_size=engine.mesh.world_size,
            node_size=engine.mesh.node_size,
            device=_device_name(job.device),
            precision=str(settings.precision),
            num_micro=batching.num_micro,
            micro_size=batching.micro_size,
            seq_length=self.checked.seq_length,
            data=_source(settings),
            tokenizer=self.checked.tokenizer.name,
            num_tokens=job.samples.num_tokens,
            num_samples=job.samples.num_samples,
            num_eval_samples=0 if self.eval_samples is None else self.eval_samples.num_samples,
            num_steps=job.num_steps,
            num_epochs=num_samples / job.samples.num_samples,
            optimizer=f"{settings.optimizer}, lr {settings.learning_rate:g} ({settings.lr_scheduler_type}{warmup})",
            planned=planned.planned,
            planned_buffers=planned.planned_buffers,
            free_bytes=self.free_bytes,
            checkpoint_bytes=num_bytes,
            expected_save_s=_expected_save_s(self.folder, num_bytes),
            save_steps=settings.save_steps,
            first_step=self.first_step,
            resumed_from=settings.resume_from_checkpoint or "",
        )

    def end(self, ending: Ending, seconds: float) -> End:
        """Every rank calls it: memory is the largest of all ranks."""
        book, job = self.book, self.job
        self.memory_row()
        assert self.highest is not None
        seen = self.highest
        for other in exchange(self.hosts, self.highest):
            seen = seen.highest(other)
        why = {None: "", 130: "interrupted", 143: "terminated"}[ending.stop]
        tokens_per_s = book.tokens_per_s
        return End(
            why=why,
            step=ending.step,
            num_steps=job.num_steps,
            seconds=seconds,
            num_tokens=(ending.step - self.first_step) * book.tokens_per_step,
            first_loss=book.first_loss,
            last_loss=book.last_loss,
            eval_loss=None if self.evaluation is None else self.evaluation.loss,
            unigram_entropy=unigram_entropy(job.samples) if self.is_first else None,
            tokens_per_s=tokens_per_s,
            mfu=book.mfu,
            planned=seen.planned,
            seen=seen.seen,
            planned_buffers=seen.planned_buffers,
            seen_buffers=seen.peak_buffers,
            seen_activations=seen.peak_activations,
            peak_bytes=seen.peak,
            checkpoint="" if self.saved_step is None else str(step_folder(self.folder / CHECKPOINTS, self.saved_step)),
            export=self.exported,
            prompt=self.prompt,
            sample=self.generated,
        )


def set_up(settings: Settings) -> Run:
    world = mesh.everyone()
    rank, num_ranks, device = world.index, world.num_ranks, mesh.device()
    # A launcher has said what there is to say about the data.
    speaks = rank == 0 and not has_launcher()
    say: Callable[[str], None] = partial(print, flush=True) if speaks else _silent
    # The first rank chooses, because a folder's name may hold the time.
    chosen = all_or_none(world, lambda: choose(settings, mesh.restarts()) if rank == 0 else settings)
    settings = exchange(world, chosen)[0]
    folder = run_folder(settings)
    checked = all_or_none(world, lambda: check_all(settings, num_ranks))
    prepared, samples, eval_samples = _data(settings, checked, say)
    free_bytes = free_bytes_here()
    built = all_or_none(world, lambda: build(settings, checked.tokenizer.vocab_size, device, facts=checked.facts))
    all_or_none(world, lambda: _require_isolation(built, samples))
    model, optimizer = _sharded(built, settings)
    extra = _resumed(settings, model, optimizer)
    is_same_data = not extra or extra["data"] == data_identity(settings, prepared, checked)
    if rank == 0 and not is_same_data:
        print("the data is not what the checkpoint was trained on: it is read from its beginning", flush=True)
    first_step = extra.get("step", 0)
    first_sample = extra.get("num_samples_seen", 0) if is_same_data else 0
    num_steps = _num_steps(settings, checked.batching, samples, extra, first_sample)
    job = Job(settings, model, optimizer, samples, checked.batching, rank, device, num_steps, first_step, first_sample)
    metrics = all_or_none(world, lambda: Metrics(folder, settings.report_to, asdict(settings), rank == 0, folder.name))
    all_or_none(world, lambda: _take_folder(settings, extra) if rank == 0 else None)
    metrics.truncate_after(first_step)
    hosts = mesh.hosts()
    progress = Progress(num_steps, first_step, is_shown=rank == 0)
    run = Run(
        settings, folder, checked, prepared, built, job, eval_samples, hosts, metrics, first_step, free_bytes, progress
    )
    if extra and Path(str(settings.resume_from_checkpoint)).resolve().parent == (folder / CHECKPOINTS).resolve():
        run.saved_step = first_step
    run.book = _book(run, num_ranks)
    if extra:
        run.book.from_extra(extra["book"], is_same_data)
    run.rounds = Rounds(hosts, Requests(folder if rank == 0 else None))
    run.between = Between(run.evaluate, run.save, progress.advance)
    return run


def _resumed(settings: Settings, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The checkpoint's extra, after loading it; empty for a run that begins. Hyper-parameters stay those asked for."""
    if settings.resume_from_checkpoint is None:
        return {}
    asked = plain_settings(optimizer)
    extra = load(settings.resume_from_checkpoint, model, optimizer)
    for group, values in zip(optimizer.param_groups, asked, strict=True):
        group.update(values)
    if not {"step", "num_samples_seen", "global_batch_size", "data", "book"} <= set(extra):
        raise CheckpointError(
            f"{settings.resume_from_checkpoint} was not saved by shardwise train: it does not say at which step it is; "
            "export its weights, and train from those"
        )
    return extra


def _num_steps(
    settings: Settings, batching: Batching, samples: Samples, extra: dict[str, Any], first_sample: int
) -> int:
    before = extra.get("global_batch_size", batching.global_size)
    if settings.global_batch_size is None and before != batching.global_size:
        raise ConfigurationError(
            f"the checkpoint was trained with a global batch of {before} samples, now it would be {batching}: say "
            "which with --global-batch-size"
        )
    first_step: int = extra.get("step", 0)
    num_steps = settings.max_steps
    if num_steps is None:
        epochs = 1.0 if settings.num_train_epochs is None else settings.num_train_epochs
        left = epochs * samples.num_samples - first_sample
        num_steps = first_step + max(-int(-left // batching.global_size), 0)
    if num_steps < first_step:
        raise ConfigurationError(
            f"max_steps {num_steps}, but the checkpoint {settings.resume_from_checkpoint} has {first_step} steps "
            "already: ask for more"
        )
    return num_steps


def _take_folder(settings: Settings, extra: dict[str, Any]) -> None:
    folder = claim(settings)
    left = set_aside(folder / CHECKPOINTS, extra["step"]) if extra else None
    if left is not None:
        print(f"later checkpoints of this run are not on its way any more: they are in {left} now", flush=True)


def _data(settings: Settings, checked: Checked, say: Callable[[str], None]) -> tuple[Prepared, Samples, Samples | None]:
    """One rank of each machine makes the stores, where the launcher has not; then all find them."""
    where = run_folder(settings) / DATA
    patient = mesh.hosts(TOKENISING_S)

    def make(speaks: Callable[[str], None]) -> Prepared:
        return prepare(settings, checked.tokenizer, where, speaks, checked.facts.vocab_size)

    all_or_none(patient, lambda: make(say) if mesh.is_first_here() else None)
    prepared = all_or_none(patient, lambda: make(_silent))
    digests = [("the training data", prepared.digest), ("eval_file", str(prepared.eval_digest))]
    require_agreement(patient, digests)
    samples, eval_samples = all_or_none(
        patient, lambda: open_samples(settings, checked.tokenizer, prepared, checked.seq_length, say)
    )
    return prepared, samples, eval_samples


def _require_isolation(built: Built, samples: Samples) -> None:
    if samples.windows.is_isolated and not built.isolates_documents:
        raise ConfigurationError(
            f"isolate_documents: the attention of {built.facts.config.get('model_type')} cannot be stopped at the ends "
            "of documents; use --packing padded, or --no-isolate-documents"
        )


def _sharded(built: Built, settings: Settings) -> tuple[nn.Module, Any]:
    model = built.model
    checkpoint_blocks(model, settings.gradient_checkpointing)
    if settings.compile:
        blocks = find_blocks(model)
        if not blocks:
            raise ConfigurationError(f"compile: model {settings.model} has no repeated blocks; leave it out")
        for path in blocks:
            model.get_submodule(path).compile()
    model, optimizer = shard(
        model,
        optimizer_for(model, settings),
        settings.strategy,
        precision=precision_of(settings.precision or "bf16", None),
        reduce_dtype=settings.reduce_dtype,
        node_size=settings.node_size,
        seed=settings.seed,
    )
    if built.weights is not None and settings.resume_from_checkpoint is None:
        load_full_state_dict(model, built.weights)
    return model, optimizer


def _book(run: Run, num_ranks: int) -> Book:
    settings, job, precision = run.settings, run.job, engine_of(run.job.model).precision
    peak = peak_flops(_device_name(job.device), precision.compute)
    # Padding is not counted.
    is_padded = settings.packing == "padded"
    tokens_per_sample = job.samples.tokens_per_sample if is_padded else run.checked.seq_length
    return Book(
        tokens_per_step=round(job.batching.global_size * tokens_per_sample),
        first_step=job.first_step,
        first_tokens=round(job.first_sample * tokens_per_sample),
        num_steps=job.num_steps,
        logging_steps=settings.logging_steps,
        flops_per_token=run.built.flops_per_token(run.checked.seq_length),
        peak_flops=None if peak is None else peak * num_ranks,
        divergence=Divergence(settings.divergence_ratio),
        may_overflow=precision.loss_scaling,
        more=run.memory_row,
        write=run.write,
    )


def data_identity(settings: Settings, prepared: Prepared, checked: Checked) -> list[Any]:
    """Of the samples and their order: a run that finds the same goes on in them, any other begins with them."""
    split = None if settings.eval_file else settings.eval_fraction
    return [prepared.digest, checked.seq_length, settings.packing, settings.seed, split]


def _source(settings: Settings) -> str:
    return settings.dataset or ", ".join(settings.train_file) or "Python's manual"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _expected_save_s(folder: Path, num_bytes: int) -> float | None:
    probe = folder / ".probe"
    began = time.perf_counter()
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    except OSError:  # a full disk is told when something is lost by it
        return None
    finally:
        probe.unlink(missing_ok=True)
    return num_bytes * seconds / PROBE_BYTES


def _silent(_: str) -> None:
    pass
