"""`shardwise plan`: what fits, what it costs and which strategy to use, before anything runs. Needs no torch."""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigurationError, MemoryExceededError
from ..base.text import terminal_width
from ..planner.hardware.links import quantity
from .shared import documented, write_file

if TYPE_CHECKING:
    from ..planner.assess import Machine
    from ..planner.training import Lora

MEASURED = "hardware.json"  # the file of `--hardware measured`


@contextmanager
def _without_collector() -> Iterator[None]:
    """Turn off Python's search for cycles: a plan's many values have none, and it would take a fifth longer."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@documented
@_without_collector()
def plan(
    model: str | None = None,
    shape: str | None = None,
    lora: str | None = None,
    quantize: str | None = None,
    gpus: str | None = None,
    nodes: int | None = None,
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
    price: str | None = None,
    compare: str | None = None,
    fit: bool = False,
    days: float | None = None,
    explain: bool = False,
    as_json: bool = False,
    html: Path | None = None,
    require_fit: bool = False,
) -> None:
    from ..planner import offers
    from ..planner.plan_json import plan_as_json
    from ..planner.planning import plan as make_plan
    from ..planner.states import States
    from ..report.table import explain as explained
    from ..report.table import show

    num_tokens, prices = None if tokens is None else _num_tokens(tokens), None if price is None else _prices(price)
    if prices is not None and num_tokens is None:
        raise ConfigurationError(f"--price {price}: give --tokens, the length of the training, too")
    words = {"network": network, "intra": intra, "pcie": pcie, "memory": gpu_memory, "host_memory": host_memory,
             "disk": disk}  # fmt: skip
    if (fit or days is not None) and gpus is not None and not gpus.strip()[:1].isdigit():
        gpus = f"8x{gpus}"  # a name alone, here for the largest node to use, is a usual node
    subject, machines = _answers(
        lambda: _subject(model, shape), lambda: _machines(compare, gpus, nodes, hardware, words)
    )
    given = {"seq": seq, "micro_batch": micro_batch, "num_micro_batches": accumulation}
    asked: dict[str, Any] = {
        **{name: size for name, size in given.items() if size is not None},
        "strategy": _quantized(_strategy(strategy), quantize, lora, engine),
        "checkpointing": checkpointing,
        "global_batch": global_batch_size,
        "precision": precision,
        "reduce": reduce_dtype,
        "optimizer": optimizer,
        "lora": None if lora is None else _lora(lora),
        "compile": compiled,
        "loss": loss,
        "variable_length": variable_length,
        "engine": engine,
        "code": code,
        "speculation": speculation,
    }
    several = {"--compare": compare is not None, "--fit": fit, "--days": days is not None}
    if flags := [flag for flag, is_given in several.items() if is_given]:
        alone = {"--explain": explain, "--html": html is not None, "--no-search": not search}
        alone |= {"--nodes": nodes is not None, **dict.fromkeys(flags[1:], flags[0] == "--compare")}
        for flag in (flag for flag, is_given in alone.items() if is_given):
            raise ConfigurationError(f"{flag} with {flags[0]}, which plans several clusters: leave one of them out")
        asked |= {"num_tokens": num_tokens, "prices": prices}
        found = offers.smallest(subject, machines[0], days=days, **asked) if compare is None else None
        answer = found or offers.compare(subject, machines, **asked)
    else:
        machine = machines[0]
        asked["precision"] = offers.precision_for(machine.cluster.gpu, precision)
        made = make_plan(subject, machine, search=search, **asked)
        if num_tokens is not None and isinstance(made, States):
            raise ConfigurationError(f"--tokens {tokens}: only the states are planned, without time; give a real shape")
        answer = plan_as_json(made, num_tokens)
        offers.add_costs(answer, offers.price_for(machine.cluster.gpu, prices))
    if as_json:
        print(json.dumps(answer, indent=1, allow_nan=False))
    else:
        show(answer)
        if explain:
            print(f"\n{explained(answer, terminal_width())}")
    if html is not None:
        from ..report.page import render

        write_file(html, render(answer))
        if not as_json:
            print(f"\npage: {html}")
    if require_fit and answer["recommended"] is None:
        raise MemoryExceededError(f"--require-fit: {answer['why']}")


def _answers(*questions: Callable[[], Any]) -> list[Any]:
    """Answer all questions, or raise one error with everything that is wrong."""
    found, errors = [], []
    for question in questions:
        try:
            found.append(question())
        except ConfigurationError as error:
            errors.append(str(error))
    if errors:
        raise ConfigurationError("; and ".join(errors))
    return found


def _subject(model: str | None, shape: str | None) -> Any:
    from ..planner.shapes.names import is_file, parse_shape, shape_named

    if (model is None) == (shape is None):
        raise ConfigurationError("give a model or --shape" + ("" if model is None else ", not both"))
    if model is not None and not is_file(model):
        shape_named(model)
    return model if shape is None else parse_shape(shape)


def _machines(
    compare: str | None, gpus: str | None, nodes: int | None, hardware: str | None, words: dict[str, Any]
) -> "list[Machine]":
    from ..planner.assess import Machine
    from ..planner.hardware.cluster import cluster_in, efficiency_in, make_cluster, read_measured
    from ..planner.hardware.gpus import IDEAL, REAL
    from ..planner.planning import machine_of

    given = {"--compare": compare, "--gpus": gpus, "--hardware": hardware}
    flags = [f"{flag} {word}" for flag, word in given.items() if word is not None]
    if len(flags) > 1:
        raise ConfigurationError(f"{' with '.join(flags)}: give one of them")
    if hardware is None:
        if not flags:
            raise ConfigurationError("give --gpus 8xH100-80GB, or --hardware with a measured file")
        names = [gpus or ""] if compare is None else compare.split(",")
        if "," in names[0]:
            raise ConfigurationError(f"--gpus {gpus} names several clusters: give them to --compare")
        return list(dict.fromkeys(machine_of(make_cluster(name, nodes, **words)) for name in names))
    measured = read_measured(MEASURED if hardware == "measured" else hardware)
    own = [name for name, value in words.items() if value is not None and name != "network"]
    if own:
        raise ConfigurationError(f"--{own[0].replace('_', '-')} with --hardware {hardware}: the file has it")
    cluster = cluster_in(measured, nodes=1 if nodes is None else nodes, network=words["network"])
    is_gpu = measured.kind == "cuda"
    return [Machine(cluster, efficiency_in(measured), REAL if is_gpu else IDEAL, has_reserve=is_gpu)]


def _prices(text: str) -> "float | dict[str, float]":
    """Parse `2.5`, or `H100=2.5,A100-80GB=1.6`."""
    from ..planner.hardware.gpus import gpu_named

    found = {}
    for name, _, word in (pair.rpartition("=") for pair in text.split(",")):
        value = quantity(word.strip().removeprefix("$"), {"": 1})
        gpu = gpu_named(name, "--price").name if name else ""
        if value is None or not 0 < value < 1e6 or (not name and "," in text) or gpu in found:
            raise ConfigurationError(f"--price: {text!r}: write 2.5, or each GPU once, as in H100=2.5,A100-80GB=1.6")
        found[gpu] = value
    return found.get("", found)


def _strategy(text: str | None) -> Any:
    """Parse a name, or a JSON mapping from unit patterns to names."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--strategy: {text[:200]!r} is not JSON: {error}") from None


