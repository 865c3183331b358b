"""What would make a strategy fit that does not: the smallest change first, each tried by planning it."""

from collections.abc import Iterator
from dataclasses import replace

from ..dtypes import BF16
from ..errors import ConfigurationError
from .assess import Assessment, Assessor, Machine
from .training import Training

MOST_NODES = 1024


def nearest_change(assess: Assessor, entry: Assessment) -> str:
    """The first change that makes it fit, as flags of `shardwise plan`; empty where none of these does."""
    for words, training in _other_trainings(entry.training):
        if _fits(assess, entry, training):
            return words
    small, smallest = _smallest(entry.training)
    num_nodes = assess.machine.cluster.num_nodes
    while entry.layouts[0].optimizer == "world" and num_nodes < MOST_NODES:
        num_nodes *= 2
        if _fits(_with_nodes(assess, num_nodes), entry, smallest):
            return f"--nodes {num_nodes}{small}"
    return ""


def _fits(assess: Assessor, entry: Assessment, training: Training) -> bool:
    """What cannot be planned, such as checkpointing of a model without blocks, does not help."""
    try:
        return assess(entry.name, entry.layouts, training).fits
    except ConfigurationError:
        return False


def _smallest(training: Training) -> tuple[str, Training]:
    """With full checkpointing and micro-batches of one, and the flags for that."""
    num = training.num_micro_batches * training.micro_batch
    flags = "" if training.checkpointing == "full" else " --checkpointing full"
    flags += "" if training.micro_batch == 1 else f" --micro-batch 1 --accumulation {num}"
    return flags, replace(training, checkpointing="full", micro_batch=1, num_micro_batches=num)


def _other_trainings(training: Training) -> Iterator[tuple[str, Training]]:
    words: list[str] = []
    if training.checkpointing != "full":
        words.append("--checkpointing full")
        training = replace(training, checkpointing="full")
        yield words[0], training
    if training.micro_batch > 1:
        words.append(f"--micro-batch 1 --accumulation {training.num_micro_batches * training.micro_batch}")
        training = replace(training, num_micro_batches=training.num_micro_batches * training.micro_batch, micro_batch=1)
        yield " ".join(words), training
    if training.formats.reduce.itemsize == 4 and training.formats.compute == BF16:
        words.append("--reduce-dtype bf16")
        training = replace(training, reduce="bf16")
        yield " ".join(words), training
    if training.optimizer == "adamw":
        words.append("--optimizer adamw8bit")
        training = replace(training, optimizer="adamw8bit")
        yield " ".join(words), training


def _with_nodes(assess: Assessor, num_nodes: int) -> Assessor:
    machine: Machine = replace(assess.machine, cluster=replace(assess.machine.cluster, num_nodes=num_nodes))
    return assess.on(machine)
