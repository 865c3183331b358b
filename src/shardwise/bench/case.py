"""Model shapes, the names of contenders, and cases, as values. No torch, no processes.

A contender is shardwise with one strategy, a peer (another library), the plain model, or a floor (computation alone).
Its name is a family and perhaps one argument: `fsdp2`, `deepspeed:3`, `shardwise:zero3`. The argument of `shardwise` is
a preset, or a JSON mapping from unit patterns to presets or layouts. Modifiers may follow: `@early` (early updates),
`@capture` (a CUDA graph of the whole step), `@meta` (a model built on the meta device). The argument of `deepspeed` is
a stage, and an offload or a part of ZeRO++: `3+offload`, `3+offload:0.6` (60% of the optimizer), `3+hpz`.

A `Case` is everything that a worker process needs to know; it is passed to the worker as JSON.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from ..base.errors import ConfigurationError, did_you_mean
from ..core.layout import AUTO, MOST_SPLIT, Layout, layout_of
from ..planner.hardware.links import Fabric, parse
from ..trainer.shapes import PRESETS

OURS = "shardwise"
OFFLOADED_FSDP2 = "fsdp2+offload"
HSDP = "hsdp"
DEEPSPEED = "deepspeed"
NVME = "nvme"
PEERS = ("fsdp2", OFFLOADED_FSDP2, HSDP, "fsdp1", "ddp", DEEPSPEED)
# Thread blocks of a collective (channels of NCCL), each of which writes at most 64 bytes a clock of 2 GHz.
MAX_BLOCKS = 32
MAX_GIGABYTES_PER_S = MAX_BLOCKS * 64 * 2.0
FLOORS = ("compute", "compute+update")  # lower bounds of the time of a step
SINGLE_PROCESS = ("plain", *FLOORS)  # contenders that need no process group
EXAMPLE = '{"blocks.[0-7]": "zero2", "*": "zero3"}'
MODIFIERS = ("early", "capture", "meta")
LAYOUT_FIELDS = {field.name for field in fields(Layout)}

# Kinds of offload, and the ZeRO stages that support each.
OFFLOADS: dict[str, tuple[int, ...]] = {
    "offload": (1, 2, 3),  # the optimizer to host memory; at stage 3 parameters too
    "offload_optimizer": (3,),  # the optimizer alone
    "super_offload": (3,),  # the same, updated by a separate process
    NVME: (3,),  # optimizer and parameters to disk
}
# ZeRO++, whole or in parts. DeepSpeed supports it at stage 3, and silently ignores it at lower stages.
ZEROPP: dict[str, tuple[str, ...]] = {
    "hpz": ("hpz",),  # a second copy of the parameters, sharded within the node
    "qwz": ("qwz",),  # parameters are sent as int8
    "qgz": ("qgz",),  # gradients are sent as int4
    "zeropp": ("hpz", "qwz", "qgz"),
}


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """The parsed form of `deepspeed:3+offload:0.6`."""

    stage: int
    offload: str = ""  # a key of `OFFLOADS`
    ratio: float = 1.0  # the part of the optimizer that is offloaded
    parts: tuple[str, ...] = ()  # of ZeRO++


def read_deepspeed(argument: str) -> DeepSpeed:
    """Parse the text after `deepspeed:` in a contender's name."""
    name = f"--peers: '{DEEPSPEED}:{argument}'"
    stage, plus, words = argument.partition("+")
    word, colon, part = words.partition(":")
    stages = {**OFFLOADS, **dict.fromkeys(ZEROPP, (3,))}
    if stage not in ("0", "1", "2", "3"):
        raise ConfigurationError(f"{name}; say which ZeRO stage, {DEEPSPEED}:0 to {DEEPSPEED}:3")
    if plus and word not in stages:
        raise ConfigurationError(f"{name}: unknown option {word!r}; {did_you_mean(word, stages)}")
    if plus and int(stage) not in stages[word]:
        raise ConfigurationError(f"{name}; DeepSpeed has {word!r} at stage {' or '.join(map(str, stages[word]))} only")
    if colon and (stage != "3" or word == NVME or word in ZEROPP):
        raise ConfigurationError(f"{name}; DeepSpeed offloads a part of the optimizer to the host only, at stage 3")
    if colon and (not re.fullmatch(r"\d*\.?\d+", part) or not 0 < float(part) <= 1):
        raise ConfigurationError(f"{name}; {part!r} is not a part of the optimizer: write 0.6")
    return DeepSpeed(int(stage), "" if word in ZEROPP else word, float(part or 1), ZEROPP.get(word, ()))


def strategies_in(text: str) -> list[str]:
    """Parse --strategies, such as `zero3,zero2` or `zero3,{"blocks.[0-7]":"zero2","*":"zero3"}`, into contenders."""
    names, rest = [], text.strip()
    while rest:
        if rest.startswith("{"):
            try:
                mapping, end = json.JSONDecoder().raw_decode(rest)
            except json.JSONDecodeError as error:
                raise ConfigurationError(f"--strategies: {rest!r} is no JSON: {error}; write {EXAMPLE}") from error
            modifiers, _, rest = rest[end:].partition(",")
            name = json.dumps(mapping, separators=(",", ":")) + modifiers.strip()
        else:
            name, _, rest = rest.partition(",")
        name, rest = name.strip(), rest.strip()
        if name:
            read_strategy(name)
            names.append(f"{OURS}:{name}")
    return names


