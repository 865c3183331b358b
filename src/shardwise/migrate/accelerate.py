"""Accelerate's YAML: the kind of training, the launch, the precision, and the block of the kind.

Blocks of other kinds are ignored, as Accelerate ignores them. `deepspeed_config` names DeepSpeed's own file, or has a
few of its keys under other names; both are read by DeepSpeed's reader.
"""

from pathlib import Path
from typing import Any

from ..base.documents import Tree
from ..base.errors import ConfigurationError
from .account import AUTO, Account, Block, Entry
from .deepspeed import read_deepspeed
from .files import named_file
from .fsdp import read_fsdp, read_parallelism, sharded
from .migrated import Original
from .strategies import REPLICATED, Change
from .tables import apply_rules, rules, table, with_prefix

FSDP, DEEPSPEED = "FSDP", "DEEPSPEED"
REPLICATES = ("NO", "MULTI_CPU", "MULTI_GPU")
NO_TPU = "there are no TPUs here, only CUDA GPUs and CPUs"
# Other kinds that Accelerate knows, and why they are refused.
REFUSED = {
    "MEGATRON_LM": "Megatron-LM splits layers and sequences, and only training state is sharded here",
    "XLA": NO_TPU,
    "TPU": NO_TPU,
    **{
        f"MULTI_{device}": f"there are no {device} devices here, only CUDA GPUs and CPUs"
        for device in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
    },
}
MIN_PARAMS = 100_000_000  # SIZE_BASED_WRAP's default in `accelerate launch`
DEFAULT_PORT = 29500
BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
PRECISIONS = {"no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}
NO_FP8 = (
    "matrices are not multiplied in fp8 here; bf16 computes, and enable_fsdp_float8_all_gather sends parameters in fp8"
)
DEEPSPEED_FILE = "deepspeed_config_file"
DEFAULT_STAGE = "2"
# DeepSpeed's blocks that enable 16 bits.
HALVES = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
Read = tuple[dict[str, Any], Original]


def read_accelerate(top: Block, folder: Path) -> Read:
    """Settings of the trainer, and what Accelerate would run."""
    kind = _kind(top)
    settings = _launch(top, kind == "NO")
    if kind == "MULTI_CPU":
        settings["device"] = "cpu"
    apply_rules(top, rules("accelerate", "top"))
    apply_rules(top.inner("mpirun_config"), rules("accelerate", "mpirun_config"))
    settings |= _compile(top)
    blocks = {FSDP: top.inner("fsdp_config"), DEEPSPEED: top.inner("deepspeed_config")}
    for other, block in blocks.items():
        if other != kind:
            block.ignored_whole(f"distributed_type {kind} does not read it")
    if kind == DEEPSPEED:
        read_parallelism(top.inner("parallelism_config"), None, None)
        for change in _fp8(top):
            change.block.refused(change.key, "it goes with distributed_type FSDP")
        if top.flag("fp16"):
            top.refused("fp16", "DeepSpeed reads mixed_precision")
        top.ignored("fp16", "it is off")
        theirs, original = _deepspeed_block(top, blocks[DEEPSPEED], folder)
        return settings | theirs, original
    fsdp = read_fsdp(blocks[FSDP], MIN_PARAMS) if kind == FSDP else None
    settings |= _mixed_precision(top, fsdp is not None)
    ranks, machines = settings.get("nproc_per_node"), int(settings.get("nnodes", "1"))
    name, group = read_parallelism(top.inner("parallelism_config"), fsdp, ranks and ranks * machines)
    return sharded(settings, fsdp, name, group, _fp8(top))


def _kind(top: Block) -> str:
    if not top.has("distributed_type"):
        raise ConfigurationError(
            f"{top.account.source}: distributed_type is missing; write NO, MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED"
        )
    kind = top.word("distributed_type", (*REPLICATES, FSDP, DEEPSPEED, *REFUSED), "NO")
    if kind in REFUSED:
        top.refused("distributed_type", REFUSED[kind])
    elif kind in REPLICATES:
        top.used("distributed_type", f"strategy {REPLICATED}" + (" on CPUs" if kind == "MULTI_CPU" else ""))
    else:
        top.used("distributed_type", f"{kind.lower()}_config has the strategy")
    return kind


def _fp8(top: Block) -> list[Change]:
    """Matrices are not multiplied in fp8, but parameters may be sent in fp8."""
    block = top.inner("fp8_config")
    apply_rules(block, with_prefix(rules("accelerate", "fp8_config"), "fp8_"))
    changes = []
    for key in ("enable_fsdp_float8_all_gather", "fp8_enable_fsdp_float8_all_gather"):
        if block.flag(key):
            changes.append(Change(block, key, ("params_as=e4m3",), "parameters are sent as e4m3 (params_as)"))
        else:
            block.used(key, "parameters are sent as they are")
    return changes


def _compile(top: Block) -> dict[str, Any]:
    """`dynamo_config`, or the one key that older files have for it."""
    block = top.inner("dynamo_config")
    apply_rules(block, with_prefix(rules("accelerate", "dynamo_config"), "dynamo_"))
    settings: dict[str, Any] = {}
    for holder, key in ((top, "dynamo_backend"), (block, "dynamo_backend"), (block, "backend")):
        word = holder.text(key).upper()
        if word == "INDUCTOR":
            settings["compile"] = True
        elif word not in ("", "NO"):
            holder.refused(key, "blocks are compiled by INDUCTOR only; write that, or NO")
        holder.used(key, f"compile {'true' if 'compile' in settings else 'false'}")
    return settings


def _launch(top: Block, is_single: bool) -> dict[str, Any]:
    """The device, the number of ranks, and where machines meet."""
    settings: dict[str, Any] = {}
    if top.flag("use_cpu"):
        settings["device"] = "cpu"
    top.used("use_cpu", f"device {'cpu' if 'device' in settings else 'cuda, where there is one'}")
    settings |= _ranks(top, is_single)
    settings |= _devices(top, settings)
    return settings | _rendezvous(top, settings.get("nnodes", "1") != "1")


def _ranks(top: Block, is_single: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    machines = top.whole("num_machines", 1, least=1)
    if top.has("num_machines"):
        settings["nnodes"] = str(machines)
    top.used("num_machines", f"nnodes {machines}")
    ranks = top.whole("num_processes", -1, least=-1)
    if is_single:
        top.used("num_processes", "nproc_per_node 1: distributed_type NO is one process, whatever is written here")
        return settings | {"nproc_per_node": 1}
    if ranks == 0:
        top.refused("num_processes", "it must be at least 1")
    elif ranks < 0:
        top.ignored("num_processes", "the number of ranks is given where they are started")
    elif ranks % machines:
        top.refused("num_processes", f"it is not a multiple of num_machines {machines}: it counts all machines' ranks")
    else:
        settings["nproc_per_node"] = ranks // machines
        top.used("num_processes", f"nproc_per_node {ranks // machines} ({ranks} in all)")
    return settings


def _devices(top: Block, settings: dict[str, Any]) -> dict[str, Any]:
    """`gpu_ids`, whose number is the number of ranks where nothing else says it."""
    ids = [word.strip() for word in top.text("gpu_ids", "all").split(",")]
    in_order = "ranks take the visible devices in order"
    if ids[0].lower() in ("all", "none", ""):
        top.ignored("gpu_ids", in_order)
        return {}
    if ids != [str(number) for number in range(len(ids))]:
        fix = f"set CUDA_VISIBLE_DEVICES={','.join(ids)} where ranks are started, and leave it out"
        top.refused("gpu_ids", f"{in_order}: {fix}")
    elif "nproc_per_node" not in settings:
        top.used("gpu_ids", f"nproc_per_node {len(ids)}: {in_order}")
        return {"nproc_per_node": len(ids)}
    top.ignored("gpu_ids", in_order)
    return {}


def _rendezvous(top: Block, has_many: bool) -> dict[str, Any]:
    """Machines meet at a host and a port; the backend `static`, Accelerate's default, needs a machine's rank."""
    rank = top.whole("machine_rank", 0, least=0)
    backend = top.word("rdzv_backend", BACKENDS, BACKENDS[0])
    host, port = top.text("main_process_ip"), top.whole("main_process_port", DEFAULT_PORT, least=0, most=65535)
    if not has_many:
        for key in ("machine_rank", "rdzv_backend", "main_process_ip", "main_process_port"):
            top.ignored(key, "there is only one machine")
        return {}
    settings: dict[str, Any] = {"rdzv_backend": backend}
    if top.has("machine_rank"):
        settings["node_rank"] = rank
    top.used("machine_rank", f"node_rank {rank}")
    top.used("rdzv_backend", f"rdzv_backend {backend}")
    if host:
        settings["rdzv_endpoint"] = f"{host}:{port}"
    for key in ("main_process_ip", "main_process_port"):
        top.used(key, f"rdzv_endpoint {host or 'HOST, which has to be given'}:{port}")
    return settings


def precision_settings(word: str, is_fsdp: bool) -> dict[str, Any]:
    """Settings for Accelerate's word.

    DDP computes under autocast from fp32 weights, and sums fp32 gradients. FSDP casts parameters and gradients alike,
    so it sums in 16 bits: there `reduce_dtype` is bf16. Masters are fp32 in all of them.
    """
    settings: dict[str, Any] = {"precision": PRECISIONS[word]}
    if is_fsdp and word == "bf16":
        settings["reduce_dtype"] = "bf16"
    return settings


def precision_text(word: str, is_fsdp: bool) -> str:
    if PRECISIONS[word] == "fp32":
        return "precision fp32"
    if not is_fsdp:
        return f"precision {word}: fp32 masters, fp32 gradients; the whole block computes in {word}, without autocast"
    if word == "bf16":
        return "precision bf16 with reduce_dtype bf16: fp32 masters, gradients are summed in bf16, as in FSDP"
    return "precision fp16: fp32 masters, and gradients are summed in fp32, where FSDP would sum in fp16"


def _mixed_precision(top: Block, is_fsdp: bool) -> dict[str, Any]:
    """`mixed_precision`, or `fp16: true` in older files."""
    is_half = top.flag("fp16")
    word = top.word("mixed_precision", [*PRECISIONS, "fp8"], "fp16" if is_half else "no")
    if top.has("mixed_precision"):
        top.ignored("fp16", "mixed_precision decides it")
    else:
        top.used("fp16", precision_text(word, is_fsdp))
    if word == "fp8":
        top.refused("mixed_precision", NO_FP8)
        word = "bf16"
    top.used("mixed_precision", precision_text(word, is_fsdp))
    return precision_settings(word, is_fsdp)


def _deepspeed_block(top: Block, block: Block, folder: Path) -> Read:
    apply_rules(block, rules("accelerate", "deepspeed_config"))
    word = top.word("mixed_precision", [*PRECISIONS, "fp8"], "")
    if block.has(DEEPSPEED_FILE) and block.text(DEEPSPEED_FILE).lower() != "none":
        for key in table("accelerate")["deepspeed_keys"]:
            block.refused(key, f"{DEEPSPEED_FILE} decides it; write it there")
        settings, original = read_completed(named_file(block, DEEPSPEED_FILE, folder), word or "no")
        if word in PRECISIONS and settings["precision"] != PRECISIONS[word]:
            top.refused("mixed_precision", f"DeepSpeed's file has {settings['precision']}; leave it to the file")
    else:
        block.ignored(DEEPSPEED_FILE, "no file is named")
        settings, original = _from_keys(top, block, word)
    if word == "fp8":
        top.refused("mixed_precision", NO_FP8)
    top.used("mixed_precision", f"precision {settings['precision']}")
    return settings, original


def _from_keys(top: Block, block: Block, word: str) -> Read:
    """Make DeepSpeed's tree from the keys, and report what becomes of it under the names that were written."""
    tree: dict[str, Tree] = {"zero_optimization": {"stage": DEFAULT_STAGE}}
    names = {"zero_optimization.stage": "zero_stage"}
    for key, path in table("accelerate")["deepspeed_keys"].items():
        if not block.has(key):
            continue
        if key.endswith("_nvme_path") and block.text(key.replace("_nvme_path", "_device")).lower() != "nvme":
            block.text(key)
            block.ignored(key, "nothing is stored on a disk")
            continue
        names[path] = key
        *parents, name = path.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = block.values[key]
    if word in ("fp16", "bf16"):
        tree[word] = {"enabled": "true"}
    account = Account(top.account.source)
    settings, original = read_deepspeed(account.block("", tree))
    for entry in account.entries:
        # An entry may be about a whole block.
        for path, key in names.items():
            if path == entry.key or path.startswith(f"{entry.key}."):
                block.settle(key, entry.fate, entry.text)
        if word and entry.fate == "refused" and entry.key.partition(".")[0] == word:
            top.refused("mixed_precision", entry.text)
    return settings, original


def read_completed(block: Block, word: str) -> Read:
    """Read DeepSpeed's keys as Accelerate and the Trainer complete them from mixed precision (no, fp16 or bf16)."""
    account = Account(block.account.source)
    settings, original = read_deepspeed(account.block("", completed(block.values, word)))
    _copy_entries(block, block, {entry.key: entry for entry in account.entries})
    return settings, original


def completed(values: Any, word: str) -> dict[str, Tree]:
    """Enable the 16 bits of `word` where the file says `auto`, or nothing."""
    tree = dict(values)
    for key, kind in HALVES.items():
        inner = tree.get(key)
        if isinstance(inner, dict) and str(inner.get("enabled")).lower() == AUTO:
            tree[key] = inner | {"enabled": str(kind == word).lower()}
    written = [key for key, kind in HALVES.items() if kind == word and tree.get(key) is not None]
    if word in HALVES and not written:
        tree[word] = {"enabled": "true"}
    return tree


def _copy_entries(root: Block, block: Block, entries: dict[str, Entry]) -> None:
    """Take the entries of a completed copy over to the keys that were written."""
    for key, path in block.paths.items():
        entry = entries.get(path.removeprefix(f"{root.path}.") if root.path else path)
        value = block.values[key]
        if entry is not None:
            block.account.settle(path, value, entry.fate, entry.text)
        elif block.has(key) and isinstance(value, dict):
            _copy_entries(root, block.inner(key), entries)
