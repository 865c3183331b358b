"""Settings of a step that decide memory, traffic and time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..base.dtypes import FP32
from ..base.errors import ConfigurationError, did_you_mean
from ..core.layout import AUTO, Layout, Place
from ..core.precision import Precision, precision_of
from ..core.schedule.state_bytes import why_no_spares
from .hardware.cluster import bytes_of

Optimizer = Literal["adamw", "adamw8bit", "sgd"]
Checkpointing = Literal["none", "selective", "full"]
Loss = Literal["chunked", "plain", "compiled", "fused"]
EngineName = Literal["shardwise", "fsdp1", "fsdp2", "deepspeed"]
# Titles of engines other than ours.
TITLES = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}
OURS: EngineName = "shardwise"
Code = Literal["auto", "in-tree", "hf", "titan", "mpt"]
LossChunk = Literal["small", "large"]

USUAL_SEQ = 2048
# Upper limits, larger than any real training.
MOST = {"seq": 10**8, "micro_batch": 10**6, "num_micro_batches": 10**6}
MOST_RANK = 10**6
ALL_LINEAR = "all-linear"  # a target of adapters: all linear layers except the head

# Moments of each parameter (SGD has momentum), and the bytes of one if it does not have the master's dtype: 8-bit
# moments have one fp32 scale per 256 elements.
MOMENTS: dict[Optimizer, int] = {"adamw": 2, "adamw8bit": 2, "sgd": 1}
MOMENT_BYTES: dict[Optimizer, float] = {"adamw8bit": 1 + 4 / 256}

# Limits of the fp32 logits of one chunk of the chunked loss (trainer/loss.py); with their softmax and its 16-bit copy a
# chunk takes 2.5 times as much. Every chunk reads and writes the whole fp32 gradient of the weight: for a vocabulary of
# 128k, small chunks have 512 tokens, and large ones of 2048 make a step of a 1.24B model 5 % faster.
CHUNK_LOGITS_BYTES: dict[LossChunk, int] = {"small": 256 * 2**20, "large": 2**30}
# The number of tokens of a chunk is a multiple of this, because tensor cores are faster then.
CHUNK_MULTIPLE = 64


def tokens_per_chunk(vocab: int, chunk: LossChunk = "small") -> int:
    tokens = CHUNK_LOGITS_BYTES[chunk] // (4 * vocab)
    return max(tokens // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE


@dataclass(frozen=True, slots=True)
class Lora:
    """LoRA adapters of rank `r` on the linear layers `targets`; (): those that peft uses for this kind of model.
    `upcast`: adapters compute in fp32 beside 16-bit weights, so peft casts their inputs. `dora`: with a trained norm of
    each output. `modules_to_save`: modules of which a copy is trained."""

    r: int = 16
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    upcast: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.r) is not int or not 1 <= self.r <= MOST_RANK:
            raise ConfigurationError(f"lora: rank {self.r!r} must be a whole number from 1 to {MOST_RANK:,}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ConfigurationError(f"lora: dropout {self.dropout!r} must be a number from 0 to less than 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Settings of one training step. Sizes are per rank. `loss`: "chunked" is the trainer's own, "plain" is the usual
    cross-entropy on full logits, "compiled" is that by torch.compile, "fused" is Liger's. `loss_chunk`: of the chunked
    loss. `engine`: the engine that is planned; others than ours are there to compare with. `code`: whose model code
    runs; "auto": `coded` in shapes/names.py decides."""

    seq: int = USUAL_SEQ
    micro_batch: int = 1
    num_micro_batches: int = 1
    precision: str | Precision = "bf16"
    reduce: str | None = None  # reduce dtype; None: that of `precision`
    optimizer: Optimizer = "adamw"
    lora: Lora | None = None
    checkpointing: Checkpointing = "none"
    compile: bool = False
    loss: Loss = "chunked"
    loss_chunk: LossChunk = "small"
    engine: EngineName = "shardwise"
    code: Code = "auto"
    variable_length: bool = False  # batches differ in length, and `seq` is the longest
    moments: float | None = None  # replaces `num_moments`, for another optimizer
    speculation: int | str = AUTO  # memory of a rank for updates before the gradients' norm is known

    def __post_init__(self) -> None:
        for why in self._problems():
            raise ConfigurationError(f"training: {why}")
        formats = precision_of(self.precision, self.reduce)
        if self.engine == "deepspeed" and (formats.master != FP32 or formats.autocast):
            raise ConfigurationError(
                f"training: engine 'deepspeed' with precision {self.precision!r}, but it is planned with fp32 masters "
                "beside weights in the compute dtype: give precision bf16, fp16 or fp32"
            )
        if num_bytes_of(self.speculation) and self.engine != OURS:
            raise ConfigurationError(f"training: speculation {self.speculation!r} with engine {self.engine!r}: only "
                                     f"{OURS} updates before the norm; leave it out")  # fmt: skip

    def _problems(self) -> Iterator[str]:
        for name, most in MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                yield f"{name} {value!r}, but it must be a whole number from 1 to {most:,}"
        if self.micro_batch * self.num_micro_batches > MOST["micro_batch"]:
            yield (
                f"{self.num_micro_batches:,} micro-batches of {self.micro_batch:,} sequences are more than the "
                f"{MOST['micro_batch']:,} that are planned for"
            )
        lora: Any = self.lora
        if lora is not None and not isinstance(lora, Lora):
            yield f"lora {lora!r}, but it must be a rank, or a Lora(r=16, ...)"
        kinds: dict[str, Any] = {"optimizer": Optimizer, "checkpointing": Checkpointing, "loss": Loss}
        kinds |= {"loss_chunk": LossChunk, "engine": EngineName, "code": Code}
        for name, kind in kinds.items():
            if (value := getattr(self, name)) not in get_args(kind):
                yield f"{name} {str(value)!r}; {did_you_mean(str(value), get_args(kind))}"

    @property
    def formats(self) -> Precision:
        if self.engine == "deepspeed" and self.reduce is None:
            # DeepSpeed's `communication_data_type` is that of the weights, unless it is given.
            return precision_of(self.precision, precision_of(self.precision, None).compute)
        return precision_of(self.precision, self.reduce)

    @property
    def is_fsdp(self) -> bool:
        return self.engine in ("fsdp1", "fsdp2")

    @property
    def num_tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.seq * self.micro_batch

    def why_not_on(self, places: Iterable[Place]) -> str:
        """Say why our engine would refuse the optimizer's state in these places; empty if it would not."""
        found = set(places) if self.optimizer == "adamw8bit" and self.engine == OURS else set()
        if "disk" in found:
            return "puts 8-bit moments on disk, where they cannot be: take adamw, or optimizer=host"
        if "host" in found and self.formats.master != FP32:
            return "updates 8-bit moments on the host, which needs fp32 masters next to them: take bf16, or adamw"
        return ""

    @property
    def num_moments(self) -> float:
        """Memory of the moments, as a multiple of the memory of the masters."""
        master_itemsize = self.formats.master.itemsize
        return self.moment_bytes(master_itemsize) / master_itemsize

    def moment_bytes(self, master_itemsize: int) -> float:
        """Bytes of the moments of one parameter whose master has `master_itemsize` bytes."""
        if self.moments is not None:
            return self.moments * master_itemsize
        return MOMENTS[self.optimizer] * MOMENT_BYTES.get(self.optimizer, master_itemsize)


def check_speculation(speculation: int | str, layouts: Iterable[Layout], shares: tuple[int, int]) -> None:
    """Refuse a size that no model could use with these layouts. `shares`: a rank's bytes of host and disk."""
    able = (each for each in layouts if each.params_on != "disk" or each.params != each.optimizer)
    size, places = num_bytes_of(speculation), {each.optimizer_on for each in able} - {"device"}
    if size and (why := why_no_spares(size, places, *shares)):
        raise ConfigurationError(why)


def num_bytes_of(speculation: int | str) -> int | None:
    """The bytes that `speculation` names; None for "auto"."""
    if isinstance(speculation, str):
        return None if speculation == AUTO else 0 if speculation == "0" else bytes_of(speculation, "speculation")
    if type(speculation) is not int or speculation < 0:
        raise ConfigurationError(f"speculation={speculation!r}: give 'auto', bytes as in 8_000_000_000 or '8GB', or 0")
    return speculation
