"""`shardwise bench`: strategies compared with their peers, on real ranks or on an emulated fabric.

`shardwise bench wire` measures the effect of codecs on training, on the user's own model and data. Its flags are those
of `shardwise train`, without the settings that the benchmark fixes or varies itself.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ..base.errors import ConfigurationError
from ..base.processes import temporary_folder
from ..trainer.settings import Settings
from .shared import documented, exit_on_sigterm, progress, require_known
from .train import FLAGS, TrainCommand

if TYPE_CHECKING:
    from ..bench.pages import Page
    from ..bench.wire import Request

Number = TypeVar("Number", int, float)
RESULTS_FOLDER = Path("benchmark-results")
PRECISIONS = ("fp32", "bf16", "pure-bf16")
DTYPES = ("fp32", "bf16")
CHECKPOINTING = ("none", "selective", "full")
STRATEGIES = (
    "zero3,zero3+grads_as=bf16,zero3+params_as=int8,zero3+grads_as=int8,zero3+grads_as=int4,"
    "zero3+grads_as=int4:feedback,zeropp,hpz+params_as=int8+grads_as=int4:feedback"
)
GRADIENT_CODECS = "bf16,fp16,e4m3,e5m2,int8,int8:stochastic,int4,int4:asymmetric,int4:64,int4:stochastic"
WEIGHT_CODECS = "bf16,int8,int8:64,e4m3,e5m2"
# Settings that `bench wire` fixes, whatever a file for `shardwise train` says: it chooses the steps and the strategy of
# each run, and a run writes only its figures and a checkpoint.
FIXED: dict[str, Any] = {
    name: getattr(Settings(), name)
    for name in (
        "strategy", "max_steps", "num_train_epochs", "output_dir", "resume_from_checkpoint", "save_steps", "async_save",
        "save_total_limit", "report_to", "sample_prompt", "profile", "nnodes", "node_rank", "rdzv_backend",
        "rdzv_endpoint", "rdzv_id", "max_restarts",
    )
} | {"logging_steps": 1, "export": False, "sample_tokens": 0}  # fmt: skip
NUM_RANKS, NODE_SIZE = 4, 2
# Options of this command replace two more flags of the trainer.
WIRE_FLAGS = [flag for name, flag in FLAGS.items() if name not in {*FIXED, "nproc_per_node", "node_size"}]

app = typer.Typer()


@app.callback(invoke_without_command=True)
@documented
def bench(
    context: typer.Context,
    strategies: str = "zero3",
    peers: str = "fsdp2",
    shape: str | None = None,
    tokens: str | None = None,
    batch: int = 1,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    device: str | None = None,
    world_size: int | None = None,
    nproc_per_node: int | None = None,
    fabric: str | None = None,
    links: str | None = None,
    disk_path: Path | None = None,
    micro_batches: int = 1,
    clip: float = 0,
    compile_blocks: bool = False,
    checkpointing: str = "none",
    steps: int = 20,
    warmup: int = 5,
    repetitions: int = 1,
    seed: int = 0,
    calls: bool = False,
    floors: bool = True,
    reference: bool = True,
    trace: bool = False,
    timeout: float = 600,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from ..bench import compare
    from ..bench.case import SHAPES, Case, peers_in, settings_of, strategies_in
    from ..bench.launch import launch
    from ..bench.pages import new_page
    from ..bench.results import name_of, page_of
    from ..planner.hardware.links import parse

    exit_on_sigterm()
    folder = out or RESULTS_FOLDER
    emulated = parse(fabric) if fabric is not None else None
    if links is not None and emulated is None:
        raise ConfigurationError(f"--links {links} sets the speed of an emulated fabric: name one, --fabric 8")
    if emulated is not None and (world_size or nproc_per_node):
        raise ConfigurationError(f"--fabric {fabric} has {emulated.world_size} ranks: leave --world-size out")
    where = _device(device)
    num_ranks, node_size = _ranks(where, world_size, nproc_per_node) if emulated is None else (1, 1)
    chosen = require_known("--precision", precision or ("bf16" if where == "cuda" else "fp32"), PRECISIONS)
    shapes = [
        replace(SHAPES[name], tokens=length or SHAPES[name].tokens)
        for name in _list("--shape", shape or ("blocks-202m" if where == "cuda" else "50m"), SHAPES)
        for length in (_numbers("--tokens", tokens, int, "a whole number above 0") or [0])
    ]
    base = Case(
        contender="",
        shape=shapes[0],
        device=where,
        world_size=num_ranks,
        node_size=node_size,
        fabric="",
        batch=batch,
        micro_batches=micro_batches,
        precision=chosen,
        reduce="",
        clip=clip,
        compile=compile_blocks,
        checkpointing=require_known("--checkpointing", checkpointing, CHECKPOINTING),
        warmup=warmup,
        steps=steps,
        seed=seed,
        trace=str(folder.resolve()) if trace else "",
        disk_path=str(disk_path.resolve()) if disk_path else "",
    )
    reduces = _list("--reduce-dtype", reduce_dtype or ("bf16" if chosen == "pure-bf16" else "fp32"), DTYPES)
    speeds = _numbers("--links", links, float, "a number of GB/s; write 1000,400,200")
    fabrics = [emulated] if emulated is not None else []
    if emulated is not None and speeds:
        fabrics = [replace(emulated, intra=replace(emulated.intra, gigabytes_per_s=speed)) for speed in speeds]
    session = compare.Session(
        settings_of(base, shapes, reduces, fabrics),
        strategies_in(strategies),
        peers_in(peers),
        repetitions,
        calls,
        floors,
        reference,
    )
    session.check()
    page = partial(new_page, folder, name_of(session)) if out or not as_json else None
    found = compare.run(session, partial(launch, timeout_s=timeout), progress)
    raise run_benchmark(map(page_of, found), page, as_json)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _list(option: str, text: str, known: Iterable[str]) -> list[str]:
    words = [require_known(option, word, known) for word in _words(text)]
    if not words:
        raise ConfigurationError(f"{option}: {text!r} names nothing; known: {', '.join(known)}")
    return words


def _numbers(option: str, text: str | None, kind: type[Number], what: str) -> list[Number]:
    found = []
    for word in _words(text):
        try:
            found.append(kind(word))
        except ValueError:
            raise ConfigurationError(f"{option}: {word!r} is not {what}") from None
        if not found[-1] > 0:
            raise ConfigurationError(f"{option}: {word!r} is not {what}")
    return found


def _device(name: str | None) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    device = require_known("--device", name or ("cuda" if has_gpu else "cpu"), ("cpu", "cuda"))
    if device == "cuda" and not has_gpu:
        raise ConfigurationError("--device cuda: torch sees no GPU here; leave it out to run on the CPU")
    return device


def _ranks(device: str, world_size: int | None, nproc_per_node: int | None) -> tuple[int, int]:
    """The number of real ranks, and the number of ranks per node."""
    import torch

    num_gpus = torch.cuda.device_count()
    num_ranks = world_size or nproc_per_node or (num_gpus if device == "cuda" else 2)
    node_size = nproc_per_node or num_ranks
    if num_ranks % node_size:
        raise ConfigurationError(f"--world-size {num_ranks} does not divide into nodes of --nproc-per-node {node_size}")
    if device == "cuda" and num_ranks > num_gpus:
        raise ConfigurationError(
            f"--world-size {num_ranks}, but this machine has {num_gpus} GPUs, and NCCL needs one per rank: emulate "
            f"them with --fabric {num_ranks}, or use --device cpu"
        )
    return num_ranks, node_size


@app.command(cls=TrainCommand)
@partial(documented, more=WIRE_FLAGS)
def wire(
    words: list[str] | None = None,
    strategies: str = STRATEGIES,
    steps: int = 300,
    codecs: str = GRADIENT_CODECS,
    weight_codecs: str = WEIGHT_CODECS,
    nproc_per_node: int | None = None,
    node_size: int | None = None,
    out: Path | None = None,
    runs: Path | None = None,
    as_json: bool = False,
    **flags: Any,
) -> None:
    import torch

    from ..bench.pages import new_page
    from ..bench.wire import Request, codecs_of, name_of, strategies_of
    from ..trainer.checks import completed
    from ..trainer.config import resolve
    from ..trainer.launcher import ranks_here

    exit_on_sigterm()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigurationError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} started by another launcher, but "
            "bench wire starts its own ranks: call it once, without torchrun"
        )
    numbers = {"nproc_per_node": nproc_per_node, "node_size": node_size}
    flags |= {name: str(number) for name, number in numbers.items() if number is not None}
    named = strategies_of(strategies)
    resolved = resolve(words or [], flags, os.environ)
    for key in FIXED:
        if resolved.origin[key].startswith("override"):
            instead = {"max_steps": "--steps", "strategy": "--strategies", "output_dir": "--runs"}.get(key)
            raise ConfigurationError(
                f"{key}: is set by bench wire for every run; {f'use {instead}' if instead else 'leave it out'}"
            )
    fixed = {**FIXED, "strategy": next(iter(named.values())), "max_steps": steps}
    settings = completed(replace(resolved.settings, **fixed), torch.cuda.is_available())
    if settings.nproc_per_node is None and settings.device == "cpu":
        settings = replace(settings, nproc_per_node=NUM_RANKS)
    num_ranks = ranks_here(settings)
    settings = replace(settings, nproc_per_node=num_ranks, node_size=settings.node_size or NODE_SIZE)
    request = Request(settings, named, num_ranks, codecs_of(codecs), codecs_of(weight_codecs))
    request.check()
    page = partial(new_page, out or RESULTS_FOLDER, name_of(request)) if out or not as_json else None
    raise run_benchmark(_pages(request, runs), page, as_json)


def _pages(request: "Request", runs: Path | None) -> "Iterator[Page]":
    """Run the benchmark with its run folders in `runs`, which must be empty, or in a temporary folder."""
    from ..bench import wire as session

    if runs is not None:
        if runs.exists() and any(runs.iterdir()):
            raise ConfigurationError(f"--runs {runs} is not empty: name an empty or a new folder")
        runs.mkdir(parents=True, exist_ok=True)
    with temporary_folder() if runs is None else nullcontext(runs) as folder:
        session.prepare(request, folder, progress)
        yield from map(session.page_of, session.run(request, folder, progress))


def run_benchmark(pages: "Iterable[Page]", new_page: Callable[[], Path] | None, as_json: bool) -> typer.Exit:
    """Run a benchmark, which yields its page of results after every run. Return the exit, to be raised.

    The page is rewritten after every run, so an interrupted benchmark keeps its results. `new_page` returns the path of
    the page; if it is None, no files are written.
    """
    path: Path | None = None
    try:
        for page in pages:
            if new_page is not None:
                path = path or new_page()
                page.write(path)
    except KeyboardInterrupt:
        saved = f"the results so far are in {path}" if path is not None else "nothing was written"
        progress(f"interrupted; everything that was started is stopped, and {saved}")
        return typer.Exit(130)
    if as_json:
        print(json.dumps(page.document, indent=1))
    else:
        page.show()
    if path is not None:
        progress(f"written: {path}")
    return typer.Exit(1 if page.problems else 0)
