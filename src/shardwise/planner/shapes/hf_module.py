"""A Hugging Face config.json as the module that transformers makes of it, on the meta device, where it takes no memory.

It is for models that sizes alone do not describe: several models in one, blocks that differ, unknown families. Nothing
is downloaded, and code from a model's repository is never run.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigurationError
from .hf_config import Config

if TYPE_CHECKING:
    from torch import nn

MOST_LAYERS = 1_000
# Auto classes to try if `architectures` names no class, the most complete first.
_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_MAPPING",
)
_INSTEAD = "or give --shape layers=..., or the module itself: sw.plan(model, ...)"


def hush() -> None:
    """Silence torchao: transformers and peft import it if it is installed, and it warns of parts that nobody uses."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def module_of_config(name: str, config: Config, why: str) -> "nn.Module":
    """Build the module. `why`: the reason why sizes are not enough, for the error if it cannot be built."""
    hush()
    try:
        import torch
        import transformers
    except ImportError:
        raise ConfigurationError(
            f"model {name!r}: {why}, so the model itself is counted, which needs transformers: install shardwise[hf], "
            f"{_INSTEAD}"
        ) from None
    kind = str(config.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigurationError(
            f"model {name!r}: {why}, and transformers {transformers.__version__} does not know it either; install one "
            f"that does, {_INSTEAD}"
        )
    for key, value in _numbers_in(config):
        if "layer" in key and value > MOST_LAYERS:
            raise ConfigurationError(f"model {name!r}: {key} is {value:,}, but at most {MOST_LAYERS:,} is planned for")
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            made: Any = transformers.CONFIG_MAPPING[kind].from_dict(_values_of(config))
            return _class_for(transformers, made, config)._from_config(made)
    except Exception as error:  # any model's own code runs here
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"model {name!r}: {why}, so the model itself is counted, and transformers cannot build it: "
            f"{type(error).__name__}: {reason}; {_INSTEAD.removeprefix('or ')}"
        ) from error


def num_positions_in(model: "nn.Module") -> int:
    """Maximum sequence length of a built model; 0: its config gives none."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    found = (getattr(text, key, None) for key in ("max_position_embeddings", "n_positions", "max_target_positions"))
    return next((value for value in found if type(value) is int and value > 0), 0)


def _class_for(transformers: Any, made: Any, config: Config) -> Any:
    for name in config.get("architectures") or ():
        found: Any = getattr(transformers, str(name), None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if is_model and found.config_class is type(made):
            return found
    for mapping in (getattr(transformers, name) for name in _MAPPINGS):
        if type(made) in mapping:
            found = mapping[type(made)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError("no class of it is one that is trained on tokens or images, and architectures names none")


def _values_of(config: Config) -> dict[str, Any]:
    """Decode the config: numbers that JSON cannot express are written as text. Weights of backbones from other
    libraries are not downloaded."""
    return {key: False if key == "use_pretrained_backbone" else _value(value) for key, value in config.items()}


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return float(value["__float__"]) if set(value) == {"__float__"} else _values_of(value)
    return [_value(entry) for entry in value] if isinstance(value, list) else value


def _numbers_in(config: Config) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers_in(value)
        elif type(value) is int:
            yield str(key), value
