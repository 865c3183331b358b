"""The ranks' side of `benchmarks.checkpoints`: whose checkpoints are measured, and what one run measures.

    shardwise:S   sw.save, sw.load and sw.start_save under the strategy S
    dcp:N         torch's FSDP2 with torch.distributed.checkpoint, N writing threads; async_save with a stager that
                  keeps its memory. Everything is loaded in place, so nothing is copied afterwards
    deepspeed:N   DeepSpeed's ZeRO stage N, save_checkpoint and load_checkpoint; it has nothing asynchronous
    disk          the floor: each rank writes and reads as many bytes as weights and AdamW's moments have, around the
                  page cache, 8 MiB at a time, nothing else

All train the same in-tree transformer in fp32 with torch's AdamW. A save is timed twice: until every rank's call has
returned, and until an fsync of all its files has, whether or not the contender did that itself. Before a load the files
are dropped from the page cache, and after it every tensor must be what it was when it was saved. Asynchronous saves are
measured beside steps that compute, on whatever cores there are, and beside steps that only wait for as long: as where
another device computes.
"""

import json
import mmap
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.trainer.model import Transformer
from shardwise.trainer.shapes import TransformerShape

SHAPES = {
    "1m": TransformerShape(vocab=512, hidden=128, layers=4, heads=4, kv_heads=4, ffn=352, max_seq=64),
    "50m": TransformerShape(vocab=8192, hidden=512, layers=12, heads=8, kv_heads=8, ffn=1408, max_seq=64),
    "100m": TransformerShape(vocab=16000, hidden=768, layers=11, heads=12, kv_heads=12, ffn=2048, max_seq=64),
    "500m": TransformerShape(vocab=32000, hidden=1280, layers=21, heads=20, kv_heads=20, ffn=3456, max_seq=64),
    "3b": TransformerShape(vocab=64000, hidden=2560, layers=36, heads=20, kv_heads=20, ffn=6912, max_seq=64),
}
BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Job:
    contender: str
    shape: str
    device: str
    folder: str
    num_saves: int
    num_loads: int
    num_steps: int


@dataclass(frozen=True)
class Contender:
    """`start_save` returns whether it is done, and a wait for its end. `step` calls its argument before its update."""

    step: Callable[[Callable[[], object]], object]
    save: Callable[[Path], object]
    load: Callable[[Path], object]
    tensors: Callable[[], list[Tensor]]  # what this rank holds
    start_save: Callable[[Path], "Started"] | None = None


@dataclass(frozen=True)
class Started:
    is_done: Callable[[], bool]
    finish: Callable[[], object]
    before_update: Callable[[], object] = lambda: None


def num_params(shape: str) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in Transformer(SHAPES[shape]).parameters())


def build(job: Job) -> Transformer:
    torch.manual_seed(0)
    with torch.device(job.device):
        return Transformer(SHAPES[job.shape])


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def loss_of(model: nn.Module, job: Job) -> Tensor:
    shape = SHAPES[job.shape]
    batch = torch.randint(shape.vocab, (1, shape.max_seq + 1), device=job.device)
    return model(batch[:, :-1], batch[:, 1:])


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    return [getattr(tensor, "_local_tensor", tensor).detach() for tensor in (*model.parameters(), *state)]


def trained(model: nn.Module, optimizer: Any, job: Job) -> Callable[[Callable[[], object]], None]:
    def step(before_update: Callable[[], object]) -> None:
        loss_of(model, job).backward()
        before_update()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shardwise(job: Job, strategy: str) -> Contender:
    import shardwise as sw

    sw.init(device=job.device)
    model = build(job)
    model, optimizer = sw.shard(model, adamw(model.parameters()), strategy, precision="fp32")

    def start(path: Path) -> Started:
        saving = sw.start_save(path, model, optimizer)
        return Started(lambda: saving.is_finished, saving.finish)

    return Contender(
        trained(model, optimizer, job),
        lambda path: sw.save(path, model, optimizer),
        lambda path: sw.load(path, model, optimizer),
        lambda: tensors_of(model, optimizer),
        start,
    )


