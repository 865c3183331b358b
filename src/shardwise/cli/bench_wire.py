"""`shardwise bench wire`: the effect of codecs on training, on the user's own model and data.

Its flags are those of `shardwise train`, without the settings that the benchmark fixes or varies itself.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigurationError
from ..base.processes import temporary_folder
from ..trainer.settings import Settings
from .shared import exit_on_sigterm, panels, progress, run_benchmark
from .train import train

if TYPE_CHECKING:
    from ..bench.pages import Report
    from ..bench.wire import Request

WHAT, RESULTS = panels("What is compared", "Results")
RESULTS_FOLDER = Path("benchmark-results")
OUT_HELP = f"Folder for a page and JSON. Default: {RESULTS_FOLDER}."
JSON_FILES_HELP = "Print JSON to the standard output; write files only with --out."
STRATEGIES = (
    "zero3,zero3+grads_as=bf16,zero3+params_as=int8,zero3+grads_as=int8,zero3+grads_as=int4,"
    "zero3+grads_as=int4:feedback,zeropp,hpz+params_as=int8+grads_as=int4:feedback"
)
GRADIENT_CODECS = "bf16,fp16,e4m3,e5m2,int8,int8:stochastic,int4,int4:asymmetric,int4:64,int4:stochastic"
WEIGHT_CODECS = "bf16,int8,int8:64,e4m3,e5m2"
# Settings that the benchmark fixes, whatever a file for `shardwise train` says: steps and strategy of a run, and that a
# run leaves only its figures and a checkpoint.
FIXED: dict[str, Any] = {
    "strategy": "",
    "max_steps": None,
    "num_train_epochs": None,
    "output_dir": None,
    "resume_from_checkpoint": None,
    "save_steps": 0,
    "async_save": False,
    "save_total_limit": None,
    "logging_steps": 1,
    "report_to": (),
    "export": False,
    "sample_tokens": 0,
    "sample_prompt": None,
    "profile": False,
    "nnodes": "1",
    "node_rank": None,
    "rdzv_backend": "c10d",
    "rdzv_endpoint": None,
    "rdzv_id": None,
    "max_restarts": 0,
}
# Options of this command that replace a flag of the trainer.
OWN = ("nproc_per_node", "node_size")
NUM_RANKS, NODE_SIZE = 4, 2


def wire(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="FILE|KEY=VALUE", help="A configuration for train, and changes to it.")
    ] = None,
    strategies: Annotated[
        str,
        WHAT(
            help="Strategies, separated by commas: presets with codecs, or JSON mappings from units to them. The first "
            "must be exact. Default: zero3, zero3 with weights or gradients in fewer bits, and zeropp.",
            show_default=False,
        ),
    ] = STRATEGIES,
    steps: Annotated[int, WHAT(help="Training steps per run.", min=3)] = 300,
    codecs: Annotated[str, WHAT(help="Codecs to measure on gradients; '' for none.")] = GRADIENT_CODECS,
    weight_codecs: Annotated[str, WHAT(help="Codecs to measure on weights; '' for none.")] = WEIGHT_CODECS,
    nproc_per_node: Annotated[
        int | None, WHAT(help="Number of ranks. Default: 4 on CPUs, all GPUs.", min=2, show_default=False)
    ] = None,
    node_size: Annotated[int | None, WHAT(help="Ranks per node. Default: 2.", min=1)] = None,
    out: Annotated[Path | None, RESULTS(help=OUT_HELP, file_okay=False)] = None,
    runs: Annotated[
        Path | None,
        RESULTS(help="Folder to keep the run folders in, without checkpoints. Default: not kept.", file_okay=False),
    ] = None,
    as_json: Annotated[bool, RESULTS("--json", help=JSON_FILES_HELP)] = False,
    **flags: Any,
) -> None:
    """Measure what codecs do to training, on your own model and data.

    Each strategy trains the same model from the same weights on the same
    data, as `shardwise train` would with these settings. Losses are compared
    with those of the first, exact strategy. Then the trained model's
    gradients and weights are encoded and decoded with each codec.

    A small model on Python's manual, four CPU ranks as two nodes:

        shardwise bench wire

    In a few minutes:

        shardwise bench wire shape.layers=2 --steps 50 \\
          --strategies zero3,zero3+grads_as=int8,zeropp

    Your own model, settings and data:

        shardwise bench wire mine.yaml --train-file mine.jsonl --steps 500

    Encode the blocks, and nothing else:

        shardwise bench wire --strategies \\
          'zero3,{"blocks.*":"zero3+grads_as=int4:feedback","*":"zero3"}'
    """
    from ..bench.pages import new_page
    from ..bench.wire_report import name_of

    exit_on_sigterm()
    numbers = {"nproc_per_node": nproc_per_node, "node_size": node_size}
    flags |= {name: str(number) for name, number in numbers.items() if number is not None}
    request = _request(words or [], flags, strategies, steps, codecs, weight_codecs)
    request.check()
    page = partial(new_page, out or RESULTS_FOLDER, name_of(request)) if out or not as_json else None
    raise run_benchmark(_reports(request, runs), page, as_json)


def _reports(request: "Request", runs: Path | None) -> "Iterator[Report]":
    from ..bench import wire as session
    from ..bench.wire_report import report_of

    with _folder(runs) as folder:
        session.prepare(request, folder, progress)
        yield from map(report_of, session.run(request, folder, progress))


def _request(
    words: list[str], flags: dict[str, Any], strategies: str, steps: int, codecs: str, weight_codecs: str
) -> "Request":
    import torch

    from ..bench.wire import Request, codecs_of, strategies_of
    from ..trainer.checks import completed
    from ..trainer.config import resolve
    from ..trainer.launcher import ranks_here

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigurationError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} started by another launcher, but "
            "bench wire starts its own ranks: call it once, without torchrun"
        )
    named = strategies_of(strategies)
    resolved = resolve(words, flags, os.environ)
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
    return Request(settings, named, num_ranks, codecs_of(codecs), codecs_of(weight_codecs))


@contextmanager
def _folder(runs: Path | None) -> Iterator[Path]:
    """The folder for run folders: `runs`, which must be empty, or a temporary one."""
    if runs is None:
        with temporary_folder() as own:
            yield own
        return
    if runs.exists() and any(runs.iterdir()):
        raise ConfigurationError(f"--runs {runs} is not empty: name an empty or a new folder")
    runs.mkdir(parents=True, exist_ok=True)
    yield runs


def _parameters() -> list[inspect.Parameter]:
    """The signature for typer: in place of `**flags` the trainer's flags, without those that are fixed here."""
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(wire).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    settings = {entry.name for entry in fields(Settings)} - {*OWN, *FIXED}
    return own + [entry for name, entry in inspect.signature(train).parameters.items() if name in settings]


wire.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
