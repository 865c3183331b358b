"""Model shapes and benchmark cases, as values. No torch, no processes.

A `Case` is everything that a worker process needs to know; it is passed to the worker as JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ..planner.hardware.links import Fabric, parse
from ..trainer.shapes import PRESETS
from .names import FLOORS, label


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer. `vocab=0` means blocks alone, from hidden states to hidden states."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tokens: int  # per sequence
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
    fabric: str  # of the emulation; empty: real ranks
    batch: int  # sequences per micro-batch
    micro_batches: int  # per step and rank
    precision: str
    reduce: str
    clip: float  # 0: no clipping
    compile: bool
    checkpointing: str
    warmup: int
    steps: int
    seed: int
    count_calls: bool = False  # instead of seconds
    trace: str = ""  # the folder for a chrome trace; empty: none
    disk_path: str = ""  # the folder for state that is offloaded to disk; empty: none

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one rank."""
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
    """The work of all ranks of `case` in one process in fp32, whose losses are the reference."""
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
    """The product of `base` with shapes, reduction dtypes and fabrics; every contender runs in each setting."""
    on_fabrics = [
        replace(base, fabric=str(fabric), world_size=fabric.world_size, node_size=fabric.node_size)
        for fabric in fabrics
    ]
    return [
        replace(setting, shape=shape, reduce=reduce)
        for shape in shapes
        for reduce in reduces
        for setting in (on_fabrics or [base])
    ]


def with_intra(fabric: Fabric, gigabytes_per_s: float) -> Fabric:
    return replace(fabric, intra=replace(fabric.intra, gigabytes_per_s=gigabytes_per_s))
