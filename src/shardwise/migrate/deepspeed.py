"""DeepSpeed's JSON (of version 0.19). Every key is used, ignored for a reason, or refused for a reason.

A missing key has DeepSpeed's default, if it has one: gradients are clipped to 1, and an optimizer without a learning
rate has 1e-3. The trainer decides where the file has no optimizer, no schedule, or the value "auto".

In your own training loop, the optimizer is the one that you give to `sw.shard`. Adam means AdamW, as in DeepSpeed
unless `adam_w_mode` is false. Defaults are those of the class that DeepSpeed uses: its own Adam has no weight decay,
torch's AdamW 0.01. DeepSpeed's three schedules with a warm-up exist in the trainer under their own names, and give the
same learning rate in every step.
"""

from ..base.documents import Tree
from .account import Block, as_number
from .deepspeed_sharding import read_precision, read_sharding
from .migrated import Original
from .tables import apply_rules, read_setting, table

MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-3
DECAYED = (
    "DeepSpeed decays every parameter that it is given in one group; the trainer, and Hugging Face's with DeepSpeed, "
    "leave out norms and biases"
)
WARMUP_STEPS, LEAST_WARMUP = 1000, 2


def read_deepspeed(top: Block) -> Original:
    """Read the document's settings; return what DeepSpeed would run."""
    known = table("deepspeed")
    sharding = read_sharding(top)
    read_precision(top, sharding)
    top.settings["strategy"] = sharding.strategy
    apply_rules(top, "deepspeed", "top")
    for path in known["plain_blocks"]:
        block = top
        for key in path.split("."):
            block = block.inner(key)
        apply_rules(block, "deepspeed", path)
    for row in known["switches"]:
        for key in filter(top.has, row["keys"]):
            _refuse_if_on(top, key, row)
    _read_training(top)
    return Original("deepspeed", sharding.bucket_elems)


def _refuse_if_on(top: Block, key: str, row: dict[str, Tree]) -> None:
    """Refuse the key of a feature that is not supported here if the feature is on; ignore the key if it is off."""
    if not isinstance(top.values[key], dict):
        if top.flag(key):
            top.refused(key, row["refused"])
        top.ignored(key, "it is off")
        return
    block, name = top.inner(key), row.get("size_key", "enabled")
    if block.whole(name, least=0) > 1 if "size_key" in row else block.flag(name, "on_by_default" in row):
        where, name = (block, name) if block.has(name) else (top, key)
        where.refused(name, row["refused"])
        block.settle_rest("ignored", f"belongs to {key}, which is refused")
    block.settle_rest("ignored", "it is off")


def _read_training(top: Block) -> None:
    """Read the batch, clipping, the optimizer and its schedule, logging and compilation."""
    _read_batch(top)
    if not top.auto("gradient_clipping", "--max-grad-norm of the trainer"):
        norm = top.number("gradient_clipping", MAX_GRAD_NORM, least=0)
        in_a_loop = f"call optimizer.clip_grad_norm({norm:g})" if norm else "there is nothing to call: clipping is off"
        top.sets("gradient_clipping", f"; in a loop of your own, {in_a_loop}", max_grad_norm=norm)
    _read_optimizer(top.inner("optimizer"))
    rate = top.settings.get("learning_rate")
    _read_schedule(top.inner("scheduler"), rate)
    peak = top.settings.get("learning_rate")
    if peak != rate:
        why = f"the schedule has a peak learning rate of its own, {peak:g}"
        top.inner("optimizer").inner("params").ignored("lr", why)
    read_setting(top, "steps_per_print", "logging_steps")
    reporters = []
    for name in ("tensorboard", "wandb"):
        block = apply_rules(top.inner(name), "deepspeed", name)
        reporters += [name] if block.flag("enabled") else []
        block.used_if(name in reporters, "enabled", f"report_to {name}", "it is off")
    top.settings |= {"report_to": tuple(reporters)} if reporters else {}
    # `disable` and `backend` are from the time when DeepSpeed called torch.compile; DeepCompile is refused.
    block = apply_rules(top.inner("compile"), "deepspeed", "compile")
    is_compiled = block.has("disable") and not block.flag("disable")
    block.word("backend", ("inductor",), "inductor")
    compiled = "compile on: torch.compile, block by block (DeepSpeed has dropped the key)"
    block.used_if(is_compiled, ("disable", "backend"), compiled, "compile auto")
    top.settings |= {"compile": "on"} if is_compiled else {}


def _read_batch(top: Block) -> None:
    batch = table("deepspeed")["batch"]
    total, micro, num_micro = (read_setting(top, key, setting, auto=True) for key, setting in batch.items())
    if micro and num_micro is None and total is None and not top.has("gradient_accumulation_steps"):
        top.settings["gradient_accumulation_steps"] = 1  # DeepSpeed's default; ours follows from the global batch
    per_rank = (micro or 1) * (num_micro or 1)
    if total and total % per_rank:
        product = f"ranks x {micro or 1} train_micro_batch_size_per_gpu x {num_micro or 1} gradient_accumulation_steps"
        fix = f"make it a multiple of {per_rank}"
        top.refused("train_batch_size", f"it is not {product} for any number of ranks; {fix}")
    elif total and micro and num_micro:
        top.used("train_batch_size", f"global_batch_size {total}, which needs {total // per_rank} ranks")


