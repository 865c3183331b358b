"""Accelerate's YAML: the kind of training, the launch, the precision, and the block of the kind.

Blocks of other kinds are ignored, as Accelerate ignores them. `deepspeed_config` names DeepSpeed's own file, or has a
few of its keys under other names; `deepspeed.py` reads both.

`accelerate launch` passes its configuration to its ranks in environment variables. They are turned back into the keys
of a file, and read as such; entries have the variables' names. The launcher also sets variables to its defaults: such a
default is ignored if it contradicts a value that only a user can have set.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.documents import Tree
from ..base.errors import ConfigurationError
from ..core.layout import AUTO as AUTO_STRATEGY
from .account import AUTO, FALSE, TRUE, Block, Entry, shown
from .deepspeed import read_deepspeed
from .fsdp import FULL, REPLICATED, known_keys, read_fsdp, read_groups, set_strategy, strategy_name
from .migrated import Change, Migrated, Original
from .tables import apply_rules, table

FSDP, DEEPSPEED = "FSDP", "DEEPSPEED"
REPLICATES = ("NO", "MULTI_CPU", "MULTI_GPU")
MIN_PARAMS = 100_000_000  # SIZE_BASED_WRAP's default in `accelerate launch`
DEFAULT_PORT = 29500
BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
PRECISIONS = {"no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}
NO_FP8 = (
    "matrices are not multiplied in fp8 here; bf16 computes, and enable_fsdp_float8_all_gather sends parameters in fp8"
)
DEEPSPEED_FILE = "deepspeed_config_file"
DEFAULT_STAGE = "2"
# DeepSpeed's blocks that enable a 16-bit precision.
HALVES = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
ENVIRONMENT = "the environment of accelerate launch"
# Variables that turn a kind of sharding on.
SWITCHES = {f"ACCELERATE_USE_{kind}": kind for kind in (DEEPSPEED, FSDP, "MEGATRON_LM")}
RESHARD, STRATEGY, PRECISION = "FSDP_RESHARD_AFTER_FORWARD", "FSDP_SHARDING_STRATEGY", "ACCELERATE_MIXED_PRECISION"


def read_accelerate(top: Block, folder: Path) -> Original:
    """Read the document's settings; return what Accelerate would run."""
    kind = _kind(top)
    _launch(top, kind == "NO")
    if kind == "MULTI_CPU":
        top.settings["device"] = "cpu"
    apply_rules(top, "accelerate", "top")
    apply_rules(top.inner("mpirun_config"), "accelerate", "mpirun_config")
    _compile(top)
    blocks = {FSDP: top.inner("fsdp_config"), DEEPSPEED: top.inner("deepspeed_config")}
    for other, block in blocks.items():
        if other != kind:
            block.settle_rest("ignored", f"distributed_type {kind} does not read it")
    groups = top.inner("parallelism_config")
    # Matrices are not multiplied in fp8, but parameters may be sent in fp8.
    block = apply_rules(top.inner("fp8_config"), "accelerate", "fp8_config", "fp8_")
    keys = ("enable_fsdp_float8_all_gather", "fp8_enable_fsdp_float8_all_gather")
    fp8 = [
        Change(block, key, "params_as=e4m3", "parameters are sent as e4m3 (params_as)")
        for key in keys
        if block.flag(key)
    ]
    block.used(keys, "parameters are sent as they are")
    if kind == DEEPSPEED:
        read_groups(groups, None, None)
        for change in fp8:
            change.block.refused(change.key, "it goes with distributed_type FSDP")
        if top.flag("fp16"):
            top.refused("fp16", "DeepSpeed reads mixed_precision")
        top.ignored("fp16", "it is off")
        return _deepspeed_block(top, blocks[DEEPSPEED], folder)
    fsdp = read_fsdp(blocks[FSDP], MIN_PARAMS) if kind == FSDP else None
    _mixed_precision(top, fsdp is not None)
    ranks = top.settings.get("nproc_per_node")
    return set_strategy(top, fsdp, groups, ranks and ranks * int(top.settings.get("nnodes", "1")), fp8)


