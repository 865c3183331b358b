"""Opens trained models in a folder: loads them with their tokenizer for inference, or reads them for an export.

The folder is an export (a Hugging Face folder, an in-tree model, a PEFT adapter), a checkpoint of a run, or a run
folder: then its export is used if there is one, else its newest complete checkpoint.

For an export the model is built on the meta device, for its names, tied weights and config. It is the model of the run
if the checkpoint is in a run folder, else the one that the user names. An export needs no ranks and no memory for all
weights: each tensor is read when it is written.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...api.full_weights import load_full_state_dict
from ...api.sharding import shard
from ...base.documents import read_object, read_text
from ...base.dtypes import dtype_of
from ...base.errors import CheckpointError, ConfigurationError, import_library
from ...checkpoint.folder import CHECKPOINTS, find, latest, newest_in
from ...checkpoint.index import Saved
from ...checkpoint.loading import load
from ...checkpoint.opened import Reader, open_checkpoint
from ...checkpoint.tensor_files import Source
from ...checkpoint.writer import MAX_FILE_BYTES, NOTE, converted, stored_source
from ...core.layout import Strategy, quantized
from ...core.mesh import device, init
from ...core.wire.codec import codec_in, parse
from ...core.wire.reference_codecs import decoder
from ..data.tokenizer import Tokenizer, tokenizer_for
from ..run_folder import CONFIG, EXPORT
from ..settings import Settings, settings_from_json
from .build import Built, build
from .export import BASE, Content
from .facts import check, find_model, tokenizer_in
from .lora import adapter_file_name, is_adapter
from .weights import COMPUTED, LazyWeights, names_of, stored_tensors

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HOST = torch.device("cpu")


def restore(path: Path, strategy: Strategy, tokenizer: str | None = None) -> tuple[nn.Module, Tokenizer, int]:
    """Load a model. Return it, its tokenizer and its maximum sequence length.

    The strategy does not matter on a single rank. `tokenizer` replaces that of the model.
    """
    place = find_restorable(path)
    init()
    is_checkpoint = find(place) is not None
    settings, adapters = Settings(model=str(place), tokenizer=tokenizer), None
    if is_checkpoint:
        saved = settings_of(place, open_checkpoint(place).index.extra)
        if saved is None:
            raise ConfigurationError(
                f"{place}: its model is unknown, there is neither a run's {CONFIG} nor a note in the checkpoint: "
                f"export it first (shardwise export {place} FOLDER --model FOLDER_OF_ITS_MODEL), and generate from that"
            )
        settings = dataclasses.replace(saved, tokenizer=tokenizer or saved.tokenizer)
    elif (place / ADAPTER_CONFIG).is_file():
        base, own_tokenizer, adapters = _adapter_config(place)
        settings = Settings(model=base, tokenizer=tokenizer or own_tokenizer)
    facts = check(settings)
    strategy = quantized(strategy, settings.quantize or facts.quantized)
    loaded = tokenizer_for(facts.tokenizer)
    built = build(settings, loaded.vocab_size, device(), adapters, facts)
    precision = "bf16" if device().type == "cuda" else "fp32"
    if is_checkpoint:
        # The dtype of master weights must match the checkpoint; the compute dtype need not.
        precision = "pure-bf16" if settings.precision == "pure-bf16" else precision
        shard(built.model, None, strategy, precision=precision, seed=settings.seed)
        load(place, built.model)
    else:
        # Without training there are no master weights, and the weights keep the dtype of their files.
        weights: Any = built.weights if adapters is None else _weights_with_adapter(built, place)
        built.model.requires_grad_(False)
        shard(built.model, None, strategy, precision=precision, seed=0)
        load_full_state_dict(built.model, weights)
    return built.model, loaded, built.facts.max_seq


def find_restorable(path: Path) -> Path:
    """Return the export or checkpoint to load for `path`, which may be a run folder."""
    if not path.is_dir():
        raise ConfigurationError(f"{path}: there is no such folder")
    for place in (path, path / EXPORT):
        if find(place) is not None or (place / ADAPTER_CONFIG).is_file() or is_model(place):
            return place
    newest = latest(path / CHECKPOINTS)
    if newest is None:
        raise ConfigurationError(
            f"{path} is neither an export (config.json of a model, or {ADAPTER_CONFIG}), nor a complete checkpoint, "
            "nor a run folder with one of them"
        )
    return newest


def is_model(place: Path) -> bool:
    """Return True for a Hugging Face folder, or one in the same format."""
    return find(place) is None and (place / CONFIG).is_file() and "model_type" in read_object(place / CONFIG)


def settings_of(place: Path, extra: Mapping[str, Any]) -> Settings | None:
    """Return the settings of the run folder of a checkpoint, else those in its `extra`, else None."""
    config = place.resolve().parent.parent / CONFIG
    is_in_run = config.is_file() and "model_type" not in read_object(config)  # a model's has model_type
    if not is_in_run and "configuration" not in extra:
        return None
    try:
        return settings_from_json(read_text(config) if is_in_run else json.dumps(extra["configuration"]))
    except (AttributeError, TypeError, KeyError, ValueError, OSError) as error:
        where = config if is_in_run else f"the 'configuration' of {place}"
        raise ConfigurationError(f"{where} does not hold the settings of a run: {error}") from None


def _adapter_config(place: Path, base: str | None = None) -> tuple[str, str | None, Any]:
    """Return the base model of an adapter (`base` if given), its own tokenizer, if any, and its peft configuration."""
    about = read_object(place / ADAPTER_CONFIG)
    if about.get("peft_type") != "LORA":
        raise ConfigurationError(f"{place}: adapters of type {about.get('peft_type')!r}; only LORA can be opened")
    own_base = place / BASE
    base = base or (str(own_base) if own_base.is_dir() else about.get("base_model_name_or_path"))
    if not base:
        raise ConfigurationError(f"{place / ADAPTER_CONFIG} does not name the model that the adapters belong to")
    tokenizer = tokenizer_in(place, read_object(place / NOTE) if (place / NOTE).is_file() else {})
    return base, tokenizer, import_library("peft", f"{place}, an adapter,").PeftConfig.from_pretrained(str(place))


def _weights_with_adapter(built: Built, place: Path) -> LazyWeights:
    stored = stored_tensors([place / ADAPTER_WEIGHTS])
    is_in_tree = built.facts.kind == "in-tree"
    names = {adapter_file_name(name, is_in_tree): name for name in built.model.state_dict() if is_adapter(name)}
    wrong = sorted(set(names) ^ set(stored))
    if wrong:
        raise ConfigurationError(f"{place / ADAPTER_WEIGHTS} does not fit its {ADAPTER_CONFIG}: first {wrong[0]!r}")
    if built.weights is None:
        raise ConfigurationError(f"{place}: its base model has no weights")
    return built.weights.with_tensors({names[name]: tensor for name, tensor in stored.items()})


# The content of an export


@contextmanager
def content_of(
    path: Path, model: str | None = None, dtype: str = "auto", is_merged: bool = False, max_bytes: int = MAX_FILE_BYTES
) -> Iterator[Content]:
    """Open a checkpoint, model or adapter for an export, and check that it fits its model and is complete.

    `model` replaces the model of the run, if there is one. `dtype` is a dtype's name, `keep` (the checkpoint's dtype)
    `auto` (the dtype of the original model, as in the export at the end of a run), or `nf4`: `auto`, with the matrices
    of blocks as bitsandbytes stores them.
    """
    is_quantized, dtype = dtype == "nf4", "auto" if dtype == "nf4" else dtype
    place = newest_in(path)
    about: dict[str, Any] = {"from": str(place.resolve())}
    is_adapted = (place / ADAPTER_CONFIG).is_file()
    with ExitStack() as stack:
        if is_adapted:
            if not is_merged:
                raise ConfigurationError(f"{place} is a PEFT adapter already: to write a whole model, add --merge")
            built = _build_from_folder(*_adapter_config(place, model))
            _refuse_quantized(built)
            sources = _weight_sources(built.model, _weights_with_adapter(built, place), dtype)
        elif is_model(place):
            if model is not None:
                raise ConfigurationError(f"{place} is a model of its own: leave --model out")
            built = _build_from_folder(str(place))
            _refuse_quantized(built)
            sources = _weight_sources(built.model, built.weights, dtype)
        else:
            opened = open_checkpoint(place)
            built, is_adapted = _model_of(place, opened.index.extra, model)
            about |= {key: opened.index.extra[key] for key in ("step",) if key in opened.index.extra}
            reader = stack.enter_context(opened.reader())
            sources = _stored_sources(built, opened.index.tensors, reader, dtype, place)
        if is_merged and not is_adapted:
            raise ConfigurationError("--merge: there are no adapters to merge")
        if is_adapted and not is_merged and built.facts.has_weights:
            sources = [source for source in sources if is_adapter(source.name)]  # the base model has its own folder
        names = names_of(built.model)
        if is_quantized and is_adapted and not is_merged and built.facts.has_weights:
            raise ConfigurationError(
                "--dtype nf4: adapters are not stored in 4 bits; add --merge to write a whole model"
            )
        if is_quantized and any(type(part).__name__ == "Conv1D" for part in built.model.modules()):
            raise ConfigurationError(
                "--dtype nf4: the Conv1D layers of GPT-2 are transposed there; choose another dtype"
            )
        yield Content(built.model, built.facts, sources, names, is_adapted, is_merged, max_bytes, is_quantized, about)


def _refuse_quantized(built: Built) -> None:
    if built.facts.quantized:
        fix = "use the unquantised model (--model FOLDER)"
        raise ConfigurationError(f"model {built.facts.origin!r} is stored as {built.facts.quantized}: {fix}")


def _model_of(place: Path, extra: Mapping[str, Any], model: str | None) -> tuple[Built, bool]:
    """Return the model of a checkpoint, and whether it has adapters."""
    why = "it is not in a run folder, and was not saved by a run"
    try:
        settings = settings_of(place, extra)
    except ConfigurationError as error:
        settings, why = None, str(error)
    if settings is None:
        if model is None:
            raise ConfigurationError(
                f"{place}: its model is unknown ({why}): name a Hugging Face folder with its config and "
                "tokenizer, --model FOLDER"
            )
        return _build_from_folder(model), False
    if model is not None:
        settings = dataclasses.replace(settings, model=model, shape={})
    try:
        facts = check(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (if the model was moved: --model FOLDER)") from None
    built = build(settings, tokenizer_for(facts.tokenizer).vocab_size, _HOST, facts=facts)
    return built, settings.lora is not None


def _build_from_folder(model: str, tokenizer: str | None = None, adapters: Any = None) -> Built:
    """Build the model of a folder on the meta device, with its tokenizer files if there are any."""
    folder = find_model(model, with_weights=False)
    folder = folder.parent if folder.is_file() else folder
    is_random = not any(folder.glob("*.safetensors"))
    tokenizer = tokenizer or tokenizer_in(folder, read_object(folder / CONFIG)) or str(folder)
    settings = Settings(model=model, tokenizer=tokenizer, random_weights=is_random)
    built = build(settings, 0, _HOST, adapters)
    dtype = getattr(torch, str(built.facts.config.get("dtype") or built.facts.config.get("torch_dtype")), None)
    if is_random and isinstance(dtype, torch.dtype):
        built.model.to(dtype)  # `build` uses fp32 if there are no weight files
    return built


def _stored_sources(
    built: Built, tensors: Mapping[str, Saved], reader: Reader, dtype: str, place: Path
) -> list[Source]:
    by_name = {name: saved for first, saved in tensors.items() for name in (first, *saved.tied)}
    encoded = {name.removesuffix(f".{codec}"): (name, codec) for name in by_name if (codec := codec_in(name))}
    expected = built.model.state_dict(keep_vars=True)
    sources, missing = [], []
    for first, names in names_of(built.model).items():
        tensor = expected[first]
        saved = next((by_name[name] for name in names if name in by_name), None)
        if first in encoded:
            name, codec = encoded[first]
            rows = partial(_decoded, stored_source(name, reader, by_name[name], torch.uint8), tensor, codec)
            sources.append(
                Source(
                    first, chosen := _dtype_of(tensor, tensor.dtype, dtype), tuple(tensor.shape), partial(rows, chosen)
                )
            )
        elif saved is None:
            missing.append(first)
        elif saved.shape != tuple(tensor.shape):
            raise CheckpointError(f"{place}: {first!r} is {saved.shape} in it, {tuple(tensor.shape)} in the model")
        else:
            sources.append(stored_source(first, reader, saved, _dtype_of(tensor, saved.torch_dtype, dtype)))
    as_stored = {name for name, _ in encoded.values()}
    unknown = [
        name for name, saved in tensors.items() if name not in as_stored and not {name, *saved.tied} & expected.keys()
    ]
    unknown = [name for name in unknown if not COMPUTED.search(name)]
    lacks = [f"it lacks {len(missing)} tensors, first {missing[0]!r}"] if missing else []
    has = [f"it has {len(unknown)} that the model has not, first {unknown[0]!r}"] if unknown else []
    if lacks or has:
        kind = type(built.model).__name__
        raise CheckpointError(f"{place} does not fit its model, a {kind}: {'; '.join(lacks + has)}")
    return sources


def _decoded(source: Source, like: Tensor, codec: str, dtype: torch.dtype) -> list[Tensor]:
    out = torch.empty(like.numel(), dtype=like.dtype)
    decoder(parse(codec), source.read()[None], out)()
    return [converted(source.name, out.view(like.shape), dtype)]


def _weight_sources(model: nn.Module, weights: Mapping[str, Tensor] | None, dtype: str) -> list[Source]:
    if weights is None:
        raise ConfigurationError("the model has no weights in its folder: there is nothing to export")
    expected = model.state_dict(keep_vars=True)
    sources = []

    def rows(name: str, chosen: torch.dtype) -> list[Tensor]:
        return [converted(name, weights[name], chosen)]

    for first, names in names_of(model).items():
        tensor = expected[first]
        name = next(name for name in names if name in weights)
        chosen = _dtype_of(tensor, tensor.dtype, dtype)
        sources.append(Source(first, chosen, tuple(tensor.shape), partial(rows, name, chosen)))
    return sources


def _dtype_of(tensor: Tensor, stored: torch.dtype, choice: str) -> torch.dtype:
    """Return the dtype to write. Integers keep the stored one; so do buffers, unless `choice` is `auto`."""
    if not stored.is_floating_point or choice == "keep":
        return stored
    if choice == "auto":
        return tensor.dtype
    return dtype_of(choice).torch if isinstance(tensor, nn.Parameter) else stored