def _quantized(strategy: Any, quantize: str | None, lora: str | None, engine: str) -> Any:
    from ..core.layout import AUTO, quantized

    if quantize is not None and (lora is None or engine != "shardwise"):
        why = (
            "all weights are trained: add --lora" if lora is None else f"not planned for engine {engine}: leave it out"
        )
        raise ConfigurationError(f"--quantize {quantize} is for frozen weights, and {why}")
    return strategy if quantize is None else quantized(strategy or AUTO, quantize)


def _num_tokens(text: str) -> float:
    number = quantity(text.strip().lower(), {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}) or 0.0
    if not 0 < number < 1e24:
        raise ConfigurationError(f"--tokens: {text!r} is not a number of tokens; write 15e12, or 100B")
    return number


def _lora(text: str) -> "Lora":
    """Parse `16`, or `r=16,targets=q_proj+v_proj,dropout=0.05,upcast,dora,modules_to_save=lm_head`."""
    from ..planner.training import Lora

    words: dict[str, str] = {}
    parts = [word.strip() for word in text.split(",")]
    for word in (part for part in parts if part not in ("upcast", "dora")):
        key, equals, value = word.strip().partition("=")
        key, value = (key, value) if equals else ("r", key)
        if key not in ("r", "targets", "dropout", "modules_to_save") or key in words:
            why = f"{key} is given twice" if key in words else f"unknown word {key!r}"
            raise ConfigurationError(f"--lora: {why} in {text!r}; write r=16,targets=q_proj+v_proj,dropout=0.05,dora")
        words[key] = value
    rank = words.get("r", "16")
    if not rank.isdecimal():
        raise ConfigurationError(f"--lora: {rank!r} in {text!r} is not a rank; write r=16,targets=q_proj+v_proj")
    dropout = quantity(words.get("dropout", "0"), {"": 1})
    if dropout is None:
        raise ConfigurationError(f"--lora: dropout {words['dropout']!r} in {text!r} is no number; write dropout=0.05")
    targets, copied = (tuple(words[k].split("+")) if k in words else () for k in ("targets", "modules_to_save"))
    return Lora(int(rank), targets, dropout, "upcast" in parts, "dora" in parts, copied)
