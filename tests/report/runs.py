"""Run folders made by hand, as the trainer writes them."""

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

PARAMS, OPTIMIZER, TOKENS = 6_695_936, 13_386_240, 2048


def row(step: int, loss: float, **more: float) -> Json:
    held = {
        "memory_params": PARAMS,
        "memory_peak_grads": PARAMS,
        "memory_optimizer": OPTIMIZER,
        "memory_peak_buffers": 468,
    }
    return {
        "step": step,
        "time": 1.8e9 + step,
        "loss": loss,
        "tokens": step * TOKENS,
        "tokens_per_s": 10_000.0,
        **held,
        **more,
    }


def evaluation(step: int, loss: float) -> Json:
    return {"step": step, "time": 1.8e9 + step, "eval_loss": loss, "eval_perplexity": 2.0}


def make_run(
    folder: Path,
    rows: list[Json],
    left: list[Json] | None = None,
    plan: Json | None = None,
    traffic: Json | None = None,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": "tiny", "strategy": "auto", "max_steps": 60}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    if left is not None:
        (folder / "metrics-left.jsonl").write_text("".join(json.dumps(one) + "\n" for one in left))
    for name, content in (("plan.json", plan), ("traffic.json", traffic)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def trained(folder: Path, with_plan: bool = True) -> Path:
    """A run on one GPU that has gone on once from step 20, with evaluations."""
    gpu = {"memory_peak": 95_000_000, "memory_reserved": 120_000_000, "memory_peak_activations": 64_000_000}
    rows = [row(step, 6 - step / 15, **gpu) for step in range(2, 61, 2)] + [
        evaluation(step, 6.1 - step / 15) for step in (20, 40, 60)
    ]
    rows[0]["first_loss"] = 6.25
    left = [row(step, 6.3 - step / 15) for step in range(22, 31, 2)]
    return make_run(folder, rows, left, small_plan() if with_plan else None, moved() if with_plan else None)


def small_plan() -> Json:
    held = {
        "params": PARAMS,
        "grads": PARAMS,
        "optimizer": OPTIMIZER,
        "activations": 60_000_000,
        "gathered": 400,
        "reduce": 68,
        "loss": 3_000_000,
        "context": 0,
        "peak_active": 94_000_000,
        "peak_reserved": 118_000_000,
    }
    return {
        "model": {"name": "tiny", "num_params": PARAMS // 4},
        "cluster": {"gpu": {"name": "H100-80GB", "memory_bytes": 85_000_000_000}, "node_size": 2, "num_nodes": 1},
        "training": {"seq": 128},
        "strategies": [
            {
                "name": "ddp",
                "fits": True,
                "per_gpu_bytes": held,
                "step_seconds": 0.2,
                "tokens_per_second_per_gpu": 5120,
                "mfu": 0.3,
                "traffic_bytes": {"intra_node": PARAMS},
                "instants": [
                    {"name": "forward", "at_s": 0, "bytes": held},
                    {"name": "loss", "at_s": 0.1, "bytes": held},
                ],
                "timeline": [{"lane": "compute", "name": "forward", "begin_s": 0, "end_s": 0.2}],
            }
        ],
        "recommended": "ddp",
        "why": "it fits.",
    }


def moved() -> Json:
    rows = [{"axis": "world", "kind": "all_reduce", "dtype": "float32", "num_calls": 5, "wire_bytes": float(PARAMS)}]
    return {"seen": rows, "planned": rows}
