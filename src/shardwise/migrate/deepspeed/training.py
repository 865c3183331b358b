"""What DeepSpeed's JSON says of the training beside its optimizer: the batch, clipping, and where numbers go."""

from typing import Any

from ..account import Block
from ..rules import settle
from .keys import IGNORED
from .optimizer import read_optimizer
from .schedule import read_schedule

# DeepSpeed's key, and ours.
BATCH = (
    ("train_batch_size", "global_batch_size"),
    ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
)
CLIPPED_TO = 1.0


def read_training(top: Block) -> dict[str, Any]:
    block = top.inner("optimizer")
    params = block.inner("params")
    optimizer = read_optimizer(block, params)
    schedule = read_schedule(top, optimizer)
    rate = schedule.get("learning_rate")
    if rate is not None and rate != optimizer.get("learning_rate"):
        params.ignored("lr", f"the schedule goes up to a learning rate of its own, {rate:g}")
    _read_rest(top)
    return {
        **_read_batch(top),
        **_read_clipping(top),
        **optimizer,
        **schedule,
        **_read_reports(top),
        **_read_compiler(top),
    }


def as_trained(setting: str) -> str:
    """What becomes of "auto"."""
    return f"--{setting.replace('_', '-')}, as the trainer has it"


def _read_batch(top: Block) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, setting in BATCH:
        if top.auto(key, as_trained(setting)) or not top.has(key):
            continue
        value = top.whole(key, least=1)
        if value:
            found[setting] = value
            top.used(key, f"{setting} {value}")
    whole, micro, num_micro = (found.get(setting) for _, setting in BATCH)
    if micro and num_micro is None and whole is None and not top.has("gradient_accumulation_steps"):
        found["gradient_accumulation_steps"] = 1  # DeepSpeed's; ours would be what a global batch asks for
    of_a_rank = (micro or 1) * (num_micro or 1)
    if whole and whole % of_a_rank:
        top.refused(
            "train_batch_size",
            f"it is not ranks x {micro or 1} train_micro_batch_size_per_gpu x {num_micro or 1} "
            f"gradient_accumulation_steps for any number of ranks; make it a multiple of {of_a_rank}",
        )
    elif whole and micro and num_micro:
        top.used("train_batch_size", f"global_batch_size {whole}, which is so on {whole // of_a_rank} ranks")
    return found


def _read_clipping(top: Block) -> dict[str, Any]:
    if top.auto("gradient_clipping", as_trained("max_grad_norm")):
        return {}
    norm = top.number("gradient_clipping", CLIPPED_TO, least=0)
    in_a_loop = f"in a loop of your own, optimizer.clip_grad_norm({norm:g})"
    if norm == 0:
        in_a_loop = "clipping is off, and in a loop of your own there is nothing to call"
    top.used("gradient_clipping", f"max_grad_norm {norm:g}; {in_a_loop}")
    return {"max_grad_norm": norm}


def _read_reports(top: Block) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sinks = []
    for name in ("tensorboard", "wandb"):
        block = top.inner(name)
        settle(block, IGNORED[name])
        if block.flag("enabled"):
            sinks.append(name)
            block.used("enabled", f"report_to {name}")
        else:
            block.ignored("enabled", "it is off")
    comet = top.inner("comet")
    if comet.flag("enabled"):
        comet.refused("enabled", "nothing is sent to Comet; tensorboard and wandb are what there is")
    settle(comet, IGNORED["comet"])
    if top.has("steps_per_print"):
        steps = top.whole("steps_per_print", least=1)
        top.used("steps_per_print", f"logging_steps {steps}")
        found |= {"logging_steps": steps} if steps else {}
    return {**found, **({"report_to": tuple(sinks)} if sinks else {})}


def _read_rest(top: Block) -> None:
    if top.word("gradient_allreduce_op", ("mean", "sum"), "mean") == "sum":
        top.refused(
            "gradient_allreduce_op", "gradients are averaged over ranks; multiply the loss by their number instead"
        )
    top.used("gradient_allreduce_op", "the mean over ranks, as here")
    if top.whole("sequence_parallel_size", 1, least=1) > 1:
        top.refused("sequence_parallel_size", "sequences are not split over ranks here; leave it out")
    top.ignored("sequence_parallel_size", "one rank has whole sequences")


def _read_compiler(top: Block) -> dict[str, Any]:
    """DeepCompile is refused; `disable` and `backend` said that torch.compile is to be used, once."""
    compile_ = top.inner("compile")
    if compile_.flag("deepcompile"):
        compile_.refused("deepcompile", "there is no such compiler here; --compile is torch.compile, block by block")
    compile_.ignored("deepcompile", "it is off")
    settle(compile_, IGNORED["compile"])
    compiles = compile_.has("disable") and not compile_.flag("disable")
    compile_.word("backend", ("inductor",), "inductor")
    for key in ("disable", "backend"):
        if compiles:
            compile_.used(key, "compile: torch.compile, block by block (DeepSpeed has dropped the key)")
        else:
            compile_.ignored(key, "nothing is compiled")
    return {"compile": True} if compiles else {}
