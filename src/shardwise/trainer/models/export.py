"""Exports of trained weights: a Hugging Face folder, or a PEFT adapter. In-tree models are written as Llama models.

The shapes decide which tensor goes to which file; then files are written sequentially. At the end of a run (`export`)
all ranks gather one unit after the other, and rank 0 writes; if it fails, every rank raises. An export of a checkpoint
(`restore.py`) writes the same files without gathering. An incomplete folder has a temporary name.
"""

import copy
import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...api.full_weights import whole_parts
from ...base.documents import read_object, read_text
from ...base.errors import ShardwiseError
from ...checkpoint.tensor_files import OnBytes, Source
from ...checkpoint.writer import MAX_FILE_BYTES, new_folder, write_note, write_sources, write_weights
from ...core.engine.guards import engine_of, own_state_dict
from ...core.wire.collectives import exchange
from ...version import VERSION
from ..data.tokenizer import BYTES, tokenizer_for, write_byte_tokenizer
from ..model import Transformer
from ..settings import Settings
from .build import Built
from .facts import TOKENIZER_KEY, ModelFacts, tokenizer_files
from .llama import LEAVES, llama_config
from .lora import ADAPTER, adapter_file_name, base_name, is_adapter, merged, under_all_names
from .quantized import QUANTIZATION, quantized
from .weights import stored_form

BASE = "base"  # the folder of randomly initialised weights, next to the adapters that were trained on them


@dataclass(frozen=True, slots=True)
class Content:
    """The input of an export: a model, which may be on the meta device, and its tensors under its own names."""

    model: Any
    facts: ModelFacts
    sources: Sequence[Source]
    names: Mapping[str, Sequence[str]]  # all names of each tensor, by the first of them; tied tensors have several
    is_adapted: bool
    is_merged: bool = False
    max_bytes: int = MAX_FILE_BYTES
    is_quantized: bool = False  # writes matrices of blocks as nf4
    about: Mapping[str, Any] = field(default_factory=dict)  # for the note in the folder

    @property
    def num_bytes(self) -> int:
        """Bytes to write, without adapters that are merged."""
        return sum(s.num_bytes for s in self.sources if not self.is_merged or not is_adapter(s.name))


def export(model: nn.Module, built: Built, settings: Settings, folder: Path) -> None:
    """Write a sharded model; replaces `folder`. Every rank calls it."""
    engine = engine_of(model)
    world, rank = engine.mesh.world, engine.mesh.rank
    engine.rest()
    is_adapted = settings.lora is not None
    # Adapters need the weights that they were trained on: if those exist nowhere else, they are written too.
    needs_base = not is_adapted or not built.facts.has_weights

    def wants(name: str) -> bool:
        return needs_base or is_adapter(name)

    parts = whole_parts(model, rank0_only=True, wants=wants)
    problem = ""
    if rank == 0:
        try:
            sources, names = _gathered_sources(model, parts, wants)
            write_export(Content(model, built.facts, sources, names, is_adapted, max_bytes=MAX_FILE_BYTES), folder)
        except Exception as error:  # noqa: BLE001  raised on all ranks below, after the remaining gathers
            problem = f"{type(error).__name__}: {error}"
    for _ in parts:
        pass
    problem = exchange(world, problem)[0]
    if problem:
        raise ShardwiseError(f"export to {folder} failed: {problem}")


def _gathered_sources(
    model: nn.Module, parts: Iterator[dict[str, Tensor]], wants: Callable[[str], bool]
) -> tuple[list[Source], dict[str, list[str]]]:
    """Return the tensors in the order of their gathers, so that none is held for long, and all names of each."""
    engine = engine_of(model)
    names: dict[Tensor, list[str]] = {}
    for name, value in own_state_dict(model, engine).items():
        if isinstance(value, Tensor) and wants(name):
            names.setdefault(value, []).append(name)
    held: dict[str, Tensor] = {}
    firsts = {tied[0]: tied for tied in names.values()}

    def take(name: str) -> list[Tensor]:
        while name not in held:
            held.update({key: value for key, value in next(parts).items() if key in firsts})
        return [held.pop(name)]

    sources = []
    for state in engine.all_states:
        for user, spec in zip(state.user_params, state.flat.params, strict=True):
            if user in names:
                name = names.pop(user)[0]
                sources.append(Source(name, spec.dtype.torch, tuple(spec.shape), partial(take, name)))
    for buffer, (name, *_) in names.items():
        sources.append(Source(name, buffer.dtype, tuple(buffer.shape), partial(take, name)))
    return sources, firsts


