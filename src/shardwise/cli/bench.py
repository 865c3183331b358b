"""`shardwise bench`: strategies beside their peers, in one run, on real ranks or on an emulated fabric."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigurationError, did_you_mean
from .bench_end import end_on_sigterm, interrupted, say
from .bench_wire import wire
from .train import TrainCommand

WHAT, WHERE, STEP, MEASURING, RESULTS = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("What runs", "Where it runs", "A step", "Measuring", "Results")
)
PRECISIONS = ("fp32", "bf16", "pure-bf16")
DTYPES = ("fp32", "bf16")
CHECKPOINTING = ("none", "selective", "full")

app = typer.Typer()
app.command(cls=TrainCommand)(wire)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    strategies: Annotated[
        str, WHAT(help="Presets, with commas; or mixes, as JSON. Behind one: @early, @capture, @meta.")
    ] = "zero3",
    peers: Annotated[
        str,
        WHAT(
            help="fsdp2, hsdp, fsdp1, ddp (torch's), deepspeed:STAGE; with state on the host fsdp2+offload, "
            "deepspeed:STAGE+offload, on disk deepspeed:3+nvme; ZeRO++ in parts deepspeed:3+hpz, and not on CPUs "
            "3+qwz, 3+qgz, 3+zeropp; '' for none."
        ),
    ] = "fsdp2",
    shape: Annotated[
        str | None,
        WHAT(
            help="smoke, 50m, llama-3.2-1b, llama-3.2-3b, llama-3-8b, llama-3-70b; without embedding and head: "
            "blocks-smoke, blocks-202m, blocks-202m-8, blocks-202m-20, blocks-13b. Several with commas. "
            "Default: 50m on CPUs, blocks-202m on GPUs."
        ),
    ] = None,
    tokens: Annotated[str | None, WHAT(help="Tokens of a sequence; several with commas.")] = None,
    batch: Annotated[int, WHAT(help="Sequences of a micro-batch.", min=1)] = 1,
    precision: Annotated[
        str | None,
        WHAT(help="fp32, bf16 (fp32 masters; ddp: autocast) or pure-bf16. Default: fp32 on CPUs, bf16 on GPUs."),
    ] = None,
    reduce_dtype: Annotated[str | None, WHAT(help="Gradients are summed in fp32, bf16, or fp32,bf16.")] = None,
    device: Annotated[str | None, WHERE(help="cpu or cuda. Default: cuda where there is one.")] = None,
    world_size: Annotated[
        int | None, WHERE(help="Real ranks on this machine. Default: 2 on CPUs, all GPUs.", min=1)
    ] = None,
    nproc_per_node: Annotated[
        int | None, WHERE(help="Ranks that count as a node; fewer than all play several nodes.", min=1)
    ] = None,
    fabric: Annotated[
        str | None,
        WHERE(help="No real ranks: one process plays a rank of this, 2x8,intra=400GB/s,inter=50GB/s."),
    ] = None,
    links: Annotated[str | None, WHERE(help="GB/s inside a node, in place of the fabric's: 1000,400.")] = None,
    disk_path: Annotated[
        Path | None,
        WHERE(help="Folder for what rests on disk, strategies' and deepspeed:3+nvme's.", exists=True, file_okay=False),
    ] = None,
    micro_batches: Annotated[int, STEP(help="Accumulated in a step.", min=1)] = 1,
    clip: Annotated[float, STEP("--clip", "--max-grad-norm", help="Largest gradient norm; 0: no clipping.", min=0)] = 0,
    compile_blocks: Annotated[bool, STEP("--compile", help="torch.compile on each block, for everybody.")] = False,
    checkpointing: Annotated[str, STEP(help="Of activations: none, selective or full.")] = "none",
    steps: Annotated[int, MEASURING(help="Measured steps.", min=1)] = 20,
    warmup: Annotated[int, MEASURING(help="Steps before them.", min=1)] = 5,
    repetitions: Annotated[int, MEASURING(help="Fresh runs of each contender, interleaved.", min=1)] = 1,
    seed: Annotated[int, MEASURING(help="Of weights and batches.", min=0)] = 0,
    calls: Annotated[bool, MEASURING("--calls", help="Count Python calls per unit and step too.")] = False,
    floors: Annotated[
        bool, MEASURING(help="On a fabric also the whole model's computation alone, which must fit the device.")
    ] = True,
    reference: Annotated[
        bool, MEASURING(help="First one process in fp32, for its losses; without, the first contender's are taken.")
    ] = True,
    trace: Annotated[
        bool, MEASURING("--trace", help="Write chrome traces too, and how much of a step went on at the same time.")
    ] = False,
    timeout: Annotated[float, MEASURING(help="Seconds that one run may take.", min=1)] = 600,
    out: Annotated[
        Path | None, RESULTS(help="Folder for JSON and a page. Default: benchmark-results.", file_okay=False)
    ] = None,
    as_json: Annotated[bool, RESULTS("--json", help="JSON to the standard output; files only with --out.")] = False,
) -> None:
    """Measure strategies beside torch DDP, FSDP1, FSDP2, HSDP and DeepSpeed.

    Everybody gets the same weights, batches and work, in fresh processes.
    Losses are compared first. Who fails, or computes something else, is a
    row that says so, and the exit code is 1.

    Two CPU ranks, in a minute:

        shardwise bench --shape smoke --strategies zero3,ddp --peers fsdp2,ddp

    One GPU as one of eight, three speeds of the network:

        shardwise bench --fabric 8 --links 1000,400,100 --shape blocks-202m

    Two nodes of eight, strategies mixed in one model:

        shardwise bench --fabric 2x8,intra=400GB/s,inter=50GB/s \\
          --strategies 'hsdp,{"blocks.?":"shard_grad_op","*":"zero3"}'

    One GPU and its host, beside the others' offload:

        shardwise bench --world-size 1 --shape blocks-202m-20 --clip 1 \\
          --checkpointing full --reduce-dtype bf16 --trace \\
          --strategies zero2_offload --peers deepspeed:2+offload,fsdp2+offload

    All GPUs of this machine, a real shape:

        shardwise bench --shape llama-3-8b --checkpointing full --compile
    """
    if context.invoked_subcommand is not None:
        return
    from ..bench import compare, report
    from ..bench.case import SHAPES, Case, settings_of, with_intra
    from ..bench.launch import launch
    from ..bench.names import peers_in, strategies_in
    from ..planner.hardware.links import parse

    end_on_sigterm()
    folder = out or Path("benchmark-results")
    emulated = parse(fabric) if fabric is not None else None
    if links is not None and emulated is None:
        raise ConfigurationError(f"--links {links} sets the speed of an emulated fabric: say which, --fabric 8")
    if emulated is not None and (world_size or nproc_per_node):
        raise ConfigurationError(f"--fabric {fabric} has {emulated.world_size} ranks: leave --world-size out")
    where = _device(device)
    num_ranks, node_size = _ranks(where, world_size, nproc_per_node) if emulated is None else (1, 1)
    chosen = _one_of("--precision", precision or ("bf16" if where == "cuda" else "fp32"), PRECISIONS)
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
        checkpointing=_one_of("--checkpointing", checkpointing, CHECKPOINTING),
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
    session.refuse_what_cannot_run()
    page = report.new_page(folder, report.name_of(session)) if out or not as_json else None
    try:
        for findings in compare.run(session, partial(launch, timeout_s=timeout), say):
            if page is not None:
                report.write(findings, page)
    except KeyboardInterrupt:
        raise interrupted(page) from None
    rows = report.rows_of(findings)
    about = report.document(findings, rows)
    if as_json:
        print(json.dumps(about, indent=1))
    else:
        report.print_table(rows, about["note"])
    if page is not None:
        say(f"written: {page}")
    raise typer.Exit(1 if report.problems(rows) else 0)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _one_of(option: str, word: str, known: Iterable[str]) -> str:
    if word not in known:
        raise ConfigurationError(f"{option}: unknown {word!r}; {did_you_mean(word, known)}")
    return word


def _list(option: str, text: str, known: Iterable[str]) -> list[str]:
    words = [_one_of(option, word, known) for word in _words(text)]
    if not words:
        raise ConfigurationError(f"{option}: {text!r} names nothing; known: {', '.join(known)}")
    return words


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{option}: {text!r} is no whole number above 0")
    return int(text)


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"--links: {text!r} is no number of GB/s; write --links 1000,400,200") from None


def _device(asked: str | None) -> str:
    import torch

    found = _one_of("--device", asked or ("cuda" if torch.cuda.is_available() else "cpu"), ("cpu", "cuda"))
    if found == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: torch sees no GPU here; leave it out to run on the CPU")
    return found


def _ranks(device: str, world_size: int | None, nproc_per_node: int | None) -> tuple[int, int]:
    """All real ranks, and how many of them count as a node."""
    import torch

    num_ranks = world_size or nproc_per_node or (torch.cuda.device_count() if device == "cuda" else 2)
    node_size = nproc_per_node or num_ranks
    if num_ranks < 1 or node_size < 1 or num_ranks % node_size:
        raise ConfigurationError(f"--world-size {num_ranks} does not divide into nodes of --nproc-per-node {node_size}")
    if device == "cuda" and num_ranks > torch.cuda.device_count():
        raise ConfigurationError(
            f"--world-size {num_ranks}, but this machine has {torch.cuda.device_count()} GPUs: NCCL wants one for each "
            f"rank; emulate them with --fabric {num_ranks}, or use --device cpu"
        )
    return num_ranks, node_size
