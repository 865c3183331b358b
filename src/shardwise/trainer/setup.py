"""Everything a rank needs before its first step.

1. The ranks choose the run folder, and check the settings against the model, the tokenizer and the data.
2. The model is built on the meta device, sharded, and filled: with random weights, saved ones, or a checkpoint.
3. The records, the metrics and the requests are opened.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..api.full_weights import load_full_state_dict
from ..api.sharding import free_bytes_here, shard
from ..base.errors import ConfigurationError
from ..checkpoint.folder import CHECKPOINTS, go_on_from
from ..core import mesh
from ..core.engine.guards import engine_of
from ..core.engine.rank_agreement import all_or_none, require_agreement
from ..core.precision import precision_of
from ..core.schedule.units import find_blocks
from ..core.wire.collectives import exchange
from ..planner.assess import Machine
from ..planner.auto import host_bytes_here, machine_here
from ..planner.hardware.gpus import peak_flops
from .checkpointing import checkpoint_blocks
from .checks import Checked, check_all, require_targets
from .data.prepare import Prepared, prepare
from .data.samples import Samples, open_samples
from .job import Batching, Job
from .loop import HostExchange
from .metrics import Metrics
from .models.build import Built, build
from .offload import is_auto, offload_of, updates_early
from .optimizers import learning_rate_rise, num_warmup_steps, optimizer_for
from .out_of_memory import FailureContext
from .progress import Progress
from .run_checkpoints import Resumed, require_room, resume, saves_of
from .run_folder import DATA, choose, claim, remove_oom_reports, require_still_there, resume_candidates, run_folder
from .run_plan import RunPlan, draft, plan_before, plan_of, write_plan
from .run_summary import device_name
from .settings import Settings, units_asked
from .signals import Requests, has_launcher
from .step_callbacks import Run, data_identity
from .step_records import Divergence, StepRecords

TOKENISING_S = 24 * 3600  # the other ranks wait for the one that tokenises


def set_up(settings: Settings, context: FailureContext) -> Run:
    """Make the run of this rank; `context` collects facts for the report if memory is not enough."""
    world = mesh.everyone()
    rank, num_ranks, device = world.index, world.num_ranks, mesh.device()
    say: Callable[[str], None] = partial(print, flush=True) if rank == 0 else _silent
    # Rank 0 chooses, because a folder's name may contain the time. Machines that joined late count fewer restarts.
    num_restarts = max(exchange(world, mesh.restarts()))
    given = settings
    chosen = all_or_none(world, lambda: _chosen(given, num_restarts) if rank == 0 else given)
    settings, candidates = exchange(world, (chosen, resume_candidates(given, chosen)))[0]
    folder = context.folder = run_folder(settings)
    context.rank = rank
    checked = all_or_none(world, lambda: check_all(settings, num_ranks))
    # A launcher has already printed the messages about the data.
    prepared, samples, eval_samples = _data(settings, checked, _silent if has_launcher() else say)
    free_bytes, free_host_bytes = free_bytes_here(), host_bytes_here() // mesh.num_local_ranks()
    built = all_or_none(world, lambda: build(settings, checked.tokenizer.vocab_size, device, facts=checked.facts))
    all_or_none(world, lambda: _require_isolation(built, samples))
    model, optimizer, planned = _sharded(built, settings, checked, free_bytes, context)
    resumed = resume(candidates, model, optimizer, say)
    settings = replace(settings, resume_from_checkpoint=resumed.checkpoint)
    is_same_data = _is_same_data(resumed, data_identity(settings, prepared, checked), say)
    first_step = resumed.step
    first_sample = resumed.num_samples_seen if is_same_data else 0
    num_steps = _num_steps(settings, checked.batching, samples, resumed, first_sample)
    _warn_of_steps(settings, resumed, num_steps, say)
    job = Job(
        settings, model, optimizer, samples, checked.batching, rank, device, num_steps, updates_early(settings),
        first_step, first_sample,
    )  # fmt: skip
    hosts = mesh.hosts()
    num_moments = planned.entry.training.num_moments
    saves = saves_of(engine_of(model), num_moments, settings.async_save, free_host_bytes, hosts)
    if num_steps > first_step:
        steps = range(first_step, num_steps)
        all_or_none(world, lambda: require_room(folder, saves, steps, settings, say) if rank == 0 else None)
    metrics = all_or_none(world, lambda: Metrics(folder, settings.report_to, asdict(settings), rank == 0))
    all_or_none(world, lambda: _take_folder(settings, resumed, planned) if rank == 0 else None)
    metrics.truncate_after(first_step)
    progress = Progress(num_steps, first_step, is_shown=rank == 0)
    run = Run(
        settings, folder, checked, prepared, built, job, eval_samples, hosts, metrics, progress, planned, saves,
        free_bytes, free_host_bytes,
    )  # fmt: skip
    if _is_own(folder, resumed):
        run.saved_step = first_step
    run.step = first_step
    run.records = _records(run, num_ranks)
    if resumed.book:
        run.records.from_extra(resumed.book, is_same_data)
    run.exchange = HostExchange(hosts, Requests(folder if rank == 0 else None))
    return run


def _is_same_data(resumed: Resumed, identity: dict[str, Any], say: Callable[[str], None]) -> bool:
    before = identity if resumed.data is None else resumed.data
    changed = [f"{name} {before.get(name)}, now {now}" for name, now in identity.items() if before.get(name) != now]
    if before != identity:
        say(f"the data is not what the checkpoint was trained on ({'; '.join(changed)}): it is read from its beginning")
    return bool(before == identity)


def _warn_of_steps(settings: Settings, resumed: Resumed, num_steps: int, say: Callable[[str], None]) -> None:
    if num_steps == resumed.step:
        say(f"nothing is left to train: the checkpoint has all {num_steps} steps; raise --max-steps")
    elif num_warmup_steps(settings, num_steps) >= num_steps:
        say(f"the learning rate never comes up: warmup_steps {settings.warmup_steps:g}, steps {num_steps}")
    elif warning := learning_rate_rise(settings, resumed.learning_rate, resumed.step, num_steps):
        say(warning)


def _chosen(given: Settings, num_restarts: int) -> Settings:
    if num_restarts and has_launcher():
        require_still_there(run_folder(given))
    chosen = choose(given, num_restarts)
    remove_oom_reports(run_folder(chosen))
    return chosen


def _num_steps(settings: Settings, batching: Batching, samples: Samples, resumed: Resumed, first_sample: int) -> int:
    before = resumed.global_batch_size or batching.global_size
    if settings.global_batch_size is None and before != batching.global_size:
        raise ConfigurationError(
            f"the checkpoint was trained with a global batch of {before} samples, now it would be {batching}: say "
            "which with --global-batch-size"
        )
    first_step = resumed.step
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


def _is_own(folder: Path, resumed: Resumed) -> bool:
    """Return whether the run resumes from a checkpoint in its own folder."""
    place = resumed.checkpoint
    return place is not None and Path(place).resolve().parent == (folder / CHECKPOINTS).resolve()


def _take_folder(settings: Settings, resumed: Resumed, planned: RunPlan) -> None:
    folder = claim(settings)
    try:
        write_plan(folder, planned, resumed.step)
        left = go_on_from(folder / CHECKPOINTS, resumed.step)
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be written: {error.strerror or error}") from error
    if left is not None:
        print(f"later checkpoints of this run are moved to {left}", flush=True)


def _data(settings: Settings, checked: Checked, say: Callable[[str], None]) -> tuple[Prepared, Samples, Samples | None]:
    """Prepare and open the data: one rank per machine writes the token stores, unless the launcher has done so."""
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
    if not has_launcher():  # it has checked this
        all_or_none(patient, lambda: require_targets(samples, say))
    return prepared, samples, eval_samples


def _require_isolation(built: Built, samples: Samples) -> None:
    if samples.windows.is_isolated and not built.isolates_documents:
        raise ConfigurationError(
            f"isolate_documents: the attention of {built.facts.config.get('model_type')} cannot be stopped at the ends "
            "of documents; use --packing padded, or --no-isolate-documents"
        )


def _sharded(
    built: Built, settings: Settings, checked: Checked, free_bytes: int, context: FailureContext
) -> tuple[nn.Module, Any, RunPlan]:
    model, batching, seq_length = built.model, checked.batching, checked.seq_length
    offload = offload_of(settings.offload, settings.wire)
    strategy = offload.applied_to(settings.strategy)
    is_automatic = is_auto(strategy)
    optimizer = optimizer_for(model, settings)
    machine = None if is_automatic else _machine(settings, free_bytes, offload.folder)
    drafted = draft(built, settings, batching, seq_length, optimizer, machine)
    context.planned = plan_before(drafted, settings)
    checkpoint_blocks(model, settings.gradient_checkpointing)
    if settings.compile:
        blocks = find_blocks(model)
        if not blocks:
            raise ConfigurationError(f"compile: model {settings.model} has no repeated blocks; leave it out")
        for path in blocks:
            model.get_submodule(path).compile()
    model, optimizer = shard(
        model,
        optimizer,
        strategy,
        precision=precision_of(settings.precision or "bf16", None),
        reduce_dtype=settings.reduce_dtype,
        node_size=settings.node_size,
        units=units_asked(settings.units),
        seed=settings.seed,
        early_update=updates_early(settings),
        skip_nonfinite=settings.skip_nonfinite,
        batch=(batching.micro_size, seq_length, batching.num_micro) if is_automatic else None,
        disk_path=offload.folder,
    )
    context.model, context.optimizer = model, optimizer
    context.planned = planned = plan_of(drafted, model, settings)
    if built.weights is not None and settings.resume_from_checkpoint is None:
        load_full_state_dict(model, built.weights)
    return model, optimizer, planned


def _machine(settings: Settings, free_bytes: int, disk_path: Path | None) -> Machine:
    """Describe the machine of the ranks, with the least memory that is free on any of them."""
    world = mesh.everyone()
    return machine_here(world, mesh.make_axes(settings.node_size), min(exchange(world, free_bytes)), disk_path)


def _records(run: Run, num_ranks: int) -> StepRecords:
    settings, job, precision = run.settings, run.job, engine_of(run.job.model).precision
    peak = peak_flops(device_name(job.device), precision.products)
    # Padding is not counted.
    has_padding = job.samples.windows.has_padding
    tokens_per_sample = job.samples.tokens_per_sample if has_padding else run.checked.seq_length
    return StepRecords(
        tokens_per_step=round(job.batching.global_size * tokens_per_sample),
        first_step=job.first_step,
        first_tokens=round(job.first_sample * tokens_per_sample),
        num_steps=job.num_steps,
        logging_steps=settings.logging_steps,
        flops_per_token=run.built.flops_per_token(run.checked.seq_length),
        peak_flops=None if peak is None else peak * num_ranks,
        divergence=Divergence(settings.divergence_ratio),
        may_overflow=precision.loss_scaling or settings.skip_nonfinite,
        memory_row=run.memory_row,
        write=run.write,
    )


def _silent(_: str) -> None:
    pass
