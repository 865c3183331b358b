"""What the user is told of a run: the facts of its first and of its last screen."""

import math

import torch

from ..api import num_cores
from ..checkpoint.steps import CHECKPOINTS, step_folder
from ..core.engine.guards import engine_of
from ..core.engine.memory_report import memory
from ..core.wire.collectives import exchange
from ..planner.plan_json import at
from .banner import End, Start
from .data.samples import unigram_entropy
from .learning_rate import num_warmup_steps
from .loop import Ending
from .saves import expected_s
from .settings import Settings, interval_of
from .step_callbacks import Run


def start_of(run: Run) -> Start:
    settings, job, built, batching = run.settings, run.job, run.built, run.job.batching
    engine = engine_of(job.model)
    planned = memory(job.model, job.optimizer)
    host = engine.host
    layouts = list(dict.fromkeys(unit.layout.name for unit in engine.schedule.units))
    plan, is_known = run.planned, not run.planned.note
    asked = settings.strategy if isinstance(settings.strategy, str) else "a mapping"
    asked += f" with {','.join(settings.offload)}" if settings.offload else ""
    asked += f", on the wire {','.join(settings.wire)}" if settings.wire else ""
    num_warmup = num_warmup_steps(settings, job.num_steps)
    warmup = f", {num_warmup} warm-up steps" if num_warmup else ""
    num_samples = job.num_samples_before(job.num_steps)
    return Start(
        folder=str(run.folder),
        model=settings.model,
        num_params=built.num_params,
        num_trainable=built.num_trainable,
        strategy_asked=asked,
        strategy_runs=plan.entry.name if plan.why else ", ".join(layouts),
        why=plan.why,
        world_size=engine.mesh.world_size,
        node_size=engine.mesh.node_size,
        device=device_name(job.device),
        precision=str(settings.precision),
        num_micro=batching.num_micro,
        micro_size=batching.micro_size,
        seq_length=run.checked.seq_length,
        data=_source(settings),
        tokenizer=run.checked.tokenizer.name,
        num_tokens=job.samples.num_tokens,
        num_samples=job.samples.num_samples,
        num_eval_samples=0 if run.eval_samples is None else run.eval_samples.num_samples,
        num_steps=job.num_steps,
        num_epochs=num_samples / job.samples.num_samples,
        optimizer=f"{settings.optimizer}, lr {settings.learning_rate:g} ({settings.lr_scheduler_type}{warmup})",
        planned=planned.planned,
        planned_buffers=planned.planned_buffers,
        planned_activations=plan.left_at_peak() if is_known else None,
        peak_is=at(plan.entry.memory.peak.name) if is_known else "",
        plan_note=plan.note,
        free_bytes=run.free_bytes,
        planned_host=planned.planned_host,
        planned_disk=planned.planned_disk,
        free_host_bytes=run.free_host_bytes,
        is_pinned=host.arena.is_pinned if job.device.type == "cuda" else None,
        num_cores=num_cores() if any(unit.layout.optimizer_on != "device" for unit in engine.schedule.units) else 0,
        updates_early=job.updates_early,
        disk_folder="" if host.disk is None else str(host.disk.folder),
        checkpoint_bytes=run.saves.num_bytes,
        expected_save_s=expected_s(run.folder, run.saves, engine),
        save_steps=interval_of(settings.save_steps, job.num_steps),
        async_save=run.saves.in_background,
        why_not_async=run.saves.why_not,
        first_step=run.first_step,
        resumed_from=settings.resume_from_checkpoint or "",
    )


def end_of(run: Run, ending: Ending, seconds: float) -> End:
    """Every rank calls it: memory is the largest of all ranks."""
    book, job = run.book, run.job
    run.memory_row()
    assert run.highest is not None
    seen = run.highest
    for other in exchange(run.hosts, run.highest):
        seen = seen.highest(other)
    why = {None: "", 130: "interrupted", 143: "terminated"}[ending.stop]
    tokens_per_s = book.tokens_per_s
    peak = run.planned_peak
    return End(
        why=why,
        step=ending.step,
        num_steps=job.num_steps,
        seconds=seconds,
        num_tokens=(ending.step - run.first_step) * book.tokens_per_step,
        first_loss=None if math.isnan(book.first_loss) else book.first_loss,
        last_loss=None if math.isnan(book.last_loss) else book.last_loss,
        eval_loss=None if run.evaluation is None else run.evaluation.loss,
        unigram_entropy=unigram_entropy(job.samples) if run.is_first else None,
        tokens_per_s=tokens_per_s,
        mfu=book.mfu,
        planned=seen.planned,
        seen=seen.seen,
        planned_buffers=seen.planned_buffers,
        seen_buffers=seen.peak_buffers,
        planned_activations=None if peak is None else run.planned.left_at_peak(),
        planned_peak=peak,
        planned_host=seen.planned_host,
        seen_host=seen.host,
        planned_disk=seen.planned_disk,
        seen_disk=seen.disk,
        seen_activations=seen.peak_activations,
        peak_bytes=seen.peak,
        checkpoint="" if run.saved_step is None else str(step_folder(run.folder / CHECKPOINTS, run.saved_step)),
        export=run.exported,
        prompt=run.prompt,
        sample=run.generated,
    )


def _source(settings: Settings) -> str:
    return settings.dataset or ", ".join(settings.train_file) or "Python's manual"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
