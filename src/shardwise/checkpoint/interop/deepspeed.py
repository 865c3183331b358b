"""Read DeepSpeed's `global_stepN` folders: master weights and optimizer state from the ranks' parts, and the rest.

A file of model states lists the names and shapes of the trained parameters in order, and holds buffers and frozen
parameters. Below stage 3 there is one file; stage 3 has one for each rank, with its parts of the frozen parameters.
Each rank also has a file of optimizer states, with its parts of the flat groups (see the comment at `_in_a_row`).
"""

import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ...base.errors import CheckpointError
from ...base.files import read_regular
from ...base.intervals import Interval
from ..index import Index, Piece, Plain, Stored, counts, cut, shape_from, text
from . import archives
from .described import Described, add_model, describing, index_of, settings_of, version_text
from .pickles import Record, Strided

LATEST = "latest"
_MAX_PARAMETERS = 1 << 20
_MAX_TAG_BYTES = 4096
_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_PARALLEL = re.compile(r"layer_\d+.*_states\.pt|expp_rank_.*_states\.pt|.*expert_.*_states\.pt")


def folder_of(path: Path) -> Path | None:
    """Return the folder with DeepSpeed's files: the path itself, or the one named in its file `latest`. Else None."""
    if any(_FILE.fullmatch(entry.name) for entry in path.iterdir()):
        return path
    if not (path / LATEST).is_file():
        return None
    tag = read_regular(path / LATEST, _MAX_TAG_BYTES).decode(errors="replace").strip()
    if not tag or "/" in tag or "\0" in tag or tag in (".", ".."):
        raise CheckpointError(f"{path / LATEST} names {tag!r}, which is not the name of a folder")
    if not (path / tag).is_dir():
        raise CheckpointError(f"{path / LATEST} names {tag!r}, which is not there: name the folder of an older one")
    return path / tag


def read(folder: Path) -> Index:
    with describing(folder, "what DeepSpeed wrote there") as found:
        model_files, part_files = _files(folder)
        models = [archives.load(found.source(name)) for name in model_files]
        parts = [archives.load(found.source(name))["optimizer_state_dict"] for name in part_files]
        stage = _stage(parts)
        if stage:
            given = parts[0]["partition_count"]
            world = max(counts(given if isinstance(given, list) else [given]))
            # DeepSpeed overwrites folders, and files of a larger world may be left.
            if world != len(parts) or len(models) != (world if stage == 3 else 1):
                files = f"{len(parts)} files of optimizer states and {len(models)} of model states"
                raise CheckpointError(f"{world} ranks wrote it, and there are {files}: some are missing, or of others")
            _add_trained(found, models[0], parts, stage)
            _add_others(found, models, stage)
        else:
            add_model(found, models[0]["module"])
            found.leave_out("the optimizer, and masters if any, which DeepSpeed writes without names at stage 0")
        if type(step := models[0].get("global_steps")) is int:
            found.extra["step"] = step
        origin = {
            "format": f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed",
            "deepspeed": version_text(models[0].get("ds_version")),
            "ranks": str(len(parts) or 1),
        }
        return index_of(found, origin)


