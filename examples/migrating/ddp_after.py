"""The loop of ddp_before.py, sharded in any way: `strategy` is all that says how."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import DEVICE, DTYPES, NUM_MICRO, NUM_STEPS, Model, arguments, eval_data, loss_of, report, train_data

import shardwise as sw

args = arguments()
sw.init()
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = sw.shard(model, optimizer, strategy="ddp", precision="fp32")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
autocast = torch.autocast(DEVICE.type, DTYPES[args.precision], enabled=args.precision != "fp32")

first_step = 0
if args.checkpoint.exists():
    saved = sw.load(args.checkpoint, model, optimizer)
    scheduler.load_state_dict(saved["scheduler"])
    first_step = saved["step"]

for step in range(first_step, args.steps):
    step_loss = torch.zeros((), device=DEVICE)
    for micro, tokens in enumerate(train_data(step)):
        is_last = micro == NUM_MICRO - 1
        with nullcontext() if is_last else sw.accumulate(model):
            with autocast:
                loss = loss_of(model(tokens), tokens) / NUM_MICRO
            loss.backward()
        step_loss += loss.detach()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    report(f"step {step + 1} loss", step_loss)

    if (step + 1) % 10 == 0:
        model.eval()
        with torch.no_grad(), autocast:
            report("eval loss", torch.stack([loss_of(model(tokens), tokens) for tokens in eval_data()]).mean())
        model.train()
        sw.save(args.checkpoint, model, optimizer, extra={"scheduler": scheduler.state_dict(), "step": step + 1})

dist.destroy_process_group()