def _kind(top: Block) -> str:
    if "distributed_type" not in top.values:
        known = "NO, MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED"
        raise ConfigurationError(f"{top.source}: distributed_type is missing; write {known}")
    refused = table("accelerate")["refused_kinds"]
    kind = top.word("distributed_type", (*REPLICATES, FSDP, DEEPSPEED, *refused), "NO")
    if kind in refused:
        top.refused("distributed_type", refused[kind])
    elif kind in REPLICATES:
        top.used("distributed_type", f"strategy {REPLICATED}" + (" on CPUs" if kind == "MULTI_CPU" else ""))
    else:
        top.used("distributed_type", f"{kind.lower()}_config has the strategy")
    return kind


def _compile(top: Block) -> None:
    """Read `dynamo_config`, or the one key that older files have instead."""
    block = apply_rules(top.inner("dynamo_config"), "accelerate", "dynamo_config", "dynamo_")
    for holder, key in ((top, "dynamo_backend"), (block, "dynamo_backend"), (block, "backend")):
        word = holder.text(key).upper()
        if word == "INDUCTOR":
            top.settings["compile"] = "on"
        elif word not in ("", "NO"):
            holder.refused(key, "blocks are compiled by INDUCTOR only; write that, or NO")
        holder.used(key, f"compile {top.settings.get('compile', 'auto')}")


