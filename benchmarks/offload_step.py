"""Seconds, memory and moves of a training step whose state rests off the device, for one strategy in one process.

    python -m benchmarks.offload_step zero2_offload --layers 20
    python -m benchmarks.offload_step zero3_offload+optimizer=host:0.4 --layers 40 --hidden 5120 --ffn 13824
    python -m benchmarks.offload_step zero3_nvme --layers 4 --disk-path /nvme
    python -m benchmarks.offload_step zero2_offload --clip 1e9,1e-9     # never clipped: updates before the norm are
                                                                        # used; always clipped
    python -m benchmarks.offload_step zero2_offload --tokens 8192,32768

Blocks as in `shardwise bench` (`--shape blocks-202m-20`), checkpointed, bf16 with fp32 masters, gradients reduced in
bf16. Steps are not waited for one by one: the mean is over all of them, and the updates of the last one are waited for
in the end, as those before the first are. Several values of --clip and --tokens are measured one after the other, with
one set-up. `shardwise bench` compares with others; this is for shapes and places that it would take too long for.
"""

import argparse
import itertools
import time
from typing import Any

import torch

import shardwise as sw
from shardwise.bench.case import Shape
from shardwise.bench.model import Blocks
from shardwise.core.engine.guards import engine_of
from shardwise.trainer.checkpointing import checkpoint_blocks


def main() -> None:
    asked = parsed()
    sw.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = max(1, asked.hidden // 128)
    shape = Shape("blocks", asked.hidden, asked.ffn, asked.layers, heads, heads, max(asked.tokens))
    torch.manual_seed(0)
    with device:
        model: Any = Blocks(shape)
    num_params = sum(param.numel() for param in model.parameters())
    checkpoint_blocks(model, "full", blocks=[type(model.blocks[0])])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    begin_s = time.perf_counter()
    disk = {} if asked.disk_path is None else {"disk_path": asked.disk_path}
    model, optimizer = sw.shard(
        model,
        optimizer,
        asked.strategy,
        reduce_dtype="bf16",
        early_update=not any(asked.clip),
        speculation=asked.speculation,
        **disk,
    )
    print(f"{num_params / 1e9:.2f}B parameters, set up in {time.perf_counter() - begin_s:.1f} s\n{sw.describe(model)}")

    def train(tokens: int, clip: float, num_steps: int) -> float:
        """Mean seconds; nothing is left to do before and after."""
        x = torch.randn(1, tokens, asked.hidden, device=device, dtype=torch.bfloat16)
        settle(model)
        begin_s = time.perf_counter()
        for _ in range(num_steps):
            model(x).float().square().mean().backward()
            if clip:
                optimizer.clip_grad_norm(clip)
            optimizer.step()
            optimizer.zero_grad()
        settle(model)
        return (time.perf_counter() - begin_s) / num_steps

    engine = engine_of(model)
    num_updates = asked.steps * sum(state.flat.host_updates for state in engine.trainable_states)
    for clip, tokens in itertools.product(asked.clip, asked.tokens):
        train(tokens, clip, asked.warmup)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine.host_jobs.num_ahead.clear()
        step_s = train(tokens, clip, asked.steps)
        held, ahead = sw.memory(model, optimizer), engine.host_jobs.num_ahead
        moved = ", ".join(f"{way.replace('_', ' ')} {size / 1e9:.2f}" for way, size in sw.traffic(model).moves.items())
        print(
            f"{asked.strategy}, {tokens} tokens, clip {clip:g}: {step_s:.3f} s a step, {tokens / step_s:,.0f} tokens/s "
            f"(mean of {asked.steps})\n"
            f"  updates before the norm: {ahead['accepted']} used, {ahead['dropped']} dropped, of {num_updates}; "
            f"spare memory {engine.host.spare_bytes / 1e9:.2f} GB\n"
            f"  GB: device {held.peak / 1e9:.2f}, host {held.host / 1e9:.2f}, disk {held.disk / 1e9:.2f}; "
            f"moved: {moved}",
            flush=True,
        )


def settle(model: Any) -> None:
    engine_of(model).finish_updates()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy")
    for name, default in (("layers", 20), ("hidden", 4096), ("ffn", 11008)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")], default=[8192])
    parser.add_argument(
        "--clip",
        type=lambda text: [float(each) for each in text.split(",")],
        default=[1.0],
        help="0 alone: no clipping, and updates inside the backward",
    )
    parser.add_argument("--speculation", default="auto", help="memory for updates before the norm: auto, 8GB, or 0")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--disk-path")
    return parser.parse_args()


if __name__ == "__main__":
    main()