def read_strategy(text: str) -> tuple[str | dict[str, Layout], set[str]]:
    """Parse one strategy into the `strategy` argument of `sw.shard` and the modifiers."""
    end = text.rfind("}") + 1
    name, *modifiers = text[end:].split("@")
    for modifier in modifiers:
        if modifier not in MODIFIERS:
            raise ConfigurationError(
                f"--strategies: {text!r}: unknown modifier {modifier!r}; {did_you_mean(modifier, MODIFIERS)}"
            )
    if end:
        rows = json.loads(text[:end])
        for row in rows.values():
            for key in row.keys() - LAYOUT_FIELDS if isinstance(row, dict) else ():
                raise ConfigurationError(f"--strategies: a layout has no {key!r}; {did_you_mean(key, LAYOUT_FIELDS)}")
        layouts = {name: layout_of(Layout(**row) if isinstance(row, dict) else row) for name, row in rows.items()}
        return layouts, set(modifiers)
    _layouts(name)
    return name, set(modifiers)


def is_auto(strategy: str | dict[str, Layout]) -> bool:
    return isinstance(strategy, str) and strategy.lower().partition("+")[0] == AUTO


def _layouts(strategy: str | dict[str, Layout]) -> list[Layout]:
    """Return the layouts of a strategy. For `auto`, return that of the preset that shards most."""
    if not isinstance(strategy, str):
        return list(strategy.values())
    return [layout_of(MOST_SPLIT + strategy[len(AUTO) :] if is_auto(strategy) else strategy)]


def peers_in(text: str) -> list[str]:
    """Parse --peers, such as `fsdp2,deepspeed:2`, into contenders."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        family, _, argument = name.partition(":")
        if family not in PEERS:
            raise ConfigurationError(f"--peers: unknown peer {name!r}; {did_you_mean(family, PEERS)}")
        if family == DEEPSPEED:
            read_deepspeed(argument)
        elif argument:
            raise ConfigurationError(f"--peers: {name!r}; {family} takes no {argument!r}")
    return names


def needs_disk(contender: str) -> bool:
    """True if the contender offloads to disk. (`auto` may use a disk, and works without one.)"""
    family, _, argument = contender.partition(":")
    if family == DEEPSPEED:
        return read_deepspeed(argument).offload == NVME
    if family != OURS:
        return False
    return any(layout.uses_disk for layout in _layouts(read_strategy(argument)[0]))


def label(contender: str) -> str:
    """Return the name for tables. A mapping is written without JSON: `shardwise:blocks.[0-7]=zero2 *=zero3`."""
    family, _, argument = contender.partition(":")
    if not argument.startswith("{"):
        return contender
    end = argument.rfind("}") + 1
    rows = json.loads(argument[:end]).items()
    mix = " ".join(f"{pattern}={row if isinstance(row, str) else '(custom)'}" for pattern, row in rows)
    return f"{family}:{mix}{argument[end:]}"


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
    fabric: str  # the emulated fabric; empty: real ranks
    batch: int  # sequences per micro-batch
    micro_batches: int  # per step and rank
    precision: str
    reduce: str  # dtype
    clip: float  # 0: no clipping
    compile: bool
    checkpointing: str
    warmup: int
    steps: int
    seed: int
    count_calls: bool = False  # count Python calls instead of seconds
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
    """Return the case in which one process does the work of all ranks in fp32. Its losses are the reference."""
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


def refuse_faster(fabric: Fabric, most: float = MAX_GIGABYTES_PER_S) -> None:
    """Refuse links whose data would come faster than a collective can write it on the device that emulates them."""
    for wire, link, num_ranks in (("intra", fabric.intra, fabric.node_size), ("inter", fabric.inter, fabric.num_nodes)):
        if num_ranks > 1 and link.gigabytes_per_s > most:
            raise ConfigurationError(
                f"fabric: {wire}={link.gigabytes_per_s:g}GB/s cannot be emulated: the {MAX_BLOCKS} thread blocks of a "
                f"collective write at most {most:.0f} GB/s; give a slower link"
            )


def settings_of(base: Case, shapes: Sequence[Shape], reduces: Sequence[str], fabrics: Sequence[Fabric]) -> list[Case]:
    """Return `base` with every combination of shape, reduction dtype and fabric. Each contender runs in each one."""
    for fabric in fabrics:
        refuse_faster(fabric)
    worlds = [
        replace(base, fabric=str(fabric), world_size=fabric.world_size, node_size=fabric.node_size)
        for fabric in fabrics
    ]
    product = itertools.product(shapes, reduces, worlds or [base])
    return [replace(world, shape=shape, reduce=reduce) for shape, reduce, world in product]
