"""A training loop around fully_shard: block by block, mixed precision, a distributed checkpoint."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import DEVICE, DTYPES, NUM_MICRO, NUM_STEPS, Model, arguments, eval_data, loss_of, report, train_data
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

args = arguments()
dist.init_process_group()
mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=DTYPES[args.precision], reduce_dtype=torch.float32)
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)

first_step = 0
if args.checkpoint.exists():
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "scheduler": scheduler.state_dict(), "step": 0}
    dcp.load(saved, checkpoint_id=args.checkpoint)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first_step = saved["step"]

for step in range(first_step, args.steps):
    step_loss = torch.zeros((), device=DEVICE)
    for micro, tokens in enumerate(train_data(step)):
        is_last = micro == NUM_MICRO - 1
        model.set_requires_gradient_sync(is_last)
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
        with torch.no_grad():
            report("eval loss", torch.stack([loss_of(model(tokens), tokens) for tokens in eval_data()]).mean())
        model.train()
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "scheduler": scheduler.state_dict(), "step": step + 1}
        dcp.save(saved, checkpoint_id=args.checkpoint)

dist.destroy_process_group()
