"""The content of a checkpoint, a Hugging Face folder or a PEFT adapter, for `write_export`.

The model is built on the meta device, for its names, tied weights and config. It is the model of the run if the
checkpoint is in a run folder, else the one that the user names. No ranks, and no weights in memory: tensors are read
when they are written.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import CheckpointError, ConfigurationError
from ...checkpoint.folder import newest_in
from ...checkpoint.index import Saved
from ...checkpoint.opened import open_checkpoint
from ...checkpoint.reader import Reader
from ...checkpoint.tensor_files import Source
from ...checkpoint.writer import MAX_FILE_BYTES, converted, stored_source
from ..data.tokenizer import tokenizer_for
from ..run_folder import CONFIG
from ..settings import Settings
from .build import Built, build
from .export import Content
from .facts import check, find_model, own_tokenizer, read_json
from .forms import is_adapter, names_of
from .restore import ADAPTER_CONFIG, adapter_in, adapter_tokenizer, is_model, settings_of, weights_with_adapter
from .weights import COMPUTED

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export.

    `model` replaces the model of the run, if there is one. `dtype` is a key of DTYPES, `keep` for that of the
    checkpoint, or `auto` for that of the original model, as in the export of a run.
    """

    model: str | None = None
    dtype: str = "auto"
    is_merged: bool = False
    max_bytes: int = MAX_FILE_BYTES


@contextmanager
def content_of(path: Path, options: ExportOptions) -> Iterator[Content]:
    """Open a checkpoint, model or adapter, and check that it fits its model and is complete."""
    place = newest_in(path)
    about = {"from": str(place.resolve())}
    if (place / ADAPTER_CONFIG).is_file():
        yield dataclasses.replace(_of_adapter(place, options), about=about)
    elif is_model(place):
        if options.model is not None:
            raise ConfigurationError(f"{place} is a model of its own: leave --model out")
        built = _named(str(place))
        yield _content(
            built, _weight_sources(built.model, built.weights, options.dtype), options, about, is_adapted=False
        )
    else:
        opened = open_checkpoint(place)
        built, is_adapted = _model_of(place, opened.index.extra, options)
        about |= {key: opened.index.extra[key] for key in ("step",) if key in opened.index.extra}
        with opened.reader() as reader:
            sources = _stored_sources(built, opened.index.tensors, reader, options.dtype, place)
            yield _content(built, sources, options, about, is_adapted)


def _content(
    built: Built, sources: list[Source], options: ExportOptions, about: Mapping[str, Any], is_adapted: bool
) -> Content:
    if options.is_merged and not is_adapted:
        raise ConfigurationError("--merge: there are no adapters to merge")
    if is_adapted and not options.is_merged and built.facts.has_weights:
        sources = [source for source in sources if is_adapter(source.name)]  # the base exists already
    return Content(
        built.model,
        built.facts,
        sources,
        names_of(built.model),
        is_adapted,
        options.is_merged,
        options.max_bytes,
        about,
    )


def _of_adapter(place: Path, options: ExportOptions) -> Content:
    if not options.is_merged:
        raise ConfigurationError(f"{place} is a PEFT adapter already: to write a whole model, add --merge")
    base, config = adapter_in(place, options.model)
    built = _named(base, adapter_tokenizer(place), config)
    weights = weights_with_adapter(built, place)
    return _content(built, _weight_sources(built.model, weights, options.dtype), options, {}, is_adapted=True)


