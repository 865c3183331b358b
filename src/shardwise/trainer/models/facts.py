"""Facts about a run's model, without building it. The launcher needs them before any rank exists.

A model is the name of an in-tree shape, a folder (of Hugging Face, or an export of the in-tree transformer), a
config.json (with random weights), or the id of a Hugging Face repository, which is downloaded into its cache once per
machine. Code in a repository is never run, and pickled weights are never opened. This file does not import torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...base.documents import read_object
from ...base.errors import ConfigurationError, did_you_mean, import_library
from ...planner.shapes.hf_config import QUANTISED, is_nf4
from ...planner.training import ALL_LINEAR
from ..data.tokenizer import BYTES
from ..settings import Lora, Settings
from ..shapes import PRESETS, SHAPE_KEYS, TransformerShape
from .llama import SHAPE_KEY

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER_KEY = "shardwise_tokenizer"  # key in a config.json that names the byte tokenizer, which has no files
NO_LIMIT = 2**31 - 1  # sequence length of models without a limit

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# Narrow patterns: a folder with a config.json may contain other files.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.*", "additional_chat_templates", "spiece.model",
    "sentencepiece*.model", "tekken.json",
)  # fmt: skip
_OTHER_ADAPTER_KEYS = (
    "alpha_pattern", "rank_pattern", "layers_to_transform", "layers_pattern", "layer_replication", "exclude_modules",
    "target_parameters", "trainable_token_indices", "lora_bias", "use_qalora",
)  # fmt: skip
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FETCHED = ["*.json", "*.model", "*.txt", "*.jinja"]
_NOT_FETCHED = ["*/*", "consolidated*"]  # copies of the weights in formats of other libraries
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    kind: Literal["in-tree", "hf"]
    max_seq: int
    vocab_size: int | None  # None: that of the tokenizer, for an in-tree shape
    tokenizer: str  # from the settings, else the model's, else (with random weights) "bytes"
    origin: str  # name, id or folder that the user gave; never a folder of the download cache
    folder: Path | None = None  # None: an in-tree shape by name
    config_file: Path | None = None
    has_weights: bool = False  # in the folder; else they are random
    config: Mapping[str, Any] = field(default_factory=dict)  # the content of config_file
    chat_template: str | None = None  # a file, instead of the tokenizer's own template

    @property
    def quantized(self) -> str | None:
        """The format of the weights in the folder, if they are quantised."""
        return "nf4" if self.has_weights and QUANTISED in self.config else None


def check(settings: Settings) -> ModelFacts:
    if settings.model in PRESETS:
        max_seq, vocab = in_tree_shape(settings, 1).max_seq, settings.shape.get("vocab")
        facts = ModelFacts("in-tree", max_seq, vocab, settings.tokenizer or BYTES.name, settings.model)
    else:
        facts = _facts_of_folder(settings)
    if facts.tokenizer == BYTES.name:
        require_vocabulary(facts, BYTES.vocab_size)
    return replace(facts, chat_template=settings.chat_template)


def require_vocabulary(facts: ModelFacts, tokenizer_vocab: int) -> None:
    """Refuse a tokenizer with more ids than the model has embeddings. Fewer are fine: vocabularies are padded."""
    if facts.vocab_size is not None and tokenizer_vocab > facts.vocab_size:
        raise ConfigurationError(
            f"tokenizer {facts.tokenizer!r} has {tokenizer_vocab} tokens, but the model's vocabulary is "
            f"{facts.vocab_size}: use the tokenizer that belongs to the model"
        )


def in_tree_shape(settings: Settings, tokenizer_vocab: int) -> TransformerShape:
    """Return the shape of the preset, changed by `settings.shape`; by default its vocabulary is the tokenizer's."""
    unknown = sorted(set(settings.shape) - set(SHAPE_KEYS))
    if unknown:
        raise ConfigurationError(f"shape: unknown key {unknown[0]!r}; {did_you_mean(unknown[0], SHAPE_KEYS)}")
    values: dict[str, Any] = {**PRESETS[settings.model].shape, "vocab": tokenizer_vocab, **settings.shape}
    return TransformerShape(**values)


