"""The first and the last thing a user sees of a run: what is about to happen, and what came of it. Pure text.

Plain ASCII and at most 100 columns, so that a log file reads like the terminal; fewer where the terminal has fewer.
"""

import math
import textwrap
from dataclasses import dataclass

from ..base.text import LABEL_WIDTH, count, duration, labelled_lines, plural, size, terminal_width, unbroken
from ..core.schedule.state_bytes import StateBytes
from ..version import VERSION

# Lines of the sample: the rest of the summary should stay on the screen.
_SAMPLE_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run is about to do."""

    folder: str
    model: str
    num_params: int
    num_trainable: int
    strategy_asked: str
    strategy_runs: str  # what was made of it; equal where nothing had to be chosen
    world_size: int
    node_size: int
    device: str  # "cpu", or the GPU's name
    precision: str
    num_micro: int  # micro-batches of a step and rank
    micro_size: int  # samples of one
    seq_length: int
    data: str  # where it comes from
    tokenizer: str = ""
    num_tokens: int  # of the training data
    num_samples: int
    num_eval_samples: int
    num_steps: int
    num_epochs: float
    optimizer: str  # "adamw, lr 3e-04 (cosine, 10 warm-up steps)"
    why: str = ""  # this strategy, where the planner chose it
    planned: StateBytes  # of a rank
    planned_buffers: int
    planned_activations: int | None = None  # at the peak; None: not known
    peak_is: str = ""  # its instant, in words
    plan_note: str = ""  # why it is not known
    free_bytes: int | None = None  # of a rank, before the run
    planned_host: int = 0  # of a rank; 0: nothing rests there
    planned_disk: int = 0
    free_host_bytes: int = 0
    is_pinned: bool | None = None  # None: the device is the host
    num_cores: int = 0  # that update for this rank; 0: the device does
    updates_early: bool = False
    disk_folder: str = ""
    checkpoint_bytes: int | None = None  # of one checkpoint, all ranks together
    expected_save_s: float | None = None
    save_steps: int = 0  # 0: at the end only
    async_save: bool = False
    why_not_async: str = ""  # although it was asked for
    first_step: int = 0
    resumed_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What came of a run. What is not known, or was not asked for, is None or empty and has no line."""

    why: str = ""  # why it ended early: "interrupted", "terminated"; empty: it is complete
    step: int
    num_steps: int
    seconds: float
    num_tokens: int  # trained on, in this start
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None = None
    unigram_entropy: float | None = None  # nats per token
    tokens_per_s: float | None = None  # of all ranks
    mfu: float | None = None
    planned: StateBytes
    seen: StateBytes  # the largest of all ranks
    planned_buffers: int
    seen_buffers: int
    planned_activations: int | None = None
    planned_peak: int | None = None
    planned_host: int = 0  # 0: nothing rests there
    seen_host: int = 0
    planned_disk: int = 0
    seen_disk: int = 0
    seen_activations: int | None = None  # None: not known on this device
    peak_bytes: int | None = None  # of a rank, everything included
    checkpoint: str = ""
    export: str = ""
    prompt: str = ""
    sample: str = ""  # what was generated after the prompt


def banner(facts: Start) -> str:
    trained = "all trained"
    if facts.num_trainable != facts.num_params:
        share = facts.num_trainable / max(facts.num_params, 1)
        trained = f"{count(facts.num_trainable)} trained ({share:.2%})"
    chosen = facts.strategy_asked
    if facts.strategy_runs != facts.strategy_asked:
        chosen = f"{facts.strategy_asked} -> {facts.strategy_runs}"
    world = plural(facts.world_size, "rank")
    if facts.node_size != facts.world_size:
        world += f" = {plural(facts.world_size // facts.node_size, 'node')} x {facts.node_size}"
    batch = facts.world_size * facts.num_micro * facts.micro_size
    evaluation = f", {facts.num_eval_samples:,} more for evaluation" if facts.num_eval_samples else ""
    tokenizer = ", " + unbroken(f"tokenizer {facts.tokenizer}") if facts.tokenizer else ""
    steps = f"{plural(facts.num_steps, 'step')} = {facts.num_epochs:.3g} epochs"
    if facts.first_step:
        steps += f", from step {facts.first_step:,} on"
    lines = {
        "model": f"{facts.model}, {count(facts.num_params)} parameters, {trained}",
        "strategy": f"{chosen} on {world}, {facts.device}, {facts.precision}" + (f": {facts.why}" if facts.why else ""),
        "batch": f"{plural(batch, 'sample')} = {plural(facts.world_size, 'rank')} x "
        f"{plural(facts.num_micro, 'micro-batch')} x {facts.micro_size}, "
        f"{batch * facts.seq_length:,} tokens a step",
        "data": f"{facts.data}, {count(facts.num_tokens)} tokens, "
        f"{plural(facts.num_samples, 'sample')} of {facts.seq_length:,}{evaluation}{tokenizer}",
        "training": f"{steps}, {facts.optimizer}",
        "memory": _planned(facts),
        "host": _on_host(facts),
        "disk": _on_disk(facts),
        "checkpoint": _saving(facts),
        "resumes": unbroken(facts.resumed_from),
    }
    return "\n".join([f"shardwise {VERSION}  {facts.folder}", "", *labelled_lines(lines)])


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
    text = [head, "", *labelled_lines(lines), *_memory_table(facts, terminal_width())]
    if facts.sample:
        text += ["", *_sample(facts.prompt, facts.sample)]
    return "\n".join(text)


