"""Our engine, measured: memory at every instant of a step, traffic and seconds, to hold the planner against.

    python -m benchmarks.planner_measure --device cuda --out FILE.json [--cases PATTERN ...] [--limit-s 560] [--raw]

One process plays rank 0 of each case's emulated fabric (`bench/fabric.py`), one case after the other; what a case held
is let go before the next. The file is written after every case, so a run that is cut off keeps what it has. `--raw`
measures what products, attention and copies reach as well (`planner_raw.py`), and does that first.

Steps of a case, in this order:

    2 to warm up, the first with the optimizer's state not there yet: peaks as a user's first steps have them
    then the allocator gives back all it does not need, and 1 settles
    1 for memory by phase: bytes when each ends, and the peak within it; `peak` is of this step and the one before
    1 for memory by module: the same at the ends of each block's forward and at the begin of its backward
    5 for seconds, 3 of long ones: events on the compute stream, the host is never waited for
    1 for the host: how long queueing a step takes when the device is idle at its begin

On a CPU there is no allocator to ask: memory is what the engine counts (`sw.memory`), and seconds mean nothing.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from benchmarks.planner_cases import Case, cases, smoke
from shardwise.base.errors import import_library
from shardwise.bench import fabric
from shardwise.bench.measure import failure
from shardwise.bench.pages import commit, processor
from shardwise.planner.hardware import links
from shardwise.trainer.checkpointing import checkpoint_blocks
from shardwise.trainer.data.samples import Batch
from shardwise.trainer.model import Transformer
from shardwise.trainer.models.headloss import find_path, loss_sum, set_path
from shardwise.trainer.models.lora import adapters_for, with_adapters
from shardwise.trainer.optimizers import optimizer_for
from shardwise.trainer.settings import Lora, Settings

LONG_S = 0.4
SEED = 1
LEAK_BYTES = 8 * 2**20
MODULE_KEYS = ("allocated", "allocated_peak")

Answer = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------
# what a case asks for


def build(case: Case, device: torch.device) -> nn.Module:
    """On the meta device; adapters, where there are any, on the real one."""
    with torch.device("meta"):
        model: Any = Transformer(case.shape) if case.code == "in-tree" else hugging_face(case)
    if case.lora_targets:
        model = with_adapters(model, adapters_for(Lora(r=16, targets=case.lora_targets), True), SEED, device)
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad and case.trained in name)
    checkpoint_blocks(model, case.checkpointing)  # type: ignore[arg-type]
    if case.compile:
        for block in model.blocks:
            block.compile()
    return model


def hugging_face(case: Case) -> Any:
    transformers = import_library("transformers", "this benchmark")
    auto: Any = transformers.AutoModelForCausalLM
    shape = case.shape
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_seq,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )
    model = auto.from_config(config, dtype=torch.float32).train()
    set_path(model, find_path(model))
    return model


def loss_of(case: Case, model: Any, batch: Batch) -> Tensor:
    tokens, targets = batch.tokens, batch.targets
    if case.code == "hf":
        return model(input_ids=tokens, labels=tokens).loss if case.loss == "plain" else loss_sum(model, batch)
    if case.loss == "plain":
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
    return model(tokens, targets)


def batches_of(case: Case, device: torch.device) -> list[Batch]:
    generator = torch.Generator(device).manual_seed(SEED)
    size = (case.micro_batch, case.seq + 1)
    found = []
    for _ in range(case.num_micro_batches):
        tokens = torch.randint(0, case.shape.vocab, size, device=device, generator=generator)
        found.append(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None))
    return found


@dataclass(frozen=True)
class Run:
    """A case that is set up."""

    case: Case
    model: nn.Module
    optimizer: Any
    batches: list[Batch]

    def step(self, mark: Callable[[str], object] = lambda phase: None) -> Tensor:
        """As the trainer takes it. `mark` is called at the end of each phase."""
        total = torch.zeros((), device=self.batches[0].tokens.device)
        for index, batch in enumerate(self.batches):
            is_last = index == len(self.batches) - 1
            with nullcontext() if is_last else sw.accumulate(self.model):
                loss = loss_of(self.case, self.model, batch)
                mark("forward")
                (loss / len(self.batches)).backward()
            total += loss.detach()
            del loss
            mark("backward")
        self.optimizer.clip_grad_norm(1.0)
        mark("clip")
        self.optimizer.step()
        mark("update")
        self.optimizer.zero_grad()
        mark("zero_grad")
        return total


def set_up(case: Case, device: torch.device) -> Run:
    emulated = links.parse(case.fabric)
    fabric.start(emulated)
    sw.init(device=device)
    model = build(case, device)
    model, optimizer = sw.shard(
        model,
        optimizer_for(model, Settings()),
        case.strategy,
        precision=case.precision,
        reduce_dtype=case.reduce,
        node_size=emulated.node_size,
        seed=SEED,
    )
    return Run(case, model, optimizer, batches_of(case, device))


# ---------------------------------------------------------------------------------------------------------
# what is seen


class DeviceMemory:
    """The allocator's books."""

    def forget(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> Answer:
        """And the peaks since the last look."""
        stats = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        return {
            "allocated": stats["allocated_bytes.all.current"],
            "allocated_peak": stats["allocated_bytes.all.peak"],
            "active_peak": stats["active_bytes.all.peak"],
            "requested_peak": stats["requested_bytes.all.peak"],
            "reserved_peak": stats["reserved_bytes.all.peak"],
        }

    def context(self) -> Answer:
        """What the device lacks beside what the allocator took: the context, modules, other libraries."""
        free, total = torch.cuda.mem_get_info()
        return {"total": total, "outside": total - free - torch.cuda.memory_reserved()}


class HostMemory:
    def forget(self) -> None:
        gc.collect()

    def now(self) -> Answer:
        return {}

    def context(self) -> Answer:
        return {}


Books = DeviceMemory | HostMemory


def by_phase(run: Run, books: Books) -> list[Answer]:
    instants: list[Answer] = [{"phase": "begin", **books.now(), "classes": classes(run)}]
    run.step(lambda phase: instants.append({"phase": phase, **books.now(), "classes": classes(run)}))
    return instants


def classes(run: Run) -> dict[str, int]:
    return sw.memory(run.model, run.optimizer).by_class()


def by_module(run: Run, books: Books) -> list[Answer]:
    """Where forwards of modules begin and end and their backwards begin, in the order in which it happened."""
    instants: list[Answer] = []

    def mark(name: str, when: str) -> None:
        seen = books.now()
        instants.append({"module": name, "when": when} | {key: seen[key] for key in MODULE_KEYS if key in seen})

    with watched(run.model, mark):
        run.step(lambda phase: mark("", phase))
    return instants


@contextmanager
def watched(model: nn.Module, mark: Callable[[str, str], None]) -> Iterator[None]:
    handles = []

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # computed again
        mark(name, "forward")
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda _: mark(name, "backward begins"))

    for name, module in model.named_modules():
        is_part = not isinstance(module, nn.ModuleList) and any(True for _ in module.parameters(recurse=False))
        is_block = name.rpartition(".")[2].isdigit()
        if is_block or (is_part and not any(word.isdigit() for word in name.split("."))):
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: mark(name, "begins")))
            handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def timed(run: Run, num_steps: int) -> Answer:
    """Device seconds of steps and their phases, and what the wires carried in a step."""
    before = fabric.busy_s(), fabric.moved_bytes()
    on_device = run.batches[0].tokens.is_cuda
    ticks: list[tuple[str, Any]] = []

    def tick(phase: str) -> None:
        if not on_device:
            ticks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        ticks.append((phase, event))

    tick("zero_grad")
    for _ in range(num_steps):
        run.step(tick)
    after = fabric.busy_s(), fabric.moved_bytes()
    step_s, phases = [0.0], dict[str, list[float]]()
    for (_, begin), (phase, end) in itertools.pairwise(ticks):
        passed_s = begin.elapsed_time(end) * 1e-3 if on_device else end - begin
        step_s[-1] += passed_s
        phases.setdefault(phase, []).append(passed_s)
        if phase == "zero_grad":
            step_s.append(0.0)
    wires = [
        {wire: (now[wire] - then[wire]) / num_steps for wire in now} for then, now in zip(before, after, strict=True)
    ]
    return {
        "steps_s": step_s[:-1],
        "step_s": statistics.median(step_s[:-1]),
        "phases_s": {phase: statistics.median(each) for phase, each in phases.items()},
        "wire_busy_s": wires[0],
        "wire_bytes": wires[1],
    }


