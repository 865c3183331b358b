"""All settings of a training run, as one frozen value. This file imports neither torch nor pydantic.

The names here are the keys of a configuration file and, with hyphens, the flags of `shardwise train`. Each has its
default, its panel (a group of flags in `--help`) and its help text. None means that the value follows from others, as
the help says. `config.py` makes a `Settings` from files, the environment and flags; a rank gets it as JSON.
"""

import dataclasses
import json
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..base.errors import ConfigurationError, did_you_mean
from ..planner.training import ALL_LINEAR, num_bytes_of


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters of peft. Without targets, peft chooses the modules for the architecture. `rslora`: the scale is
    alpha / sqrt(r) instead of alpha / r. `dora`: the norms of the weights are trained, too. `modules_to_save`: modules
    of which a copy is trained as a whole."""

    r: int = field(default=16, metadata={"least": 1})
    alpha: float = field(default=32.0, metadata={"above": 0})
    dropout: float = field(default=0.0, metadata={"least": 0, "below": 1})
    targets: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_limits(self, "lora.")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ConfigurationError(
                f"lora.targets: {', '.join(self.targets)}: {ALL_LINEAR} stands alone; leave out the rest"
            )


def setting(panel: str, default: Any, help: str, **limits: float) -> Any:  # noqa: A002, as in typer
    """Declare a setting; `limits` are keys of LIMITS."""
    return field(default=default, metadata={"panel": panel, "help": help, **limits})


# Limits of a number: the words in an error, and the comparison that is true for a value outside the limit.
LIMITS = {
    "least": ("at least", operator.lt),
    "most": ("at most", operator.gt),
    "above": ("above", operator.le),
    "below": ("below", operator.ge),
}
MODEL, DATA, BATCH, TRAINING = "Model", "Data", "Batch", "Training"
SHARDING, RUN, LAUNCH = "Sharding", "Run folder", "Launch"
# Default learning rates of fine-tuning: for all weights of a pretrained model, and for adapters; with an objective of
# preference, a twentieth of these.
FINE_TUNING_RATE, LORA_RATE, PREFERENCE_SHARE = 2e-5, 2e-4, 0.05
Tracker = Literal["tensorboard", "wandb"]
TrainRole = Literal["assistant", "user", "system", "tool", "all", "last"]
Backend = Literal["c10d", "static", "etcd", "etcd-v2"]
Compile = Literal["auto", "on", "off"]
AnyLossChunk = Literal["auto", "small", "large"]
Objective = Literal["dpo", "hinge", "ipo", "simpo", "orpo"]
WITH_REFERENCE = ("dpo", "hinge", "ipo")  # objectives that compare with the model without its adapters
DEFAULT_GLOBAL_BATCH = 16
# Metrics of an evaluation; the last two belong to objectives of pairs.
Metric = Literal["eval_loss", "eval_perplexity", "eval_rewards/accuracies", "eval_rewards/margins"]
DEEPSPEED_SCHEDULES = ("warmup-lr", "warmup-decay-lr", "warmup-cosine-lr")
READ_BY: dict[str, tuple[str, tuple[str, ...]]] = {  # settings that only some values of another setting read
    "decay_steps": ("lr_scheduler_type", ("wsd",)),
    **dict.fromkeys(("warmup_type", "warmup_min_ratio", "schedule_steps"), ("lr_scheduler_type", DEEPSPEED_SCHEDULES)),
    "dpo_beta": ("objective", get_args(Objective)),
    "label_smoothing": ("objective", ("dpo", "simpo")),
    "simpo_gamma": ("objective", ("simpo",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    # fmt: off
    model: str = setting(MODEL, "tiny", "In-tree shape (tiny, 50m, llama-3.2-1b, llama-3.2-3b, llama-3-8b, llama-3-70b), or a Hugging Face folder, config.json or id.")
    shape: dict[str, int | bool] = field(default_factory=dict, metadata={"panel": MODEL, "help": "Changes to an in-tree shape, as in shape.layers=8. Keys: vocab, hidden, layers, heads, kv_heads, ffn, max_seq, tied."})
    random_weights: bool = setting(MODEL, False, "Start a Hugging Face model from random weights instead of those in its folder.")
    tokenizer: str | None = setting(MODEL, None, "Folder or id of a tokenizer, or 'bytes'. Default: the model's own, otherwise bytes.")
    lora: Lora | None = setting(MODEL, None, "Train low-rank adapters only: 16 (short for r=16,alpha=32: alpha is twice r), or r=16,alpha=32 and, if needed, dropout=0.05, targets=q_proj+v_proj or targets=all-linear (all linear layers except the head), rslora, dora, and modules_to_save=lm_head+... (trained as a whole).")
    lora_from: str | None = setting(MODEL, None, "Start from the adapter in this folder, which gives all values of lora; only its dropout may be changed.")
    quantize: Literal["nf4", "int8", "int4", "fp8"] | None = setting(MODEL, None, "Store the frozen matrices of blocks in few bits, with lora: nf4 (as bitsandbytes does, 0.52 bytes each), int8, int4 or fp8.")
    gradient_checkpointing: Literal["none", "selective", "full"] = setting(MODEL, "none", "Recompute activations of blocks in the backward: none, selective or full. Without a value: full.")
    compile: Compile = setting(MODEL, "auto", "Compile each block with torch.compile: auto (on GPUs, if the run is long enough to save more time than that takes), on or off. Without a value: on. true and false are on and off.")
    loss_chunk: AnyLossChunk = setting(MODEL, "auto", "Logits that exist at a time in the loss: small (256 MB), large (1 GB, faster if the vocabulary is large), or auto (on GPUs large, if the plan says that it fits and is faster).")

    train_file: tuple[str, ...] = setting(DATA, (), "Training data: files, folders or patterns: text (.txt, .md), rows (.jsonl, .json, .csv, .tsv, .parquet), tokens (.bin). Separate several with commas. Default for in-tree shapes: Python's manual.")
    dataset: tuple[str, ...] = setting(DATA, (), "Hugging Face datasets, as saved folders or ids (owner/name, owner/name:configuration), instead of files.")
    dataset_split: str = setting(DATA, "train", "Split of the datasets.")
    data_weights: tuple[float, ...] = setting(DATA, (), "Shares of the samples of an epoch, one number for each entry of train-file or dataset. Default: everything once.")
    columns: dict[str, str] = field(default_factory=dict, metadata={"panel": DATA, "help": "Other names of columns, ours first: instruction=question,output=answer. Ours: text, messages, tools, prompt, completion, instruction, input, output, system, history, chosen, rejected and, in messages, role and content."})
    train_roles: tuple[TrainRole, ...] = setting(DATA, ("assistant",), "Messages that are trained on: assistant, user, system, tool, all, or last (only the last answer).")
    chat_template: str | None = setting(DATA, None, "File with a Jinja template for chats. Default: the tokenizer's own template.")
    eval_file: tuple[str, ...] = setting(DATA, (), "Evaluation data, instead of a part of the training data.")
    eval_fraction: float = setting(DATA, 0.02, "Part of the samples that is held out for evaluation; 0: none.", least=0, below=1)
    max_eval_samples: int = setting(DATA, 1000, "Maximum number of samples per evaluation.", least=1)
    token_dtype: Literal["uint16", "uint32"] = setting(DATA, "uint16", "Type of the tokens in .bin files.")
    seq_length: int | None = setting(DATA, None, "Tokens per sample. Default: the model's maximum, at most 2048.", least=1)
    packing: Literal["packed", "padded"] = setting(DATA, "packed", "packed: documents end to end, cut at seq-length; rows with prompts or messages stay whole. padded: one document per sample.")
    isolate_documents: bool | None = setting(DATA, None, "Stop attention at the ends of documents. Default: only for rows with prompts or messages.")
    max_bad_rows: int = setting(DATA, 100, "Maximum number of unreadable rows that are skipped; one more is an error.", least=0)

    global_batch_size: int | None = setting(BATCH, None, "Samples per step, over all ranks and micro-batches. Default: the product of the next two and the ranks, otherwise 16.", least=1)
    per_device_train_batch_size: int | Literal["auto"] | None = setting(BATCH, None, "Samples per micro-batch; auto: within the global batch, the planner takes what fits and is fastest. Default: a rank's whole share of a step.", least=1)
    gradient_accumulation_steps: int | None = setting(BATCH, None, "Micro-batches per step on each rank. Default: as many as the global batch needs.", least=1)
    per_device_eval_batch_size: int | None = setting(BATCH, None, "Samples per evaluation batch. Default: as in training.", least=1)

    max_steps: int | None = setting(TRAINING, None, "Total number of steps. Default: given by the epochs.", least=1)
    num_train_epochs: float | None = setting(TRAINING, None, "Passes over the data, if max-steps is not given. Default: 1.", above=0)
    objective: Objective | None = setting(TRAINING, None, "Train on pairs of a chosen and a rejected answer: dpo, hinge or ipo (with the model without its adapters as the reference), simpo or orpo (without a reference). Default: the next token.")
    dpo_beta: float = setting(TRAINING, 0.1, "Beta of the objective for pairs; the weight of the odds ratio for orpo.", above=0)
    label_smoothing: float = setting(TRAINING, 0.0, "Share of pairs whose answers are assumed to be swapped, for dpo and simpo.", least=0, below=0.5)
    simpo_gamma: float = setting(TRAINING, 0.5, "Margin between the rewards of both answers, for simpo.", least=0)
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = setting(TRAINING, "adamw", "Optimizer: adamw, adamw8bit (8-bit moments, needs torchao) or sgd.")
    learning_rate: float = setting(TRAINING, 3e-4, f"Peak learning rate. Default for fine-tuning: {FINE_TUNING_RATE:g} for all weights of a pretrained model, {LORA_RATE:g} for adapters; for pairs a twentieth of these.", least=0)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd", "warmup-lr", "warmup-decay-lr", "warmup-cosine-lr"] = setting(TRAINING, "cosine", "Schedule after the warm-up: cosine, linear, constant, or wsd (constant, then down in decay-steps). warmup-lr, warmup-decay-lr and warmup-cosine-lr are exactly DeepSpeed's.")
    warmup_steps: float = setting(TRAINING, 0, "Number of warm-up steps, in which the learning rate grows from 0; below 1: part of all steps.", least=0)
    warmup_type: Literal["linear", "log"] = setting(TRAINING, "linear", "Shape of the warm-up, for DeepSpeed's schedules.")
    warmup_min_ratio: float = setting(TRAINING, 0.0, "Start of the warm-up as a part of the learning rate, for DeepSpeed's schedules.", least=0, most=1)
    schedule_steps: int | None = setting(TRAINING, None, "Length of DeepSpeed's schedules in steps. Default: all steps.", least=1)
    decay_steps: int | None = setting(TRAINING, None, "Length of the decay of wsd in steps. Default: a fifth of all steps.", least=1)
    min_lr_ratio: float = setting(TRAINING, 0.1, "Learning rate at the end, as a part of the peak.", least=0, most=1)
    weight_decay: float = setting(TRAINING, 0.1, "Weight decay of matrices; norms and biases have none.", least=0)
    adam_beta1: float = setting(TRAINING, 0.9, "Decay of the first moment.", least=0, below=1)
    adam_beta2: float = setting(TRAINING, 0.95, "Decay of the second moment.", least=0, below=1)
    adam_epsilon: float = setting(TRAINING, 1e-8, "Added to the root of the second moment.", least=0)
    momentum: float = setting(TRAINING, 0.9, "Momentum of sgd.", least=0)
    max_grad_norm: float = setting(TRAINING, 1.0, "Clip gradients to this norm; 0: no clipping.", least=0)
    seed: int = setting(TRAINING, 0, "Random seed of weights, order of samples and dropout.", least=0, most=2**63 - 1)
    eval_steps: float = setting(TRAINING, 0, "Steps between two evaluations; below 1: part of all steps; 0: only at the end.", least=0)
    early_stopping_patience: int | None = setting(TRAINING, None, "Stop after this many evaluations in a row without a better metric-for-best-model. Default: never.", least=1)
    early_stopping_threshold: float = setting(TRAINING, 0.0, "How much better an evaluation must be to count for early-stopping-patience.", least=0)
    metric_for_best_model: str | None = setting(TRAINING, None, f"Metric that says which evaluation is the best: {', '.join(get_args(Metric))}. Default: eval_loss.")
    greater_is_better: bool | None = setting(TRAINING, None, "Whether more of metric-for-best-model is better. Default: known from its name; anything else is refused.")
    load_best_model_at_end: bool = setting(TRAINING, False, "Save each new best evaluation's weights, never remove the best ones, and export them at the end instead of the last ones.")
    skip_nonfinite: bool = setting(TRAINING, False, "Skip steps with a gradient that is not finite, and stop after 50 in a row; otherwise the first one stops the run. Always on with fp16.")
    divergence_ratio: float = setting(TRAINING, 3.0, "Stop with exit code 4 if the mean loss is this many times its lowest value, or is not a number; 0: never.", least=0)

    strategy: str | dict[str, str] = setting(SHARDING, "auto", "Sharding strategy: auto, ddp, zero1, zero2, zero3, hsdp, zero2-offload, zero3-offload, zero3-nvme, ...; or a mapping from unit patterns to them.")
    wire: tuple[str, ...] = setting(SHARDING, (), "Formats in which parameters and gradients are sent: params=int8,grads=int4:feedback; bf16, fp16, e4m3, e5m2, int8, int4. params=int8:forward leaves backwards exact. none: unchanged.")
    offload: tuple[str, ...] = setting(SHARDING, (), "State that is offloaded to host memory or disk, of params, grads, optimizer and activations: optimizer=host:0.6,params=disk:/nvme (a part, a folder). disk:/nvme names only the folder. none: no offload.")
    speculation: str = setting(SHARDING, "auto", "Memory of each rank in which offloaded updates are computed before the norm of the gradients is known: auto (half of the free host memory, on GPUs), a size as in 8GB (with space on disk, if state is there), or 0. The results are the same.")
    precision: Literal["fp32", "bf16", "bf16-autocast", "fp16", "pure-bf16"] | None = setting(SHARDING, None, "Precision: fp32, bf16 (fp32 masters), bf16-autocast (fp32 weights, products in bf16), fp16 or pure-bf16. Default: bf16 on GPUs, fp32 on CPUs.")
    reduce_dtype: Literal["fp32", "bf16"] | None = setting(SHARDING, None, "Type in which gradients are summed. Default: given by the precision.")
    units: tuple[str, ...] = setting(SHARDING, (), "Units of sharding: class names of modules, as in LlamaDecoderLayer, or a number of parameters. Default: the model's repeated blocks.")
    node_size: int | None = setting(SHARDING, None, "Number of ranks in a node. Default: the ranks of this machine.", least=1)

    output_dir: str | None = setting(RUN, None, "Run folder. Default: runs/MODEL-DATE-TIME.")
    resume_from_checkpoint: str | None = setting(RUN, None, "Checkpoint to resume from: 'latest', 'auto' (latest if there is one), or a folder. Ranks and strategy may differ from those that saved it.")
    save_steps: float = setting(RUN, 0, "Steps between two checkpoints; below 1: part of all steps; 0: only at the end.", least=0)
    async_save: bool = setting(RUN, False, "Save in the background: training waits only for a copy in host memory.")
    save_total_limit: int | None = setting(RUN, None, "Number of checkpoints to keep; older ones are removed.", least=1)
    logging_steps: int = setting(RUN, 10, "Steps between two lines of metrics.", least=1)
    report_to: tuple[Tracker, ...] = setting(RUN, (), "Trackers: tensorboard, wandb; separate both with a comma.")
    export: bool = setting(RUN, True, "Write the trained weights at the end, as a Hugging Face folder or a PEFT adapter.")
    sample_tokens: int = setting(RUN, 160, "Number of tokens to generate at the end, and for each of eval-prompts; 0: none.", least=0)
    sample_prompt: str | None = setting(RUN, None, "Prompt of the text that is generated at the end.")
    eval_prompts: str | None = setting(RUN, None, "Text file with a prompt in each line. Each evaluation writes generated texts to samples.jsonl in the run folder.")
    profile: bool = setting(RUN, False, "Write a profiler trace of three steps.")

    device: Literal["cpu", "cuda"] | None = setting(LAUNCH, None, "Device: cpu or cuda. Default: cuda if there is one.")
    nproc_per_node: int | None = setting(LAUNCH, None, "Ranks on this machine. Default: its GPUs, or 2 on CPUs.", least=1)
    nnodes: str = setting(LAUNCH, "1", "Number of machines, or MIN:MAX.")
    node_rank: int | None = setting(LAUNCH, None, "Number of this machine, from 0, for rdzv-backend static.", least=0)
    rdzv_backend: Backend = setting(LAUNCH, "c10d", "Rendezvous backend: c10d, static, etcd or etcd-v2.")
    rdzv_endpoint: str | None = setting(LAUNCH, None, "HOST:PORT at which several machines meet.")
    rdzv_id: str | None = setting(LAUNCH, None, "Name of the job at the rendezvous. Default: a random one, shared through the run folder.")
    max_restarts: int = setting(LAUNCH, 0, "Number of restarts of a machine's ranks after a crash, from the last checkpoint.", least=0)
    timeout: float = setting(LAUNCH, 600.0, "Time limit of a collective, in seconds.", least=1)
    # fmt: on

    def __post_init__(self) -> None:
        """Refuse values that are wrong for every model and all data."""
        _check_limits(self)
        defaults = {entry.name: entry.default for entry in dataclasses.fields(self)}
        if self.train_file and self.dataset:
            raise ConfigurationError(
                f"train_file {', '.join(self.train_file)} and dataset {', '.join(self.dataset)}: leave one out"
            )
        if self.max_steps is not None and self.num_train_epochs is not None:
            both = f"max_steps {self.max_steps} and num_train_epochs {self.num_train_epochs:g}"
            raise ConfigurationError(f"{both} both say when to stop: leave one out")
        for name, words, choices in (
            ("report_to", self.report_to, Tracker),
            ("train_roles", self.train_roles, TrainRole),
            ("rdzv_backend", [self.rdzv_backend], Backend),
            ("compile", [self.compile], Compile),
            ("loss_chunk", [self.loss_chunk], AnyLossChunk),
            ("metric_for_best_model", [self.best_metric], Metric),
        ):
            for word in words:
                if word not in get_args(choices):
                    raise ConfigurationError(f"{name}: unknown {word!r}; {did_you_mean(str(word), get_args(choices))}")
        if not self.train_roles:
            raise ConfigurationError("train_roles: is empty, so there is nothing to train on; name assistant, or all")
        if unusable := [weight for weight in self.data_weights if not 0 < weight < math.inf]:
            raise ConfigurationError(f"data_weights: {unusable[0]:g} must be a finite number above 0")
        if self.divergence_ratio and self.divergence_ratio <= 1:
            raise ConfigurationError(f"divergence_ratio: {self.divergence_ratio:g} must be above 1, or 0 to continue")
        for name in ("warmup_steps", "eval_steps", "save_steps"):
            steps = getattr(self, name)
            if steps > 1 and steps != int(steps):
                raise ConfigurationError(
                    f"{name}: {steps:g} is no number of steps; below 1 it is a part of all of them"
                )
        for name, (other, readers) in READ_BY.items():
            value, chosen = getattr(self, name), getattr(self, other)
            if value != defaults[name] and chosen not in readers:
                needed = f"{name} {value} belongs to {other} {', '.join(readers)}"
                raise ConfigurationError(f"{needed}, but that is {chosen}")
        if self.quantize is not None and self.lora is None:
            fix = "add lora, or leave quantize out"
            raise ConfigurationError(f"quantize {self.quantize} is for frozen weights, and all are trained: {fix}")
        num_nodes(self.nnodes)
        num_bytes_of(self.speculation)
        parse_units(self.units)

    @property
    def best_metric(self) -> str:
        """The metric of the best evaluation. Transformers writes it with or without "eval_"."""
        return f"eval_{(self.metric_for_best_model or 'loss').removeprefix('eval_')}"

    @property
    def is_less_better(self) -> bool:
        return self.best_metric.endswith(("loss", "perplexity"))

    @property
    def rows_per_sample(self) -> int:
        """The number of sequences in a sample: a pair has two."""
        return 1 if self.objective is None else 2

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def _check_limits(settings: Any, prefix: str = "") -> None:
    for entry in dataclasses.fields(settings):
        value, limits = getattr(settings, entry.name), entry.metadata
        if isinstance(value, int | float):
            if not math.isfinite(value):
                raise ConfigurationError(f"{prefix}{entry.name}: {value} is not a finite number")
            for name, (words, is_outside) in LIMITS.items():
                if name in limits and is_outside(value, limits[name]):
                    raise ConfigurationError(f"{prefix}{entry.name}: {value} must be {words} {limits[name]:g}")


def interval_of(steps: float, num_steps: int) -> int:
    """Return the steps between two saves or evaluations (0: none). Below 1, `steps` is a part of all steps.

    Without `round`, 0.07 of 100 steps would be 8: binary fractions are not exact.
    """
    return math.ceil(round(steps * num_steps, 6)) if steps < 1 else int(steps)


def num_nodes(text: str) -> tuple[int, int]:
    """Parse --nnodes: a number of machines, or MIN:MAX."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ConfigurationError(f"nnodes: {text!r} is no number of machines; write 2, or 1:4 for 1 to 4")
    return low, high


