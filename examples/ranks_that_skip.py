"""A model of two parts, one of which a batch may not need: images on one rank, text alone on the other.

    torchrun --nproc-per-node 2 examples/ranks_that_skip.py
    torchrun --nproc-per-node 2 examples/ranks_that_skip.py --strategy shard_grad_op

Nothing in the loop is about it. A rank that leaves units out takes part in their collectives all the same.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 1)

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        if image is not None:
            for layer in self.tower:
                image = torch.relu(layer(image)) + image
            text = text + image
        for layer in self.body:
            text = torch.relu(layer(text)) + text
        return self.head(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3")
    asked = parser.parse_args()

    sw.init(hang_timeout_s=10)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = sw.shard(model, optimizer, asked.strategy, precision="fp32", units=["Linear"])
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        text = torch.randn(8, 64, generator=draw)
        image = torch.randn(8, 64, generator=draw) if (step + dist.get_rank()) % 2 else None
        loss = (model(text, image) - text.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step}: loss {loss.item():.3f}{'' if image is None else ', with images'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
