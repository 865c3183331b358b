"""Small plans for tests: a model whose blocks are few, on machines of any memory."""

from dataclasses import replace
from typing import Any

from shardwise.core.layout import PRESETS, Strategy
from shardwise.planner.assess import Assessment, Assessor, Machine
from shardwise.planner.hardware.cluster import make_cluster
from shardwise.planner.hardware.gpus import REAL, efficiency_of
from shardwise.planner.search import Choice, assess_named, choices
from shardwise.planner.shapes.shape import ModelShape
from shardwise.planner.subject import subject_of
from shardwise.planner.training import Training

GB = 10**9
GPU = "A100-40GB"

SHAPE = ModelShape(
    name="small", layers=8, hidden=1024, heads=8, kv_heads=4, head_dim=128, ffn=4096, vocab=32000, code="in-tree"
)


MANY = replace(SHAPE, layers=64)


def machine(gpus: int = 8, nodes: int = 1, free_bytes: int | None = None, **words: Any) -> Machine:
    return Machine(make_cluster(f"{gpus}x{GPU}", nodes, **words), efficiency_of(GPU), REAL, free_bytes)


def assessor(on: Machine | None = None, training: Training | None = None, shape: ModelShape = SHAPE) -> Assessor:
    return Assessor(subject_of(shape, training or Training()), on or machine())


def choice_of(training: Training) -> Choice:
    return choices(training, (training.checkpointing,), [(training.micro_batch, training.num_micro_batches)])


def assessed(
    strategy: Strategy = "zero3", on: Machine | None = None, shape: ModelShape = SHAPE, **sizes: Any
) -> Assessment:
    training = Training(**sizes)
    return assess_named(assessor(on, training, shape), strategy, choice_of(training))


EVERY = list(PRESETS)
# What travels encoded: everywhere, or in one way alone.
WIRES = [
    "ddp+grads_as=int8",
    "zero1+params_as=int8+grads_as=int4:feedback",
    "zero2+params_as=e4m3",
    "zero3+params_as=int8",
    "zero3+params_as=int8:forward",
    "zero3+grads_as=int4:128:feedback",
    "hsdp+params_as=bf16+grads_as=bf16",
    "hfsdp+params_as=int8:asymmetric",
    "zero3_offload+params_as=int8+grads_as=int8",
]