def parse_units(words: tuple[str, ...]) -> str | int | tuple[str, ...]:
    """Parse --units for `sw.shard`."""
    if not words:
        return "auto"
    numbers = [word for word in words if word.isdecimal()]
    if numbers and len(words) > 1:
        raise ConfigurationError(f"units: {', '.join(words)}: give names of classes, or one number of parameters")
    return int(numbers[0]) if numbers else words


def settings_from_json(text: str) -> Settings:
    """Parse the output of `Settings.to_json`, in a rank. Files of users are read by `config.py`."""
    values = json.loads(text)
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    if values["lora"] is not None:
        lists = {name: tuple(values["lora"].get(name, ())) for name in ("targets", "modules_to_save")}
        values["lora"] = Lora(**{**values["lora"], **lists})
    return Settings(**values)


@dataclass(frozen=True, slots=True)
class Batching:
    """The split of the global batch over ranks and micro-batches. It does not change the result."""

    num_ranks: int
    num_micro: int  # micro-batches of a step on one rank
    micro_size: int  # samples of a micro-batch

    @property
    def global_size(self) -> int:
        return self.num_ranks * self.num_micro * self.micro_size

    def share(self, samples: Sequence[int], rank: int) -> list[Sequence[int]]:
        """Return the micro-batches of a rank: consecutive samples of one step, in order."""
        first = rank * self.num_micro * self.micro_size
        starts = range(first, first + self.num_micro * self.micro_size, self.micro_size)
        return [samples[start : start + self.micro_size] for start in starts]