def write_export(content: Content, folder: Path, on_bytes: OnBytes = lambda num_bytes: None) -> None:
    """Write an export. An existing folder is replaced at the end."""
    model, facts = content.model, content.facts
    inner = model.get_base_model() if content.is_adapted else model
    if content.is_merged:
        base = merged(model, content.sources)
    else:
        base = [dataclasses.replace(s, name=base_name(s.name)) for s in content.sources if not is_adapter(s.name)]
    adapters = [] if content.is_merged else [source for source in content.sources if is_adapter(source.name)]
    names = {base_name(first): [base_name(name) for name in tied] for first, tied in content.names.items()}
    note = {"format": "shardwise export", "shardwise": VERSION, **content.about}
    with new_folder(folder) as into:
        if base:
            place = into / BASE if adapters else into
            place.mkdir(exist_ok=True)
            stored = stored_form(inner, base, names)
            if content.is_quantized:
                # Experts that are one tensor in the model are several matrices in a folder: these stay as they are.
                names_kept = {*inner.state_dict()} if facts.kind == "hf" else {source.name for source in stored}
                stored = [
                    part for source in stored for part in (quantized(source) if source.name in names_kept else [source])
                ]
            write_weights(place, stored, content.max_bytes, on_bytes)
            _write_config(inner, facts, place, stored)
            if content.is_quantized:
                about = {**read_object(place / "config.json"), "quantization_config": QUANTIZATION}
                (place / "config.json").write_text(json.dumps(about, indent=2))
            _write_tokenizer(facts, place)
        if adapters:
            is_in_tree = facts.kind == "in-tree"
            every = [each for s in adapters for each in under_all_names(s, content.names[s.name])]
            named = [dataclasses.replace(s, name=adapter_file_name(s.name, is_in_tree)) for s in every]
            write_sources(into / "adapter_model.safetensors", named, on_bytes)
            _write_adapter_config(model, into, str(folder.resolve() / BASE) if base else None)
            _write_tokenizer(facts, into)
            # The config.json of a model has this key. peft refuses unknown keys in an adapter's, so it is in the note.
            note |= {TOKENIZER_KEY: BYTES.name} if facts.tokenizer == BYTES.name else {}
        write_note(into, note)


def _write_config(inner: Any, facts: ModelFacts, folder: Path, sources: Sequence[Source]) -> None:
    counts = Counter({torch.float32: 0})  # elements by dtype
    for source in sources:
        if source.dtype.is_floating_point:
            counts[source.dtype] += source.num_bytes // source.dtype.itemsize
    dtype = counts.most_common(1)[0][0]
    if facts.kind == "in-tree":
        about = llama_config(inner.shape, str(dtype).removeprefix("torch."), tokenizer_for(facts.tokenizer).end_id)
        about |= {TOKENIZER_KEY: BYTES.name} if facts.tokenizer == BYTES.name else {}
        (folder / "config.json").write_text(json.dumps(about, indent=1))
        return
    config = copy.deepcopy(inner.config)
    config.use_cache = facts.config.get("use_cache", True)  # was switched off for training only
    config.architectures = [type(inner).__name__]
    config.dtype = dtype
    vars(config).pop(TOKENIZER_KEY, None)  # the model may have it from an earlier export
    config.update({TOKENIZER_KEY: BYTES.name} if facts.tokenizer == BYTES.name else {})
    # If the tokenizer is not the model's own, a document begins and ends with the end token of the tokenizer.
    assert facts.folder is not None
    is_own = Path(facts.tokenizer).expanduser().resolve() == facts.folder
    ends = {} if is_own else dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer_for(facts.tokenizer).end_id)
    config.get_text_config().update({**ends, "pad_token_id": None} if ends else {})
    config.save_pretrained(folder)
    given = facts.folder / "generation_config.json"
    if given.is_file():
        (folder / given.name).write_text(json.dumps({**read_object(given), **ends}, indent=2) + "\n")
    elif inner.can_generate():
        generation = copy.deepcopy(inner.generation_config)
        for name, value in ends.items():
            setattr(generation, name, value)
        generation.save_pretrained(folder)


def _write_adapter_config(model: Any, folder: Path, base: str | None) -> None:
    config = copy.deepcopy(model.peft_config[ADAPTER])
    config.inference_mode = True
    if isinstance(model.get_base_model(), Transformer):
        for key in ("target_modules", "modules_to_save"):
            if isinstance(getattr(config, key), list | set):
                setattr(config, key, sorted(LEAVES.get(name, name) for name in getattr(config, key)))
        config.task_type = "CAUSAL_LM"
    if base is not None:
        config.base_model_name_or_path = base
    config.save_pretrained(folder)


def _write_tokenizer(facts: ModelFacts, folder: Path) -> None:
    source = Path(facts.tokenizer).expanduser()
    if facts.tokenizer == BYTES.name:
        write_byte_tokenizer(folder, facts.max_seq)
    elif source.is_dir():
        for path in tokenizer_files(source):
            copy_one: Callable[..., Any] = shutil.copytree if path.is_dir() else shutil.copyfile
            copy_one(path, folder / path.name)
    else:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(facts.tokenizer, trust_remote_code=False).save_pretrained(folder)
    if facts.chat_template is not None:
        (folder / "chat_template.jinja").write_text(read_text(Path(facts.chat_template).expanduser()))
