"""`shardwise plan`: what fits, what it costs and which strategy to use, before anything runs. Needs no torch."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigurationError, MemoryExceededError
from .shared import JSON_HELP, panels, write_file

if TYPE_CHECKING:
    from ..planner.assess import Machine
    from ..planner.training import Lora

MODEL, HARDWARE, STEP, ANSWER = panels("Model", "Hardware", "Training step", "Answer")
MEASURED = "measured"
MEASURED_FILE = "hardware.json"


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A name (llama-3-8b, qwen3-4b, gpt2-xl), a config.json or its folder.")
    ] = None,
    shape: Annotated[
        str | None,
        MODEL(
            help="Instead of a model: layers=32,hidden=4096,heads=32,kv-heads=8,ffn=14336,vocab=128256, or "
            "params=7.5e9 to plan the training state alone."
        ),
    ] = None,
    lora: Annotated[str | None, MODEL(help="Train adapters only: 16, or r=16,targets=q_proj+v_proj.")] = None,
    gpus: Annotated[str | None, HARDWARE(help="GPUs of one node: 8xH100-80GB, 4xA100-40GB, RTX-4090.")] = None,
    nodes: Annotated[int, HARDWARE(help="Number of nodes.")] = 1,
    hardware: Annotated[
        str | None,
        HARDWARE(help=f"'{MEASURED}' ({MEASURED_FILE}), or a file written by `shardwise doctor --measure FILE`."),
    ] = None,
    network: Annotated[
        str | None, HARDWARE(help="Network between nodes: ib-ndr, efa-p5, ethernet-100, or 50GB/s per GPU.")
    ] = None,
    intra: Annotated[str | None, HARDWARE(help="Links inside a node: nvlink, pcie4, or 300GB/s.")] = None,
    pcie: Annotated[str | None, HARDWARE(help="Link from a GPU to the host: pcie4, pcie5, or 25GB/s.")] = None,
    gpu_memory: Annotated[str | None, HARDWARE(help="Memory of a GPU: 80GB.")] = None,
    host_memory: Annotated[str | None, HARDWARE(help="Host memory of a node: 1TB.")] = None,
    disk: Annotated[str | None, HARDWARE(help="Disk of a node: 8TB.")] = None,
    seq: Annotated[
        int | None,
        STEP("--seq", "--seq-length", help="Tokens per sequence. Default: 2048, or the positions that the model has."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        STEP("--micro-batch", "--per-device-train-batch-size", help="Sequences per micro-batch. Default: 1."),
    ] = None,
    accumulation: Annotated[
        int | None,
        STEP("--accumulation", "--gradient-accumulation-steps", help="Micro-batches per step. Default: 1."),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        STEP(help="Sequences per step over all GPUs. The best micro-batch is searched for each strategy."),
    ] = None,
    precision: Annotated[
        str | None,
        STEP(
            help="bf16 and fp16 (fp32 masters), bf16-autocast, pure-bf16 or fp32. Default: bf16, or fp16 if the GPU "
            "has no bf16."
        ),
    ] = None,
    reduce_dtype: Annotated[str | None, STEP(help="Dtype of gradients and their reduction: fp32, bf16.")] = None,
    optimizer: Annotated[str, STEP(help="adamw, adamw8bit or sgd.")] = "adamw",
    checkpointing: Annotated[
        str,
        STEP(
            "--checkpointing",
            "--gradient-checkpointing",
            help="Activation checkpointing: none, selective, full, or auto for the least that fits.",
        ),
    ] = "auto",
    compiled: Annotated[bool, STEP("--compile", help="Use torch.compile on each block.")] = False,
    loss: Annotated[str, STEP(help="chunked (as in the trainer), plain or fused.")] = "chunked",
    engine: Annotated[
        str, STEP(help="Engine whose memory is planned: shardwise, or fsdp2 to compare with its logs.")
    ] = "shardwise",
    strategy: Annotated[
        str | None,
        ANSWER(help="Plan this strategy alone, or every preset with a change: auto+params_as=int8."),
    ] = None,
    search: Annotated[bool, ANSWER(help="Search for a mix of layouts, unit by unit, that fills the memory.")] = True,
    tokens: Annotated[
        str | None, ANSWER(help="Tokens of the whole training (15e12, 100B), to estimate the days it takes.")
    ] = None,
    explain: Annotated[bool, ANSWER("--explain", help="Print every term with its formula and source.")] = False,
    as_json: Annotated[bool, ANSWER("--json", help=JSON_HELP)] = False,
    html: Annotated[Path | None, ANSWER(help="Write a self-contained page to this file.")] = None,
    require_fit: Annotated[bool, ANSWER("--require-fit", help="Exit with code 3 if nothing fits.")] = False,
) -> None:
    """Show what fits, what it costs and which strategy to use.

    Memory is computed for every instant of the step that the engine would
    execute, traffic as the engine would count it. Nothing is run or
    downloaded.

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
        from ..report.page import render

        write_file(html, render(answer))
        if not as_json:
            print(f"\npage: {html}")
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
            raise ConfigurationError("give --gpus 8xH100-80GB, or --hardware with a measured file")
        return machine_of(make_cluster(gpus, nodes, **words))
    if gpus is not None:
        raise ConfigurationError(f"--gpus {gpus} with --hardware {hardware}: give one of them")
    measured = read_measured(MEASURED_FILE if hardware == MEASURED else hardware)
    given = [name for name, value in words.items() if value is not None and name != "network"]
    if given:
        raise ConfigurationError(f"--{given[0].replace('_', '-')} with --hardware {hardware}: the file has it")
    cluster = cluster_in(measured, nodes=nodes, network=words["network"])
    is_gpu = measured.kind == "cuda"
    return Machine(cluster, efficiency_in(measured), REAL if is_gpu else IDEAL, has_reserve=is_gpu)


def _strategy(text: str | None) -> Any:
    """Parse a name, or a JSON mapping from unit patterns to names."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--strategy: {text[:200]!r} is not JSON: {error}") from None


def _num_tokens(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()] if found else 0.0
    if not 0 < number < 1e24:
        raise ConfigurationError(f"--tokens: {text!r} is not a number of tokens; write 15e12, or 100B")
    return number


def _precision(name: str | None, machine: "Machine") -> str:
    gpu = machine.cluster.gpu
    if name is not None and "bf16" in name and not gpu.has_bf16:
        raise ConfigurationError(f"--precision: {name}, but a {gpu.name} does not compute in bf16; use fp16 or fp32")
    return name or ("bf16" if gpu.has_bf16 else "fp16")


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
        raise ConfigurationError(f"--lora: {words['r']!r} in {text!r} is not a rank; write r=16,targets=q_proj+v_proj")
    return Lora(int(words.get("r", 16)), words.get("targets", ()))