def seconds_alone(run: Run, wait: Callable[[], object]) -> tuple[float, float]:
    """Of a step that finds the device idle: until the host has queued it, and until it ends.

    A device's queue holds about a thousand kernels: where a step has more, waiting for room counts too.
    """
    wait()
    began = time.perf_counter()
    run.step()
    queued = time.perf_counter()
    wait()
    return queued - began, time.perf_counter() - began


def measure(case: Case, device: torch.device, books: Books) -> Answer:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    books.forget()
    began = time.perf_counter()
    run = set_up(case, device)
    answer: Answer = {"set_up": {"seconds": time.perf_counter() - began, **books.now()}}
    first_loss = run.step()
    answer["first_step"] = books.now()
    _, second_s = seconds_alone(run, wait)
    answer["second_step"] = books.now()
    books.forget()
    later_loss = run.step()
    settled = books.now()
    answer["phases"] = by_phase(run, books)
    peaks = [key for key in settled if key.endswith("_peak")]
    answer["peak"] = {key: max(instant[key] for instant in [settled, *answer["phases"]]) for key in peaks}
    if not case.compile:
        answer["modules"] = by_module(run, books)
    answer |= timed(run, 3 if second_s > LONG_S else 5)
    answer["host_s"], answer["alone_s"] = seconds_alone(run, wait)
    answer["context"] = books.context()
    answer["memory"] = asdict(sw.memory(run.model, run.optimizer))
    answer["traffic"] = [asdict(row) for row in sw.traffic(run.model).rows]
    answer["losses"] = [first_loss.item(), later_loss.item()]
    answer["num_params"] = num_params(case)
    return answer


