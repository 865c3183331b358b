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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...api.casts import fp32_patterns
from ...api.full_weights import load_full_state_dict
from ...api.sharding import shard
from ...base.documents import read_object, read_text
from ...base.dtypes import dtype_of
from ...base.errors import CheckpointError, ConfigurationError, import_library
from ...checkpoint.folder import find
from ...checkpoint.index import Saved
from ...checkpoint.opened import Reader, open_checkpoint
from ...checkpoint.tensor_files import Source
from ...checkpoint.writer import MAX_FILE_BYTES, NOTE, converted, stored_source
from ...core.layout import Strategy, quantized
from ...core.mesh import device
from ...core.precision import precision_of
from ...core.schedule.model import matches
from ...core.wire.codec import codec_in, parse
from ...core.wire.reference_codecs import decoder
from ..data.tokenizer import Tokenizer, tokenizer_for
from ..metrics import best_or_newest
from ..run_folder import CONFIG, EXPORT
from ..settings import Settings, settings_from_json
from .build import Built, build
from .export import BASE, Content
from .facts import ADAPTER_CONFIG, ModelFacts, check, find_model, tokenizer_in
from .lora import is_adapter, with_stored
from .weights import COMPUTED, LazyWeights, names_of

STORED = "stored"  # as in the checkpoint, and bytes for weights that are stored in few bits
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Restorable:
    """A model in a folder, found and checked, with its tokenizer. Its weights are read by `load`."""

    place: Path
    settings: Settings
    facts: ModelFacts
    tokenizer: Tokenizer
    adapters: Any  # peft's configuration; None unless the folder is an adapter
    quantized: str | None = None  # the format of few bits in which its weights are stored

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a text: that of the tokenizer, and those in generation_config.json."""
        file = self.facts.folder and self.facts.folder / "generation_config.json"
        given = read_object(file).get("eos_token_id") if file and file.is_file() else None
        return frozenset([self.tokenizer.end_id, *(given if isinstance(given, list) else [given])]) - {None}

    def load(
        self,
        precision: str | None = None,
        *,
        strategy: Strategy,
        quantize: str | None = None,
        is_trained: bool = False,
        **words: Any,
    ) -> nn.Module:
        """Build the model, shard it as `words` say (the keywords of `sw.shard`), and read its weights.

        Unless it `is_trained`, no weight needs a gradient, and there is one copy of each, in the compute dtype.
        Weights that are stored in few bits stay so; `quantize` is for others.
        """
        strategy = quantized(strategy, self.quantized or quantize)
        precision = precision or ("bf16" if device().type == "cuda" else "fp32")
        built = build(self.settings, self.tokenizer.vocab_size, device(), self.adapters, self.facts)
        with ExitStack() as stack:
            weights: Mapping[str, Tensor] | None = built.weights
            if self.adapters is not None:
                weights = with_stored(built.model, built.weights, self.place)
            elif find(self.place) is not None:
                opened = open_checkpoint(self.place)
                reader = stack.enter_context(opened.reader())
                sources = _stored_sources(built, opened.index.tensors, reader, STORED, self.place)
                weights = LazyWeights({source.name: source.read for source in sources})
            if not is_trained:
                _freeze(built.model, precision)
            shard(built.model, None, strategy, precision=precision, seed=self.settings.seed, **words)
            load_full_state_dict(built.model, weights)
        return built.model


def find_model_in(path: Path, tokenizer: str | None = None) -> Restorable:
    """Find the model of a folder, and check all that needs no weights. `tokenizer` replaces that of the model."""
    place, adapters = find_restorable(path), None
    settings = Settings(model=str(place), tokenizer=tokenizer)
    if find(place) is not None:
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
    quantized = settings.quantize or facts.quantized
    if adapters is not None and place != path and not (place / BASE).is_dir():
        # The base is as in the run. A base that was written with the adapter has these values already.
        quantized = read_object(path / CONFIG).get("quantize") or quantized
    return Restorable(place, settings, facts, tokenizer_for(facts.tokenizer, facts.chat_template), adapters, quantized)


def _freeze(model: nn.Module, precision: str) -> None:
    """Give every weight, still on the meta device, the dtype in which it is computed with, and no gradient."""
    chosen = precision_of(precision, None)
    in_fp32 = fp32_patterns(model, chosen)
    for path, module in model.named_modules():
        dtype = torch.float32 if matches(path, in_fp32) else chosen.compute.torch
        for param in module.parameters(recurse=False):
            param.requires_grad_(False)
            if param.is_floating_point():
                param.data = param.data.to(dtype)


def find_restorable(path: Path) -> Path:
    """Return the export or checkpoint to load for `path`, which may be a run folder."""
    if not path.is_dir():
        raise ConfigurationError(f"{path}: there is no such folder")
    for place in (path, path / EXPORT):
        if find(place) is not None or (place / ADAPTER_CONFIG).is_file() or is_model(place):
            return place
    newest = best_or_newest(path)
    if find(newest) is None:
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
        settings = settings_from_json(read_text(config) if is_in_run else json.dumps(extra["configuration"]))
        return dataclasses.replace(settings, lora_from=None)  # the checkpoint has the adapter
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
    place = best_or_newest(path)
    about: dict[str, Any] = {"from": str(place.resolve())}
    is_adapted = (place / ADAPTER_CONFIG).is_file()
    with ExitStack() as stack:
        if is_adapted:
            if not is_merged:
                raise ConfigurationError(f"{place} is a PEFT adapter already: to write a whole model, add --merge")
            built = _unquantized(_build_from_folder(*_adapter_config(place, model)))
            sources = _weight_sources(built.model, with_stored(built.model, built.weights, place), dtype)
        elif is_model(place):
            if model is not None:
                raise ConfigurationError(f"{place} is a model of its own: leave --model out")
            built = _unquantized(_build_from_folder(str(place)))
            sources = _weight_sources(built.model, built.weights, dtype)
        else:
            opened = open_checkpoint(place)
            built, is_adapted = _model_of(place, opened.index.extra, model)
            about |= {"step": opened.index.extra["step"]} if "step" in opened.index.extra else {}
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


def _unquantized(built: Built) -> Built:
    if built.facts.quantized:
        fix = "use the unquantised model (--model FOLDER)"
        raise ConfigurationError(f"model {built.facts.origin!r} is stored as {built.facts.quantized}: {fix}")
    return built


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
            source = dataclasses.replace(stored_source(name, reader, by_name[name], torch.uint8), name=first)
            if dtype != STORED:
                chosen = _dtype_of(tensor, tensor.dtype, dtype)
                rows = partial(_decoded, source, tensor, codec, chosen)
                source = Source(first, chosen, tuple(tensor.shape), rows)
            sources.append(source)
        elif saved is None:
            missing.append(first)
        elif saved.shape != tuple(tensor.shape):
            raise CheckpointError(f"{place}: {first!r} is {saved.shape} in it, {tuple(tensor.shape)} in the model")
        else:
            sources.append(stored_source(first, reader, saved, _dtype_of(tensor, saved.torch_dtype, dtype)))
    known = {*expected, *(name for name, _ in encoded.values())}
    unknown = [name for name, saved in tensors.items() if not {name, *saved.tied} & known and not COMPUTED.search(name)]
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
    if not stored.is_floating_point or choice in ("keep", STORED):
        return stored
    if choice == "auto":
        return tensor.dtype
    return dtype_of(choice).torch if isinstance(tensor, nn.Parameter) else stored
