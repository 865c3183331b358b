"""A training loop around DistributedDataParallel: autocast, accumulation, clipping, a schedule, a checkpoint."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import DEVICE, DTYPES, NUM_MICRO, NUM_STEPS, Model, arguments, eval_data, loss_of, report, train_data
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

args = arguments()
dist.init_process_group()
model = DistributedDataParallel(Model().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
autocast = torch.autocast(DEVICE.type, DTYPES[args.precision], enabled=args.precision != "fp32")

first_step = 0
if args.checkpoint.exists():
    saved = torch.load(args.checkpoint, map_location=DEVICE, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first_step = saved["step"]

for step in range(first_step, args.steps):
    step_loss = torch.zeros((), device=DEVICE)
    for micro, tokens in enumerate(train_data(step)):
        is_last = micro == NUM_MICRO - 1
        with nullcontext() if is_last else model.no_sync():
            with autocast:
                loss = loss_of(model(tokens), tokens) / NUM_MICRO
            loss.backward()
        step_loss += loss.detach()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    report(f"step {step + 1} loss", step_loss)

    if (step + 1) % 10 == 0:
        model.eval()
        with torch.no_grad(), autocast:
            report("eval loss", torch.stack([loss_of(model(tokens), tokens) for tokens in eval_data()]).mean())
        model.train()
        if dist.get_rank() == 0:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"scheduler": scheduler.state_dict(), "step": step + 1}, args.checkpoint)

dist.destroy_process_group()
