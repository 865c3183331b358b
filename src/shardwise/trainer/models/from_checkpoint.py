"""What a checkpoint, a Hugging Face folder or a PEFT adapter holds, ready for `write_export`: read when it is written.

The model is built on the meta device, for its names, ties and config. It is that of the run, where the checkpoint lies
in its run folder, or else the one that is named. No ranks, and no weights in memory.
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
from ...checkpoint.index import Saved
from ...checkpoint.opened import open_checkpoint
from ...checkpoint.reader import Reader
from ...checkpoint.steps import newest_in
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
class Wish:
    """How it shall be exported.

    `model` replaces what the run was told, or says what nobody did. `dtype` is a key of DTYPES, `keep` for that of
    the checkpoint, or `auto` for that of the model that the training began with, which is what a run exports.
    """

    model: str | None = None
    dtype: str = "auto"
    is_merged: bool = False
    max_bytes: int = MAX_FILE_BYTES


@contextmanager
def content_of(path: Path, wish: Wish) -> Iterator[Content]:
    """Everything is checked here: what it is, whether it fits its model, and that nothing is missing."""
    place = newest_in(path)
    about = {"from": str(place.resolve())}
    if (place / ADAPTER_CONFIG).is_file():
        yield dataclasses.replace(_of_adapter(place, wish), about=about)
    elif is_model(place):
        if wish.model is not None:
            raise ConfigurationError(f"{place} is a model of its own: leave --model out")
        built = _named(str(place))
        yield _content(built, _weight_sources(built.model, built.weights, wish.dtype), wish, about, is_adapted=False)
    else:
        opened = open_checkpoint(place)
        built, is_adapted = _model_of(place, opened.index.extra, wish)
        about |= {key: opened.index.extra[key] for key in ("step",) if key in opened.index.extra}
        with opened.reader() as reader:
            sources = _stored_sources(built, opened.index.tensors, reader, wish.dtype, place)
            yield _content(built, sources, wish, about, is_adapted)


def _content(built: Built, sources: list[Source], wish: Wish, about: Mapping[str, Any], is_adapted: bool) -> Content:
    if wish.is_merged and not is_adapted:
        raise ConfigurationError("--merge: there are no adapters in it, so there is nothing to merge")
    if is_adapted and not wish.is_merged and built.facts.has_weights:
        sources = [source for source in sources if is_adapter(source.name)]  # the base is where it was
    return Content(
        built.model, built.facts, sources, names_of(built.model), is_adapted, wish.is_merged, wish.max_bytes, about
    )


def _of_adapter(place: Path, wish: Wish) -> Content:
    if not wish.is_merged:
        raise ConfigurationError(f"{place} is an adapter as peft opens it: to make a model of it, add --merge")
    base, config = adapter_in(place, wish.model)
    built = _named(base, adapter_tokenizer(place), config)
    weights = weights_with_adapter(built, place)
    return _content(built, _weight_sources(built.model, weights, wish.dtype), wish, {}, is_adapted=True)


def _model_of(place: Path, extra: Mapping[str, Any], wish: Wish) -> tuple[Built, bool]:
    """The model of a checkpoint, and whether it has adapters."""
    settings = _settings_of(place, extra, wish)
    if settings is None:
        assert wish.model is not None
        return _named(wish.model), False
    if wish.model is not None:
        settings = dataclasses.replace(settings, model=wish.model, shape={})
    try:
        facts = check(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (if the model is elsewhere now: --model FOLDER)") from None
    built = build(settings, tokenizer_for(facts.tokenizer).vocab_size, _HOST, facts=facts)
    return built, settings.lora is not None


def _settings_of(place: Path, extra: Mapping[str, Any], wish: Wish) -> Settings | None:
    """Of the run that it is in, or that it was saved by; None where neither is told, and a model is named."""
    try:
        settings, why = settings_of(place, extra), "it is in no run folder, and no run saved it"
    except ConfigurationError as error:
        settings, why = None, str(error)
    if settings is None and wish.model is None:
        raise ConfigurationError(
            f"{place}: which model it belongs to is not told ({why}): name a Hugging Face folder with its config and "
            "tokenizer, --model FOLDER"
        )
    return settings


def _named(model: str, tokenizer: str | None = None, adapters: Any = None) -> Built:
    """A model as it lies in a folder, with the tokenizer files that are there, if any are."""
    folder = find_model(model, with_weights=False)
    folder = folder.parent if folder.is_file() else folder
    is_drawn = not any(folder.glob("*.safetensors"))
    tokenizer = tokenizer or own_tokenizer(folder, read_json(folder / CONFIG)) or str(folder)
    settings = Settings(model=model, tokenizer=tokenizer, random_weights=is_drawn)
    built = build(settings, 0, _HOST, adapters, check(settings))
    dtype = getattr(torch, str(built.facts.config.get("dtype") or built.facts.config.get("torch_dtype")), None)
    if is_drawn and isinstance(dtype, torch.dtype):
        built.model.to(dtype)  # drawn weights are fp32 by themselves
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
        elif saved.stored.shape != tuple(own.shape):
            raise CheckpointError(f"{place}: {first!r} is {saved.stored.shape} in it, {tuple(own.shape)} in the model")
        else:
            chosen = _dtype_of(own, saved.stored.torch_dtype, dtype)
            sources.append(stored_source(first, reader, saved.stored, chosen))
    unknown = [
        name
        for name, saved in tensors.items()
        if not any(each in expected for each in (name, *saved.tied)) and not COMPUTED.search(name)
    ]
    if missing or unknown:
        kind = type(built.model).__name__
        raise CheckpointError(f"{place} does not fit its model, a {kind}: {_told(missing, unknown)}")
    return sources


def _told(missing: list[str], unknown: list[str]) -> str:
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


def _dtype_of(own: Tensor, stored: torch.dtype, wish: str) -> torch.dtype:
    """Numbers that are no floats stay what they are; so do buffers, but where the model says it."""
    if not stored.is_floating_point or wish == "keep":
        return stored
    if wish == "auto":
        return own.dtype
    return DTYPES[wish] if isinstance(own, nn.Parameter) else stored
