"""Everything a training run can be told, as one frozen value. Pure: no torch, no pydantic.

The names here are the keys of a configuration file and, with hyphens, the flags of `shardwise train`; the help and
the panel of each stand beside its default. None means that the value follows from others: the comment, or the
help, says how. `config.py` makes a `Settings` from files, the environment and flags; a rank gets it as JSON.
"""

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from ..base.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters, in peft's words. No targets: peft's own choice for the architecture."""

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigurationError(f"lora.r: {self.r} must be at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigurationError(f"lora.alpha: {self.alpha:g} must be above 0")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"lora.dropout: {self.dropout:g} must be at least 0 and below 1")


def setting(
    panel: str,
    default: Any,
    help: str,  # noqa: A002, typer's word
    *,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    limits = {"least": least, "most": most, "below": below}
    return field(default=default, metadata={"panel": panel, "help": help, **limits})


def mapping(panel: str, help: str) -> Any:  # noqa: A002
    return field(default_factory=dict, metadata={"panel": panel, "help": help})


MODEL, DATA, BATCH, TRAINING, SHARDING, RUN, LAUNCH = (
    "Model",
    "Data",
    "Batch",
    "Training",
    "Sharding",
    "Run folder",
    "Launch",
)


# Peak learning rates where none is said: all weights of a pretrained model, and adapters.
FINE_TUNING_RATE, LORA_RATE = 2e-5, 2e-4
DEEPSPEED_SCHEDULES = ("warmup-lr", "warmup-decay-lr", "warmup-cosine-lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    # fmt: off
    model: str = setting(MODEL, "tiny", "In-tree shape (tiny, 50m, llama-3.2-1b, llama-3.2-3b, llama-3-8b, llama-3-70b), or a Hugging Face folder, config.json or id.")
    shape: dict[str, int | bool] = mapping(MODEL, "In-tree shapes only: what differs from the named one, shape.layers=8. Keys: vocab, hidden, layers, heads, kv_heads, ffn, max_seq, tied.")
    random_weights: bool = setting(MODEL, False, "Fresh weights for a Hugging Face model instead of those in its folder.")
    tokenizer: str | None = setting(MODEL, None, "Folder or id of a tokenizer, or 'bytes'. Default: the model's own, else bytes.")
    lora: Lora | None = setting(MODEL, None, "Train low-rank adapters only: r=16,alpha=32 and, where needed, dropout=0.05 and targets=q_proj+v_proj.")
    gradient_checkpointing: Literal["none", "selective", "full"] = setting(MODEL, "none", "What blocks compute again in the backward: none, selective or full; alone: full.")
    compile: bool = setting(MODEL, False, "torch.compile on each block.")

    train_file: tuple[str, ...] = setting(DATA, (), "Text (.txt, .md), rows (.jsonl: text, prompt and completion, or messages), tokens (.bin). Several with commas. Default, for in-tree shapes: Python's manual.")
    dataset: str | None = setting(DATA, None, "A Hugging Face dataset: a saved folder or an id, in place of files.")
    dataset_split: str = setting(DATA, "train", "Which split of the dataset.")
    eval_file: tuple[str, ...] = setting(DATA, (), "Evaluate on these instead of on a part of the training data.")
    eval_fraction: float = setting(DATA, 0.02, "The part of the samples that is kept for evaluation; 0: none.", least=0, below=1)
    max_eval_samples: int = setting(DATA, 1000, "At most so many of them are evaluated at a time.", least=1)
    token_dtype: Literal["uint16", "uint32"] = setting(DATA, "uint16", "How wide the numbers of .bin files are.")
    seq_length: int | None = setting(DATA, None, "Tokens of a sample. Default: what the model can take, at most 2048.", least=1)
    packing: Literal["packed", "padded"] = setting(DATA, "packed", "packed: documents end to end, cut at seq-length, but rows with prompts or messages stay whole; padded: a document a sample.")
    isolate_documents: bool | None = setting(DATA, None, "Whether attention stops at the ends of documents. Default: for rows with prompts or messages.")
    max_bad_rows: int = setting(DATA, 100, "Rows that may be left out because they cannot be read; one more is an error.", least=0)

    global_batch_size: int | None = setting(BATCH, None, "Samples of a step, over all ranks and micro-batches: the contract. Default: what the next two make, else 16.", least=1)
    per_device_train_batch_size: int | None = setting(BATCH, None, "Samples of a micro-batch. Default: a rank's whole share of a step.", least=1)
    gradient_accumulation_steps: int | None = setting(BATCH, None, "Micro-batches of a step and rank. Default: what the global batch asks for.", least=1)
    per_device_eval_batch_size: int | None = setting(BATCH, None, "Samples that are evaluated at once. Default: as in training.", least=1)

    max_steps: int | None = setting(TRAINING, None, "Steps in all. Default: what the epochs make.", least=1)
    num_train_epochs: float | None = setting(TRAINING, None, "Passes over the data, where max-steps does not say. Default: 1.", least=0)
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = setting(TRAINING, "adamw", "adamw, adamw8bit (8-bit moments, needs torchao) or sgd.")
    learning_rate: float = setting(TRAINING, 3e-4, f"Its highest value. Where none is said, {FINE_TUNING_RATE:g} for all weights of a pretrained model and {LORA_RATE:g} for adapters.", least=0)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd", "warmup-lr", "warmup-decay-lr", "warmup-cosine-lr"] = setting(TRAINING, "cosine", "After the warm-up: cosine, linear, constant, or wsd (constant, then down in decay-steps). warmup-lr, warmup-decay-lr and warmup-cosine-lr are DeepSpeed's, step by step.")
    warmup_steps: float = setting(TRAINING, 0, "Steps in which the learning rate grows from 0; below 1: a part of all steps.", least=0)
    warmup_type: Literal["linear", "log"] = setting(TRAINING, "linear", "Of DeepSpeed's schedules: how it grows.")
    warmup_min_ratio: float = setting(TRAINING, 0.0, "Of DeepSpeed's schedules: the part of the learning rate that it grows from.", least=0, most=1)
    schedule_steps: int | None = setting(TRAINING, None, "Of DeepSpeed's schedules: steps until their end. Default: all.", least=1)
    decay_steps: int | None = setting(TRAINING, None, "Of wsd. Default: a fifth of all steps.", least=1)
    min_lr_ratio: float = setting(TRAINING, 0.1, "What is left of the learning rate at the end.", least=0, most=1)
    weight_decay: float = setting(TRAINING, 0.1, "Of matrices; norms and biases have none.", least=0)
    adam_beta1: float = setting(TRAINING, 0.9, "Decay of the first moment.", least=0, below=1)
    adam_beta2: float = setting(TRAINING, 0.95, "Decay of the second moment.", least=0, below=1)
    adam_epsilon: float = setting(TRAINING, 1e-8, "Added to the root of the second moment.", least=0)
    momentum: float = setting(TRAINING, 0.9, "Of sgd.", least=0)
    max_grad_norm: float = setting(TRAINING, 1.0, "Clip gradients to this norm; 0: no clipping.", least=0)
    seed: int = setting(TRAINING, 0, "Of weights, order and dropout.", least=0, most=2**63 - 1)
    eval_steps: float = setting(TRAINING, 0, "Steps between two evaluations; below 1: a part of all steps; 0: at the end only.", least=0)
    skip_nonfinite: bool = setting(TRAINING, False, "Leave out steps whose gradient is not finite, and stop after 50 in a row; else the first stops the run. fp16 always does.")
    divergence_ratio: float = setting(TRAINING, 3.0, "Stop with exit code 4 when the loss is this many times its lowest mean, or is not a number; 0: go on.", least=0)

    strategy: str | dict[str, str] = setting(SHARDING, "auto", "auto, ddp, zero1, zero2, zero3, hsdp, zero2-offload, zero3-offload, zero3-nvme, ...; or a mapping from unit patterns to them.")
    wire: tuple[str, ...] = setting(SHARDING, (), "What params and grads travel as between ranks: params=int8,grads=int4:feedback; bf16, fp16, e4m3, e5m2, int8, int4. params=int8:forward leaves backwards exact. As they are: none.")
    offload: tuple[str, ...] = setting(SHARDING, (), "What of params, grads, optimizer and activations rests on the host or on disk: optimizer=host:0.6,params=disk:/nvme (a part, a folder). The folder alone: disk:/nvme. Nothing: none.")
    precision: Literal["fp32", "bf16", "bf16-autocast", "fp16", "pure-bf16"] | None = setting(SHARDING, None, "fp32, bf16 (fp32 masters), bf16-autocast (fp32 weights, products in bf16), fp16 or pure-bf16. Default: bf16 on GPUs, fp32 on CPUs.")
    reduce_dtype: Literal["fp32", "bf16"] | None = setting(SHARDING, None, "What gradients are summed in. Default: what the precision says.")
    units: tuple[str, ...] = setting(SHARDING, (), "Classes of the modules that travel as one, LlamaDecoderLayer, or a number of parameters. Default: the model's repeated blocks.")
    node_size: int | None = setting(SHARDING, None, "Ranks that count as a node. Default: those of this machine.", least=1)

    output_dir: str | None = setting(RUN, None, "The run folder. Default: runs/MODEL-DATE-TIME.")
    resume_from_checkpoint: str | None = setting(RUN, None, "'latest', 'auto' (latest if there is one), or a checkpoint's folder; ranks and strategy may differ from those that saved it.")
    save_steps: float = setting(RUN, 0, "Steps between two saves; below 1: a part of all steps; 0: at the end only.", least=0)
    async_save: bool = setting(RUN, False, "Save in the background: training waits for a copy on the host only.")
    save_total_limit: int | None = setting(RUN, None, "Keep only the last so many checkpoints.", least=1)
    logging_steps: int = setting(RUN, 10, "Steps between two lines.", least=1)
    report_to: tuple[str, ...] = setting(RUN, (), "tensorboard, wandb; several with commas.")
    export: bool = setting(RUN, True, "Write the trained weights as a Hugging Face folder, or a PEFT adapter, at the end.")
    sample_tokens: int = setting(RUN, 160, "Tokens of a sample that is generated at the end; 0: none.", least=0)
    sample_prompt: str | None = setting(RUN, None, "What the sample begins with.")
    profile: bool = setting(RUN, False, "Write a trace of three steps.")

    device: Literal["cpu", "cuda"] | None = setting(LAUNCH, None, "Default: cuda where there is one.")
    nproc_per_node: int | None = setting(LAUNCH, None, "Ranks on this machine. Default: its GPUs, or 2 on CPUs.", least=1)
    nnodes: str = setting(LAUNCH, "1", "Machines, or MIN:MAX of them.")
    node_rank: int | None = setting(LAUNCH, None, "Which of them this is, for rdzv-backend static.", least=0)
    rdzv_backend: str = setting(LAUNCH, "c10d", "How machines find each other.")
    rdzv_endpoint: str | None = setting(LAUNCH, None, "HOST:PORT where several machines meet.")
    rdzv_id: str | None = setting(LAUNCH, None, "The job's name there. Default: a random one, of the run folder.")
    max_restarts: int = setting(LAUNCH, 0, "How often a machine's ranks are started again after a crash; they go on from the last checkpoint.", least=0)
    timeout: float = setting(LAUNCH, 600.0, "Seconds that a collective may take.", least=1)
    # fmt: on

    def __post_init__(self) -> None:
        """What can be refused by looking at the values alone."""
        for entry in dataclasses.fields(self):
            _refuse_outside(entry, getattr(self, entry.name))
        if self.train_file and self.dataset:
            raise ConfigurationError(
                f"train_file {', '.join(self.train_file)} and dataset {self.dataset}: the data comes from one of them"
            )
        if self.num_train_epochs == 0:
            raise ConfigurationError("num_train_epochs: 0 trains on nothing; it must be above 0")
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise ConfigurationError(
                f"max_steps {self.max_steps} and num_train_epochs {self.num_train_epochs:g} both say when to stop: leave one out"
            )
        if self.divergence_ratio and self.divergence_ratio <= 1:
            raise ConfigurationError(f"divergence_ratio: {self.divergence_ratio:g} must be above 1, or 0 to go on")
        for name in ("warmup_steps", "eval_steps", "save_steps"):
            steps = getattr(self, name)
            if steps > 1 and steps != int(steps):
                raise ConfigurationError(
                    f"{name}: {steps:g} is no number of steps; below 1 it is a part of all of them"
                )
        if self.decay_steps is not None and self.lr_scheduler_type != "wsd":
            raise ConfigurationError(
                f"decay_steps {self.decay_steps} belongs to lr_scheduler_type wsd, but that is {self.lr_scheduler_type}"
            )
        for name, unless in (("warmup_type", "linear"), ("warmup_min_ratio", 0.0), ("schedule_steps", None)):
            if getattr(self, name) != unless and self.lr_scheduler_type not in DEEPSPEED_SCHEDULES:
                raise ConfigurationError(
                    f"{name} {getattr(self, name)} belongs to lr_scheduler_type {', '.join(DEEPSPEED_SCHEDULES)}, but "
                    f"that is {self.lr_scheduler_type}"
                )
        num_nodes(self.nnodes)
        units_asked(self.units)
        for word in self.report_to:
            if word not in ("tensorboard", "wandb"):
                raise ConfigurationError(f"report_to: unknown {word!r}; known: tensorboard, wandb")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def _refuse_outside(entry: dataclasses.Field[Any], value: Any) -> None:
    """A number outside the limits that stand beside its default; a float that is no number has no limits."""
    limits = entry.metadata
    if not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise ConfigurationError(f"{entry.name}: {value} is not a finite number")
    if limits["least"] is not None and value < limits["least"]:
        raise ConfigurationError(f"{entry.name}: {value} must be at least {limits['least']:g}")
    if limits["most"] is not None and value > limits["most"]:
        raise ConfigurationError(f"{entry.name}: {value} must be at most {limits['most']:g}")
    if limits["below"] is not None and value >= limits["below"]:
        raise ConfigurationError(f"{entry.name}: {value} must be below {limits['below']:g}")


def interval_of(steps: float, num_steps: int) -> int:
    """Steps between two saves or evaluations (0: none), where below 1 it is a part of all steps.

    A third of 99 steps is 33, whatever binary fractions make of it.
    """
    return math.ceil(round(steps * num_steps, 6)) if steps < 1 else int(steps)


def num_nodes(text: str) -> tuple[int, int]:
    """--nnodes: a number of machines, or MIN:MAX."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ConfigurationError(f"nnodes: {text!r} is no number of machines; write 2, or 1:4 for 1 to 4")
    return low, high


def units_asked(words: tuple[str, ...]) -> str | int | tuple[str, ...]:
    """--units, as `sw.shard` takes them."""
    if not words:
        return "auto"
    numbers = [word for word in words if word.isdecimal()]
    if numbers and len(words) > 1:
        raise ConfigurationError(f"units: {', '.join(words)}: give names of classes, or one number of parameters")
    return int(numbers[0]) if numbers else words


def settings_from_json(text: str) -> Settings:
    """The inverse of `Settings.to_json`, for ranks; files that people write go through `config.py`."""
    values = json.loads(text)
    for name in ("train_file", "eval_file", "report_to", "offload", "wire", "units"):
        values[name] = tuple(values[name])
    if values["lora"] is not None:
        values["lora"] = Lora(**{**values["lora"], "targets": tuple(values["lora"]["targets"])})
    return Settings(**values)