def _facts_of_folder(settings: Settings) -> ModelFacts:
    place = find_model(settings.model, with_weights=not settings.random_weights)
    is_config = place.is_file()
    folder, config_file = (place.parent, place) if is_config else (place, place / "config.json")
    config = read_object(config_file)
    problem = ""
    if settings.shape:
        key = f"shape.{next(iter(settings.shape))}"
        problem = f"{key} is for in-tree shapes by name ({', '.join(PRESETS)}), but it has its own config.json"
    elif not isinstance(config.get("model_type"), str):
        problem = "its config.json has no model_type"
    elif (about := config.get(QUANTISED)) is not None and not is_nf4(about):
        method = about.get("quant_method") if isinstance(about, dict) else about
        problem = (
            f"its weights are quantised in another way ({method}) than nf4 of bitsandbytes with double quantisation"
        )
        problem += ": use the unquantised ones"
    if problem:
        raise ConfigurationError(f"model {settings.model!r}: {problem}")
    has_weights = not (is_config or settings.random_weights)
    if has_weights:
        weight_files(folder)
    if SHAPE_KEY in config:
        shape = shape_in(config, settings.model)
        max_seq = shape.max_seq
        vocab: int | None = shape.vocab
    else:
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        max_seq = next((text[key] for key in _LENGTH_KEYS if isinstance(text.get(key), int)), NO_LIMIT)
        vocab = text.get("vocab_size")
    tokenizer = settings.tokenizer or tokenizer_in(folder, config)
    if tokenizer is None and has_weights:
        raise ConfigurationError(
            f"model {settings.model!r} has weights but no tokenizer files, so its tokenizer is unknown: "
            f"give the one it was trained with (--tokenizer, a folder or an id), or --tokenizer {BYTES.name}"
        )
    return ModelFacts(
        kind="in-tree" if SHAPE_KEY in config else "hf",
        max_seq=max_seq,
        vocab_size=vocab,
        tokenizer=tokenizer or BYTES.name,
        origin=str(folder) if Path(settings.model).expanduser().exists() else settings.model,
        folder=folder,
        config_file=config_file,
        has_weights=has_weights,
        config=config,
    )


def shape_in(config: Mapping[str, Any], name: str) -> TransformerShape:
    try:
        return TransformerShape(**config[SHAPE_KEY])
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"model {name!r}: its config.json has no complete shape: {error}") from None


def lora_in(folder: Path) -> Lora:
    """Return the settings of a PEFT adapter. One with settings that `Lora` does not have is refused."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigurationError(
            f"lora_from {folder}: it has no {ADAPTER_CONFIG}: give an adapter's folder, such as the export of a run"
        )
    about = read_object(folder / ADAPTER_CONFIG)
    problem = next((f"{key} {about[key]!r}" for key in _OTHER_ADAPTER_KEYS if about.get(key)), "")
    if about.get("peft_type") != "LORA":
        problem = f"peft_type {about.get('peft_type')!r}"
    elif about.get("bias", "none") != "none":
        problem = f"bias {about['bias']!r}"
    elif isinstance(about.get("init_lora_weights"), str) and about["init_lora_weights"] != "gaussian":
        problem = f"init_lora_weights {about['init_lora_weights']!r}"
    targets: Any = about.get("target_modules")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        problem = f"the pattern {targets!r} as target_modules"
    if problem:
        raise ConfigurationError(f"lora_from {folder}: {problem} cannot be continued here")
    try:
        return Lora(
            r=about["r"],
            alpha=float(about["lora_alpha"]),
            dropout=about.get("lora_dropout", 0.0),
            targets=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
            rslora=about.get("use_rslora", False),
            dora=about.get("use_dora", False),
            modules_to_save=tuple(sorted(about.get("modules_to_save") or ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"lora_from {folder}: its {ADAPTER_CONFIG} is not complete: {error}") from None


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer files of a model's folder; some of them are folders."""
    return sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)})


def tokenizer_in(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the tokenizer that `config` names, else the folder if it has tokenizer files, else None."""
    return config.get(TOKENIZER_KEY) or (str(folder) if tokenizer_files(folder) else None)


def find_model(name: str, *, with_weights: bool) -> Path:
    """Return the folder of a model, or its config file. If `name` is a repository id, download the repository."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigurationError(f"model {name!r}: the folder has no config.json")
    if path.is_file() and path.suffix != ".json":
        raise ConfigurationError(f"model {name!r} is a file, but not a config.json: give the model's folder")
    if path.is_dir() or path.is_file():
        return path.resolve()
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) or name.endswith(".json"):
        raise ConfigurationError(f"model {name!r}: there is no such folder")
    known = "neither an in-tree shape nor a folder" + ("" if "/" in name else f"; {did_you_mean(name, PRESETS)}")
    hub = import_library("huggingface_hub", f"model {name!r}: {known}; an id of Hugging Face")
    patterns = [*_FETCHED, "*.safetensors"] if with_weights else _FETCHED
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=_NOT_FETCHED))
    except Exception as error:  # noqa: BLE001  no network, no such repository, or a login is needed
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(f"model {name!r}: {known}; the download failed: {reason}") from None
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"model {name!r}: the repository has no config.json")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order. Missing or pickled files are refused."""
    if (folder / _INDEX).is_file():
        weight_map = read_object(folder / _INDEX).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigurationError(f"model {str(folder)!r}: the weight_map of {_INDEX} does not contain file names")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise ConfigurationError(f"model {str(folder)!r}: {_INDEX} names {name!r}, which is not in the folder")
        if names:
            return [folder / name for name in names]
    elif (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickled = next((path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))), None)
    why = "has no model.safetensors; for fresh weights use --random-weights"
    if pickled is not None:
        fix = "save it again as safetensors with save_pretrained"
        why = f"has pickled weights only ({pickled}), which are never opened: {fix}"
    raise ConfigurationError(f"model {str(folder)!r} {why}")
