"""The first and the last thing that a user sees of a run: what is about to happen, and what came of it.

`start_of` and `end_of` collect the facts of a run; `banner` and `summary` turn them into text.
"""

import math
import textwrap
from dataclasses import dataclass

import torch

from ..api.memory_report import Memory, memory
from ..api.sharded_model import num_cores
from ..base.text import column_table, count, duration, labelled_lines, plural, size, terminal_width, unbroken
from ..checkpoint.folder import CHECKPOINTS, step_folder
from ..core.engine.guards import engine_of
from ..core.wire.collectives import exchange
from ..planner.plan_json import at
from ..version import VERSION
from .data.samples import unigram_entropy
from .job import Batching
from .loop import Ending
from .optimizers import num_warmup_steps
from .run_checkpoints import Saves, expected_save_s
from .settings import Settings, interval_of
from .signals import INTERRUPTED, TERMINATED
from .step_callbacks import Run

MAX_SAMPLE_LINES = 6  # the rest of the summary should stay on the screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Facts about a run that is about to begin. Memory is that of one rank."""

    folder: str
    settings: Settings
    batching: Batching
    memory: Memory
    saves: Saves
    num_params: int
    num_trainable: int
    strategy: str  # the layouts that run
    node_size: int
    device: str  # "cpu", or the GPU's name
    seq_length: int
    num_tokens: int  # of the training data
    num_samples: int
    num_eval_samples: int
    num_steps: int
    num_epochs: float
    first_step: int = 0
    tokenizer: str = ""
    why: str = ""  # why the planner chose this strategy
    planned_activations: int | None = None  # at the peak; None: unknown
    peak_is: str = ""  # the instant of the peak, in words
    plan_note: str = ""  # why activations are unknown
    free_bytes: int | None = None
    free_host_bytes: int = 0
    is_pinned: bool | None = None  # None: the device is the host
    num_cores: int = 0  # cores that update for this rank; 0: the device updates
    updates_early: bool = False
    disk_folder: str = ""
    save_s: float | None = None  # expected time of one save


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Facts about a run that has ended. Unknown ones are None or empty, and have no line in the summary."""

    why: str = ""  # why it ended early: "interrupted", "terminated"; empty: it is complete
    step: int
    num_steps: int
    seconds: float
    num_tokens: int  # trained on in this start
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None = None
    unigram_entropy: float | None = None  # nats per token
    tokens_per_s: float | None = None  # of all ranks
    mfu: float | None = None
    memory: Memory  # the largest of all ranks
    planned_activations: int | None = None
    planned_peak: int | None = None
    checkpoint: str = ""
    export: str = ""
    prompt: str = ""
    sample: str = ""  # text that was generated after the prompt


def start_of(run: Run) -> Start:
    job, engine, plan = run.job, engine_of(run.job.model), run.planned
    units, host = engine.schedule.units, engine.host
    layouts = list(dict.fromkeys(unit.layout.name for unit in units))
    return Start(
        folder=str(run.folder),
        settings=run.settings,
        batching=job.batching,
        memory=memory(job.model, job.optimizer),
        saves=run.saves,
        num_params=run.built.num_params,
        num_trainable=run.built.num_trainable,
        strategy=plan.entry.name if plan.why else ", ".join(layouts),
        node_size=engine.mesh.node_size,
        device=device_name(job.device),
        seq_length=run.checked.seq_length,
        num_tokens=job.samples.num_tokens,
        num_samples=job.samples.num_samples,
        num_eval_samples=0 if run.eval_samples is None else run.eval_samples.num_samples,
        num_steps=job.num_steps,
        num_epochs=job.num_samples_before(job.num_steps) / job.samples.num_samples,
        first_step=job.first_step,
        tokenizer=run.checked.tokenizer.name,
        why=plan.why,
        planned_activations=None if plan.note else plan.left_at_peak(),
        peak_is="" if plan.note else at(plan.entry.memory.peak.name),
        plan_note=plan.note,
        free_bytes=run.free_bytes,
        free_host_bytes=run.free_host_bytes,
        is_pinned=host.arena.is_pinned if job.device.type == "cuda" else None,
        num_cores=num_cores() if any(unit.layout.optimizer_on != "device" for unit in units) else 0,
        updates_early=job.updates_early,
        disk_folder="" if host.disk is None else str(host.disk.folder),
        save_s=expected_save_s(run.folder, run.saves, engine),
    )


def end_of(run: Run, ending: Ending, seconds: float) -> End:
    """Collect the facts of a run that has ended. Every rank calls it."""
    records, job = run.records, run.job
    run.memory_row()
    assert run.peak_memory is not None
    largest = run.peak_memory
    for other in exchange(run.hosts, run.peak_memory):
        largest = largest.highest(other)
    return End(
        why={None: "", INTERRUPTED: "interrupted", TERMINATED: "terminated"}[ending.stop],
        step=ending.step,
        num_steps=job.num_steps,
        seconds=seconds,
        num_tokens=(ending.step - job.first_step) * records.tokens_per_step,
        first_loss=None if math.isnan(records.first_loss) else records.first_loss,
        last_loss=None if math.isnan(records.last_loss) else records.last_loss,
        eval_loss=run.eval_loss,
        unigram_entropy=unigram_entropy(job.samples) if run.is_first else None,
        tokens_per_s=records.tokens_per_s,
        mfu=records.mfu,
        memory=largest,
        planned_activations=None if run.planned.note else run.planned.left_at_peak(),
        planned_peak=run.planned_peak,
        checkpoint="" if run.saved_step is None else str(step_folder(run.folder / CHECKPOINTS, run.saved_step)),
        export=run.exported,
        prompt=run.prompt,
        sample=run.generated,
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def banner(facts: Start) -> str:
    settings, batching = facts.settings, facts.batching
    trained = "all trained"
    if facts.num_trainable != facts.num_params:
        share = facts.num_trainable / max(facts.num_params, 1)
        trained = f"{count(facts.num_trainable)} trained ({share:.2%})"
    ranks = world = plural(batching.num_ranks, "rank")
    if facts.node_size != batching.num_ranks:
        world += f" = {plural(batching.num_ranks // facts.node_size, 'node')} x {facts.node_size}"
    data = settings.dataset or ", ".join(settings.train_file) or "Python's manual"
    evaluation = f", {facts.num_eval_samples:,} more for evaluation" if facts.num_eval_samples else ""
    tokenizer = ", " + unbroken(f"tokenizer {facts.tokenizer}") if facts.tokenizer else ""
    steps = f"{plural(facts.num_steps, 'step')} = {facts.num_epochs:.3g} epochs"
    steps += f", from step {facts.first_step:,} on" if facts.first_step else ""
    num_warmup = num_warmup_steps(settings, facts.num_steps)
    warmup = f", {num_warmup} warm-up steps" if num_warmup else ""
    disk = f"{size(facts.memory.planned_disk)} a rank in {unbroken(facts.disk_folder)}, gone when the run ends"
    lines = {
        "model": f"{settings.model}, {count(facts.num_params)} parameters, {trained}",
        "strategy": f"{_strategy(facts)} on {world}, {facts.device}, {settings.precision}"
        + (f": {facts.why}" if facts.why else ""),
        "batch": f"{plural(batching.global_size, 'sample')} = {ranks} x {plural(batching.num_micro, 'micro-batch')} x "
        f"{batching.micro_size}, {batching.global_size * facts.seq_length:,} tokens a step",
        "data": f"{data}, {count(facts.num_tokens)} tokens, "
        f"{plural(facts.num_samples, 'sample')} of {facts.seq_length:,}{evaluation}{tokenizer}",
        "training": f"{steps}, {settings.optimizer}, lr {settings.learning_rate:g} "
        f"({settings.lr_scheduler_type}{warmup})",
        "memory": _device_memory(facts),
        "host": _host_memory(facts),
        "disk": disk if facts.memory.planned_disk else "",
        "checkpoint": _saving(facts),
        "resumes": unbroken(settings.resume_from_checkpoint or ""),
    }
    return "\n".join([f"shardwise {VERSION}  {facts.folder}", "", *labelled_lines(lines)])


def _strategy(facts: Start) -> str:
    settings = facts.settings
    requested = settings.strategy if isinstance(settings.strategy, str) else "a mapping"
    requested += f" with {','.join(settings.offload)}" if settings.offload else ""
    requested += f", on the wire {','.join(settings.wire)}" if settings.wire else ""
    return requested if requested == facts.strategy else f"{requested} -> {facts.strategy}"


def _device_memory(facts: Start) -> str:
    planned = facts.memory.planned
    state = {"params": planned.params, "grads": planned.grads, "optimizer": planned.optimizer}
    state["buffers"] = facts.memory.planned_buffers
    shown = ", ".join(unbroken(f"{name} {size(num_bytes)}") for name, num_bytes in state.items() if num_bytes)
    free = "" if facts.free_bytes is None else f", of {size(facts.free_bytes)} free"
    note = f"; {facts.plan_note}" if facts.plan_note else ""
    if facts.planned_activations is None:
        return f"{size(sum(state.values()))} + activations a rank{free}: {shown}{note}"
    peak = sum(state.values()) + facts.planned_activations
    activations = unbroken(f"activations {size(facts.planned_activations)}")
    return f"planned peak {size(peak)} a rank{free}: {shown}, {activations} at {facts.peak_is}{note}"


def _host_memory(facts: Start) -> str:
    words = []
    if facts.memory.planned_host:
        pinned = {True: ", pinned", False: ", not pinned", None: ""}[facts.is_pinned]
        words.append(f"{size(facts.memory.planned_host)} a rank{pinned}, of {size(facts.free_host_bytes)} free")
    if facts.num_cores:
        when = " inside the backward, so that no norm of gradients is known" if facts.updates_early else ""
        words.append(f"updates by {plural(facts.num_cores, 'core')} a rank{when}")
    return "; ".join(words)


def _saving(facts: Start) -> str:
    saves, every = facts.saves, interval_of(facts.settings.save_steps, facts.num_steps)
    words = [f"every {plural(every, 'step')}" if every else "at the end", size(saves.num_bytes)]
    if facts.save_s is not None:
        words.append(f"{_about(facts.save_s)} each")
    if saves.in_background:
        copy = size(saves.num_bytes / facts.batching.num_ranks)
        words.append(f"in the background from a copy of {copy} a rank on the host")
    if saves.why_not:
        words.append(f"not in the background: {saves.why_not}")
    return ", ".join(words)


def _about(seconds: float) -> str:
    if seconds < 0.1:
        return "under 0.1 s"
    shown = f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s" if seconds < 100 else duration(seconds)
    return f"about {shown}"


def summary(facts: End) -> str:
    done = f"done: {plural(facts.step, 'step')}" if not facts.why else f"stopped ({facts.why}): step {facts.step:,}"
    head = f"{done} of {facts.num_steps:,}, {count(facts.num_tokens)} tokens in {duration(facts.seconds)}"
    speed = [] if facts.tokens_per_s is None else [f"{facts.tokens_per_s:,.0f} tokens/s"]
    speed += [] if facts.mfu is None else [f"MFU {facts.mfu:.1%}"]
    lines = {
        "loss": _losses(facts),
        "speed": ", ".join(speed),
        "checkpoint": unbroken(facts.checkpoint),
        "export": unbroken(facts.export),
    }
    text = [head, "", *labelled_lines(lines), *_memory_table(facts)]
    if facts.sample:
        text += ["", *_sample(facts.prompt, facts.sample)]
    return "\n".join(text)


def _losses(facts: End) -> str:
    words = []
    if facts.first_loss is not None and facts.last_loss is not None:
        words.append(f"{facts.first_loss:.4f} -> {facts.last_loss:.4f}")
    if facts.eval_loss is not None:
        # The perplexity of a larger loss means nothing, and may not fit into a float.
        perplexity = f" (perplexity {math.exp(facts.eval_loss):.2f})" if facts.eval_loss < 50 else ""
        words.append(f"evaluation {facts.eval_loss:.4f}{perplexity}")
    if words and facts.unigram_entropy is not None:
        words.append(f"unigram entropy {facts.unigram_entropy:.4f}")
    return ", ".join(words)


def _memory_table(facts: End) -> list[str]:
    held = facts.memory
    planned, seen = held.planned, held.seen
    is_process = held.peak_activations is None  # on a CPU only the memory of the whole process is known
    columns: dict[str, tuple[int | None, int | None]] = {
        "params": (planned.params, seen.params),
        "grads": (planned.grads, seen.grads),
        "optimizer": (planned.optimizer, seen.optimizer),
        "buffers": (held.planned_buffers, held.peak_buffers),
        "activations": (facts.planned_activations, held.peak_activations),
        "peak": (facts.planned_peak, None if is_process else held.peak),
        "process": (None, held.peak if is_process else None),
        "host": (held.planned_host or None, held.host or None),
        "disk": (held.planned_disk or None, held.disk or None),
    }
    shown = {name: cells for name, cells in columns.items() if cells != (None, None)}
    rows = {"memory": list(shown)}
    for index, label in enumerate(("  planned", "  seen")):
        rows[label] = ["-" if cells[index] is None else size(cells[index] or 0) for cells in shown.values()]
    return column_table(rows)


def _sample(prompt: str, sample: str) -> list[str]:
    """Return the generated text, without characters that would move the cursor."""
    visible = "".join(char if char.isprintable() or char == "\n" else "?" for char in f"{prompt}{sample}")
    wrapped = [part for line in visible.splitlines() for part in textwrap.wrap(line, terminal_width() - 4) or [""]]
    more = ["  | ..."] if len(wrapped) > MAX_SAMPLE_LINES else []
    return [f"  | {line}".rstrip() for line in wrapped[:MAX_SAMPLE_LINES]] + more
