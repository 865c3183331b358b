"""Compare the training of two checkouts bit for bit: losses, norms, weights and traffic of every preset.

    python -m benchmarks.same_training ../other-checkout

Both checkouts run on this interpreter, on 2 and on 4 ranks (two nodes of two), in fp32 and bf16, with two micro-batches
and clipping; and the default run of `shardwise train`, shortened. Only public names of shardwise are used here, so that
this file can run on an older checkout. Exit code 1, and a list, if anything differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4
STRATEGIES = (
    "ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp", "hybrid_shard_zero2", "hfsdp", "hpz", "zeropp",
    "zero2_offload", "zero3_offload", "zero3_nvme", "zero3+optimizer=host:0.5", "zero1+params_as=int8",
    "hsdp+grads_as=int8",
)  # fmt: skip


def train(strategy: str, precision: str, node_size: int, folder: str) -> dict[str, Any]:
    """Train a small model; what one rank saw of it, with every number exact."""
    import torch
    from torch import nn

    import shardwise as sw

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.Linear(3 * width, width),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(97, 40)
            self.blocks = nn.ModuleList(Block(40) for _ in range(5))
            self.head = nn.Linear(40, 97)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(1)
    model = Model()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    disk = {"disk_path": folder} if "nvme" in strategy else {}
    sharded, optimizer = sw.shard(model, plain, strategy, precision=precision, node_size=node_size, **disk)
    draws = torch.Generator().manual_seed(int(os.environ["RANK"]))
    losses, norms = [], []
    for _ in range(STEPS):
        for last in (False, True):
            tokens = torch.randint(97, (3, 12), generator=draws)

            def run(tokens: torch.Tensor = tokens) -> float:
                out = sharded(tokens).float()
                loss = nn.functional.cross_entropy(out[:, :-1].reshape(-1, 97), tokens[:, 1:].reshape(-1))
                (loss / 2).backward()
                return float(loss.detach())

            if last:
                losses.append(run().hex())
            else:
                with sw.accumulate(sharded):
                    losses.append(run().hex())
        norms.append(float(optimizer.clip_grad_norm(0.5)).hex())
        optimizer.step()
        optimizer.zero_grad()
    traffic = str(sw.traffic(sharded))
    weights = hashlib.sha256()
    for name, tensor in sorted((sw.full_state_dict(sharded) or {}).items()):
        weights.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return {"losses": losses, "norms": norms, "weights": weights.hexdigest(), "traffic": traffic.splitlines()}


def run_rank(node_size: int, out: str) -> None:
    import torch

    import shardwise as sw

    torch.set_num_threads(1)
    sw.init()
    found = {}
    for strategy in STRATEGIES:
        for precision in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory() as folder:
                found[f"{strategy} {precision}"] = train(strategy, precision, node_size, folder)
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def fingerprint(checkout: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        for num_ranks in (2, 4):
            out = f"{folder}/{num_ranks}"
            launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
            subprocess.run([*launch, __file__, "--rank", "2", out], env=environment, cwd=folder, check=True)
            for rank in range(num_ranks):
                for name, value in json.loads(Path(f"{out}.{rank}").read_text()).items():
                    found[f"{num_ranks} ranks, {name}, rank {rank}"] = value
        words = ["max_steps=12", "--output-dir", f"{folder}/run"]
        run = [sys.executable, "-m", "shardwise", "train", *words]
        subprocess.run(run, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        rows = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        found["shardwise train"] = [row["loss"] for row in rows if "loss" in row]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", type=Path, nargs="?", help="the checkout to compare this one with")
    parser.add_argument(
        "--keep", type=Path, help="a file for what the other gave; read instead of running it, if there"
    )
    parser.add_argument("--rank", nargs=2, metavar=("NODE_SIZE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(int(args.rank[0]), args.rank[1])
        return
    if args.keep is not None and args.keep.exists():
        theirs = json.loads(args.keep.read_text())
    else:
        theirs = fingerprint(args.other.resolve())
        if args.keep is not None:
            args.keep.write_text(json.dumps(theirs))
    ours = fingerprint(ROOT)
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    print(f"{len(ours) - len(differing)} of {len({*ours, *theirs})} are identical bit for bit", *differing, sep="\n")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
