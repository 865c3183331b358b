"""The loop of deepspeed_before.py, with its configuration. What the engine did by itself is written out."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import BATCH, DEVICE, NUM_MICRO, NUM_STEPS, Model, arguments, eval_data, loss_of, report, train_data

import shardwise as sw

args = arguments()
sw.init()
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": NUM_MICRO,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": args.precision == "bf16"},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}
model, optimizer = sw.shard(model, optimizer, **sw.from_deepspeed(config).words)

first_step = 0
if args.checkpoint.exists():
    saved = sw.load(args.checkpoint, model, optimizer)
    scheduler.load_state_dict(saved["scheduler"])
    first_step = saved["step"]

for step in range(first_step, args.steps):
    step_loss = torch.zeros((), device=DEVICE)
    for micro, tokens in enumerate(train_data(step)):
        with nullcontext() if micro == NUM_MICRO - 1 else sw.accumulate(model):
            loss = loss_of(model(tokens), tokens)
            (loss / NUM_MICRO).backward()
        step_loss += loss.detach() / NUM_MICRO
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    report(f"step {step + 1} loss", step_loss)

    if (step + 1) % 10 == 0:
        model.eval()
        with torch.no_grad():
            report("eval loss", torch.stack([loss_of(model(tokens), tokens) for tokens in eval_data()]).mean())
        model.train()
        sw.save(args.checkpoint, model, optimizer, extra={"scheduler": scheduler.state_dict(), "step": step + 1})

dist.destroy_process_group()
