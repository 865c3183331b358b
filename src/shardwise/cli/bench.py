"""`shardwise bench`: strategies compared with their peers, on real ranks or on an emulated fabric."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigurationError
from .bench_wire import JSON_FILES_HELP, OUT_HELP, RESULTS_FOLDER, wire
from .shared import exit_on_sigterm, panels, progress, require_known, run_benchmark
from .train import TrainCommand

WHAT, WHERE, STEP, MEASURING, RESULTS = panels("What runs", "Where it runs", "A step", "Measuring", "Results")
PRECISIONS = ("fp32", "bf16", "pure-bf16")
DTYPES = ("fp32", "bf16")
CHECKPOINTING = ("none", "selective", "full")

app = typer.Typer()
app.command(cls=TrainCommand)(wire)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    strategies: Annotated[
        str,
        WHAT(
            help="Presets, separated by commas, or JSON mappings from units to presets. Each may end in @early, "
            "@capture or @meta."
        ),
    ] = "zero3",
    peers: Annotated[
        str,
        WHAT(
            help="Peers, separated by commas: fsdp2, hsdp, fsdp1, ddp (of torch), deepspeed:STAGE; with offload "
            "fsdp2+offload, deepspeed:STAGE+offload, deepspeed:3+nvme; with ZeRO++ deepspeed:3+hpz, and on GPUs "
            "3+qwz, 3+qgz, 3+zeropp. '' for none."
        ),
    ] = "fsdp2",
    shape: Annotated[
        str | None,
        WHAT(
            help="Model shapes, separated by commas: smoke, 50m, llama-3.2-1b, llama-3.2-3b, llama-3-8b, llama-3-70b; "
            "without embedding and head blocks-smoke, blocks-202m, blocks-202m-8, blocks-202m-20, blocks-13b. "
            "Default: 50m on CPUs, blocks-202m on GPUs."
        ),
    ] = None,
    tokens: Annotated[str | None, WHAT(help="Tokens per sequence. Several values are separated by commas.")] = None,
    batch: Annotated[int, WHAT(help="Sequences per micro-batch.", min=1)] = 1,
    precision: Annotated[
        str | None,
        WHAT(help="fp32, bf16 (fp32 masters; ddp: autocast) or pure-bf16. Default: fp32 on CPUs, bf16 on GPUs."),
    ] = None,
    reduce_dtype: Annotated[str | None, WHAT(help="Dtype of gradient reductions: fp32, bf16, or fp32,bf16.")] = None,
    device: Annotated[str | None, WHERE(help="cpu or cuda. Default: cuda if there is a GPU.")] = None,
    world_size: Annotated[
        int | None, WHERE(help="Number of real ranks on this machine. Default: 2 on CPUs, all GPUs.", min=1)
    ] = None,
    nproc_per_node: Annotated[
        int | None, WHERE(help="Ranks per node. A value below the world size simulates several nodes.", min=1)
    ] = None,
    fabric: Annotated[
        str | None,
        WHERE(help="Emulate this fabric, with one process as one of its ranks: 2x8,intra=400GB/s,inter=50GB/s."),
    ] = None,
    links: Annotated[
        str | None, WHERE(help="Bandwidths inside a node of the fabric in GB/s, one run for each: 1000,400.")
    ] = None,
    disk_path: Annotated[
        Path | None,
        WHERE(help="Folder for strategies and peers that offload to disk.", exists=True, file_okay=False),
    ] = None,
    micro_batches: Annotated[int, STEP(help="Micro-batches that are accumulated per step.", min=1)] = 1,
    clip: Annotated[
        float, STEP("--clip", "--max-grad-norm", help="Maximum gradient norm; 0 disables clipping.", min=0)
    ] = 0,
    compile_blocks: Annotated[bool, STEP("--compile", help="Use torch.compile on each block, for everyone.")] = False,
    checkpointing: Annotated[str, STEP(help="Activation checkpointing: none, selective or full.")] = "none",
    steps: Annotated[int, MEASURING(help="Number of measured steps.", min=1)] = 20,
    warmup: Annotated[int, MEASURING(help="Number of warm-up steps.", min=1)] = 5,
    repetitions: Annotated[int, MEASURING(help="Number of runs per contender, interleaved.", min=1)] = 1,
    seed: Annotated[int, MEASURING(help="Seed of weights and batches.", min=0)] = 0,
    calls: Annotated[bool, MEASURING("--calls", help="Also count Python calls per unit and step.")] = False,
    floors: Annotated[
        bool,
        MEASURING(help="On a fabric, also measure the computation of the whole model alone. It must fit the device."),
    ] = True,
    reference: Annotated[
        bool,
        MEASURING(help="First train in one process in fp32 for reference losses. Else the first contender has them."),
    ] = True,
    trace: Annotated[
        bool, MEASURING("--trace", help="Also write chrome traces, and report how much work overlapped.")
    ] = False,
    timeout: Annotated[float, MEASURING(help="Maximum seconds per run.", min=1)] = 600,
    out: Annotated[Path | None, RESULTS(help=OUT_HELP, file_okay=False)] = None,
    as_json: Annotated[bool, RESULTS("--json", help=JSON_FILES_HELP)] = False,
) -> None:
    """Compare strategies with torch DDP, FSDP1, FSDP2, HSDP and DeepSpeed.

    Every contender gets the same weights, batches and work, in fresh
    processes. Losses are compared first. A contender that fails, or whose
    losses differ, gets a row that says so, and the exit code is 1.

    Two CPU ranks, in a minute:

        shardwise bench --shape smoke --strategies zero3,ddp --peers fsdp2,ddp

    One GPU as one of eight, three network speeds:

        shardwise bench --fabric 8 --links 1000,400,100 --shape blocks-202m

    Two nodes of eight, with several strategies in one model:

        shardwise bench --fabric 2x8,intra=400GB/s,inter=50GB/s \\
          --strategies 'hsdp,{"blocks.?":"shard_grad_op","*":"zero3"}'

    One GPU with offload to the host, compared with the peers' offload:

        shardwise bench --world-size 1 --shape blocks-202m-20 --clip 1 \\
          --checkpointing full --reduce-dtype bf16 --trace \\
          --strategies zero2_offload --peers deepspeed:2+offload,fsdp2+offload

    All GPUs of this machine, a real shape:

        shardwise bench --shape llama-3-8b --checkpointing full --compile
    """
    if context.invoked_subcommand is not None:
        return
    from ..bench import compare
    from ..bench.case import SHAPES, Case, settings_of, with_intra
    from ..bench.launch import launch
    from ..bench.names import peers_in, strategies_in
    from ..bench.pages import new_page
    from ..bench.report import name_of, report_of
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
        for length in ([_count("--tokens", text) for text in _words(tokens)] or [0])
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
    speeds = [_speed(text) for text in _words(links)]
    fabrics = [with_intra(emulated, speed) for speed in speeds] or [emulated] if emulated is not None else []
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
    raise run_benchmark(map(report_of, found), page, as_json)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _list(option: str, text: str, known: Iterable[str]) -> list[str]:
    words = [require_known(option, word, known) for word in _words(text)]
    if not words:
        raise ConfigurationError(f"{option}: {text!r} names nothing; known: {', '.join(known)}")
    return words


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{option}: {text!r} is not a whole number above 0")
    return int(text)


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"--links: {text!r} is not a number of GB/s; write --links 1000,400,200") from None


def _device(name: str | None) -> str:
    import torch

    device = require_known("--device", name or ("cuda" if torch.cuda.is_available() else "cpu"), ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: torch sees no GPU here; leave it out to run on the CPU")
    return device


def _ranks(device: str, world_size: int | None, nproc_per_node: int | None) -> tuple[int, int]:
    """The number of real ranks, and the number of ranks per node."""
    import torch

    num_ranks = world_size or nproc_per_node or (torch.cuda.device_count() if device == "cuda" else 2)
    node_size = nproc_per_node or num_ranks
    if num_ranks % node_size:
        raise ConfigurationError(f"--world-size {num_ranks} does not divide into nodes of --nproc-per-node {node_size}")
    if device == "cuda" and num_ranks > torch.cuda.device_count():
        raise ConfigurationError(
            f"--world-size {num_ranks}, but this machine has {torch.cuda.device_count()} GPUs, and NCCL needs one per "
            f"rank: emulate them with --fabric {num_ranks}, or use --device cpu"
        )
    return num_ranks, node_size
