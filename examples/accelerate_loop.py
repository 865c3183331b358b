"""A loop on Accelerate under any strategy, in seconds on two CPU processes:

    torchrun --nproc-per-node 2 examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --strategy zero3_offload

The line that is marked is the one that such a script changes; the keywords of `sw.shard` go to the Accelerator.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--output_dir", default="runs/accelerate-loop")
    asked = parser.parse_args()

    accelerator = Accelerator(strategy=asked.strategy, gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(loader) * 3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(3):
        total = torch.zeros((), device=accelerator.device)
        for features, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(features), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(total, 'mean').item() / len(loader):.4f}")
        accelerator.save_state(f"{asked.output_dir}/epoch-{epoch}")
    accelerator.save_model(model, asked.output_dir)


if __name__ == "__main__":
    main()