def _read_optimizer(block: Block) -> None:
    names = table("deepspeed")["optimizers"]
    params = block.inner("params")
    apply_rules(block, "deepspeed", "optimizer")
    if not block.has("type"):
        params.settle_rest("refused", "DeepSpeed makes no optimizer without a type; write optimizer.type")
        return
    chosen = block.word("type", names, "")
    name = names.get(chosen)
    if name is None:
        ours = ", ".join(dict.fromkeys(filter(None, names.values())))
        block.refused("type", f"the trainer has {ours}; leave the block out and give sw.shard your own optimizer")
        params.settle_rest("ignored", "belongs to an optimizer that is refused")
        return
    apply_rules(params, "deepspeed", "optimizer.params")
    note = f", which DeepSpeed runs for {chosen} as well" if chosen.endswith("Adam") else ""
    block.sets("type", note, optimizer=name)
    read_setting(params, "lr", "learning_rate", LEARNING_RATE, True)
    decay = 0.0
    if name == "adamw":
        decay = _read_adam(params, chosen)
    else:
        apply_rules(params, "deepspeed", "optimizer.params of SGD")
        read_setting(params, "momentum", "momentum", 0.0)
    if not params.auto("weight_decay", f"--weight-decay of the trainer; {DECAYED}"):
        decay = params.number("weight_decay", decay, least=0)
        params.sets("weight_decay", f"; {DECAYED}" if decay else "", weight_decay=decay)


def _read_adam(params: Block, chosen: str) -> float:
    """Read the parameters of Adam and return its default weight decay."""
    if not params.auto("betas", "--adam-beta1 and --adam-beta2 of the trainer"):
        beta1, beta2 = params.read("betas", _as_betas, (0.9, 0.999))
        params.sets("betas", adam_beta1=beta1, adam_beta2=beta2)
    read_setting(params, "eps", "adam_epsilon", 1e-8, True)
    is_decoupled = params.flag("adam_w_mode", True) or chosen == "AdamW"
    is_torch = params.flag("torch_adam")
    params.ignored("torch_adam", "torch's fused AdamW is the optimizer here")
    params.ignored("adam_w_mode", "weight decay is decoupled from the gradient, as in AdamW")
    decay = 0.01 if is_torch and is_decoupled else 0.0
    is_decayed = params.auto("weight_decay", "") or params.number("weight_decay", decay, least=0) > 0
    if not is_decoupled and is_decayed:
        params.refused("adam_w_mode", "decay inside the gradient is not AdamW; write true, or weight_decay 0")
    return decay


def _as_betas(value: Tree) -> tuple[float, float]:
    betas = [as_number(part, least=0) for part in value] if isinstance(value, list) else []
    if len(betas) != 2 or max(betas) >= 1:
        raise ValueError("it must be two numbers, each at least 0 and below 1")
    return betas[0], betas[1]


def _read_schedule(block: Block, rate: float | None) -> None:
    """Read the schedule. `rate` is the optimizer's learning rate: the peak, if the schedule names none."""
    names, refused = table("deepspeed")["schedules"], table("deepspeed")["refused_schedules"]
    params = block.inner("params")
    if not block.has("type"):
        params.settle_rest("refused", "DeepSpeed makes no schedule without a type; write scheduler.type")
        return
    chosen = block.word("type", (*names, *refused), "")
    if chosen not in names:
        instead = "use a scheduler of your own in your loop, or one of the trainer's (--lr-scheduler-type)"
        block.refused("type", f"{refused.get(chosen, 'it is unknown')}; {instead}")
        params.settle_rest("ignored", "belongs to a schedule that is refused")
        return
    same = "the same learning rate in every step; a skipped step counts here, and not in DeepSpeed"
    block.sets("type", f": {same}", lr_scheduler_type=names[chosen])
    params.sets("warmup_type", warmup_type=params.word("warmup_type", ("log", "linear"), "log"))
    if not params.auto("warmup_num_steps", "--warmup-steps of the trainer"):
        steps = params.whole("warmup_num_steps", WARMUP_STEPS, least=0)
        note = "" if steps else ": DeepSpeed's least (its newest version refuses 0)"
        params.sets("warmup_num_steps", note, warmup_steps=steps or LEAST_WARMUP)
    key = "total_num_steps"
    if chosen != "WarmupLR" and not params.auto(key, "all steps of the run") and params.has(key):
        params.sets(key, "; --max-steps is the length of the run", schedule_steps=params.whole(key, 1, least=1))
    if chosen == "WarmupCosineLR":
        read_setting(params, "warmup_min_ratio", "warmup_min_ratio", 0.0)
        read_setting(params, "cos_min_ratio", "min_lr_ratio", 1e-4)
    else:
        _read_rates(params, rate if chosen == "WarmupLR" else LEARNING_RATE)
    apply_rules(params, "deepspeed", "scheduler.params")


def _read_rates(params: Block, peak: float | None) -> None:
    """Read the learning rates at the start and the end of the warm-up; the second replaces the optimizer's."""
    peak = read_setting(params, "warmup_max_lr", "learning_rate", peak, True)
    if params.auto("warmup_min_lr", "warmup_min_ratio 0: Hugging Face begins at 0"):
        return
    low = params.number("warmup_min_lr", 0.0, least=0)
    if low and (peak is None or low > peak):
        limit = "which is not given" if peak is None else peak
        params.refused("warmup_min_lr", f"it must be at most warmup_max_lr, {limit}")
    ratio = low / peak if low and peak else 0.0
    params.settings |= {"warmup_min_ratio": ratio} if ratio else {}
    params.used("warmup_min_lr", f"warmup_min_ratio {ratio:g} of the learning rate")