def _model_of(place: Path, extra: Mapping[str, Any], options: ExportOptions) -> tuple[Built, bool]:
    """The model of a checkpoint, and True if it has adapters."""
    settings = _settings_of(place, extra, options)
    if settings is None:
        assert options.model is not None
        return _named(options.model), False
    if options.model is not None:
        settings = dataclasses.replace(settings, model=options.model, shape={})
    try:
        facts = check(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (if the model was moved: --model FOLDER)") from None
    built = build(settings, tokenizer_for(facts.tokenizer).vocab_size, _HOST, facts=facts)
    return built, settings.lora is not None


def _settings_of(place: Path, extra: Mapping[str, Any], options: ExportOptions) -> Settings | None:
    """The settings of the run of a checkpoint; None if they are unknown and the user named a model."""
    try:
        settings, why = settings_of(place, extra), "it is not in a run folder, and was not saved by a run"
    except ConfigurationError as error:
        settings, why = None, str(error)
    if settings is None and options.model is None:
        raise ConfigurationError(
            f"{place}: its model is unknown ({why}): name a Hugging Face folder with its config and "
            "tokenizer, --model FOLDER"
        )
    return settings


def _named(model: str, tokenizer: str | None = None, adapters: Any = None) -> Built:
    """The model in a folder, with its tokenizer files if there are any."""
    folder = find_model(model, with_weights=False)
    folder = folder.parent if folder.is_file() else folder
    is_drawn = not any(folder.glob("*.safetensors"))
    tokenizer = tokenizer or own_tokenizer(folder, read_json(folder / CONFIG)) or str(folder)
    settings = Settings(model=model, tokenizer=tokenizer, random_weights=is_drawn)
    built = build(settings, 0, _HOST, adapters, check(settings))
    dtype = getattr(torch, str(built.facts.config.get("dtype") or built.facts.config.get("torch_dtype")), None)
    if is_drawn and isinstance(dtype, torch.dtype):
        built.model.to(dtype)  # randomly initialised weights are fp32 otherwise
    return built


def _stored_sources(
    built: Built, tensors: Mapping[str, Saved], reader: Reader, dtype: str, place: Path
) -> list[Source]:
    by_name = {name: saved for first, saved in tensors.items() for name in (first, *saved.tied)}
    expected = built.model.state_dict(keep_vars=True)
    sources, missing = [], []
    for first, names in names_of(built.model).items():
        own = expected[first]
        saved = next((by_name[name] for name in names if name in by_name), None)
        if saved is None:
            missing.append(first)
        elif saved.shape != tuple(own.shape):
            raise CheckpointError(f"{place}: {first!r} is {saved.shape} in it, {tuple(own.shape)} in the model")
        else:
            chosen = _dtype_of(own, saved.torch_dtype, dtype)
            sources.append(stored_source(first, reader, saved, chosen))
    unknown = [
        name
        for name, saved in tensors.items()
        if not any(each in expected for each in (name, *saved.tied)) and not COMPUTED.search(name)
    ]
    if missing or unknown:
        kind = type(built.model).__name__
        raise CheckpointError(f"{place} does not fit its model, a {kind}: {_mismatch(missing, unknown)}")
    return sources


def _mismatch(missing: list[str], unknown: list[str]) -> str:
    lacks = f"it lacks {len(missing)} tensors, first {missing[0]!r}" if missing else ""
    has = f"it has {len(unknown)} that the model has not, first {unknown[0]!r}" if unknown else ""
    return "; ".join(part for part in (lacks, has) if part)


def _weight_sources(model: nn.Module, weights: Mapping[str, Tensor] | None, dtype: str) -> list[Source]:
    if weights is None:
        raise ConfigurationError("the model has no weights in its folder: there is nothing to export")
    expected = model.state_dict(keep_vars=True)
    sources = []
    for first, names in names_of(model).items():
        own = expected[first]
        name = next(name for name in names if name in weights)
        chosen = _dtype_of(own, own.dtype, dtype)
        sources.append(Source(first, chosen, tuple(own.shape), partial(_converted, weights, name, chosen)))
    return sources


def _converted(weights: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> list[Tensor]:
    return [converted(name, weights[name], dtype)]


def _dtype_of(own: Tensor, stored: torch.dtype, choice: str) -> torch.dtype:
    """The dtype to write. Integers keep theirs, and buffers too, unless `auto` takes the model's."""
    if not stored.is_floating_point or choice == "keep":
        return stored
    if choice == "auto":
        return own.dtype
    return DTYPES[choice] if isinstance(own, nn.Parameter) else stored
