"""Settings from all their sources: flags, overrides, a YAML or TOML file, the environment, the model's preset.

Every source becomes rows of `Given`: a key, its value as text (or a list or a mapping of texts), and its origin. The
strongest source comes first and wins; mappings (`shape`, `lora`, `strategy`) are merged part by part. pydantic then
turns text into types. So 1e-4 is a number and 1:4 a string in every source, whatever type YAML would choose.

A mistake raises one `ConfigurationError` that names its origin. Only this file imports pydantic, and only when
settings are resolved.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from ..base.documents import as_strings, read_text, yaml_node, yaml_pairs, yaml_texts, yaml_tree
from ..base.errors import ConfigurationError, did_you_mean, nearest
from .data.rows import COLUMNS
from .models.facts import lora_in
from .offload import check_strategy, without_unused_folder
from .settings import FINE_TUNING_RATE, LORA_RATE, PREFERENCE_SHARE, Lora, Settings
from .shapes import PRESETS, TransformerShape

if TYPE_CHECKING:
    import pydantic

FIELDS = {entry.name: entry for entry in fields(Settings)}
PREFIX = "SHARDWISE_"
# Settings that are mappings: their keys and types. The keys of a strategy are patterns of unit names.
PARTS: dict[str, dict[str, Any]] = {
    "shape": {entry.name: entry.type for entry in fields(TransformerShape)},
    "lora": {entry.name: entry.type for entry in fields(Lora)},
    "strategy": {},
    "columns": dict.fromkeys(COLUMNS, str),
}
EXAMPLES = {
    "shape": "layers=8,hidden=256",
    "lora": "r=16,alpha=32,targets=q_proj+v_proj",
    "columns": "instruction=question,output=answer",
}
# Words that stand for another value.
WORDS: dict[str, dict[str, Any]] = {
    "compile": {"true": "on", "yes": "on", "false": "off", "no": "off"},
    "gradient_checkpointing": {"true": "full", "false": "none"},
    "lora": {"true": {}, "false": None},
    "offload": {"none": [], "false": []},
    "wire": {"none": [], "false": []},
}
# A preset's value for a key is ignored if all settings listed here for the key are given: they determine it.
RIVALS = {
    "max_steps": ("num_train_epochs",),
    "global_batch_size": ("per_device_train_batch_size", "gradient_accumulation_steps"),
}
# Pairs of alternatives: only one setting of a pair may be given.
EITHER = (("max_steps", "num_train_epochs"), ("train_file", "dataset"))
# Kubernetes sets variables for every service of a namespace, and one may be called shardwise.
FROM_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT|PORT)(_|$)")
# Maximum nesting of a value, such as a mapping that contains lists.
DEPTH = 2
FALSE = ("none", "false", "0", "no", "off", "f", "n")
WANTED = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text",
    tuple[float, ...]: "a list of numbers", tuple: "a list of texts",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    key: str
    value: Any  # None, a string, or a list or mapping of strings; already typed if it comes from a program or a preset
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    settings: Settings
    origin: dict[str, str]  # by key


def resolve(
    words: Sequence[str],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: tuple[str, str] | None = None,
    others: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Resolved:
    """Combine a command line, its file and the environment.

    `words` are at most one file and any number of key=value; a flag that was not given is None. Relative paths are
    relative to the working directory, also those in a file. `file` is the name and the YAML of a file that the command
    line does not name, such as that of a resumed run. `others` are settings from configurations of other libraries, by
    origin; our own file is stronger.
    """
    files = files_in(words)
    if len(files) > 1:
        raise ConfigurationError(f"{files[0]} and {files[1]}: give one file, and what differs from it as key=value")
    own = [[*_from_flags(flags), *_from_overrides(word for word in words if word not in files)]]
    own += [[*_from_file(name)] for name in files]
    foreign = [[Given(key, value, name) for key, value in found.items()] for name, found in others.items()]
    if _has("precision", own):  # another library's reduce dtype is used only with its precision
        foreign = [[entry for entry in source if entry.key != "reduce_dtype"] for source in foreign]
    earlier = [] if file is None else [*_from_yaml(file[1], file[0])]
    given: list[Given] = []
    for source in [*own, *foreign, earlier, _from_environment(environment)]:
        # If a stronger source gives one setting of a pair, ignore the other here. Both in one source raise later.
        stronger = {entry.key for entry in given if entry.value}
        replaced = {key for pair in EITHER if stronger & {*pair} for key in pair} - stronger
        given += [entry for entry in source if entry.key not in replaced]
    values, origins = _merged(given)
    values, origins = _merged([*given, *_from_preset(values), *_from_adapter(values)])
    goes_on = file is not None and not _has("offload", [*own, *foreign])
    return Resolved(_typed(values, origins, goes_on), {key: "; ".join(origins.get(key, ["default"])) for key in FIELDS})


def _has(key: str, sources: list[list[Given]]) -> bool:
    return any(entry.key == key for source in sources for entry in source)


def explain(resolved: Resolved) -> str:
    """Return all settings as a YAML file, with the origin of each."""
    lines, panel = [], None
    for key, value in asdict(resolved.settings).items():
        if panel != FIELDS[key].metadata["panel"]:
            panel = FIELDS[key].metadata["panel"]
            lines.append(f"\n# {panel}")
        lines.append(f"{f'{key}: {as_yaml(value)}':<40}  # {resolved.origin[key]}")
    return "\n".join(lines).lstrip()


def as_yaml(value: Any) -> str:
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w/][\w/.+-]*", value)
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, for editors and programs."""
    found = _adapter().json_schema()
    found |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "shardwise train"}
    limits = {"minimum": "least", "maximum": "most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
    size = {"type": "integer", "minimum": 1}
    sizes = {part: {"type": "boolean"} if part == "tied" else size for part in PARTS["shape"]}
    parts = {"shape": sizes, "columns": {name: {"type": "string"} for name in COLUMNS}}
    for key, entry in FIELDS.items():
        about = found["properties"][key]
        about.pop("title", None)
        about |= {word: entry.metadata[name] for word, name in limits.items() if entry.metadata.get(name) is not None}
        # Values that a file may have besides the type itself.
        if get_origin(entry.type) is tuple:
            about = {"anyOf": [{"type": "string"}, about], "default": about.pop("default")}
        elif key == "lora":
            about["anyOf"] += [{"type": "string"}, {"type": "boolean"}]
        elif key in ("gradient_checkpointing", "compile"):
            about["enum"] += [True, False]
            del about["type"]
        elif key == "nnodes":
            about["type"] = ["string", "integer"]
        elif key in parts:
            about = {"type": "object", "properties": parts[key], "additionalProperties": False, "default": {}}
        found["properties"][key] = {**about, "description": entry.metadata["help"]}
    for part in (found, found["$defs"]["Lora"]):
        part["additionalProperties"] = False
    return found


def _from_flags(flags: Mapping[str, Any]) -> Iterator[Given]:
    for key, value in flags.items():
        if value is not None:
            negated = "no-" if value is False or value == "false" else ""
            text = ",".join(value) if isinstance(value, list | tuple) else value
            yield _given(key, text, f"flag --{negated}{key.replace('_', '-')}")


def files_in(words: Sequence[str]) -> list[str]:
    """Return the words that are not key=value. A path may contain "=", but a key has no slash, except in a pattern."""
    return [word for word in words if not re.match(r"(strategy\.[^=]+|[\w.-]+)=", word)]


def _from_overrides(words: Iterable[str]) -> list[Given]:
    """Return one row per key. The last one wins; parts of a mapping keep their order, which matters in a strategy."""
    latest: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        given = _given(name, text, "override")
        before = latest.get(given.key)
        adds = isinstance(given.value, dict) and isinstance(before, dict)
        latest[given.key] = before | given.value if adds else given.value
    return [Given(key, value, "override") for key, value in latest.items()]


def _from_file(file: str) -> Iterator[Given]:
    path = Path(file)
    if not path.exists():
        raise ConfigurationError(f"{file}: no such file; give a YAML or TOML file, and what differs as key=value")
    if path.suffix.lower() not in READERS or not path.is_file():
        raise ConfigurationError(f"{file} is no configuration: give a file that ends in {', '.join(READERS)}")
    seen: dict[str, str] = {}
    for given in READERS[path.suffix.lower()](read_text(path), file):
        for name in [f"{given.key}.{part}" for part in given.value] if isinstance(given.value, dict) else [given.key]:
            if name in seen:
                raise ConfigurationError(f"{name} is said twice: {seen[name]} and {given.origin}")
            seen[name] = given.origin
        yield given


def _from_yaml(text: str, file: str) -> Iterator[Given]:
    where, root = f"file {file}", yaml_node(text, f"file {file}")
    if root is None or root.tag.endswith(":null"):
        return
    for name, node, line in yaml_pairs(root, where):
        yield _given(name, yaml_texts(node, where, DEPTH), f"{where} line {line}")


def _from_toml(text: str, file: str) -> Iterator[Given]:
    try:
        document = as_strings(tomllib.loads(text, parse_float=str))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"file {file} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"file {file} is nested too deep") from None
    for name, value in document.items():
        yield _given(name, value, f"file {file}")


READERS = {".yaml": _from_yaml, ".yml": _from_yaml, ".json": _from_yaml, ".toml": _from_toml}


def _from_environment(environment: Mapping[str, str]) -> Iterator[Given]:
    for name, text in environment.items():
        if name.startswith(PREFIX) and not FROM_KUBERNETES.search(name):
            yield _given(name.removeprefix(PREFIX).lower(), text, f"environment {name}")


def _from_preset(values: Mapping[str, Any]) -> Iterator[Given]:
    """Yield settings that suit the model, except those that the given `values` replace."""
    model = values.get("model", FIELDS["model"].default)
    random_weights = str(values.get("random_weights")).strip().lower() not in FALSE
    share, pairs = (1.0, "") if values.get("objective") is None else (PREFERENCE_SHARE, ", with pairs")
    if isinstance(model, str) and model in PRESETS:
        for key, value in PRESETS[model].settings.items():
            rivals = RIVALS.get(key, ())
            if not rivals or any(values.get(rival) in (None, "auto") for rival in rivals):
                yield Given(key, value, f"preset {model}")
    elif values.get("lora") is not None or values.get("lora_from") is not None:
        yield Given("learning_rate", LORA_RATE * share, f"for adapters{pairs}")
    elif isinstance(model, str) and not model.endswith(".json") and not random_weights:
        yield Given("learning_rate", FINE_TUNING_RATE * share, f"for pretrained weights{pairs}")


def _from_adapter(values: Mapping[str, Any]) -> Iterator[Given]:
    """Yield the values of `lora` in the adapter that the run starts from."""
    if isinstance(folder := values.get("lora_from"), str):
        found = asdict(lora_in(Path(folder).expanduser()))
        if values.get("lora", {}) is None:
            raise ConfigurationError(f"lora_from {folder}: it needs lora, but that is none: leave it out")
        yield Given("lora", found, f"adapter {folder}")


def _given(name: str, value: Any, origin: str) -> Given:
    """Make a row. Names may have hyphens or underscores; `shape.layers` is a part of `shape`."""
    head, dot, part = name.partition(".")
    key = head.replace("-", "_")
    if key not in FIELDS:
        near = nearest(key, FIELDS)
        hint = f"did you mean {near!r}?" if near else "`shardwise train --help` lists them all"
        raise ConfigurationError(f"unknown key {name!r} ({origin}); {hint}")
    if dot and key not in PARTS:
        raise ConfigurationError(f"unknown key {name!r} ({origin}); {key} has no parts")
    return Given(key, _plain(key, {part: value} if dot else value, origin), origin)


def _plain(key: str, value: Any, origin: str) -> Any:
    """Parse words, lists and mappings that were written as one string."""
    kind = FIELDS[key].type
    if value is None and get_origin(kind) is tuple:  # as `dataset` was written when it was one name
        return []
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, str):
        word = value.strip().lower()
        if word in WORDS.get(key, {}):
            return WORDS[key][word]
        if word in ("null", "none") and NoneType in get_args(kind):
            return None
        if get_origin(kind) is tuple:
            return _listed(value, ",")
        if key in PARTS:
            value = _parts_in(key, value, origin)
        elif word.replace("_", "-") in _choices(kind):
            return word.replace("_", "-")
    if isinstance(value, dict) and PARTS.get(key):
        value = {name.replace("-", "_"): part for name, part in value.items()}
        for name in value:
            if name not in PARTS[key]:
                raise ConfigurationError(f"unknown {key} key {name!r} ({origin}); {did_you_mean(name, PARTS[key])}")
        for name in ("targets", "modules_to_save"):
            if isinstance(value.get(name), str):
                value[name] = _listed(value[name], "+,")
    return value