def num_params(case: Case) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in Transformer(case.shape).parameters())


def attempt(case: Case, device: torch.device, books: Books) -> Answer:
    """A measurement, or why there is none. No frame of it outlives this, and so none of its tensors."""
    try:
        return {"status": "ok", **measure(case, device, books)}
    except Exception as error:  # noqa: BLE001, a case that fails is a result
        print(f"  {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        at = books.now() if isinstance(error, torch.OutOfMemoryError) else {}
        error.__traceback__ = None
        return {**failure(error), "at_failure": at}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------
# the run


def summary(answer: Answer) -> str:
    if answer["status"] != "ok":
        return f"{answer['status']}: {answer['error']}"
    told = [
        f"{kind} {answer['peak'][f'{kind}_peak'] / 1e9:.2f} GB" for kind in ("allocated", "reserved") if answer["peak"]
    ]
    return ", ".join([*told, f"{answer['step_s'] * 1e3:.1f} ms a step, host {answer['host_s'] * 1e3:.1f}"])


def machine(device: torch.device) -> Answer:
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=[], help="patterns of names; all unless given (on a CPU: tiny)")
    parser.add_argument("--done", nargs="*", type=Path, default=[], help="files of earlier runs: not measured again")
    parser.add_argument("--limit-s", type=float, default=560.0, help="no case is begun later")
    parser.add_argument("--raw", action="store_true", help="what the device itself reaches, first")
    parser.add_argument("--list", action="store_true", help="only say which cases there are")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Case]:
    done = {
        row["name"]
        for file in options.done
        for row in json.loads(file.read_text())["cases"]
        if row["status"] in ("ok", "oom")
    }
    known = [*cases(), *smoke()] if options.cases else smoke() if options.device == "cpu" else cases()
    return [
        case
        for case in known
        if case.name not in done
        and (not options.cases or any(fnmatchcase(case.name, pattern) for pattern in options.cases))
    ]


def main() -> None:
    options = parse()
    began = time.perf_counter()
    asked = chosen(options)
    if options.list:
        print("\n".join(case.name for case in asked))
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    books: Books = HostMemory()
    if device.type == "cuda":
        torch.cuda.init()
        books = DeviceMemory()
    document: Answer = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "benchmarks.planner_measure", *sys.argv[1:]]),
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "machine": machine(device),
        "raw": None,
        "cases": [],
    }

    def write() -> None:
        beside = options.out.with_suffix(".part")
        beside.write_text(json.dumps(document) + "\n")
        beside.replace(options.out)

    if options.raw:
        from benchmarks.planner_raw import measure_raw

        document["raw"] = measure_raw(device)
        write()
        print(f"raw: {time.perf_counter() - began:.0f} s", flush=True)
    for index, case in enumerate(asked):
        if time.perf_counter() - began > options.limit_s:
            print(f"{len(asked) - index} cases are left after {options.limit_s:g} s", flush=True)
            break
        case_began = time.perf_counter()
        held = [books.now().get("allocated", 0)]
        answer = attempt(case, device, books)
        books.forget()
        held.append(books.now().get("allocated", 0))
        document["cases"].append({**case.described(), "held_before": held[0], "held_after": held[1], **answer})
        write()
        leaked = f", LEFT {held[1] - held[0]} bytes" if held[1] - held[0] > LEAK_BYTES else ""
        spent = f"{time.perf_counter() - case_began:5.1f} s"
        print(f"{index + 1:3}/{len(asked)} {case.name:58} {summary(answer)} ({spent}{leaked})", flush=True)


if __name__ == "__main__":
    main()