def dcp(job: Job, num_threads: str = "1") -> Contender:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = build(job)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    is_cuda = job.device == "cuda"
    # torch 2.11's cannot copy an optimizer's state; there the default is used.
    is_newer = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    stager = DefaultStager(StagingOptions(is_cuda, False, is_cuda, is_cuda)) if is_newer else None
    beside = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    def writer(path: Path) -> Any:
        return checkpoint.FileSystemWriter(path, thread_count=int(num_threads))

    def start(path: Path) -> Started:
        begun = checkpoint.async_save(state(), storage_writer=writer(path), process_group=beside, async_stager=stager)
        if isinstance(begun, checkpoint.state_dict_saver.AsyncSaveResponse):
            return Started(
                begun.upload_completion.done, begun.upload_completion.result, begun.staging_completion.result
            )
        return Started(begun.done, begun.result)

    return Contender(
        trained(model, optimizer, job),
        lambda path: checkpoint.save(
            state(), storage_writer=writer(path), planner=checkpoint.DefaultSavePlanner(enable_plan_caching=True)
        ),
        lambda path: checkpoint.load(state(), storage_reader=checkpoint.FileSystemReader(path)),
        lambda: tensors_of(model, optimizer),
        start,
    )


def deepspeed(job: Job, stage: str) -> Contender:
    os.environ.update(DS_ACCELERATOR=job.device, LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed as ds
    import deepspeed.ops

    # Sums in shared memory, for which it would compile for half a minute; gloo does them as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ds.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    model = build(job)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, _, _ = ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(before_update: Callable[[], object]) -> None:
        engine.backward(loss_of(engine, job))
        before_update()
        engine.step()

    def tensors() -> list[Tensor]:
        inner = optimizer.optimizer
        state = [value for kept in inner.state.values() for value in kept.values() if isinstance(value, Tensor)]
        return [*(param.detach() for group in inner.param_groups for param in group["params"]), *state]

    return Contender(
        step,
        lambda path: engine.save_checkpoint(str(path), tag="saved"),
        lambda path: engine.load_checkpoint(str(path), tag="saved"),
        tensors,
    )


def disk(job: Job) -> Contender:
    """The tensors that it saves and loads are one block, again and again."""
    num_bytes = 3 * 4 * num_params(job.shape) // dist.get_world_size()
    memory = mmap.mmap(-1, BLOCK_BYTES)
    memory[:] = os.urandom(BLOCK_BYTES)

    def name(path: Path) -> Path:
        return path / f"rank-{dist.get_rank()}"

    def save(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(name(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)
        for offset in range(0, num_bytes, BLOCK_BYTES):
            os.pwrite(file, memory, offset)
        os.fsync(file)
        os.close(file)

    def load(path: Path) -> None:
        file = os.open(name(path), os.O_RDONLY | os.O_DIRECT)
        for offset in range(0, num_bytes, BLOCK_BYTES):
            os.preadv(file, [memory], offset)
        os.close(file)

    return Contender(lambda before_update: None, save, load, lambda: [torch.frombuffer(memory, dtype=torch.uint8)])


CONTENDERS: dict[str, Callable[..., Contender]] = {
    "shardwise": shardwise,
    "dcp": dcp,
    "deepspeed": deepspeed,
    "disk": disk,
}

# ---------------------------------------------------------------------------------------------------------
# measuring


def run(job: Job) -> dict[str, Any]:
    family, _, argument = job.contender.partition(":")
    contender = CONTENDERS[family](job, *([argument] if argument else []))
    for _ in range(2):
        contender.step(lambda: None)
    path = Path(job.folder)
    steps = [timed(job, lambda: contender.step(lambda: None)) for _ in range(job.num_steps)]
    found: dict[str, Any] = {"steps_s": steps, "saves": [], "loads": [], "async": [], "async, waiting": []}
    for _ in range(1 + job.num_saves):
        clean(path)
        found["saves"].append(save(job, contender, path))
    found["num_bytes"] = sum(file.stat().st_size for file in files_in(path))
    kept = sums(contender)
    for _ in range(1 + job.num_loads):
        contender.step(lambda: None)
        found["loads"].append(load(job, contender, path))
        if sums(contender) != kept:
            raise AssertionError(f"{job.contender}: what was loaded is not what was saved")
    if contender.start_save is not None:
        step_s = agreed(job, statistics.median(steps))

        def wait(before_update: Callable[[], object]) -> None:
            before_update()
            time.sleep(step_s)

        for _ in range(1 + job.num_saves):
            for name, step in (("async", contender.step), ("async, waiting", wait)):
                clean(path)
                found[name].append(save_beside_steps(job, contender.start_save, step, path))
        found["waits_s"] = [timed(job, lambda: wait(lambda: None)) for _ in range(job.num_steps)]
    return found


def save(job: Job, contender: Contender, path: Path) -> dict[str, float]:
    memory = forget_peak()
    began = time.perf_counter()
    returned_s = timed(job, lambda: contender.save(path))
    most = peak() - memory
    if dist.get_rank() == 0:
        sync(path)
    dist.barrier()
    return {"returned_s": returned_s, "on_disk_s": time.perf_counter() - began, "memory_bytes": most}


def load(job: Job, contender: Contender, path: Path) -> dict[str, float]:
    if dist.get_rank() == 0:
        forget(path)
    dist.barrier()
    memory = forget_peak()
    return {"seconds": timed(job, lambda: contender.load(path)), "memory_bytes": peak() - memory}


def save_beside_steps(
    job: Job, start_save: Callable[[Path], Started], step: Callable[[Callable[[], object]], object], path: Path
) -> dict[str, Any]:
    """Start, and go on with steps until every rank is done; at least as many steps as were measured without."""
    dist.barrier()
    began = time.perf_counter()
    started = start_save(path)
    synchronize(job)
    call_s = time.perf_counter() - began
    steps, is_done = [timed(job, lambda: step(started.before_update))], False
    while not is_done or len(steps) < job.num_steps:
        steps.append(timed(job, lambda: step(lambda: None)))
        is_done = agreed(job, float(started.is_done())) == 1.0
    started.finish()
    return {"call_s": call_s, "steps_s": steps}


def agreed(job: Job, number: float) -> float:
    """The smallest of all ranks'."""
    numbers = torch.tensor(number, dtype=torch.float64, device=job.device)
    dist.all_reduce(numbers, dist.ReduceOp.MIN)
    return float(numbers)


def timed(job: Job, do: Callable[[], object]) -> float:
    """Until all ranks are done."""
    synchronize(job)
    dist.barrier()
    began = time.perf_counter()
    do()
    synchronize(job)
    dist.barrier()
    return time.perf_counter() - began


def synchronize(job: Job) -> None:
    if job.device == "cuda":
        torch.cuda.synchronize()


def sums(contender: Contender) -> list[float]:
    return [float(tensor.double().sum()) for tensor in contender.tensors()]


def files_in(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def clean(path: Path) -> None:
    """Nothing there, and nothing left to be written by those who came before."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()


def sync(path: Path) -> None:
    for place in (*files_in(path), *(folder for folder in path.rglob("*") if folder.is_dir()), path):
        file = os.open(place, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def forget(path: Path) -> None:
    """Out of the page cache."""
    sync(path)
    for place in files_in(path):
        file = os.open(place, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def forget_peak() -> int:
    """The kernel's record of this process's largest memory begins anew; returns what it has now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return in_status("VmRSS")


def peak() -> int:
    return in_status("VmHWM")


def in_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    found = run(job)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        about = {"torch": torch.__version__, "device": device_name(job), "ranks": everyone, "job": asdict(job)}
        Path(sys.argv[2]).write_text(json.dumps(about))
    dist.barrier()
    os._exit(0)  # not through the destructors of every library here


def device_name(job: Job) -> str:
    return torch.cuda.get_device_name() if job.device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
