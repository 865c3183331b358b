"""The first and the last thing that a user sees of a run: what is about to happen, and what came of it."""

import math
import textwrap

import torch

from ..api.memory_report import Memory, memory
from ..api.sharded_model import num_cores
from ..base.text import column_table, count, duration, labelled_lines, non_breaking, plural, size, terminal_width
from ..checkpoint.folder import CHECKPOINTS, step_folder
from ..core.engine.guards import engine_of
from ..core.engine.runtime import Engine
from ..core.wire.collectives import exchange
from ..planner.plan_json import at
from ..version import VERSION
from .data.samples import unigram_entropy
from .loop import Ending
from .optimizers import num_warmup_steps
from .run_checkpoints import expected_save_s
from .run_state import Run
from .settings import interval_of
from .signals import INTERRUPTED, TERMINATED

MAX_SAMPLE_LINES = 6  # the rest of the summary should stay on the screen


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def banner(run: Run) -> str:
    """Describe a run that is about to begin. Memory is that of one rank."""
    settings, batching, samples, built = run.settings, run.batching, run.samples, run.built
    engine, seq_length, num_steps = engine_of(run.model), run.checked.seq_length, run.num_steps
    held = memory(run.model, run.optimizer)
    trained = "all trained"
    if built.num_trainable != built.num_params:
        share = built.num_trainable / max(built.num_params, 1)
        trained = f"{count(built.num_trainable)} trained ({share:.2%})"
    ranks = world = plural(batching.num_ranks, "rank")
    if engine.mesh.node_size != batching.num_ranks:
        world += f" = {plural(batching.num_ranks // engine.mesh.node_size, 'node')} x {engine.mesh.node_size}"
    data = ", ".join(settings.dataset or settings.train_file) or "Python's manual"
    evaluation = "" if run.eval_samples is None else f", {run.eval_samples.num_samples:,} more for evaluation"
    evaluation = (f", {samples.padding:.0%} padding" if samples.padding else "") + evaluation
    tokenizer = ", " + non_breaking(f"tokenizer {run.checked.tokenizer.name}") if run.checked.tokenizer.name else ""
    num_epochs = run.num_samples_before(num_steps) / samples.num_samples
    steps = f"{plural(num_steps, 'step')} = {num_epochs:.3g} epochs"
    steps += f", from step {run.first_step:,} on" if run.first_step else ""
    num_warmup = num_warmup_steps(settings, num_steps)
    warmup = f", {num_warmup} warm-up steps" if num_warmup else ""
    disk = "" if engine.host.disk is None else non_breaking(str(engine.host.disk.folder))
    lines = {
        "model": f"{settings.model}, {count(built.num_params)} parameters, {trained}",
        "strategy": f"{_strategy(run, engine)} on {world}, {device_name(run.device)}, {settings.precision}"
        + (f": {run.planned.why}" if run.planned.why else ""),
        "batch": f"{plural(batching.global_size, 'sample')} = {ranks} x {plural(batching.num_micro, 'micro-batch')} x "
        f"{batching.micro_size}, {batching.global_size * seq_length:,} tokens a step"
        + (f" ({run.planned.why_batch})" if run.planned.why_batch else ""),
        "data": f"{data}, {count(samples.num_tokens)} tokens, "
        f"{plural(samples.num_samples, 'sample')} of {seq_length:,}{evaluation}{tokenizer}",
        "training": f"{steps}, {settings.optimizer}, lr {settings.learning_rate:g} "
        f"({settings.lr_scheduler_type}{warmup})",
        "objective": "" if settings.objective is None else f"{settings.objective} on pairs, beta {settings.dpo_beta:g}",
        "compile": str(run.planned.compilation),
        "memory": _device_memory(run, held),
        "host": _host_memory(run, engine, held),
        "disk": f"{size(held.planned_disk)} a rank in {disk}, gone when the run ends" if held.planned_disk else "",
        "checkpoint": _saving(run, engine),
        "resumes": non_breaking(settings.resume_from_checkpoint or ""),
    }
    return "\n".join([f"shardwise {VERSION}  {run.folder}", "", *labelled_lines(lines)])


def _strategy(run: Run, engine: Engine) -> str:
    settings, units = run.settings, engine.schedule.units
    layouts = (
        run.planned.entry.name if run.planned.why else ", ".join(dict.fromkeys(unit.layout.name for unit in units))
    )
    requested = settings.strategy if isinstance(settings.strategy, str) else "a mapping"
    requested += f" with {','.join(settings.offload)}" if settings.offload else ""
    requested += f", on the wire {','.join(settings.wire)}" if settings.wire else ""
    requested += f", frozen weights as {settings.quantize}" if settings.quantize else ""
    return requested if requested == layouts else f"{requested} -> {layouts}"


def _device_memory(run: Run, held: Memory) -> str:
    planned, activation_bytes = held.planned, run.planned.activation_bytes
    state = {"params": planned.params, "grads": planned.grads, "optimizer": planned.optimizer}
    state["buffers"] = held.planned_buffers
    shown = ", ".join(non_breaking(f"{name} {size(num_bytes)}") for name, num_bytes in state.items() if num_bytes)
    free = f", of {size(run.free_bytes)} free"
    if activation_bytes is None:
        return f"{size(sum(state.values()))} + activations a rank{free}: {shown}; {run.planned.note}"
    peak = size(sum(state.values()) + activation_bytes)
    activations = non_breaking(f"activations {size(activation_bytes)}")
    return f"planned peak {peak} a rank{free}: {shown}, {activations} at {at(run.planned.entry.memory.peak.name)}"


