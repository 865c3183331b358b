"""Changes that would make a strategy fit: the smallest first, each tried by planning it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..base.dtypes import BF16
from ..base.errors import ConfigurationError
from ..core.layout import Layout
from .assess import Assessment, Assessor, Machine
from .training import Training

MOST_NODES = 1024
# Flags of `shardwise plan` by field of `Training`.
FLAGS = {
    "checkpointing": "--checkpointing",
    "micro_batch": "--micro-batch",
    "num_micro_batches": "--accumulation",
    "reduce": "--reduce-dtype",
    "optimizer": "--optimizer",
}
NODES = "--nodes"


def strategy_flag(layout: Layout) -> str:
    """Return the flag of `shardwise plan` for a layout with offload: the strategy's name contains all of it."""
    return f"--strategy {layout.name}"


def flags_for(before: Training, after: Training, flags: Mapping[str, str] = FLAGS) -> str:
    """Return the flags that change one training into the other."""
    changed = [name for name in flags if getattr(before, name) != getattr(after, name)]
    return " ".join(f"{flags[name]} {getattr(after, name)}" for name in changed)


def nearest_change(
    assess: Assessor,
    entry: Assessment,
    flags: Mapping[str, str] = FLAGS,
    nodes: str = NODES,
    moving: Callable[[Layout], str] = strategy_flag,
) -> str:
    """Return the first change that makes the strategy fit, as command-line flags; empty if none does."""
    training = entry.training
    for smaller in _smaller(training):
        if _fits(assess, entry, smaller):
            return flags_for(training, smaller, flags)
    smallest = with_single_sequences(replace(training, checkpointing="full"))
    for words, moved in offloaded(assess, entry):
        for tried in dict.fromkeys((training, smallest)):
            if _fits(assess, moved, tried):
                found = assess(moved.name, moved.layouts, tried)
                changed = f"{moving(moved.layouts[0])} {flags_for(training, tried, flags)}".rstrip()
                return changed + _cost(words, entry, found)
    num_nodes = assess.machine.cluster.num_nodes
    while entry.layouts[0].optimizer == "world" and num_nodes < MOST_NODES:
        num_nodes *= 2
        if _fits(_with_nodes(assess, num_nodes), entry, smallest):
            return f"{nodes} {num_nodes} {flags_for(training, smallest, flags)}".rstrip()
    return ""


def offloaded(assess: Assessor, entry: Assessment) -> Iterator[tuple[str, Assessment]]:
    """Yield plans with more and more state on the host, each with a description; none if some is offloaded already."""
    if not entry.is_on_device or len(set(entry.layouts)) > 1 or entry.training.engine != "shardwise":
        return
    words = ("the optimizer on the host", "optimizer and parameters on the host")
    for said, layout in zip(words, on_host(entry.layouts[0]), strict=False):
        yield said, assess(layout.name, [layout] * len(entry.layouts), entry.training)


def on_host(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with gradients and optimizer on the host, then with the parameters, too, where possible."""
    moved = replace(layout, grads_on="host", optimizer_on="host", kept=0.0)
    yield moved
    try:
        moved = replace(moved, params_on="host")
    except ConfigurationError:
        return
    yield moved


def _cost(words: str, before: Assessment, after: Assessment) -> str:
    saved = (before.needed_bytes - after.needed_bytes) / 1e9
    times = before.tokens_per_s / after.tokens_per_s
    return f" ({words}: {saved:,.1f} GB less on each GPU, {times:.2f}x the time)"


def _fits(assess: Assessor, entry: Assessment, training: Training) -> bool:
    """Return True if the plan fits; False also for a change that cannot be planned (checkpointing without blocks)."""
    try:
        return assess(entry.name, entry.layouts, training).fits
    except ConfigurationError:
        return False


def _smaller(training: Training) -> Iterator[Training]:
    """Yield smaller trainings; each one includes the changes of those before it."""
    if training.checkpointing != "full":
        training = replace(training, checkpointing="full")
        yield training
    if training.micro_batch > 1:
        training = with_single_sequences(training)
        yield training
    if can_reduce_in_bf16(training):
        training = replace(training, reduce="bf16")
        yield training
    if training.optimizer == "adamw":
        yield with_eight_bits(training)


def with_single_sequences(training: Training) -> Training:
    num = training.num_micro_batches * training.micro_batch
    return replace(training, micro_batch=1, num_micro_batches=num)


def can_reduce_in_bf16(training: Training) -> bool:
    return training.formats.reduce.itemsize == 4 and training.formats.compute == BF16


def with_eight_bits(training: Training) -> Training:
    return replace(training, optimizer="adamw8bit", moments=None)


def _with_nodes(assess: Assessor, num_nodes: int) -> Assessor:
    machine: Machine = replace(assess.machine, cluster=replace(assess.machine.cluster, num_nodes=num_nodes))
    return assess.on(machine)
