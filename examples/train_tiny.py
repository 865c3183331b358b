"""Train a small transformer on Python's own manual, sharded, on whatever ranks there are.

    torchrun --nproc-per-node 2 examples/train_tiny.py
    torchrun --nproc-per-node 4 examples/train_tiny.py --strategy hsdp --node-size 2 --precision bf16
    python examples/train_tiny.py --strategy ddp --steps 20

The global batch is the contract: the losses are the same for any number of ranks, any strategy and any split
into micro-batches.
"""

import argparse
import math
import time

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.train import data
from shardwise.train.model import Transformer
from shardwise.train.shapes import TransformerShape


def main() -> None:
    args = parse_args()
    sw.init()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)  # the same on all ranks: each draws the same weights, and keeps its share
    shape = TransformerShape(vocab=data.VOCAB, hidden=192, layers=4, heads=6, kv_heads=2, ffn=512, max_seq=args.seq)
    model = Transformer(shape)
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    model, optimizer = sw.shard(
        model, optimizer, strategy=args.strategy, precision=args.precision, node_size=args.node_size
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_then_cosine(step, args.steps))
    device = next(model.parameters()).device

    if rank == 0:
        print(
            f"{num_params / 1e6:.2f}M parameters, {args.strategy} in {args.precision}; global batch "
            f"{args.global_batch} = {num_ranks} ranks x {args.micro_batches} micro-batches "
            f"x {args.global_batch // (num_ranks * args.micro_batches)} samples of {args.seq} bytes"
        )
    tokens_per_step = args.global_batch * args.seq
    loss, num_steps = torch.zeros((), device=device), 0
    began = time.perf_counter()
    for step in range(args.steps):
        samples = torch.stack(data.batch(step, args.global_batch, args.seq, args.seed), dim=1)
        mine = data.share(samples, rank, num_ranks).to(device)  # (samples, tokens and targets, seq)
        micro_batches = [data.share(mine, part, args.micro_batches) for part in range(args.micro_batches)]
        with sw.accumulate(model):
            for micro_batch in micro_batches[:-1]:
                loss += backward(model, micro_batch, args.micro_batches)
        loss += backward(model, micro_batches[-1], args.micro_batches)
        num_steps += 1

        norm = float(optimizer.clip_grad_norm(1.0))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        if step % args.logging_steps == 0 or step == args.steps - 1:
            dist.all_reduce(loss)
            mean = loss.item() / (num_ranks * num_steps)  # over the steps since the last line
            speed = (step + 1) * tokens_per_step / (time.perf_counter() - began)
            if rank == 0:
                print(f"step {step:4d}  loss {mean:.4f}  norm {norm:6.3f}  {speed:7.0f} tokens/s", flush=True)
            loss, num_steps = torch.zeros_like(loss), 0

    state = sw.full_state_dict(model)  # every rank takes part, because every rank holds a share
    if rank == 0:
        print(f"\nwhole model: {len(state)} tensors, {sum(t.nbytes for t in state.values()) / 1e6:.1f} MB")
        print(f"what one rank moved in the last step:\n{sw.traffic(model)}")
    dist.destroy_process_group()


def backward(model: Transformer, micro_batch: torch.Tensor, num_micro_batches: int) -> torch.Tensor:
    """Add the gradient of one of several equal micro-batches; returns its part of this rank's mean loss."""
    tokens, targets = micro_batch.unbind(dim=1)
    loss = model(tokens, targets) / num_micro_batches
    loss.backward()
    return loss.detach()


def warmup_then_cosine(step: int, num_steps: int, num_warmup: int = 10) -> float:
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategy", default="zero3", help="a preset's name: ddp, zero1, zero2, zero3, hsdp, ...")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or pure-bf16")
    parser.add_argument("--node-size", type=int, default=None, help="ranks per node, for hybrid strategies")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=16, help="samples per step, over all ranks")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts in which a rank computes its share")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sample")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logging-steps", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
