"""Loading a trained model and its tokenizer in one process, for inference.

The source is an export (a Hugging Face folder, an in-tree model, a PEFT adapter), a checkpoint of a run, or a run
folder: its export if there is one, else its newest complete checkpoint.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...api.full_weights import load_full_state_dict
from ...api.sharding import shard
from ...base.documents import read_text
from ...base.errors import ConfigurationError
from ...checkpoint.folder import CHECKPOINTS, find, latest
from ...checkpoint.loading import load
from ...checkpoint.opened import open_checkpoint
from ...checkpoint.writer import NOTE
from ...core.layout import Strategy
from ...core.mesh import device, init
from ...planner.shapes.hf_config import hush
from ..data.tokenizer import Tokenizer, tokenizer_for
from ..run_folder import CONFIG, EXPORT
from ..settings import Settings, settings_from_json
from .build import Built, build
from .export import BASE
from .facts import check, own_tokenizer, read_json
from .forms import is_adapter
from .llama import llama_name
from .lora import ADAPTER
from .weights import LazyWeights, StoredTensors

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Restored:
    model: nn.Module
    tokenizer: Tokenizer
    max_seq: int
    place: Path  # the export or checkpoint that was loaded


def restore(path: Path, strategy: Strategy, tokenizer: str | None = None) -> Restored:
    """Load a model. Any strategy will do, since there is one rank. `tokenizer` replaces that of the model."""
    place = find_restorable(path)
    init()
    if find(place) is not None:
        return _from_checkpoint(place, strategy, tokenizer)
    if (place / ADAPTER_CONFIG).is_file():
        return _from_adapter(place, strategy, tokenizer)
    built, words = _build(Settings(model=str(place), tokenizer=tokenizer))
    _shard_for_inference(built, built.weights, strategy)
    return Restored(built.model, words, built.max_seq, place)


def find_restorable(path: Path) -> Path:
    """The export or checkpoint to load for `path`."""
    if not path.is_dir():
        raise ConfigurationError(f"{path}: there is no such folder")
    if find(path) is not None or (path / ADAPTER_CONFIG).is_file():
        return path
    if is_model(path):
        return path
    export = path / EXPORT
    if (export / CONFIG).is_file() or (export / ADAPTER_CONFIG).is_file():
        return export
    newest = latest(path / CHECKPOINTS)
    if newest is None:
        raise ConfigurationError(
            f"{path} is neither an export (config.json of a model, or {ADAPTER_CONFIG}), nor a complete checkpoint, "
            "nor a run folder with one of them"
        )
    return newest


def is_model(place: Path) -> bool:
    """True for a Hugging Face folder, or one in the same format."""
    return find(place) is None and (place / CONFIG).is_file() and "model_type" in read_json(place / CONFIG)


def settings_of(place: Path, extra: Mapping[str, Any]) -> Settings | None:
    """The settings of the run that contains a checkpoint, else those saved in its `extra`; None: unknown."""
    config = place.resolve().parent.parent / CONFIG
    is_in_run = config.is_file() and "model_type" not in read_json(config)  # else it is a model's
    if not is_in_run and "configuration" not in extra:
        return None
    try:
        return settings_from_json(read_text(config) if is_in_run else json.dumps(extra["configuration"]))
    except (AttributeError, TypeError, KeyError, ValueError, OSError) as error:
        where = config if is_in_run else f"the 'configuration' of {place}"
        raise ConfigurationError(f"{where} does not hold the settings of a run: {error}") from None


def _from_checkpoint(place: Path, strategy: Strategy, tokenizer: str | None) -> Restored:
    settings = settings_of(place, open_checkpoint(place).index.extra)
    if settings is None:
        raise ConfigurationError(
            f"{place}: its model is unknown, there is neither a run's {CONFIG} nor a note in the checkpoint: "
            f"export it first (shardwise export {place} FOLDER --model FOLDER_OF_ITS_MODEL), and generate from that"
        )
    built, words = _build(dataclasses.replace(settings, tokenizer=tokenizer or settings.tokenizer))
    # The dtype of master weights must match the checkpoint; the compute dtype need not.
    pure = "pure-bf16"
    precision = pure if settings.precision == pure else _precision()
    shard(built.model, None, strategy, precision=precision, seed=settings.seed)
    load(place, built.model)
    return Restored(built.model, words, built.max_seq, place)


def _from_adapter(place: Path, strategy: Strategy, tokenizer: str | None) -> Restored:
    base, config = adapter_in(place)
    built, words = _build(Settings(model=base, tokenizer=tokenizer or adapter_tokenizer(place)), config)
    _shard_for_inference(built, weights_with_adapter(built, place), strategy)
    return Restored(built.model, words, built.max_seq, place)


def adapter_in(place: Path, base: str | None = None) -> tuple[str, Any]:
    """The base model of an adapter (`base` if given), and peft's configuration."""
    about = read_json(place / ADAPTER_CONFIG)
    if about.get("peft_type") != "LORA":
        raise ConfigurationError(f"{place}: adapters of type {about.get('peft_type')!r}; only LORA can be opened")
    own_base = place / BASE
    base = base or (str(own_base) if own_base.is_dir() else about.get("base_model_name_or_path"))
    if not base:
        raise ConfigurationError(f"{place / ADAPTER_CONFIG} does not name the model that the adapters belong to")
    hush()
    try:
        import peft
    except ImportError:
        raise ConfigurationError(f"{place} holds adapters, which need peft: install shardwise[hf]") from None
    loader: Any = peft.PeftConfig
    return base, loader.from_pretrained(str(place))


def adapter_tokenizer(place: Path) -> str | None:
    """The tokenizer that adapters were trained with, if their folder says so."""
    return own_tokenizer(place, read_json(place / NOTE) if (place / NOTE).is_file() else {})


def weights_with_adapter(built: Built, place: Path) -> LazyWeights:
    """The weights of the base model and of the adapter."""
    stored = StoredTensors([place / ADAPTER_WEIGHTS])
    # In a model, names contain the name of the adapter; in files they do not.
    in_file = llama_name if built.kind == "in-tree" else str
    names = {in_file(name.replace(f".{ADAPTER}", "")): name for name in built.model.state_dict() if is_adapter(name)}
    wrong = sorted(set(names) ^ set(stored.names))
    if wrong:
        raise ConfigurationError(f"{place / ADAPTER_WEIGHTS} does not fit its {ADAPTER_CONFIG}: first {wrong[0]!r}")
    if not isinstance(built.weights, LazyWeights):
        raise ConfigurationError(f"{place}: its base model has no weights")
    return built.weights.with_tensors({names[name]: stored.read(name) for name in stored.names})


def _build(settings: Settings, adapters: Any = None) -> tuple[Built, Tokenizer]:
    facts = check(settings)
    words = tokenizer_for(facts.tokenizer)
    return build(settings, words.vocab_size, device(), adapters, facts), words


def _shard_for_inference(built: Built, weights: Any, strategy: Strategy) -> None:
    """Shard for inference: without training there are no master weights, and weights keep their dtype."""
    built.model.requires_grad_(False)
    shard(built.model, None, strategy, precision=_precision(), seed=0)
    load_full_state_dict(built.model, weights)


def _precision() -> str:
    return "bf16" if device().type == "cuda" else "fp32"
