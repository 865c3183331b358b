"""What is measured, as values: the shapes of models, and the cases that crossing everything asked for gives.

Pure: no torch, no processes. A `Case` is all that a worker process is told, and travels to it as JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ..planner.hardware.links import Fabric, parse
from ..trainer.shapes import PRESETS
from .names import FLOORS, label


@dataclass(frozen=True, slots=True)
class Shape:
    """`vocab=0`: blocks alone. Hidden states come in and go out, and nothing else costs time."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tokens: int  # of a sequence
    vocab: int = 0
    tied: bool = False


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        #                     hidden    ffn layers heads kv_heads tokens  vocab
        Shape("smoke",            64,   128,     2,    4,       4,    16,    256),
        Shape("50m",             512,  1408,    12,    8,       8,    64,   8192),
        *(Shape(name, p.shape["hidden"], p.shape["ffn"], p.shape["layers"], p.shape["heads"], p.shape["kv_heads"],
                p.shape["max_seq"], p.vocab, p.shape["tied"])
          for name, p in PRESETS.items() if name.startswith("llama")),
        Shape("blocks-smoke",     64,   128,     3,    4,       4,    16),
        Shape("blocks-202m",    4096, 11008,    16,   32,      32,  2048),
        Shape("blocks-202m-8",  4096, 11008,     8,   32,      32,  8192),
        Shape("blocks-202m-20", 4096, 11008,    20,   32,      32,  8192),
        Shape("blocks-13b",     5120, 13824,    40,   40,      40,  8192),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One contender in one setting."""

    contender: str
    shape: Shape
    device: str  # cpu or cuda
    world_size: int
    node_size: int
    fabric: str  # the emulated one; empty: real ranks
    batch: int  # sequences of a micro-batch
    micro_batches: int  # of a step and rank
    precision: str
    reduce: str
    clip: float  # 0: no clipping
    compile: bool
    checkpointing: str
    warmup: int
    steps: int
    seed: int
    count_calls: bool = False  # instead of seconds
    trace: str = ""  # the folder that a chrome trace goes to; empty: none
    disk_path: str = ""  # the folder for what rests on disk; empty: none

    @property
    def tokens_per_step(self) -> int:
        """Of one rank."""
        return self.shape.tokens * self.batch * self.micro_batches

    def __str__(self) -> str:
        words = [label(self.contender), self.shape.name, f"{self.shape.tokens} tokens"]
        if self.contender not in FLOORS:
            words.append(f"reduced in {self.reduce}")
            words += [f"{parse(self.fabric).intra.gigabytes_per_s:g} GB/s"] if self.fabric else []
        return ", ".join(words)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def case_from_json(text: str) -> Case:
    values = json.loads(text)
    return Case(**{**values, "shape": Shape(**values["shape"])})


def one_process(case: Case) -> Case:
    """What the ranks of `case` do together, done by one process in fp32: the losses they must have."""
    return replace(
        case,
        contender="plain",
        world_size=1,
        node_size=1,
        micro_batches=case.micro_batches * case.world_size,
        precision="fp32",
        reduce="fp32",
        compile=False,
        trace="",
        disk_path="",
    )


def settings_of(base: Case, shapes: Sequence[Shape], reduces: Sequence[str], fabrics: Sequence[Fabric]) -> list[Case]:
    """`base` crossed with everything but contenders, who are all put into each of these settings."""
    return [
        replace(setting, shape=shape, reduce=reduce)
        for shape in shapes
        for reduce in reduces
        for setting in ([_on_fabric(base, fabric) for fabric in fabrics] or [base])
    ]


def _on_fabric(case: Case, fabric: Fabric) -> Case:
    return replace(case, fabric=str(fabric), world_size=fabric.world_size, node_size=fabric.node_size)


def with_intra(fabric: Fabric, gigabytes_per_s: float) -> Fabric:
    return replace(fabric, intra=replace(fabric.intra, gigabytes_per_s=gigabytes_per_s))
