"""`shardwise plan`: what fits, what it costs and which strategy to take, before anything runs. Needs no torch."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigurationError, MemoryExceededError

if TYPE_CHECKING:
    from ..planner.assess import Machine
    from ..planner.training import Lora

MODEL, HARDWARE, STEP, ANSWER = "Model", "Hardware", "What a step does", "Answer"
MEASURED = "measured"
MEASURED_FILE = "hardware.json"


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A name (llama-3-8b, qwen3-4b, gpt2-xl), a config.json or its folder.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model: layers=32,hidden=4096,heads=32,kv-heads=8,ffn=14336,vocab=128256, or "
            "params=7.5e9 for the states alone.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(help="Train adapters only: 16, or r=16,targets=q_proj+v_proj.", rich_help_panel=MODEL),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Of one node: 8xH100-80GB, 4xA100-40GB, RTX-4090.", rich_help_panel=HARDWARE)
    ] = None,
    nodes: Annotated[int, typer.Option(help="How many of them.", rich_help_panel=HARDWARE)] = 1,
    hardware: Annotated[
        str | None,
        typer.Option(
            help=f"'{MEASURED}' ({MEASURED_FILE}), or a file that `shardwise doctor --measure FILE` wrote.",
            rich_help_panel=HARDWARE,
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Between nodes: ib-ndr, efa-p5, ethernet-100, or a GPU's 50GB/s.", rich_help_panel=HARDWARE),
    ] = None,
    intra: Annotated[
        str | None, typer.Option(help="Inside a node: nvlink, pcie4, or 300GB/s.", rich_help_panel=HARDWARE)
    ] = None,
    pcie: Annotated[
        str | None, typer.Option(help="To the host: pcie4, pcie5, or 25GB/s.", rich_help_panel=HARDWARE)
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Of a GPU: 80GB.", rich_help_panel=HARDWARE)] = None,
    host_memory: Annotated[str | None, typer.Option(help="Of a node: 1TB.", rich_help_panel=HARDWARE)] = None,
    disk: Annotated[str | None, typer.Option(help="Of a node: 8TB.", rich_help_panel=HARDWARE)] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            "--seq",
            "--seq-length",
            help="Tokens of a sequence. Default: 2048, or as many as the model has positions.",
            rich_help_panel=STEP,
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            "--micro-batch",
            "--per-device-train-batch-size",
            help="Sequences of a micro-batch. Default: 1.",
            rich_help_panel=STEP,
        ),
    ] = None,
    accumulation: Annotated[
        int | None,
        typer.Option(
            "--accumulation",
            "--gradient-accumulation-steps",
            help="Micro-batches of a step. Default: 1.",
            rich_help_panel=STEP,
        ),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences of a step over all GPUs: the micro-batch that suits each strategy best is searched.",
            rich_help_panel=STEP,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="bf16 and fp16 (fp32 masters), bf16-autocast, pure-bf16, fp32. Default: bf16, or fp16 where the GPU "
            "has no bf16.",
            rich_help_panel=STEP,
        ),
    ] = None,
    reduce_dtype: Annotated[
        str | None, typer.Option(help="What gradients travel and rest as: fp32, bf16.", rich_help_panel=STEP)
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw8bit, sgd.", rich_help_panel=STEP)] = "adamw",
    checkpointing: Annotated[
        str,
        typer.Option(
            "--checkpointing",
            "--gradient-checkpointing",
            help="none, selective, full, or auto: the least that fits.",
            rich_help_panel=STEP,
        ),
    ] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile on each block.", rich_help_panel=STEP)
    ] = False,
    loss: Annotated[str, typer.Option(help="chunked (the trainer's), plain, fused.", rich_help_panel=STEP)] = "chunked",
    engine: Annotated[
        str, typer.Option(help="Whose memory: shardwise, or fsdp2 to compare with its logs.", rich_help_panel=STEP)
    ] = "shardwise",
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Cost this one alone; or every preset with a change: auto+params_as=int8.", rich_help_panel=ANSWER
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option(help="Mix layouts unit by unit to fill the memory.", rich_help_panel=ANSWER)
    ] = True,
    tokens: Annotated[
        str | None,
        typer.Option(help="Of the whole training (15e12, 100B), for how many days it takes.", rich_help_panel=ANSWER),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every term with its formula and source.", rich_help_panel=ANSWER)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON to the standard output.", rich_help_panel=ANSWER)
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="A page that needs no network goes to this file.", rich_help_panel=ANSWER)
    ] = None,
    require_fit: Annotated[
        bool, typer.Option("--require-fit", help="End with code 3 when nothing fits.", rich_help_panel=ANSWER)
    ] = False,
) -> None:
    """Say what fits, what it costs and which strategy to take.

    Memory is that of every instant of the step that the engine would execute,
    traffic is what its ledger would count. Nothing is run or downloaded.

        shardwise plan llama-3-8b --gpus 8xH100-80GB --seq 8192

        shardwise plan llama-3-70b --gpus 8xH100-80GB --nodes 4 --html plan.html

        shardwise plan --shape params=7.5e9 --gpus 8xV100-32GB --nodes 8 --json
    """
    from ..planner.plan_json import plan_as_json
    from ..planner.planning import plan as make_plan
    from ..planner.shapes.text import parse_shape

    if (model is None) == (shape is None):
        raise ConfigurationError("give a model or --shape" + ("" if model is None else ", not both"))
    machine = _machine(
        gpus, nodes, hardware,
        {"network": network, "intra": intra, "pcie": pcie, "memory": gpu_memory, "host_memory": host_memory,
         "disk": disk},
    )  # fmt: skip
    given = {"seq": seq, "micro_batch": micro_batch, "num_micro_batches": accumulation}
    sizes: dict[str, Any] = {name: size for name, size in given.items() if size is not None}
    made = make_plan(
        parse_shape(shape) if shape is not None else model or "",
        machine,
        strategy=_strategy(strategy),
        checkpointing=checkpointing,
        global_batch=global_batch_size,
        search=search,
        **sizes,
        precision=_precision(precision, machine),
        reduce=reduce_dtype,
        optimizer=optimizer,
        lora=_lora(lora),
        compile=compiled,
        loss=loss,
        engine=engine,
    )
    answer = plan_as_json(made, _num_tokens(tokens))
    if as_json:
        print(json.dumps(answer, indent=1, allow_nan=False))
    else:
        from ..report.table import explain as explained
        from ..report.table import show

        show(answer)
        if explain:
            print()
            print(explained(answer))
    if html is not None:
        _write_page(answer, html, told=not as_json)
    if require_fit and answer["recommended"] is None:
        raise MemoryExceededError(f"--require-fit: {answer['why']}")


def _machine(gpus: str | None, nodes: int, hardware: str | None, words: dict[str, str | None]) -> "Machine":
    from ..planner.assess import Machine
    from ..planner.hardware.cluster import make_cluster
    from ..planner.hardware.efficiency import IDEAL, REAL
    from ..planner.hardware.measured import cluster_in, efficiency_in, read_measured
    from ..planner.planning import machine_of

    if hardware is None:
        if gpus is None:
            raise ConfigurationError("which GPUs? give --gpus 8xH100-80GB, or --hardware with a measured file")
        return machine_of(make_cluster(gpus, nodes, **words))
    if gpus is not None:
        raise ConfigurationError(f"--gpus {gpus} with --hardware {hardware}: give one of them")
    measured = read_measured(MEASURED_FILE if hardware == MEASURED else hardware)
    given = [name for name, value in words.items() if value is not None and name != "network"]
    if given:
        raise ConfigurationError(f"--{given[0].replace('_', '-')} with --hardware {hardware}: that was measured")
    cluster = cluster_in(measured, nodes=nodes, network=words["network"])
    is_gpu = measured.kind == "cuda"
    return Machine(cluster, efficiency_in(measured), REAL if is_gpu else IDEAL, has_reserve=is_gpu)


def _strategy(text: str | None) -> Any:
    """A name, or JSON: a mapping from patterns of units to names."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--strategy: {text[:200]!r} is no JSON: {error}") from None