def _files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of model states and of optimizer states, by rank."""
    found: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for entry in folder.iterdir():
        if _PARALLEL.fullmatch(entry.name):
            raise CheckpointError(f"{entry.name} is of pipeline or expert parallelism, which is not read here")
        name = _FILE.fullmatch(entry.name)
        if name is None:
            continue
        if int(name[2]):
            raise CheckpointError(
                f"{entry.name} is of tensor parallelism: convert it to one part with DeepSpeed's tools"
            )
        found[name[3]][int(name[1] or 0)] = entry.name
    for kind, names in found.items():
        if sorted(names) != list(range(len(names))):
            raise CheckpointError(f"files of {kind} states are there of the ranks {sorted(names)}: some are missing")
    if not found["model"]:
        raise CheckpointError("there is no file of model states: its save did not finish")
    model, optim = ([names[rank] for rank in sorted(names)] for names in found.values())
    return model, optim


def _stage(parts: Sequence[Any]) -> int:
    if not parts:
        return 0
    stage = parts[0].get("zero_stage", 1)
    (number,) = stage.args if isinstance(stage, Record) else (stage,)
    if type(number) is not int:
        raise ValueError("a stage that is no number")
    if number not in (1, 2, 3) or "ds_zero_partition_groups" in parts[0]:
        raise CheckpointError(f"ZeRO stage {number} with other than plain data parallelism is not read here")
    return number


def _add_trained(found: Described, model: Any, parts: Sequence[Any], stage: int) -> None:
    """Add master weights and state by block. A block is a parameter group; in stage 3 it may be a part of one."""
    rows_key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    bases = [part["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for part in parts]
    if isinstance(bases[0], list):  # DeepSpeed's elastic checkpoints have a list, without the groups' settings
        params = [{"params": [block]} for block in range(len(bases[0]))]
        bases = [{"state": dict(enumerate(base)), "param_groups": params} for base in bases]
    groups = bases[0]["param_groups"]
    members = [
        (number, member) for number, group in enumerate(groups) for member in counts(group["params"], _MAX_PARAMETERS)
    ]
    shapes = [{text(name): shape_from(shape) for name, shape in block.items()} for block in model["param_shapes"]]
    found.groups = [settings_of(found, group) for group in groups]
    for block, (own, (number, member)) in enumerate(zip(shapes, members, strict=True)):
        rows = [_row(found, part[rows_key][block]) for part in parts]
        given = None if stage == 3 else parts[0].get("param_alignment_paddings")
        paddings = counts(given[block] if given else [0] * len(own), len(own))
        if len(paddings) != len(own):
            raise CheckpointError(f"a group of {len(own)} parameters has {len(paddings)} paddings")
        split, common = _state(found, [base["state"].get(member, {}) for base in bases])
        # Some of DeepSpeed's optimizers keep the count of steps in the group.
        if "step" in groups[number] and split:
            common.setdefault("step", found.item(groups[number]["step"]))
        if stage < 3:
            lengths = [row.num_elems for row in rows]
            rows, split = _in_a_row(rows, lengths), {key: _in_a_row(part, lengths) for key, part in split.items()}
        begin = 0
        for (name, shape), padding in zip(own.items(), paddings, strict=True):
            found.tensors[name] = _gathered(name, shape, rows, begin)
            found.group[name] = number
            found.state[name] = common | {key: _gathered(name, shape, split[key], begin) for key in split}
            begin += _length(shape, rows) + padding
    for settings in found.groups:
        settings.pop("step", None)
    scaler = parts[0].get("loss_scaler")
    if isinstance(scaler, Record) and scaler.get("dynamic"):
        steps = scaler.get("cur_iter", 0) - scaler.get("last_overflow_iter", -1) - 1
        found.scaler = {
            "scale": float(scaler.get("cur_scale")),
            "good_steps": float(steps % scaler.get("scale_window", 1000)),
            "num_skipped": float(model.get("skipped_steps", 0)),
        }


def _state(found: Described, states: Sequence[Any]) -> tuple[dict[str, list[Stored]], dict[str, Stored | Plain]]:
    """Return the optimizer's state of a block: the ranks' rows of sharded tensors, and values common to all ranks."""
    split: dict[str, list[Stored]] = {}
    common: dict[str, Stored | Plain] = {}
    for key, value in states[0].items():
        if isinstance(value, Strided) and len(value.shape) == 1 and key != "step":
            split[text(key)] = [_row(found, state[key]) for state in states]
        else:
            common[text(key)] = found.item(value)
    return split, common


def _row(found: Described, value: Any) -> Stored:
    row = found.stored(value)
    if len(row.shape) != 1 or len(row.pieces) > 1:
        raise ValueError("a part of a flat group that does not lie in one place")
    return row


def _add_others(found: Described, models: Sequence[Any], stage: int) -> None:
    """Add buffers, frozen parameters, and the additional names of tied parameters."""
    model = models[0]
    shared = model.get("shared_params") or {}
    for other, name in shared.items():
        found.tied[text(name)] = (*found.tied.get(name, ()), text(other))
    if stage == 3:
        for name, given in (model.get("frozen_param_shapes") or {}).items():
            name, shape = text(name), shape_from(given)
            rows = [_row(found, states["frozen_param_fragments"][name]) for states in models]
            found.tensors[name] = _gathered(name, shape, rows)
            found.kinds[name] = "parameter"
    buffers = {text(name) for name in model["buffer_names"]}
    for name, value in model["module"].items():
        is_buffer = name in buffers
        if name not in found.tensors and name not in shared and (is_buffer or stage < 3):
            add_model(found, {name: value})
            found.kinds[name] = "buffer" if is_buffer else "parameter"


# Stages 1 and 2 join the parameters of each group into one row, and cut the row into one part for each rank. Stage 3
# cuts every parameter by itself into equal parts, the last ones padded; the row of a rank holds its parts, one after
# the other. Masters and optimizer state have the same order in their rows. So the joined row of stages 1 and 2 is read
# like a row of stage 3 with one rank.
def _in_a_row(parts: Sequence[Stored], lengths: Sequence[int]) -> list[Stored]:
    """Join the ranks' parts. `lengths`: of the masters' parts; those of the state may be longer, with padding."""
    pieces: list[Piece] = []
    for rank, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if part.num_elems < length:
            raise CheckpointError(f"rank {rank} wrote {length} elements of a group, and state of {part.num_elems}")
        pieces += _moved(part, Interval(0, length), sum(lengths[:rank]))
    return [Stored((sum(lengths),), parts[0].dtype, tuple(pieces))]


def _moved(row: Stored, wanted: Interval, to: int) -> Iterator[Piece]:
    """Yield the pieces of the interval `wanted` of a row, renumbered so that its first element is number `to`."""
    for piece in cut(row, wanted):
        shift = to - wanted.start
        yield piece._replace(start=piece.start + shift, stop=piece.stop + shift)


def _length(shape: tuple[int, ...], rows: Sequence[Stored]) -> int:
    return -(-prod(shape) // len(rows))


def _gathered(name: str, shape: tuple[int, ...], rows: Sequence[Stored], begin: int = 0) -> Stored:
    """Describe a parameter, or state of its shape, by its pieces. In each row they start at element `begin`."""
    pieces: list[Piece] = []
    num_elems, length = prod(shape), _length(shape, rows)
    for rank, row in enumerate(rows):
        first, last = min(rank * length, num_elems), min((rank + 1) * length, num_elems)
        pieces += _moved(row, Interval(begin, begin + last - first), first)
    written = sum(piece.stop - piece.start for piece in pieces)
    if written != num_elems:
        raise CheckpointError(f"{name!r} has {num_elems} elements, and {written} of them were written")
    return Stored(shape, rows[0].dtype, tuple(pieces))
