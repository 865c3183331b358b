"""Trained weights as files that others open: a Hugging Face folder, a PEFT adapter, or an in-tree folder.

All ranks gather, one unit after the other; rank 0 writes, and holds no more than the file that it is filling. The
folder gets its name when it is complete, so what is there can be used. If rank 0 fails, every rank hears of it.
"""

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...checkpoint.folder import sync
from ...checkpoint.tensors import entry_of, lay_out, write_file
from ...engine.guards import engine_of
from ...engine.whole import whole_parts
from ...errors import ShardwiseError
from ...wire.collectives import exchange
from ..data.tokenizer import BYTES
from ..settings import Settings
from .build import Built
from .facts import IN_TREE_TYPE, TOKENIZER_KEY, tokenizer_files
from .lora import ADAPTER

MAX_FILE_BYTES = 5 * 10**9
BASE = "base"  # the folder of drawn weights beside the adapters that were trained on them
NOTE = "shardwise.json"  # beside adapters: what a model has in its config.json, which they must not have


def export(model: nn.Module, built: Built, settings: Settings, folder: Path) -> None:
    """Write a sharded model; what was in `folder` is replaced. Every rank calls it."""
    world, rank = engine_of(model).mesh.world, engine_of(model).mesh.rank
    is_adapted = settings.lora is not None
    # Adapters are of no use without the weights they were trained on: if those exist nowhere else, they go along.
    needs_base = not is_adapted or not built.facts.has_weights
    parts = whole_parts(model, rank0_only=True, wants=lambda name: needs_base or is_adapter(name))
    problem = ""
    if rank == 0:
        try:
            _write(model, built, settings, folder, parts, needs_base)
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks are gathering and wait to hear
            problem = f"{type(error).__name__}: {error}"
    for _ in parts:
        pass
    problem = exchange(world, problem)[0]
    if problem:
        raise ShardwiseError(f"export to {folder} failed: {problem}")


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def _write(
    model: Any, built: Built, settings: Settings, folder: Path, parts: Iterator[dict[str, Tensor]], needs_base: bool
) -> None:
    unnamed = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(unnamed, ignore_errors=True)
    unnamed.mkdir(parents=True)
    is_adapted = settings.lora is not None
    inner = model.get_base_model() if is_adapted else model
    try:
        files = _Files(unnamed / BASE if is_adapted else unnamed)
        adapters: dict[str, Tensor] = {}
        for part in parts:
            adapters |= {name: value for name, value in part.items() if is_adapter(name)}
            base = {_base_name(name): value for name, value in part.items() if not is_adapter(name)}
            if base:
                files.add(_stored_form(inner, base))
        files.finish()
        if needs_base:
            _write_config(inner, built, files.folder)
            _write_tokenizer(built, files.folder)
        if is_adapted:
            _write_adapter(model, adapters, unnamed, str(folder.resolve() / BASE) if needs_base else None)
            _write_tokenizer(built, unnamed)
            if built.facts.tokenizer == BYTES.name:
                (unnamed / NOTE).write_text(json.dumps({TOKENIZER_KEY: BYTES.name}))
        for path in (*unnamed.rglob("*"), unnamed):
            path.chmod(0o755 if path.is_dir() else 0o644)  # for everybody to read
            sync(path)  # a folder that has its name is complete, also after the power went
        _replace(unnamed, folder)
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)


def _base_name(name: str) -> str:
    """What peft has put around a name is taken away; other names are as they are."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _stored_form(inner: Any, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """One copy of tied weights, under the names that the architecture has in files."""
    if callable(getattr(inner, "save_pretrained", None)):
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        part = revert_weight_conversion(inner, remove_tied_weights_from_state_dict(part, inner))
    seen: dict[int, str] = {}
    kept = {name: value for name, value in part.items() if seen.setdefault(id(value), name) == name}
    return {name: value.contiguous() for name, value in kept.items()}


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """With a word that transformers looks for."""
    entries = [entry_of(name, value) for name, value in tensors.items()]
    write_file(path, lay_out(entries, metadata={"format": "pt"}))


class _Files:
    """Safetensors files of at most `MAX_FILE_BYTES`, in Hugging Face's names, which hold the number of all files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filling: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # in each file
        self._num_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self.folder.mkdir(exist_ok=True)
        for name, tensor in tensors.items():
            if self._filling and sum(t.nbytes for t in self._filling.values()) + tensor.nbytes > MAX_FILE_BYTES:
                self._flush()
            self._filling[name] = tensor
            self._num_bytes += tensor.nbytes

    def finish(self) -> None:
        if self._filling:
            self._flush()
        if len(self._names) < 2:
            for index, _ in enumerate(self._names):
                self._unnamed(index).rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._names):
            file_name = f"model-{index + 1:05d}-of-{len(self._names):05d}.safetensors"
            self._unnamed(index).rename(self.folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        about = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(about, indent=1))

    def _flush(self) -> None:
        _save(self._unnamed(len(self._names)), self._filling)
        self._names.append(list(self._filling))
        self._filling = {}

    def _unnamed(self, index: int) -> Path:
        return self.folder / f"part-{index}"


def _write_config(inner: Any, built: Built, folder: Path) -> None:
    facts = built.facts
    if facts.kind == "in-tree":
        about = {
            "model_type": IN_TREE_TYPE,
            "shape": dataclasses.asdict(inner.shape),
            TOKENIZER_KEY: facts.tokenizer,
        }
        (folder / "config.json").write_text(json.dumps(about, indent=1))
        return
    config = copy.deepcopy(inner.config)
    config.use_cache = facts.config.get("use_cache", True)  # a matter of training only
    config.architectures = [type(inner).__name__]
    config.dtype = inner.dtype
    if facts.tokenizer == BYTES.name:
        setattr(config, TOKENIZER_KEY, BYTES.name)
    config.save_pretrained(folder)
    given = facts.folder / "generation_config.json" if facts.folder is not None else None
    if given is not None and given.is_file():
        shutil.copyfile(given, folder / given.name)
    elif inner.can_generate():
        inner.generation_config.save_pretrained(folder)


def _write_adapter(model: Any, adapters: dict[str, Tensor], folder: Path, base: str | None) -> None:
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, state_dict=adapters, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {name: value.contiguous() for name, value in found.items()}
    _save(folder / "adapter_model.safetensors", tensors)
    config = copy.deepcopy(model.peft_config[ADAPTER])
    config.inference_mode = True
    if base is not None:
        config.base_model_name_or_path = base
    config.save_pretrained(folder)


def _write_tokenizer(built: Built, folder: Path) -> None:
    name = built.facts.tokenizer
    if name == BYTES.name:
        return
    source = Path(name).expanduser()
    if not source.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(name).save_pretrained(folder)
        return
    for path in tokenizer_files(source):
        copy_one: Callable[..., Any] = shutil.copytree if path.is_dir() else shutil.copyfile
        copy_one(path, folder / path.name)


def _replace(unnamed: Path, folder: Path) -> None:
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    unnamed.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
