"""A training loop around DeepSpeed's engine, which accumulates, clips, updates and steps the schedule by itself."""

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, DEVICE, NUM_MICRO, NUM_STEPS, Model, arguments, eval_data, loss_of, report, train_data

args = arguments()
deepspeed.init_distributed()
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
model, optimizer, _, scheduler = deepspeed.initialize(
    model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
)

first_step = 0
if args.checkpoint.exists():
    _, saved = model.load_checkpoint(args.checkpoint)
    first_step = saved["step"]

for step in range(first_step, args.steps):
    step_loss = torch.zeros((), device=DEVICE)
    for tokens in train_data(step):
        loss = loss_of(model(tokens), tokens)
        model.backward(loss)
        model.step()
        step_loss += loss.detach() / NUM_MICRO
    report(f"step {step + 1} loss", step_loss)

    if (step + 1) % 10 == 0:
        model.eval()
        with torch.no_grad():
            report("eval loss", torch.stack([loss_of(model(tokens), tokens) for tokens in eval_data()]).mean())
        model.train()
        model.save_checkpoint(args.checkpoint, client_state={"step": step + 1})

dist.destroy_process_group()
