"""One rank's life: set up, train, and report how it ended. All checks are made before the loop.

If a check fails on one rank, all ranks raise its error, because the others would wait for it. A run that diverges
leaves a folder `diverged/` in the run folder:

report.json        how it diverged, the last steps, the samples of the last step, parameters that are not finite
checkpoint/        weights and optimizer after the last step; earlier checkpoints are not changed
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..api.full_weights import load_full_state_dict
from ..api.sharding import free_bytes_here, shard
from ..base.errors import ConfigurationError, DivergenceError, SaveError, ShardwiseError
from ..checkpoint.folder import CHECKPOINTS, continue_from
from ..checkpoint.saving import save
from ..core import mesh
from ..core.engine.guards import engine_of
from ..core.engine.rank_agreement import all_or_none, require_agreement
from ..core.precision import precision_of
from ..core.schedule.units import find_blocks
from ..core.wire.collectives import exchange
from ..planner.auto import host_bytes_here, machine_here
from ..planner.hardware.gpus import peak_flops
from .checkpointing import checkpoint_blocks
from .checks import Checked, check_all, completed, require_targets
from .data.prepare import Prepared, prepare
from .data.samples import Samples, open_samples
from .loop import Ending, run_steps
from .loss import Chunks
from .metrics import Divergence, Evaluations, Metrics, Progress, StepRecords, json_number
from .models.build import Built, build
from .models.headloss import path_of, set_path
from .objectives import measures_of
from .offload import is_auto, offload_of, speculation_of, updates_early
from .optimizers import learning_rate_warning, num_warmup_steps, optimizer_for
from .out_of_memory import FailureContext, FirstOutOfMemoryError, explain, is_out_of_memory
from .profile import traced_steps
from .run_checkpoints import Resumed, require_room, resume, saves_of
from .run_folder import (
    DATA,
    LOGS,
    OOM_FILES,
    choose,
    claim,
    failed_write,
    resume_candidates,
    run_folder,
    writing_to,
)
from .run_plan import RunPlan, draft, plan_before, plan_of, write_plan
from .run_state import Run, data_identity
from .run_summary import banner, device_name, summary
from .settings import Batching, Settings, parse_units, settings_from_json
from .signals import Requests, has_launcher
from .start_status import StartStatus

TOKENISING_S = 24 * 3600  # maximum time that ranks wait for the rank that tokenises
Say = Callable[[str], None]
_SILENT: Say = lambda _: None  # noqa: E731


def run_rank(text: str) -> int:
    """Train as one rank and return the exit code. A crash raises, so that a launcher can start the rank again."""
    was_joined = mesh.is_joined()
    try:
        with StartStatus(mesh.is_first()) as status:
            return _run(settings_from_json(text), FailureContext(status=status))
    except ShardwiseError as error:
        if error.exit_code == ShardwiseError.exit_code:
            raise
        # Usually every rank has the same error. Under our launcher all print it, and all but rank 0 print into logs.
        # An error before the ranks have joined, or a lack of memory, may be that of one rank, which must print it.
        is_alone = not mesh.is_joined() or isinstance(error, FirstOutOfMemoryError)
        if has_launcher() or mesh.is_first() or is_alone:
            print(f"shardwise: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        if not was_joined:
            mesh.leave()


def _run(settings: Settings, context: FailureContext) -> int:
    settings = completed(settings, torch.cuda.is_available())
    context.status.show("waiting for all ranks")
    mesh.init(device=settings.device, timeout_s=settings.timeout)
    try:
        return _train(settings, context)
    except (OSError, SaveError) as error:
        if explained := context.folder and failed_write(context.folder, error):
            raise explained from error
        raise
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise explain(error, context) from error
        raise


def _train(settings: Settings, context: FailureContext) -> int:
    began = time.perf_counter()
    run = context.run = set_up(settings, context)
    context.status.stop()
    if run.is_first:
        run.progress.say(banner(run) + "\nthe first step compiles the blocks" * (run.settings.compile == "on"))
    engine = engine_of(run.model)
    traced: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
    if settings.profile and run.is_first:
        traced = traced_steps(run.folder, run.device.type, engine.gathers.settle, engine.finish_updates)
    try:
        with run.progress, traced as after_step:
            ending = run_steps(run, after_step)
            run.finish_saving()
            if ending.complaint:
                place = _write_divergence(run, ending)
                raise DivergenceError(f"{ending.complaint}; a report and a checkpoint are in {place}")
            if ending.stop is None:
                run.finish(ending.step)
    finally:
        run.finish_removing()
        run.metrics.close()
    run.progress.say(summary(run, ending, time.perf_counter() - began))
    return ending.stop or 0


def _write_divergence(run: Run, ending: Ending) -> Path:
    """Write the folder of a run that diverged. All ranks call it; the first one writes the report."""
    not_finite = [
        state.flat.params[index].name
        for unit in engine_of(run.model).units
        for state in unit.states
        for index, held in state.held.items()
        if not bool(state.master_part(held).isfinite().all())
    ]
    names = sorted({name for part in exchange(run.hosts, not_finite) for name in part})
    place = run.folder / "diverged"
    if run.is_first:
        place.mkdir(parents=True, exist_ok=True)
        measures = run.records.measures
        steps = [{**asdict(step), **dict(zip(measures, step.measured, strict=True))} for step in run.records.last]
        last_steps = [{k: json_number(value) for k, value in step.items() if k != "measured"} for step in steps]
        report = {
            "complaint": ending.complaint,
            "last_steps": last_steps,
            "samples": run.samples_of(run.records.last[-1].step - 1),
            "parameters_not_finite": names,
        }
        (place / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    save(place / "checkpoint", run.model, run.optimizer, extra=run.extra(ending.step))
    return place


def set_up(settings: Settings, context: FailureContext) -> Run:
    """Make the run of this rank; `context` collects facts for an out-of-memory report.

    1. The ranks choose the run folder, and check the settings against the model, the tokenizer and the data.
    2. The model is built on the meta device, sharded, and filled: with random weights, saved ones, or a checkpoint.
    3. The records, the metrics and the requests are opened.
    """
    world = mesh.everyone()
    rank, num_ranks, device = world.index, world.num_ranks, mesh.device()
    status = context.status
    say: Say = status.say if rank == 0 else _SILENT
    # Rank 0 chooses, because a folder's name may contain the time. A machine that joined late counts fewer restarts.
    num_restarts = max(exchange(world, mesh.restarts()))
    given = settings
    chosen = all_or_none(world, lambda: _chosen(given, num_restarts) if rank == 0 else given)
    settings, candidates = exchange(world, (chosen, resume_candidates(given, chosen)))[0]
    folder = context.folder = run_folder(settings)
    context.rank = rank
    checked = all_or_none(world, lambda: check_all(settings, num_ranks))
    status.show("preparing the data")
    # A launcher has already printed the messages about the data.
    prepared, samples, eval_samples = _data(settings, checked, _SILENT if has_launcher() else say)

    free_bytes, free_host_bytes = free_bytes_here(), host_bytes_here() // mesh.num_local_ranks()
    status.show("building the model")
    built = all_or_none(world, lambda: _built(settings, checked, device, samples))
    num_planned = settings.max_steps or _num_steps_of_epochs(settings, checked, samples.num_samples)
    model, optimizer, planned = _sharded(built, settings, checked, free_bytes, num_planned, context)
    training = exchange(world, planned.entry.training)[0]
    size = training.micro_batch // settings.rows_per_sample
    checked = replace(checked, batching=Batching(num_ranks, training.num_micro_batches, size))
    status.show("loading the checkpoint" if candidates else "opening the run folder")
    resumed = resume(candidates, model, optimizer, say)
    compiles, chunk = planned.compilation.setting, planned.entry.training.loss_chunk
    # A resumed run does not decide again.
    settings = replace(settings, resume_from_checkpoint=resumed.checkpoint, compile=compiles, loss_chunk=chunk)
    identity = data_identity(settings, prepared, checked)
    before = identity if resumed.data is None else resumed.data
    is_same_data = before == identity
    if not is_same_data:
        changed = [f"{name} {before.get(name)}, now {now}" for name, now in identity.items() if before.get(name) != now]
        say(f"the data is not what the checkpoint was trained on ({'; '.join(changed)}): it is read from its beginning")
    first_step, first_sample = resumed.step, resumed.num_samples_seen if is_same_data else 0
    num_steps = _num_steps(settings, checked, samples.num_samples, resumed, first_sample)
    if num_steps == first_step:
        say(f"nothing is left to train: the checkpoint has all {num_steps} steps; raise --max-steps")
    elif num_warmup_steps(settings, num_steps) >= num_steps:
        say(f"the learning rate never comes up: warmup_steps {settings.warmup_steps:g}, steps {num_steps}")
    elif warning := learning_rate_warning(settings, resumed.learning_rate, first_step, num_steps):
        say(warning)

    hosts = mesh.hosts()
    num_moments = planned.entry.training.num_moments
    saves = saves_of(engine_of(model), num_moments, settings.async_save, free_host_bytes, hosts)
    if num_steps > first_step:
        steps = range(first_step, num_steps)
        all_or_none(world, lambda: require_room(folder, saves, steps, settings, say) if rank == 0 else None)
    metrics = all_or_none(world, lambda: Metrics(folder, settings.report_to, asdict(settings), rank == 0))

    def take_folder() -> None:
        with writing_to(folder):
            claim(settings)
            write_plan(folder, planned, first_step)
            left = continue_from(folder / CHECKPOINTS, first_step)
        if left is not None:
            say(f"later checkpoints of this run are moved to {left}")

    all_or_none(world, lambda: take_folder() if rank == 0 else None)
    metrics.truncate_after(first_step)
    evaluations = exchange(world, Evaluations.of(settings, folder) if rank == 0 else None)[0]
    run = Run(
        settings=settings, folder=folder, checked=checked, data=identity, built=built, model=model,
        optimizer=optimizer, samples=samples, eval_samples=eval_samples, rank=rank, device=device, hosts=hosts,
        num_steps=num_steps, updates_early=updates_early(settings), first_step=first_step, first_sample=first_sample,
        step=first_step, planned=planned, saves=saves, metrics=metrics, evaluations=evaluations, free_bytes=free_bytes,
        free_host_bytes=free_host_bytes,
        progress=Progress(num_steps, first_step, is_shown=rank == 0), requests=Requests(folder if rank == 0 else None),
    )  # fmt: skip
    place = resumed.checkpoint
    if place is not None and Path(place).resolve().parent == (folder / CHECKPOINTS).resolve():
        run.saved_step = first_step
    run.records = _records(run)
    if resumed.book:
        run.records.from_extra(resumed.book, is_same_data)
    return run


def _chosen(given: Settings, num_restarts: int) -> Settings:
    if num_restarts and has_launcher() and not (run_folder(given) / LOGS).is_dir():
        raise ConfigurationError(
            f"the run folder {given.output_dir} was moved or removed under the run, so it is not started again: move "
            "it back, then continue with --resume-from-checkpoint auto"
        )
    chosen = choose(given, num_restarts)
    for file in run_folder(chosen).glob(OOM_FILES):  # of an earlier start
        file.unlink(missing_ok=True)
    return chosen


def _data(settings: Settings, checked: Checked, say: Say) -> tuple[Prepared, Samples, Samples | None]:
    """Prepare and open the data: one rank per machine writes the token stores, unless the launcher has done so."""
    where, tokenizer, patient = run_folder(settings) / DATA, checked.tokenizer, mesh.hosts(TOKENISING_S)

    def make(speaks: Say) -> Prepared:
        return prepare(settings, tokenizer, where, speaks, checked.facts.vocab_size)

    # Not LOCAL_RANK: it is 0 on every rank if each rank sees one GPU.
    is_first_here = patient.index % mesh.num_local_ranks() == 0
    all_or_none(patient, lambda: make(say) if is_first_here else None)
    prepared = all_or_none(patient, lambda: make(_SILENT))
    eval_digest = prepared.eval.digest if prepared.eval else None
    require_agreement(patient, [("the training data", prepared.digest), ("eval_file", str(eval_digest))])
    samples, eval_samples = all_or_none(
        patient, lambda: open_samples(settings, tokenizer, prepared, checked.seq_length, say)
    )
    if not has_launcher():  # the launcher has checked this
        all_or_none(patient, lambda: require_targets(samples, settings.objective, say))
    return prepared, samples, eval_samples


def _built(settings: Settings, checked: Checked, device: torch.device, samples: Samples) -> Built:
    built = build(settings, checked.tokenizer.vocab_size, device, facts=checked.facts)
    if samples.windows.is_isolated and not built.isolates_documents:
        raise ConfigurationError(
            f"isolate_documents: the attention of {built.facts.config.get('model_type')} cannot be stopped at the ends "
            "of documents; use --packing padded, or --no-isolate-documents"
        )
    return built


def _sharded(
    built: Built, settings: Settings, checked: Checked, free_bytes: int, num_steps: int, context: FailureContext
) -> tuple[nn.Module, Any, RunPlan]:
    model, world = built.model, mesh.everyone()
    offload = offload_of(settings.offload, settings.wire, settings.quantize)
    strategy = offload.applied_to(settings.strategy)
    is_automatic = is_auto(strategy)
    optimizer = optimizer_for(model, settings)
    machine = None
    if not is_automatic:
        least_free = min(exchange(world, free_bytes))
        machine = machine_here(world, mesh.make_axes(settings.node_size), least_free, offload.folder)
    gpu = device_name(mesh.device()) if mesh.device().type == "cuda" else ""
    drafted = draft(built, settings, checked, optimizer, machine, num_steps, gpu)
    drafted = drafted.compiled(exchange(world, drafted.compilation)[0]).with_best_batch()  # devices may differ
    context.planned = plan_before(drafted)
    context.status.show("sharding the model")
    checkpoint_blocks(model, settings.gradient_checkpointing)
    if drafted.compilation.is_on:
        blocks = find_blocks(model)
        if not blocks:
            raise ConfigurationError(f"compile on: model {settings.model} has no repeated blocks; leave it out")
        for path in blocks:
            model.get_submodule(path).compile()
    model, optimizer = shard(
        model,
        optimizer,
        strategy,
        precision=precision_of(settings.precision or "bf16", None),
        reduce_dtype=settings.reduce_dtype,
        node_size=settings.node_size,
        units=parse_units(settings.units),
        seed=settings.seed,
        early_update=updates_early(settings),
        skip_nonfinite=settings.skip_nonfinite,
        batch=drafted.workload if is_automatic else None,
        disk_path=offload.folder,
        speculation=speculation_of(settings),
    )
    context.model, context.optimizer = model, optimizer
    context.planned = planned = plan_of(drafted, model)
    chunks = Chunks(planned.entry.training.loss_chunk, drafted.compilation.is_on and gpu != "")
    set_path(model, replace(path_of(model), chunks=chunks))
    if built.weights is not None and settings.resume_from_checkpoint is None:
        context.status.show("loading the weights")
        load_full_state_dict(model, built.weights)
    return model, optimizer, planned


def _num_steps(settings: Settings, checked: Checked, num_samples: int, resumed: Resumed, first_sample: int) -> int:
    batching, first_step, num_steps = checked.batching, resumed.step, settings.max_steps
    before = resumed.global_batch_size or batching.global_size
    if settings.global_batch_size is None and before != batching.global_size:
        raise ConfigurationError(
            f"the checkpoint has a global batch of {before} samples, now it is {batching.global_size} (on "
            f"{batching.num_ranks} ranks): set --global-batch-size"
        )
    if num_steps is None:
        num_steps = first_step + _num_steps_of_epochs(settings, checked, num_samples, first_sample)
    if num_steps < first_step:
        raise ConfigurationError(
            f"max_steps {num_steps}, but {settings.resume_from_checkpoint} has {first_step} steps already: ask for more"
        )
    return num_steps


def _num_steps_of_epochs(settings: Settings, checked: Checked, num_samples: int, first_sample: int = 0) -> int:
    epochs = 1.0 if settings.num_train_epochs is None else settings.num_train_epochs
    left = epochs * num_samples - first_sample
    return max(-int(-left // checked.batching.global_size), 0)


def _records(run: Run) -> StepRecords:
    settings, precision, batching = run.settings, engine_of(run.model).precision, run.batching
    peak = peak_flops(device_name(run.device), precision.products)
    # Tokens are counted without padding.
    has_padding = run.samples.has_padding
    tokens_per_sample = run.samples.tokens_per_sample if has_padding else run.checked.seq_length
    return StepRecords(
        tokens_per_step=round(batching.global_size * tokens_per_sample),
        first_step=run.first_step,
        first_tokens=round(run.first_sample * tokens_per_sample),
        num_steps=run.num_steps,
        logging_steps=settings.logging_steps,
        flops_per_token=run.built.flops_per_token(run.checked.seq_length),
        peak_flops=None if peak is None else peak * batching.num_ranks,
        divergence=Divergence(settings.divergence_ratio),
        may_overflow=precision.loss_scaling or settings.skip_nonfinite,
        memory_row=run.memory_row,
        write=run.write,
        measures=measures_of(settings),
    )
