"""Checks before any rank is started: the earlier a mistake is reported, the less it costs."""

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from ..base.documents import read_text
from ..base.errors import CheckpointError, ConfigurationError
from ..checkpoint.opened import open_checkpoint
from ..core.mesh import is_joined, num_local_ranks, require_nodes
from ..core.schedule.state_bytes import HOST_SHARE
from ..planner.auto import shares_here
from ..planner.search import tried_layouts
from ..planner.training import check_speculation, num_bytes_of
from .data.prepare import prepare
from .data.samples import Samples, open_samples
from .data.tokenizer import Tokenizer, tokenizer_for
from .models.build import build
from .models.facts import ModelFacts, check, require_vocabulary
from .models.restore import is_model
from .models.weights import names_of
from .offload import check_strategy, is_auto, layouts_of, offload_of, strategy_of, updates_early
from .run_folder import AUTO as AUTO_RESUME
from .run_folder import DATA, LATEST, run_folder, writing_to
from .settings import WITH_REFERENCE, Batching, Settings, batching_of, num_nodes

DEFAULT_SEQ_LENGTH = 2048
NUM_SAMPLES_CHECKED = 200
MAX_PROMPTS = 100  # all of them are answered at each evaluation


@dataclass(frozen=True, slots=True)
class Checked:  # result of `check_all`
    facts: ModelFacts
    tokenizer: Tokenizer
    seq_length: int
    batching: Batching
    prompts: tuple[str, ...] = ()  # those of eval_prompts


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
        require_targets(samples, settings.objective, say)
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


def require_targets(samples: Samples, objective: str | None, say: Callable[[str], None]) -> None:
    """Look at evenly spread samples. Refuse the data if none has targets, and warn if some have none."""
    if samples.windows.is_pairs and objective is None:
        raise ConfigurationError(
            "the data are preference rows (chosen, rejected), but the objective is the next token: give --objective "
            "dpo, or rows of answers"
        )
    if objective is not None and not samples.windows.is_pairs:
        raise ConfigurationError(
            f"objective {objective} needs preference rows (chosen, rejected), but the data have none: leave it out, or "
            "give other data"
        )
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
    check_evaluations(settings)
    offload = offload_of(settings.offload)
    offload.require_folder()
    num_here = num_local_ranks() if is_joined() else num_ranks // num_nodes(settings.nnodes)[0]
    (on_host, on_disk), asked = shares_here(num_here, offload.folder), strategy_of(settings)
    layouts = tried_layouts(asked, ()) if is_auto(asked) else layouts_of(asked).values()
    check_speculation(settings.speculation, layouts, (round(HOST_SHARE * on_host), on_disk))
    if num_bytes_of(settings.speculation) and updates_early(settings):
        raise ConfigurationError(
            f"speculation {settings.speculation} with max_grad_norm 0: no update waits for the norm; set it to 'auto'"
        )
    if settings.node_size is not None:
        require_nodes(num_ranks, settings.node_size)
    needed: list[tuple[str, str, str]] = [("report_to", word, word) for word in settings.report_to]
    if settings.optimizer == "adamw8bit":
        needed.append(("optimizer adamw8bit", "torchao", "eight-bit"))
    for setting, module, extra in needed:
        if find_spec(module) is None:
            raise ConfigurationError(f"{setting}: {module} is not installed; pip install 'shardwise[{extra}]'")
    if settings.objective in WITH_REFERENCE and (settings.lora is None or settings.lora_from is not None):
        why = "all weights are trained" if settings.lora is None else f"the run starts from {settings.lora_from}"
        raise ConfigurationError(
            f"objective {settings.objective}: its reference is the model without adapters, but {why}: train new "
            "adapters (--lora 16; merge earlier ones first: shardwise export --merge), or use simpo or orpo"
        )
    batching = batching_of(settings, num_ranks)
    facts = check(settings)
    if facts.quantized and facts.quantized != settings.quantize:
        asked = f"quantize is {settings.quantize}" if settings.quantize else "quantize is not given"
        fix = f"add --quantize {facts.quantized} (with --lora), or use the unquantised ones"
        raise ConfigurationError(
            f"model {settings.model}: its weights are stored as {facts.quantized}, and {asked}: {fix}"
        )
    if facts.folder is not None and not settings.train_file and not settings.dataset:
        raise ConfigurationError(
            f"model {settings.model}: no data is named: give --train-file or --dataset (in-tree shapes have a default)"
        )
    tokenizer = tokenizer_for(facts.tokenizer, facts.chat_template)
    require_vocabulary(facts, tokenizer.vocab_size)
    seq_length = settings.seq_length or min(facts.max_seq, DEFAULT_SEQ_LENGTH)
    if seq_length > facts.max_seq:
        raise ConfigurationError(
            f"seq_length {seq_length} is more than the {facts.max_seq} tokens that model {settings.model} can take: "
            "make it shorter"
        )
    return Checked(facts, tokenizer, seq_length, batching, prompts_in(settings.eval_prompts))


def check_evaluations(settings: Settings) -> None:
    """Check the settings about evaluations against each other. A resumed run may have only some of them as flags."""
    if settings.greater_is_better == settings.is_less_better:
        is_better = f"{'less' if settings.is_less_better else 'more'} {settings.best_metric} is better"
        raise ConfigurationError(f"greater_is_better {settings.greater_is_better}, but {is_better}: leave it out")
    metric, objective = settings.best_metric, settings.objective
    if metric != "eval_loss" and ("rewards" in metric) == (objective is None):
        raise ConfigurationError(f"metric_for_best_model: {metric} is not measured with objective {objective}; "
                                 "use eval_loss")  # fmt: skip
    if settings.eval_prompts and not settings.sample_tokens:
        raise ConfigurationError(f"eval_prompts {settings.eval_prompts} with sample_tokens 0: give at least 1 token")
    for name in ("early_stopping_patience", "load_best_model_at_end", "eval_prompts"):
        has_all = (settings.eval_steps or name == "eval_prompts") and (settings.eval_file or settings.eval_fraction)
        if getattr(settings, name) and not has_all:
            raise ConfigurationError(
                f"{name} {getattr(settings, name)}, but eval_steps is {settings.eval_steps:g} and eval_fraction "
                f"{settings.eval_fraction:g}: it needs evaluations; set eval_steps, and eval_fraction or eval_file"
            )


def prompts_in(file: str | None) -> tuple[str, ...]:
    """Read the prompts of --eval-prompts, one in each line."""
    if file is None:
        return ()
    prompts = tuple(line.strip() for line in read_text(Path(file).expanduser()).split("\n") if line.strip())
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ConfigurationError(f"eval_prompts {file} has {len(prompts):,} prompts; give 1 to {MAX_PROMPTS}")
    return prompts