def _num_tokens(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()] if found else 0.0
    if not 0 < number < 1e24:
        raise ConfigurationError(f"--tokens: {text!r} is no number of tokens; write 15e12, or 100B")
    return number


def _precision(asked: str | None, machine: "Machine") -> str:
    gpu = machine.cluster.gpu
    if asked is not None and "bf16" in asked and not gpu.has_bf16:
        raise ConfigurationError(f"--precision: {asked}, but a {gpu.name} does not compute in bf16; use fp16 or fp32")
    return asked or ("bf16" if gpu.has_bf16 else "fp16")


def _lora(text: str | None) -> "Lora | None":
    from ..planner.training import Lora

    if text is None:
        return None
    words: dict[str, Any] = {}
    for word in text.split(","):
        key, equals, value = word.strip().partition("=")
        key, value = (key, value) if equals else ("r", key)
        if key not in ("r", "targets"):
            raise ConfigurationError(f"--lora: unknown word {key!r} in {text!r}; write r=16,targets=q_proj+v_proj")
        if key in words:
            raise ConfigurationError(f"--lora: {key} is given twice in {text!r}")
        words[key] = tuple(value.split("+")) if key == "targets" else value
    if not str(words.get("r", 16)).isdecimal():
        raise ConfigurationError(f"--lora: {words['r']!r} in {text!r} is no rank; write r=16,targets=q_proj+v_proj")
    return Lora(int(words.get("r", 16)), words.get("targets", ()))


def _write_page(answer: dict[str, Any], file: Path, told: bool) -> None:
    from ..report.page import render

    try:
        file.write_text(render(answer))
    except OSError as error:
        raise ConfigurationError(f"--html: {file} cannot be written: {error.strerror or error}") from error
    if told:
        print(f"\npage: {file}")