def _host_memory(run: Run, engine: Engine, held: Memory) -> str:
    words = []
    if held.planned_host:
        # On a CPU the device is the host, and nothing is pinned.
        pinned = ", pinned" if engine.host.arena.is_pinned else ", not pinned"
        pinned = pinned if run.device.type == "cuda" else ""
        words.append(f"{size(held.planned_host)} a rank{pinned}, of {size(run.free_host_bytes)} free")
    if engine.host.spare_bytes:
        words.append(f"included: {size(engine.host.spare_bytes)} for updates before the norm is known")
    if any(unit.layout.optimizer_on != "device" for unit in engine.schedule.units):
        when = " inside the backward, so that no norm of gradients is known" if run.updates_early else ""
        words.append(f"updates by {plural(num_cores(), 'core')} a rank{when}")
    return "; ".join(words)


def _saving(run: Run, engine: Engine) -> str:
    saves, every = run.saves, interval_of(run.settings.save_steps, run.num_steps)
    words = [f"every {plural(every, 'step')}" if every else "at the end", size(saves.num_bytes)]
    words[0] += " and at each new best evaluation" if run.settings.load_best_model_at_end else ""
    seconds = expected_save_s(run.folder, saves, engine)
    if seconds is not None:
        words.append(f"about {duration(seconds) if seconds >= 100 else f'{max(seconds, 0.1):.1f} s'} each")
    if saves.in_background:
        copy = size(saves.num_bytes / run.batching.num_ranks)
        words.append(f"in the background from a copy of {copy} a rank on the host")
    if saves.why_not:
        words.append(f"not in the background: {saves.why_not}")
    return ", ".join(words)


def summary(run: Run, ending: Ending, seconds: float) -> str:
    """Describe a run that has ended. Every rank calls it; memory is the largest of all ranks."""
    records = run.records
    run.memory_row()
    assert run.peak_memory is not None
    largest = run.peak_memory
    for other in exchange(run.hosts, run.peak_memory):
        largest = largest.highest(other)
    why = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}.get(ending.stop or 0)
    done = f"stopped ({why}): step {ending.step:,}" if why else f"done: {plural(ending.step, 'step')}"
    if run.evaluations.is_exhausted() and not why:
        num_worse = plural(run.evaluations.num_worse, "evaluation")
        done = f"stopped early ({num_worse} without a better {run.settings.best_metric}): step {ending.step:,}"
    num_tokens = (ending.step - run.first_step) * records.tokens_per_step
    speed = [] if records.tokens_per_s is None else [f"{records.tokens_per_s:,.0f} tokens/s"]
    speed += [] if records.mfu is None else [f"MFU {records.mfu:.1%}"]
    saved = "" if run.saved_step is None else str(step_folder(run.folder / CHECKPOINTS, run.saved_step))
    lines = {
        "loss": _losses(run),
        "speed": ", ".join(speed),
        "checkpoint": non_breaking(saved),
        "export": non_breaking(run.exported),
        "best": str(run.evaluations) if run.evaluations.step not in (0, run.evaluations.last_step) else "",
    }
    head = f"{done} of {run.num_steps:,}, {count(num_tokens)} tokens in {duration(seconds)}"
    text = [head, "", *labelled_lines(lines), *_memory_table(run, largest)]
    if run.generated:
        text += ["", *_sample(f"{run.prompt}{run.generated}")]
    return "\n".join(text)


def _losses(run: Run) -> str:
    words, first, last = [], run.records.first_loss, run.records.last_loss
    if not math.isnan(first) and not math.isnan(last):
        words.append(f"{first:.4f} -> {last:.4f}")
    if run.eval_loss is not None:
        # For a larger loss, the perplexity is meaningless and may not fit into a float.
        is_plain = run.eval_loss < 50 and run.settings.objective is None
        perplexity = f" (perplexity {math.exp(run.eval_loss):.2f})" if is_plain else ""
        words.append(f"evaluation {run.eval_loss:.4f}{perplexity}")
    if words and run.is_first and run.settings.objective is None:
        words.append(f"unigram entropy {unigram_entropy(run.samples):.4f}")
    return ", ".join(words)


def _memory_table(run: Run, held: Memory) -> list[str]:
    planned, seen = held.planned, held.seen
    is_process = held.peak_activations is None  # on a CPU only the memory of the whole process is known
    columns: dict[str, tuple[int | None, int | None]] = {
        "params": (planned.params, seen.params),
        "grads": (planned.grads, seen.grads),
        "optimizer": (planned.optimizer, seen.optimizer),
        "buffers": (held.planned_buffers, held.peak_buffers),
        "activations": (run.planned.activation_bytes, held.peak_activations),
        "peak": (run.planned.peak_bytes, None if is_process else held.peak),
        "process": (None, held.peak if is_process else None),
        "host": (held.planned_host or None, held.host or None),
        "disk": (held.planned_disk or None, held.disk or None),
    }
    shown = {name: cells for name, cells in columns.items() if cells != (None, None)}
    rows = {"memory": list(shown)}
    for index, label in enumerate(("  predicted", "  measured")):
        rows[label] = ["-" if cells[index] is None else size(cells[index] or 0) for cells in shown.values()]
    return column_table(rows)


def _sample(text: str) -> list[str]:
    """Return the generated text, without characters that would move the cursor."""
    visible = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
    wrapped = [part for line in visible.splitlines() for part in textwrap.wrap(line, terminal_width() - 4) or [""]]
    more = ["  | ..."] if len(wrapped) > MAX_SAMPLE_LINES else []
    return [f"  | {line}".rstrip() for line in wrapped[:MAX_SAMPLE_LINES]] + more