def _parts_in(key: str, text: str, origin: str) -> Any:
    """Parse r=16,targets=a+b, or a mapping in braces as in YAML or JSON; a strategy's name stays a string."""
    if text.lstrip().startswith("{"):
        return yaml_tree(text, origin, DEPTH) or {}
    if not PARTS[key]:
        return text
    parts: dict[str, str] = {}
    for pair in _listed(text, ","):
        name, equals, part = pair.partition("=")
        if key == "lora" and name.isdecimal():
            parts |= {"r": name, "alpha": str(2 * int(name))}
            continue
        if key == "lora" and name in ("rslora", "dora"):
            equals, part = "=", part or "true"
        if not equals:
            raise ConfigurationError(f"{key}: {name!r} ({origin}) is no key=value; write {EXAMPLES[key]}")
        parts[name.strip()] = part.strip()
    return parts


def _listed(text: str, separators: str) -> list[str]:
    return [word.strip() for word in re.split(f"[{separators}]", text) if word.strip()]


def _merged(given: Iterable[Given]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return values, and the origins of each value and of each part of a mapping. The first row of a key wins.

    Parts of a mapping are collected until a row is no mapping. The stronger patterns of a strategy come first, and so
    they are matched first.
    """
    values: dict[str, Any] = {}
    origins: dict[str, list[str]] = {}
    settled = set()
    for entry in given:
        if entry.key not in settled and isinstance(entry.value, dict):
            parts = values.setdefault(entry.key, {})
            new = {name: part for name, part in entry.value.items() if name not in parts}
            parts.update(new)
            origins.update({f"{entry.key}.{name}": [entry.origin] for name in new})
            if new or entry.key not in origins:
                origins.setdefault(entry.key, []).append(entry.origin)
        else:
            settled.add(entry.key)
            values.setdefault(entry.key, entry.value)
            origins.setdefault(entry.key, [entry.origin])
    return values, origins


@cache
def _adapter() -> "pydantic.TypeAdapter[Settings]":
    import pydantic

    return pydantic.TypeAdapter(Settings)


def _typed(values: dict[str, Any], origins: Mapping[str, list[str]], goes_on: bool = False) -> Settings:
    """Convert to types and check. `goes_on`: offload is from a resumed run; the strategy may be new."""
    import pydantic

    try:
        settings = _adapter().validate_python(values)
        if goes_on:
            settings = without_unused_folder(settings)
        check_strategy(settings.strategy, settings.offload, settings.wire, settings.quantize)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        refused = first.get("ctx", {}).get("error")
        if isinstance(refused, ConfigurationError):
            raise _with_origins(refused, origins) from None
        raise _wrong(first["loc"], first["input"], origins) from None
    except ConfigurationError as error:
        raise _with_origins(error, origins) from None
    if settings.lora_from is not None and settings.lora is not None:
        for name, value in asdict(lora_in(Path(settings.lora_from).expanduser())).items():
            if name != "dropout" and (own := getattr(settings.lora, name)) != value:
                where = "; ".join(origins[f"lora.{name}"])
                raise ConfigurationError(f"lora.{name}: {own} ({where}), but the adapter in {settings.lora_from} has "
                                         f"{value}: leave it out")  # fmt: skip
    for name, part in settings.shape.items():  # pydantic takes "yes" for 1
        if isinstance(part, bool) != (PARTS["shape"][name] is bool):
            raise _wrong(("shape", name), values["shape"][name], origins)
    return settings


def _wrong(place: tuple[Any, ...], value: Any, origins: Mapping[str, list[str]]) -> ConfigurationError:
    """Make the error. `place` is pydantic's `loc`: the key, then parts, indices, and the union types it tried."""
    key = place[0]
    kind, path = FIELDS[key].type, key
    if len(place) > 1 and f"{key}.{place[1]}" in origins:
        path = f"{key}.{place[1]}"
        kind = PARTS[key].get(place[1], str)
    shown = {NoneType: "nothing", list: "a list", dict: "a mapping"}.get(type(value), repr(value)[:200])
    choices = _choices(kind)
    if choices and int not in get_args(kind):
        wanted = f"known; {did_you_mean(str(value), choices)}"
    elif key in PARTS and path == key:
        wanted = "a mapping" if PARTS[key] else "a name or a mapping from patterns to names"
    else:
        wanted = WANTED[next(part for part in (kind, get_origin(kind), *get_args(kind)) if part in WANTED)]
        wanted = " or ".join((wanted, *choices))
    return ConfigurationError(f"{path}: {shown} ({'; '.join(origins[path])}) is not {wanted}")


def _with_origins(error: ConfigurationError, origins: Mapping[str, list[str]]) -> ConfigurationError:
    """Return the same error with the origins of the keys that it names."""
    named = [path for path in origins if re.search(rf"(?<![\w.]){re.escape(path)}(?![\w.]\w)", str(error))]
    where = [(f"{path}: " if len(named) > 1 else "") + "; ".join(origins[path]) for path in named]
    return ConfigurationError(f"{error} ({', '.join(where)})" if where else str(error))


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the words of a Literal, also of one that may be None."""
    return next((get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ())
