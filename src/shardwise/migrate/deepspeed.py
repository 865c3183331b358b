"""DeepSpeed's JSON (of version 0.19). Every key is used, ignored for a reason, or refused for a reason.

What a file leaves out is what DeepSpeed does by default, where there is one default: gradients are clipped to 1, and
an optimizer without a learning rate has 1e-3. What it leaves to others (an optimizer, a schedule, "auto") is what the
trainer does.
"""

from typing import Any

from ..base.documents import Tree
from .account import Block
from .deepspeed_optimizer import read_optimizer, read_schedule
from .deepspeed_sharding import read_precision, read_sharding
from .migrated import Original
from .tables import apply_rules, rules, table

# Blocks with fixed answers only.
PLAIN_BLOCKS = ("activation_checkpointing", "aio", "flops_profiler", "comms_logger", "csv_monitor", "comet")
# DeepSpeed's key, and ours.
BATCH = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
MAX_GRAD_NORM = 1.0


def read_deepspeed(top: Block) -> tuple[dict[str, Any], Original]:
    """Settings of the trainer, and what DeepSpeed would run."""
    sharding = read_sharding(top)
    precision = read_precision(top, sharding)
    apply_rules(top, rules("deepspeed", "top"))
    _read_plain_blocks(top)
    _refuse_switches(top)
    training = _read_training(top)
    settings = {
        "strategy": sharding.strategy,
        **precision,
        **({} if sharding.node_size is None else {"node_size": sharding.node_size}),
        **({} if sharding.folder is None else {"offload": (f"disk:{sharding.folder}",)}),
        **({"export": True} if sharding.exports else {}),
        **training,
    }
    return settings, Original("deepspeed", sharding.bucket_elems)


def _read_plain_blocks(top: Block) -> None:
    checkpoint = top.inner("checkpoint")
    blocks = {name: top.inner(name) for name in PLAIN_BLOCKS}
    blocks |= {"checkpoint": checkpoint, "timers.throughput": top.inner("timers").inner("throughput")}
    blocks |= {f"checkpoint.{name}": checkpoint.inner(name) for name in ("parallel_write", "writer")}
    for path, block in blocks.items():
        apply_rules(block, rules("deepspeed", path))


def _refuse_switches(top: Block) -> None:
    """Features that are not supported here: refused while they are on, ignored while they are off."""
    for row in table("deepspeed")["switches"]:
        for key in row["keys"]:
            if top.has(key):
                _refuse_if_on(top, key, row)


def _refuse_if_on(top: Block, key: str, row: dict[str, Tree]) -> None:
    if not isinstance(top.values[key], dict):
        if top.flag(key):
            top.refused(key, row["refused"])
        top.ignored(key, "it is off")
        return
    block = top.inner(key)
    if "size_key" in row:
        name = row["size_key"]
        is_on = block.whole(name, least=0) > 1
    else:
        name = "enabled"
        is_on = block.flag(name, "on_by_default" in row)
    if is_on:
        where, name = (block, name) if block.has(name) else (top, key)
        where.refused(name, row["refused"])
        block.ignored_whole(f"belongs to {key}, which is refused")
    block.ignored_whole("it is off")


def _read_training(top: Block) -> dict[str, Any]:
    """The batch, the optimizer and its schedule, clipping, logging and compilation."""
    block = top.inner("optimizer")
    params = block.inner("params")
    optimizer = read_optimizer(block, params)
    schedule = read_schedule(top, optimizer)
    rate = schedule.get("learning_rate")
    if rate is not None and rate != optimizer.get("learning_rate"):
        params.ignored("lr", f"the schedule has a peak learning rate of its own, {rate:g}")
    if top.word("gradient_allreduce_op", ("mean", "sum"), "mean") == "sum":
        top.refused("gradient_allreduce_op", "gradients are averaged over ranks; multiply the loss by their number")
    top.used("gradient_allreduce_op", "the mean over ranks, as here")
    return {
        **_read_batch(top),
        **_read_clipping(top),
        **optimizer,
        **schedule,
        **_read_logging(top),
        **_read_compiler(top),
    }


def _read_batch(top: Block) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, setting in BATCH.items():
        if top.auto(key, f"--{setting.replace('_', '-')} of the trainer") or not top.has(key):
            continue
        value = top.whole(key, least=1)
        if value:
            settings[setting] = value
            top.used(key, f"{setting} {value}")
    total, micro, num_micro = (settings.get(setting) for setting in BATCH.values())
    if micro and num_micro is None and total is None and not top.has("gradient_accumulation_steps"):
        settings["gradient_accumulation_steps"] = 1  # DeepSpeed's default; ours follows from the global batch
    per_rank = (micro or 1) * (num_micro or 1)
    if total and total % per_rank:
        top.refused(
            "train_batch_size",
            f"it is not ranks x {micro or 1} train_micro_batch_size_per_gpu x {num_micro or 1} "
            f"gradient_accumulation_steps for any number of ranks; make it a multiple of {per_rank}",
        )
    elif total and micro and num_micro:
        top.used("train_batch_size", f"global_batch_size {total}, which needs {total // per_rank} ranks")
    return settings


def _read_clipping(top: Block) -> dict[str, Any]:
    if top.auto("gradient_clipping", "--max-grad-norm of the trainer"):
        return {}
    norm = top.number("gradient_clipping", MAX_GRAD_NORM, least=0)
    in_a_loop = f"call optimizer.clip_grad_norm({norm:g})" if norm else "there is nothing to call: clipping is off"
    top.used("gradient_clipping", f"max_grad_norm {norm:g}; in a loop of your own, {in_a_loop}")
    return {"max_grad_norm": norm}


def _read_logging(top: Block) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if top.has("steps_per_print"):
        steps = top.whole("steps_per_print", least=1)
        top.used("steps_per_print", f"logging_steps {steps}")
        settings |= {"logging_steps": steps} if steps else {}
    reporters = []
    for name in ("tensorboard", "wandb"):
        block = top.inner(name)
        apply_rules(block, rules("deepspeed", name))
        if block.flag("enabled"):
            reporters.append(name)
            block.used("enabled", f"report_to {name}")
        else:
            block.ignored("enabled", "it is off")
    return settings | ({"report_to": tuple(reporters)} if reporters else {})


def _read_compiler(top: Block) -> dict[str, Any]:
    """`disable` and `backend` are from the time when DeepSpeed called torch.compile; DeepCompile is refused."""
    block = top.inner("compile")
    apply_rules(block, rules("deepspeed", "compile"))
    is_on = block.has("disable") and not block.flag("disable")
    block.word("backend", ("inductor",), "inductor")
    for key in ("disable", "backend"):
        if is_on:
            block.used(key, "compile: torch.compile, block by block (DeepSpeed has dropped the key)")
        else:
            block.ignored(key, "nothing is compiled")
    return {"compile": True} if is_on else {}
