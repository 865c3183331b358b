"""A small case for tests of the bench."""

from dataclasses import replace
from typing import Any

from shardwise.bench.case import SHAPES, Case
from shardwise.bench.launch import Outcome

SMOKE = Case(
    contender="",
    shape=SHAPES["smoke"],
    device="cpu",
    world_size=2,
    node_size=2,
    fabric="",
    batch=1,
    micro_batches=1,
    precision="fp32",
    reduce="fp32",
    clip=0.0,
    compile=False,
    checkpointing="none",
    warmup=1,
    steps=2,
    seed=0,
)


def smoke(contender: str = "", **changes: Any) -> Case:
    return replace(SMOKE, contender=contender, **changes)


def answer(seconds: float, losses: tuple[float, ...] = (3.0, 2.0, 1.0), **more: Any) -> dict[str, Any]:
    return {
        "seconds": [seconds, seconds],
        "memory": {},
        "setup_s": 1.0,
        "warmup_s": 1.0,
        "losses": list(losses),
        "wires": {},
        "moved_bytes": None,
        "device": "cpu",
        "torch": "2.13.0",
        **more,
    }


def outcome(seconds: float, **more: Any) -> Outcome:
    """What two ranks that saw the same would write down."""
    return Outcome(answers=(answer(seconds, **more),) * 2)
