"""`shardwise plan`: what fits, what it costs and which strategy to use, before anything runs. Needs no torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigurationError, MemoryExceededError
from ..planner.hardware.links import quantity
from .shared import documented, write_file

if TYPE_CHECKING:
    from ..planner.assess import Machine
    from ..planner.training import Lora

MEASURED = "hardware.json"  # the file of `--hardware measured`


@documented
def plan(
    model: str | None = None,
    shape: str | None = None,
    lora: str | None = None,
    gpus: str | None = None,
    nodes: int = 1,
    hardware: str | None = None,
    network: str | None = None,
    intra: str | None = None,
    pcie: str | None = None,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
    disk: str | None = None,
    seq: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    global_batch_size: int | None = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    optimizer: str = "adamw",
    checkpointing: str = "auto",
    compiled: bool = False,
    loss: str = "chunked",
    variable_length: bool = False,
    engine: str = "shardwise",
    code: str = "auto",
    speculation: str = "auto",
    strategy: str | None = None,
    search: bool = True,
    tokens: str | None = None,
    explain: bool = False,
    as_json: bool = False,
    html: Path | None = None,
    require_fit: bool = False,
) -> None:
    from ..planner.plan_json import plan_as_json
    from ..planner.planning import plan as make_plan
    from ..planner.shapes.names import parse_shape

    if (model is None) == (shape is None):
        raise ConfigurationError("give a model or --shape" + ("" if model is None else ", not both"))
    machine = _machine(
        gpus, nodes, hardware,
        {"network": network, "intra": intra, "pcie": pcie, "memory": gpu_memory, "host_memory": host_memory,
         "disk": disk},
    )  # fmt: skip
    gpu = machine.cluster.gpu
    if precision is not None and "bf16" in precision and not gpu.has_bf16:
        raise ConfigurationError(
            f"--precision: {precision}, but a {gpu.name} does not compute in bf16; use fp16 or fp32"
        )
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
        precision=precision or ("bf16" if gpu.has_bf16 else "fp16"),
        reduce=reduce_dtype,
        optimizer=optimizer,
        lora=None if lora is None else _lora(lora),
        compile=compiled,
        loss=loss,
        variable_length=variable_length,
        engine=engine,
        code=code,
        speculation=speculation,
    )
    answer = plan_as_json(made, None if tokens is None else _num_tokens(tokens))
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
    from ..planner.hardware.cluster import cluster_in, efficiency_in, make_cluster, read_measured
    from ..planner.hardware.gpus import IDEAL, REAL
    from ..planner.planning import machine_of

    if hardware is None:
        if gpus is None:
            raise ConfigurationError("give --gpus 8xH100-80GB, or --hardware with a measured file")
        return machine_of(make_cluster(gpus, nodes, **words))
    if gpus is not None:
        raise ConfigurationError(f"--gpus {gpus} with --hardware {hardware}: give one of them")
    measured = read_measured(MEASURED if hardware == "measured" else hardware)
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


def _num_tokens(text: str) -> float:
    number = quantity(text.strip().lower(), {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}) or 0.0
    if not 0 < number < 1e24:
        raise ConfigurationError(f"--tokens: {text!r} is not a number of tokens; write 15e12, or 100B")
    return number


def _lora(text: str) -> "Lora":
    """Parse `16`, or `r=16,targets=q_proj+v_proj,dropout=0.05,upcast`."""
    from ..planner.training import Lora

    words: dict[str, str] = {}
    parts = [word.strip() for word in text.split(",")]
    for word in (part for part in parts if part != "upcast"):
        key, equals, value = word.strip().partition("=")
        key, value = (key, value) if equals else ("r", key)
        if key not in ("r", "targets", "dropout") or key in words:
            why = f"{key} is given twice" if key in words else f"unknown word {key!r}"
            raise ConfigurationError(f"--lora: {why} in {text!r}; write r=16,targets=q_proj+v_proj,dropout=0.05,upcast")
        words[key] = value
    rank = words.get("r", "16")
    if not rank.isdecimal():
        raise ConfigurationError(f"--lora: {rank!r} in {text!r} is not a rank; write r=16,targets=q_proj+v_proj")
    dropout = quantity(words.get("dropout", "0"), {"": 1})
    if dropout is None:
        raise ConfigurationError(f"--lora: dropout {words['dropout']!r} in {text!r} is no number; write dropout=0.05")
    targets = tuple(words["targets"].split("+")) if "targets" in words else ()
    return Lora(int(rank), targets, dropout, "upcast" in parts)