def _losses(facts: End) -> str:
    words = []
    if facts.first_loss is not None and facts.last_loss is not None:
        words.append(f"{facts.first_loss:.4f} -> {facts.last_loss:.4f}")
    if facts.eval_loss is not None:
        # A loss beyond this has a perplexity without meaning, and none that a float holds.
        perplexity = f" (perplexity {math.exp(facts.eval_loss):.2f})" if facts.eval_loss < 50 else ""
        words.append(f"evaluation {facts.eval_loss:.4f}{perplexity}")
    if words and facts.unigram_entropy is not None:
        words.append(f"unigram entropy {facts.unigram_entropy:.4f}")
    return ", ".join(words)


def _planned(facts: Start) -> str:
    planned, buffers = facts.planned, facts.planned_buffers
    state = {"params": planned.params, "grads": planned.grads, "optimizer": planned.optimizer, "buffers": buffers}
    shown = ", ".join(unbroken(f"{name} {size(num_bytes)}") for name, num_bytes in state.items() if num_bytes)
    free = "" if facts.free_bytes is None else f", of {size(facts.free_bytes)} free"
    note = f"; {facts.plan_note}" if facts.plan_note else ""
    if facts.planned_activations is None:
        return f"{size(sum(state.values()))} + activations a rank{free}: {shown}{note}"
    peak = sum(state.values()) + facts.planned_activations
    activations = unbroken(f"activations {size(facts.planned_activations)}")
    return f"planned peak {size(peak)} a rank{free}: {shown}, {activations} at {facts.peak_is}{note}"


def _on_host(facts: Start) -> str:
    words = []
    if facts.planned_host:
        pinned = {True: ", pinned", False: ", not pinned", None: ""}[facts.is_pinned]
        words.append(f"{size(facts.planned_host)} a rank{pinned}, of {size(facts.free_host_bytes)} free")
    if facts.num_cores:
        when = " inside the backward, so that no norm of gradients is known" if facts.updates_early else ""
        words.append(f"updates by {plural(facts.num_cores, 'core')} a rank{when}")
    return "; ".join(words)


def _on_disk(facts: Start) -> str:
    if not facts.planned_disk:
        return ""
    return f"{size(facts.planned_disk)} a rank in {unbroken(facts.disk_folder)}, gone when the run ends"


def _saving(facts: Start) -> str:
    when = f"every {plural(facts.save_steps, 'step')}" if facts.save_steps else "at the end"
    large = "" if facts.checkpoint_bytes is None else f", {size(facts.checkpoint_bytes)}"
    time_s = "" if facts.expected_save_s is None else f", {_about(facts.expected_save_s)} each"
    beside = ""
    if facts.async_save:
        copied = (
            "" if facts.checkpoint_bytes is None else f" of {size(facts.checkpoint_bytes / facts.world_size)} a rank"
        )
        beside = f", in the background from a copy{copied} on the host"
    if facts.why_not_async:
        beside = f", not in the background: {facts.why_not_async}"
    return when + large + time_s + beside


def _about(seconds: float) -> str:
    if seconds < 0.1:
        return "under 0.1 s"
    shown = f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s" if seconds < 100 else duration(seconds)
    return f"about {shown}"


def _memory_table(facts: End, limit: int) -> list[str]:
    planned, seen = facts.planned, facts.seen
    is_process = facts.seen_activations is None  # where the allocator keeps no books
    columns: dict[str, tuple[int | None, int | None]] = {
        "params": (planned.params, seen.params),
        "grads": (planned.grads, seen.grads),
        "optimizer": (planned.optimizer, seen.optimizer),
        "buffers": (facts.planned_buffers, facts.seen_buffers),
        "activations": (facts.planned_activations, facts.seen_activations),
        "peak": (facts.planned_peak, None if is_process else facts.peak_bytes),
        "process": (None, facts.peak_bytes if is_process else None),
        "host": (facts.planned_host or None, facts.seen_host or None),
        "disk": (facts.planned_disk or None, facts.seen_disk or None),
    }
    shown = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
    rows = [
        ("memory", list(shown)),
        ("  planned", ["-" if cells[0] is None else size(cells[0]) for cells in shown.values()]),
        ("  seen", ["-" if cells[1] is None else size(cells[1]) for cells in shown.values()]),
    ]
    widths = [max(len(cells[at]) for _, cells in rows) for at in range(len(shown))]
    lines, first = [], 0
    while first < len(widths):  # what a line has no room for goes on below
        num = 1
        while first + num < len(widths) and LABEL_WIDTH + 2 * num + sum(widths[first : first + num + 1]) + 2 <= limit:
            num += 1
        here = slice(first, first + num)
        for label, cells in rows:
            numbers = (f"{cell:>{width}}" for cell, width in zip(cells[here], widths[here], strict=True))
            lines.append(f"  {label:{LABEL_WIDTH}}" + "  ".join(numbers))
        first += num
    return lines


def _sample(prompt: str, sample: str) -> list[str]:
    """As it was generated, but for what would move the cursor."""
    visible = "".join(char if char.isprintable() or char == "\n" else "?" for char in f"{prompt}{sample}")
    wrapped = [part for line in visible.splitlines() for part in textwrap.wrap(line, terminal_width() - 4) or [""]]
    more = ["  | ..."] if len(wrapped) > _SAMPLE_LINES else []
    return [f"  | {line}".rstrip() for line in wrapped[:_SAMPLE_LINES]] + more