def _launch(top: Block, is_single: bool) -> None:
    """Read the device, the number of ranks, and the rendezvous of the machines."""
    read_device(top, "use_cpu")
    machines = top.whole("num_machines", 1, least=1)
    if top.has("num_machines"):
        top.sets("num_machines", nnodes=str(machines))
    ranks = top.whole("num_processes", -1, least=-1)
    if is_single:
        top.sets("num_processes", ": distributed_type NO is one process, whatever is written here", nproc_per_node=1)
    elif ranks == 0:
        top.refused("num_processes", "it must be at least 1")
    elif ranks < 0:
        top.ignored("num_processes", "the number of ranks is given where they are started")
    elif ranks % machines:
        top.refused("num_processes", f"it is not a multiple of num_machines {machines}: it counts all machines' ranks")
    else:
        top.sets("num_processes", f" ({ranks} in all)", nproc_per_node=ranks // machines)
    ids = [word.strip() for word in top.text("gpu_ids", "all").split(",")]
    is_listed, in_order = ids[0].lower() not in ("all", "none", ""), "ranks take the visible devices in order"
    top.ignored("gpu_ids", in_order)
    if is_listed and ids != [str(number) for number in range(len(ids))]:
        fix = f"set CUDA_VISIBLE_DEVICES={','.join(ids)} where ranks are started, and leave it out"
        top.refused("gpu_ids", f"{in_order}: {fix}")
    elif is_listed and "nproc_per_node" not in top.settings:
        top.sets("gpu_ids", f": {in_order}", nproc_per_node=len(ids))
    _rendezvous(top, machines > 1)


def read_device(top: Block, *keys: str) -> None:
    """Read the keys that ask for the CPU."""
    flags = [top.flag(key) for key in keys]
    top.settings |= {"device": "cpu"} if any(flags) else {}
    top.used(keys, f"device {top.settings.get('device', 'cuda, where there is one')}")


def _rendezvous(top: Block, has_many: bool) -> None:
    """Read the host and port where machines meet. The backend `static`, the default, also needs a machine's rank."""
    rank = top.whole("machine_rank", 0, least=0)
    backend = top.word("rdzv_backend", BACKENDS, BACKENDS[0])
    host, port = top.text("main_process_ip"), top.whole("main_process_port", DEFAULT_PORT, least=0, most=65535)
    endpoint = f"rdzv_endpoint {host or 'HOST, which has to be given'}:{port}"
    for key, becomes in {
        "machine_rank": f"node_rank {rank}",
        "rdzv_backend": f"rdzv_backend {backend}",
        "main_process_ip": endpoint,
        "main_process_port": endpoint,
    }.items():
        top.used_if(has_many, key, becomes, "there is only one machine")
    if has_many:
        top.settings["rdzv_backend"] = backend
        top.settings |= {"node_rank": rank} if top.has("machine_rank") else {}
        top.settings |= {"rdzv_endpoint": f"{host}:{port}"} if host else {}


def precision_for(word: str, is_fsdp: bool) -> tuple[dict[str, Any], str]:
    """Settings for a value of Accelerate's `mixed_precision`, and a description of them.

    DDP computes under autocast from fp32 weights, and sums fp32 gradients. FSDP casts both parameters and gradients, so
    it sums in 16 bits: for FSDP in bf16, `reduce_dtype` is bf16. Masters are fp32 in all cases.
    """
    settings, how = {"precision": PRECISIONS[word]}, ""
    if is_fsdp and word == "bf16":
        settings["reduce_dtype"] = "bf16"
        how = " with reduce_dtype bf16: fp32 masters, gradients are summed in bf16, as in FSDP"
    elif is_fsdp and word == "fp16":
        how = ": fp32 masters, and gradients are summed in fp32, where FSDP would sum in fp16"
    elif PRECISIONS[word] != "fp32":
        how = f": fp32 masters, fp32 gradients; the whole block computes in {word}, without autocast"
    return settings, f"precision {PRECISIONS[word]}{how}"


def _mixed_precision(top: Block, is_fsdp: bool) -> None:
    """Read `mixed_precision`, or `fp16: true` in older files."""
    is_half = top.flag("fp16")
    word = top.word("mixed_precision", [*PRECISIONS, "fp8"], "fp16" if is_half else "no")
    if word == "fp8":
        top.refused("mixed_precision", NO_FP8)
        word = "bf16"
    settings, becomes = precision_for(word, is_fsdp)
    top.settings |= settings
    top.used("mixed_precision", becomes)
    top.used_if(not top.has("mixed_precision"), "fp16", becomes, "mixed_precision decides it")


def _deepspeed_block(top: Block, block: Block, folder: Path) -> Original:
    apply_rules(block, "accelerate", "deepspeed_config")
    word = top.word("mixed_precision", [*PRECISIONS, "fp8"], "")
    if block.has(DEEPSPEED_FILE) and block.text(DEEPSPEED_FILE).lower() != "none":
        for key in table("accelerate")["deepspeed_keys"]:
            block.refused(key, f"{DEEPSPEED_FILE} decides it; write it there")
        settings, original = read_completed(block.inner_file(DEEPSPEED_FILE, folder), word or "no")
        if word in PRECISIONS and settings["precision"] != PRECISIONS[word]:
            top.refused("mixed_precision", f"DeepSpeed's file has {settings['precision']}; leave it to the file")
    else:
        block.ignored(DEEPSPEED_FILE, "no file is named")
        settings, original = _from_keys(top, block, word)
    if word == "fp8":
        top.refused("mixed_precision", NO_FP8)
    top.settings |= settings
    top.used("mixed_precision", f"precision {settings['precision']}")
    return original


def _from_keys(top: Block, block: Block, word: str) -> tuple[dict[str, Any], Original]:
    """Make a DeepSpeed configuration from Accelerate's keys and read it. Entries keep the names that were written."""
    tree: dict[str, Tree] = {"zero_optimization": {"stage": DEFAULT_STAGE}}
    names: dict[str, str] = {}
    for key, path in table("accelerate")["deepspeed_keys"].items():
        if not block.has(key):
            continue
        if key.endswith("_nvme_path") and block.text(key.replace("_nvme_path", "_device")).lower() != "nvme":
            block.text(key)
            block.ignored(key, "nothing is stored on a disk")
            continue
        names[path] = key
        _put(tree, path, block.values[key])
    if word in ("fp16", "bf16"):
        tree[word] = {"enabled": "true"}
    made = Block(tree, top.source)
    original = read_deepspeed(made)
    entries = made.entries()
    for entry in _renamed(entries, names, block.values):
        block.settle(entry.key, entry.fate, entry.text)
    for entry in entries:
        if word and entry.fate == "refused" and entry.key.partition(".")[0] == word:
            top.refused("mixed_precision", entry.text)
    return made.settings, original


def _put(tree: dict[str, Tree], path: str, value: Tree) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value


def read_completed(block: Block, word: str) -> tuple[dict[str, Any], Original]:
    """Read DeepSpeed's keys, completed from mixed precision (no, fp16, bf16) as Accelerate and the Trainer do."""
    made = Block(completed(block.values, word), block.source)
    original = read_deepspeed(made)
    _copy_entries(block, "", {entry.key: entry for entry in made.entries()})
    return made.settings, original


def completed(values: Mapping[str, Tree], word: str) -> dict[str, Tree]:
    """Enable the precision `word` if the file says `auto`, or nothing, about it."""
    tree = dict(values)
    for key, kind in HALVES.items():
        inner = tree.get(key)
        if isinstance(inner, dict) and str(inner.get("enabled")).lower() == AUTO:
            tree[key] = inner | {"enabled": str(kind == word).lower()}
    written = [key for key, kind in HALVES.items() if kind == word and tree.get(key) is not None]
    if word in HALVES and not written:
        tree[word] = {"enabled": "true"}
    return tree


def _copy_entries(block: Block, path: str, entries: Mapping[str, Entry]) -> None:
    """Copy the entries of a completed copy to the keys that were written. In the copy this block is at `path`."""
    for key, value in block.values.items():
        place = f"{path}{block.path_of(key).removeprefix(f'{block.path}.')}"
        if place in entries:
            block.settle(key, entries[place].fate, entries[place].text)
        elif block.has(key) and isinstance(value, dict):
            _copy_entries(block.inner(key), f"{place}.", entries)


# The environment


def read_environment(environ: Mapping[str, str]) -> Migrated | None:
    """Read the launcher's variables; None if they say nothing about sharding and precision.

    If the launch turns on no kind of sharding, the trainer chooses the strategy.
    """
    switch = next((name for name in SWITCHES if environ.get(name, "").lower() in TRUE), None)
    ignored: dict[str, str] = {}
    if switch is not None:
        ignored = _ignored(environ)
        paths = {path: name for name in environ if (path := _path(name)) is not None and name not in ignored}
        tree: dict[str, Tree] = {"distributed_type": SWITCHES[switch]}
        names = {"distributed_type": switch, **paths}
    elif environ.get(PRECISION, "no").lower() != "no":
        tree = {"distributed_type": "MULTI_GPU"}
        names = paths = {"mixed_precision": PRECISION}
    else:
        return None
    for path, name in paths.items():
        _put(tree, path, environ[name])
    top = Block(tree, ENVIRONMENT)
    original = read_accelerate(top, Path())
    entries = [*_renamed(top.entries(), names, environ)]
    entries += [Entry(name, environ[name], "ignored", why) for name, why in ignored.items()]
    if switch is None:
        top.settings["strategy"] = AUTO_STRATEGY
    return Migrated(ENVIRONMENT, "accelerate", top.settings, original, tuple(entries))


def _path(name: str) -> str | None:
    """The key of Accelerate's file that a variable stands for; None if the variable is not the launcher's."""
    known = table("accelerate")
    if name in known["variables"]:
        return str(known["variables"][name])
    for prefix, beginning in known["variable_prefixes"].items():
        if name.startswith(prefix):
            path = beginning + name.removeprefix(prefix).lower()
            block, _, key = path.partition(".")
            return None if block == "fsdp_config" and key not in known_keys() else path
    return None


def _ignored(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are not read, and why."""
    reasons: dict[str, str] = {}
    for name, value in environ.items():
        if name in SWITCHES:
            reasons |= {} if value.lower() in TRUE else {name: "it is off"}
        elif _path(name) is None:
            reasons |= {name: "it says nothing about sharding"} if name.startswith(("ACCELERATE_", "FSDP_")) else {}
        elif value in ("", "None"):
            reasons[name] = "it is empty"
    reshard, strategy = environ.get(RESHARD, "").lower(), strategy_name(environ.get(STRATEGY, ""))
    if environ.get("FSDP_VERSION", "1") == "1" and reshard in TRUE + FALSE:
        reasons[RESHARD] = f"version 1 reads {STRATEGY}"
    elif strategy == FULL and reshard:
        reasons[STRATEGY] = f"{RESHARD} decides it, and this is the launcher's default"
    elif strategy and reshard in TRUE:
        reasons[RESHARD] = f"{STRATEGY} decides it, and this is the launcher's default"
    if environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") and environ.get(PRECISION, "").lower() == "no":
        reasons[PRECISION] = "DeepSpeed's file decides it, and this is the launcher's default"
    return reasons


def _renamed(entries: Iterable[Entry], names: Mapping[str, str], values: Mapping[str, Tree]) -> Iterator[Entry]:
    """Give the entries of a document, made from other keys or variables, their `names`. An entry about a whole block is
    repeated for all names inside it; an entry inside a file gets the name of the file in front."""
    for entry in entries:
        for path, name in names.items():
            if entry.key == path or path.startswith(f"{entry.key}."):
                yield replace(entry, key=name, value=shown(values[name]))
            elif entry.key.startswith(f"{path}."):
                yield replace(entry, key=name + entry.key.removeprefix(path))
