"""Read folders of weights of Hugging Face's libraries: safetensors, or files of torch.save in older ones.

A folder holds a PEFT adapter, or a model in one file or in several files with an index. Folders of Accelerate, which
gathers the model on one rank, are read as well; they also hold the optimizer.
"""

from pathlib import Path
from typing import Any

from ...base.documents import parse
from ...base.errors import CheckpointError
from ..index import Index, Stored, text
from ..tensor_files import read_header
from . import archives
from .described import Described, Groups, add_model, add_optimizer, describing, index_of

# The first that exists is read, because a folder may hold several.
NAMES = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_GATHERED = "pytorch_model_fsdp.bin"  # of Accelerate
_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
_INDEX = ".index.json"
_MAX_INDEX_BYTES = 256 << 20


def file_of(folder: Path) -> str | None:
    """Return the file of weights, or the index of several, from which a folder is read."""
    names = [name for plain in NAMES for name in (f"{plain}{_INDEX}", plain)]
    return next((name for name in (_GATHERED, *names) if (folder / name).is_file()), None)


def read(folder: Path, name: str, groups: Groups = ()) -> Index:
    """Read a folder. `name`: its weights or their index. `groups`: parameter names, for state with numbers as keys."""
    what = "PEFT adapter" if name.startswith("adapter_model") else "Hugging Face folder"
    with describing(folder, str(folder / name)) as found:
        if name.endswith(_INDEX):
            shards: dict[str, Any] = parse(found.source(name).read_all(_MAX_INDEX_BYTES))["weight_map"]
            for shard in sorted({text(shard) for shard in shards.values()}):
                _add(found, shard)
            if missing := sorted(set(shards) - set(found.tensors)):
                raise CheckpointError(f"{folder / name} names {missing[0]!r}, which is not in its file")
        else:
            _add(found, name)
        for file in _OPTIMIZERS:
            if not (folder / file).is_file():
                continue
            if name == _GATHERED:
                given = archives.load(found.source(file))
                add_optimizer(found, given["param_groups"], given["state"])
            elif not (groups and _add_numbered(found, archives.load(found.source(file)), groups)):
                found.leave_out(f"the optimizer in {file}, whose state has no names")
        return index_of(found, {"format": "Accelerate" if name == _GATHERED else what})


def _add_numbered(found: Described, given: Any, groups: Groups) -> bool:
    """Add an optimizer whose keys are numbers, under these names. Return False if the groups differ in size."""
    saved = given["param_groups"]
    if [len(group["params"]) for group in saved] != [len(names) for names in groups]:
        return False
    named = [{**group, "param_names": names} for group, names in zip(saved, groups, strict=True)]
    add_optimizer(found, named, given["state"])
    for name, items in found.state.items():
        for key in ("exp_avg", "momentum_buffer"):
            item, weight = items.get(key), found.tensors.get(name)
            if isinstance(item, Stored) and weight is not None and item.shape != weight.shape:
                both = f"{key} of {name!r} has shape {item.shape}, the parameter {weight.shape}"
                fix = "build the optimizer's groups in the order of the one that was saved"
                raise CheckpointError(f"the optimizer is saved by number, and {both}: {fix}")
    return True


def read_file(path: Path) -> Index:
    """Read a single file."""
    with describing(path.parent, str(path)) as found:
        source, is_safetensors = found.source(path.name), path.suffix == ".safetensors"
        if not is_safetensors and source.read(0, min(source.num_bytes, len(archives.LOCAL))) != archives.LOCAL:
            raise CheckpointError(
                f"{path} is no checkpoint: what can be opened is a folder, a file *.safetensors, or a file of "
                "torch.save (since torch 1.6; an older one: load it with the library that wrote it, and save it again)"
            )
        _add(found, path.name)
        return index_of(found, {"format": "safetensors" if is_safetensors else "torch.save"})


def _add(found: Described, name: str) -> None:
    source, before = found.source(name), found.tensors
    if name.endswith(".safetensors"):
        found.tensors = read_header(source.path, source.number)
    else:
        found.tensors = {}
        add_model(found, archives.load(source))
    if twice := before.keys() & found.tensors.keys():
        raise CheckpointError(f"{source.path} holds {min(twice)!r}, which another file holds as well")
    found.tensors = before | found.tensors
