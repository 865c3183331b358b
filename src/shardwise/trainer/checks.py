"""Checks before any rank is started: the earlier a mistake is reported, the less it costs."""

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from ..base.errors import CheckpointError, ConfigurationError
from ..checkpoint.opened import open_checkpoint
from ..core.mesh import require_nodes
from ..planner.auto import host_bytes_here
from ..planner.training import num_bytes_of
from .data.prepare import prepare
from .data.samples import Samples, open_samples
from .data.tokenizer import Tokenizer, tokenizer_for
from .models.build import build
from .models.facts import ModelFacts, check, require_vocabulary
from .models.restore import is_model
from .models.weights import names_of
from .offload import check_strategy, offload_of
from .run_folder import AUTO as AUTO_RESUME
from .run_folder import DATA, LATEST, run_folder, writing_to
from .settings import Batching, Settings, batching_of

DEFAULT_SEQ_LENGTH = 2048
NUM_SAMPLES_CHECKED = 200


@dataclass(frozen=True, slots=True)
class Checked:  # result of `check_all`
    facts: ModelFacts
    tokenizer: Tokenizer
    seq_length: int
    batching: Batching


def completed(settings: Settings, has_gpu: bool) -> Settings:
    """Return the settings with device and precision filled in."""
    device = settings.device or ("cuda" if has_gpu else "cpu")
    precision = settings.precision or ("bf16" if device == "cuda" else "fp32")
    return dataclasses.replace(settings, device=device, precision=precision)


def look_ahead(settings: Settings, num_ranks: int, say: Callable[[str], None]) -> None:
    """Run all checks and prepare the data, so that no rank fails or waits because of them later."""
    checked = check_all(settings, num_ranks)
    require_same_names(settings, checked)
    data = run_folder(settings) / DATA
    made = [place for place in (data, *data.parents) if not place.exists()]
    before = set(data.glob("*"))
    try:
        with writing_to(data.parent):
            data.mkdir(parents=True, exist_ok=True)
        prepared = prepare(settings, checked.tokenizer, data, say, checked.facts.vocab_size)
        samples, _ = open_samples(settings, checked.tokenizer, prepared, checked.seq_length, say)
        require_targets(samples, say)
    except ConfigurationError:
        # Remove what this call created, and nothing that was there before.
        for store in set(data.glob("*")) - before:
            shutil.rmtree(store, ignore_errors=True)
        with suppress(OSError):
            for place in made:
                place.rmdir()
        raise


def require_same_names(settings: Settings, checked: Checked) -> None:
    """Refuse to resume from a Hugging Face folder of another model. To start from its weights, use --model."""
    resume = settings.resume_from_checkpoint
    if resume in (None, LATEST, AUTO_RESUME) or not is_model(place := Path(resume).expanduser()):
        return
    saved = open_checkpoint(place).index.tensors
    model = build(settings, checked.tokenizer.vocab_size, torch.device("cpu"), facts=checked.facts).model
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {first: next((name for name in names if name in saved), None) for first, names in names_of(model).items()}
    wrong = [name for name, own in found.items() if own is None or saved[own].shape != shapes[name]]
    if wrong:
        raise CheckpointError(
            f"resume_from_checkpoint {resume} is a Hugging Face folder of another model: it lacks {len(wrong)} of this "
            f"one's {len(found)} tensors, or has them in another shape, first {wrong[0]!r}; to begin with its weights: "
            f"--model {resume}"
        )


def require_targets(samples: Samples, say: Callable[[str], None]) -> None:
    """Look at evenly spread samples. Refuse the data if none has targets, and warn if some have none."""
    stride = -(-samples.num_samples // NUM_SAMPLES_CHECKED)
    numbers = [samples.batch([index]).num_targets for index in range(0, samples.num_samples, stride)]
    num_empty = numbers.count(0)
    if num_empty == len(numbers):
        raise ConfigurationError(
            f"no sample of {samples.windows.seq_length} tokens holds anything to train on: prompts are longer; "
            "make seq_length longer"
        )
    if num_empty:
        say(f"{num_empty / len(numbers):.0%} of the samples hold nothing to train on: prompts longer than seq_length?")


def check_all(settings: Settings, num_ranks: int) -> Checked:
    """Check the settings of a run against its files and its number of ranks."""
    check_strategy(settings.strategy, settings.offload, settings.wire, settings.quantize)
    folder = offload_of(settings.offload).folder
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"offload: {folder} is not a folder: make it, or name one that is there")
    spare, free = num_bytes_of(settings.speculation) or 0, host_bytes_here()
    if spare > free and folder is None:  # each rank's share is checked later, and so is a disk
        raise ConfigurationError(
            f"speculation is {spare:,} bytes for each rank, and this host has {free:,}: give less, or 0 for none"
        )
    if settings.node_size is not None:
        require_nodes(num_ranks, settings.node_size)
    needed: list[tuple[str, str, str]] = [("report_to", word, word) for word in settings.report_to]
    if settings.optimizer == "adamw8bit":
        needed.append(("optimizer adamw8bit", "torchao", "eight-bit"))
    for setting, module, extra in needed:
        if find_spec(module) is None:
            raise ConfigurationError(f"{setting}: {module} is not installed; pip install 'shardwise[{extra}]'")
    batching = batching_of(settings, num_ranks)
    facts = check(settings)
    if facts.quantized and facts.quantized != settings.quantize:
        asked = f"quantize is {settings.quantize}" if settings.quantize else "quantize is not given"
        fix = f"add --quantize {facts.quantized} (with --lora), or use the unquantised ones"
        raise ConfigurationError(
            f"model {settings.model}: its weights are stored as {facts.quantized}, and {asked}: {fix}"
        )
    if facts.folder is not None and not settings.train_file and settings.dataset is None:
        raise ConfigurationError(
            f"model {settings.model}: no data is named: give --train-file or --dataset (in-tree shapes have a default)"
        )
    tokenizer = tokenizer_for(facts.tokenizer)
    require_vocabulary(facts, tokenizer.vocab_size)
    seq_length = settings.seq_length or min(facts.max_seq, DEFAULT_SEQ_LENGTH)
    if seq_length > facts.max_seq:
        raise ConfigurationError(
            f"seq_length {seq_length} is more than the {facts.max_seq} tokens that model {settings.model} can take: "
            "make it shorter"
        )
    return Checked(facts, tokenizer, seq_length, batching)