def batching_of(settings: Settings, num_ranks: int) -> Batching:
    """Compute the batch sizes that were not given. If the product cannot be the global batch, the error shows it."""
    micro, num_micro = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    whole = settings.global_batch_size or DEFAULT_GLOBAL_BATCH
    if settings.global_batch_size is None and num_micro is not None and micro == "auto":
        raise ConfigurationError(
            f"per_device_train_batch_size auto divides the global batch, which is unknown beside "
            f"gradient_accumulation_steps {num_micro}: give global_batch_size, or leave one of the two out"
        )
    micro = given = None if micro == "auto" else micro  # until the planner has chosen
    if settings.global_batch_size is None and (micro is not None or num_micro is not None):
        return Batching(num_ranks, num_micro or 1, micro or 1)
    if num_micro is None:
        num_micro = whole // (num_ranks * micro) if micro is not None else 1
    if micro is None:
        micro = whole // (num_ranks * num_micro)
    if num_ranks * num_micro * micro != whole:
        # Sizes that were given stay; the others are at least 1.
        least = num_ranks * (settings.gradient_accumulation_steps or 1) * (given or 1)
        raise ConfigurationError(
            f"global_batch_size {whole} is not {num_ranks} ranks x {num_micro or 1} gradient_accumulation_steps x "
            f"{micro or 1} per_device_train_batch_size = {num_ranks * (num_micro or 1) * (micro or 1)}; "
            f"make it a multiple of {least}"
        )
    return Batching(num_ranks, num_micro, micro)
