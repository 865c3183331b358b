"""What is measured to hold the planner against: cases as values, the most telling ones first. Pure: no torch.

A case is one model in one setting. Compute does not depend on the strategy, so most shapes meet few settings: every
preset on small models, what fits on large ones, and one departure at a time from a middle case (`_departures`).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.core.layout import PRESETS
from shardwise.trainer.shapes import TransformerShape

LONGEST = 32768

SHAPES: dict[str, TransformerShape] = {
    #                       vocab   hidden layers heads kv_heads ffn
    "tiny":    TransformerShape(512,      64,  3,  4,  2,   128, LONGEST),
    "30m":     TransformerShape(8192,    512,  6,  8,  8,  1408, LONGEST),
    "125m":    TransformerShape(32000,   768, 12, 12, 12,  2048, LONGEST),
    "500m":    TransformerShape(32000,  1280, 24, 20, 20,  3456, LONGEST),
    "1b":      TransformerShape(128256, 2048, 16, 32,  8,  8192, LONGEST, tied=True),
    "3b":      TransformerShape(128256, 3072, 28, 24,  8,  8192, LONGEST, tied=True),
    "7b":      TransformerShape(32000,  4096, 32, 32, 32, 11008, LONGEST),
    "8b":      TransformerShape(128256, 4096, 32, 32,  8, 14336, LONGEST),
    "13b":     TransformerShape(32000,  5120, 40, 40, 40, 13824, LONGEST),
}  # fmt: skip

NODE = "1x8,intra=400GB/s,inter=50GB/s"
NODES = "2x4,intra=400GB/s,inter=50GB/s"
FREE = "1x8,intra=infGB/s,inter=infGB/s,latency=0us"  # what computing takes, and nothing else

SPLIT_BY_NODE = ("hsdp", "hybrid_shard_zero2", "hfsdp", "hpz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str  # of SHAPES
    strategy: str | dict[str, str] = "zero3"
    fabric: str = NODE
    seq: int = 2048
    micro_batch: int = 1
    num_micro_batches: int = 1
    precision: str = "bf16"
    reduce: str | None = None
    checkpointing: str = "none"
    compile: bool = False
    loss: str = "chunked"
    code: str = "in-tree"  # or hf: the same shape as a Llama of transformers
    lora_targets: tuple[str, ...] = ()  # adapters of rank 16 on these, all else frozen
    trained: str = ""  # a part of the names of the parameters that are trained; empty: all are

    @property
    def shape(self) -> TransformerShape:
        return SHAPES[self.model]

    @property
    def name(self) -> str:
        """The model, the strategy, the batch, and whatever is not as usual."""
        strategy = self.strategy if isinstance(self.strategy, str) else "+".join(self.strategy.values())
        words = [self.model, strategy, f"{self.micro_batch}x{self.seq}"]
        usual = Case(model=self.model)
        words += [f"accumulate{self.num_micro_batches}"] * (self.num_micro_batches > 1)
        words += [_fabric_word(self.fabric)]
        for key in ("precision", "checkpointing", "loss", "code"):
            words += [getattr(self, key)] * (getattr(self, key) != getattr(usual, key))
        words += [f"reduce-{self.reduce}"] * (self.reduce is not None)
        words += ["compile"] * self.compile + ["lora"] * bool(self.lora_targets)
        words += [f"trains-{self.trained}"] * bool(self.trained)
        return "/".join(words)

    def described(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self), "shape": asdict(self.shape)}


def case_from(described: dict[str, Any]) -> Case:
    """The case that a row of results describes."""
    rest = {key: value for key, value in described.items() if key in Case.__dataclass_fields__}
    return Case(**{**rest, "lora_targets": tuple(rest["lora_targets"])})


def _fabric_word(fabric: str) -> str:
    if fabric == FREE:
        return "free"
    shape, *parts = fabric.split(",")
    return "@".join([shape, *(part.partition("=")[2].removesuffix("GB/s") for part in parts)])


def _on(strategy: str) -> str:
    """The fabric on which a preset is itself."""
    return NODES if strategy in SPLIT_BY_NODE else NODE


def _presets(model: str, **rest: Any) -> Iterator[Case]:
    for strategy in PRESETS:
        yield Case(model=model, strategy=strategy, fabric=_on(strategy), **rest)


def _departures() -> Iterator[Case]:
    """From the middle case, one thing at a time."""
    middle = Case(model="1b", seq=4096)
    yield middle
    for checkpointing in ("full", "selective"):
        yield replace(middle, checkpointing=checkpointing)
    for micro_batch in (2, 4):
        yield replace(middle, micro_batch=micro_batch)
        yield replace(middle, micro_batch=micro_batch, checkpointing="full")
    yield replace(middle, fabric=FREE)
    yield replace(middle, reduce="bf16")
    yield replace(middle, precision="pure-bf16")
    yield replace(middle, precision="fp32", seq=2048)
    yield replace(middle, loss="plain")
    for strategy in ("zero3", "ddp", "zero1", "zero2", "shard_grad_op", *SPLIT_BY_NODE):
        yield replace(middle, strategy=strategy, fabric=_on(strategy), seq=2048, num_micro_batches=2)
    yield replace(middle, strategy={"blocks.[0-7]": "zero2", "*": "zero3"})
    yield replace(middle, strategy={"blocks.[0-9]": "shard_grad_op", "*": "zero3"}, checkpointing="full")
    yield replace(middle, strategy={"blocks.[0-3]": "ddp", "blocks.*": "zero1", "*": "zero3"})
    for loss in ("plain", "chunked"):
        for checkpointing in ("none", "full"):
            yield replace(middle, code="hf", loss=loss, checkpointing=checkpointing, seq=2048)
    yield replace(middle, lora_targets=("query", "value"))
    yield replace(middle, strategy="ddp", trained="attention", checkpointing="full")
    yield replace(middle, strategy="zero2", reduce="bf16", checkpointing="selective", micro_batch=2)
    yield replace(middle, strategy="hsdp", fabric=NODES, reduce="bf16")


def _speeds() -> Iterator[Case]:
    """Where the wire, the host or the device is the limit."""
    for model in ("125m", "1b", "3b"):
        yield Case(model=model, strategy="ddp", fabric="1x1")  # one GPU, nothing to wait for
    for model in ("125m", "1b"):
        yield Case(model=model, seq=128)  # the host
        yield Case(model=model, seq=128, fabric=FREE)
    for strategy in ("zero3", "zero2", "ddp"):
        yield Case(model="1b", strategy=strategy, fabric="1x8,intra=100GB/s,inter=50GB/s")
    for strategy in ("zero3", "hsdp", "hpz", "hfsdp"):
        yield Case(model="1b", strategy=strategy, fabric="2x4,intra=400GB/s,inter=12.5GB/s")
    yield Case(model="8b", fabric="1x8,intra=100GB/s,inter=50GB/s", checkpointing="full")
    yield Case(model="8b", strategy="hsdp", fabric="2x4,intra=400GB/s,inter=12.5GB/s", checkpointing="full")
    yield Case(model="8b", fabric=FREE, checkpointing="full")
    yield Case(model="3b", fabric=FREE)
    yield Case(model="13b", fabric=FREE)
    yield Case(model="1b", fabric="8x8,intra=400GB/s,inter=50GB/s")
    yield Case(model="8b", fabric="8x8,intra=400GB/s,inter=50GB/s")


def _large() -> Iterator[Case]:
    for checkpointing in ("none", "full", "selective"):
        yield Case(model="8b", seq=4096, checkpointing=checkpointing)
    yield Case(model="13b")
    yield Case(model="13b", seq=4096, checkpointing="full", micro_batch=2)
    yield Case(model="7b", strategy="ddp", checkpointing="full")
    for strategy in ("zero2", "shard_grad_op", *SPLIT_BY_NODE, "zero1"):
        yield Case(model="8b", strategy=strategy, fabric=_on(strategy), checkpointing="full", seq=4096)
    yield Case(model="7b", seq=4096)
    yield Case(model="7b", strategy="zero2", seq=4096, reduce="bf16")
    yield Case(model="8b", micro_batch=2, seq=4096, checkpointing="full", num_micro_batches=2)
    yield Case(model="8b", strategy={"blocks.[0-9]": "zero2", "*": "zero3"}, seq=4096, checkpointing="full")
    yield Case(model="8b", strategy={"blocks.1?": "shard_grad_op", "*": "zero3"}, seq=4096)
    for strategy in ("zero2", "shard_grad_op", "hsdp", "zero1"):
        yield Case(model="13b", strategy=strategy, fabric=_on(strategy), checkpointing="full")
    yield Case(model="13b", strategy="ddp", checkpointing="full")  # does not fit
    yield Case(model="8b", seq=16384, checkpointing="full")
    yield Case(model="8b", seq=4096, micro_batch=4)  # does not fit, or barely


def _small() -> Iterator[Case]:
    for strategy in ("ddp", "zero2", "zero3", "hsdp"):
        for checkpointing in ("none", "full"):
            yield Case(
                model="500m",
                strategy=strategy,
                fabric=_on(strategy),
                checkpointing=checkpointing,
                seq=4096,
                micro_batch=2,
            )


def _compiled() -> Iterator[Case]:
    for checkpointing in ("none", "full", "selective"):
        yield Case(model="1b", seq=4096, compile=True, checkpointing=checkpointing)
    yield Case(model="8b", seq=4096, compile=True)


def cases() -> list[Case]:
    middle, large = list(_departures()), list(_large())
    found = [
        *_presets("125m"), *middle[:8], *_presets("1b"), *large[:6], *middle[8:], *large[6:], *_speeds(),
        *_presets("3b"), *_small(), *_presets("125m", checkpointing="full", micro_batch=4), *_compiled(),
    ]  # fmt: skip
    return list({case.name: case for case in found}.values())


def smoke() -> list[Case]:
    """The same paths on a CPU in a minute."""
    tiny = Case(model="tiny", seq=32)
    return [
        *_presets("tiny", seq=32),
        replace(tiny, num_micro_batches=2, checkpointing="full"),
        replace(tiny, checkpointing="selective", reduce="bf16"),
        replace(tiny, strategy={"blocks.0": "zero2", "*": "zero3"}, fabric=FREE),
        replace(tiny, code="hf", loss="plain", checkpointing="full"),
        replace(tiny, code="hf"),
        replace(tiny, loss="plain", precision="fp32"),
        replace(tiny, lora_targets=("query", "value")),
        replace(tiny, trained="attention", strategy="ddp"),
    ]
