"""`shardwise bench wire`: what codecs do to training, on one's own model and data.

Its flags are those of `shardwise train`, but for what every run of the bench has the same or differs in.
"""

import inspect
import json
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
from .bench_end import end_on_sigterm, interrupted, say
from .train import train

if TYPE_CHECKING:
    from ..bench.wire import Asked

WHAT, RESULTS = (partial(typer.Option, rich_help_panel=panel) for panel in ("What is compared", "Results"))
STRATEGIES = (
    "zero3,zero3+grads_as=bf16,zero3+params_as=int8,zero3+grads_as=int8,zero3+grads_as=int4,"
    "zero3+grads_as=int4:feedback,zeropp,hpz+params_as=int8+grads_as=int4:feedback"
)
GRADIENT_CODECS = "bf16,fp16,e4m3,e5m2,int8,int8:stochastic,int4,int4:asymmetric,int4:64,int4:stochastic"
WEIGHT_CODECS = "bf16,int8,int8:64,e4m3,e5m2"
# What the bench says itself, whatever a file for `shardwise train` says: the steps of a run and its strategy, and that
# all it leaves is its figures and a checkpoint.
DECIDED: dict[str, Any] = {
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
# What stands here in place of the trainer's flag.
OWN = ("nproc_per_node", "node_size")
NUM_RANKS, NODE_SIZE = 4, 2


def wire(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="FILE|KEY=VALUE", help="A configuration, as for train, and changes.")
    ] = None,
    strategies: Annotated[
        str,
        WHAT(
            help="Presets, with what travels otherwise, with commas; or mixes, as JSON. The first is exact. Default: "
            "zero3, with weights or gradients in fewer bits, and zeropp; int4 without and with feedback.",
            show_default=False,
        ),
    ] = STRATEGIES,
    steps: Annotated[int, WHAT(help="Of each run.", min=3)] = 300,
    codecs: Annotated[str, WHAT(help="That gradients are tried in; '' for none.")] = GRADIENT_CODECS,
    weight_codecs: Annotated[str, WHAT(help="That weights are tried in; '' for none.")] = WEIGHT_CODECS,
    nproc_per_node: Annotated[
        int | None, WHAT(help="Ranks. Default: 4 on CPUs, all GPUs.", min=2, show_default=False)
    ] = None,
    node_size: Annotated[int | None, WHAT(help="Ranks that count as a node. Default: 2.", min=1)] = None,
    out: Annotated[
        Path | None, RESULTS(help="Folder for JSON and a page. Default: benchmark-results.", file_okay=False)
    ] = None,
    runs: Annotated[
        Path | None, RESULTS(help="Keep the run folders here, without checkpoints. Default: nowhere.", file_okay=False)
    ] = None,
    as_json: Annotated[bool, RESULTS("--json", help="JSON to the standard output; files only with --out.")] = False,
    **flags: Any,
) -> None:
    """See what codecs do to training, on your own model and data.

    Each strategy trains the same model from the same weights on the same
    data, as `shardwise train` would with these settings. Losses are compared
    with those of the first, exact strategy. Then the trained model's
    gradients and weights are encoded and decoded with each codec.

    A small model on Python's own manual, four CPU ranks as two nodes:

        shardwise bench wire

    In a few minutes:

        shardwise bench wire shape.layers=2 --steps 50 \\
          --strategies zero3,zero3+grads_as=int8,zeropp

    Your own model, settings and data:

        shardwise bench wire mine.yaml --train-file mine.jsonl --steps 500

    Blocks encoded, the rest as it is:

        shardwise bench wire --strategies \\
          'zero3,{"blocks.*":"zero3+grads_as=int4:feedback","*":"zero3"}'
    """
    from ..bench import wire as session
    from ..bench import wire_report
    from ..bench.report import new_page

    end_on_sigterm()
    numbers = {"nproc_per_node": nproc_per_node, "node_size": node_size}
    flags |= {name: str(number) for name, number in numbers.items() if number is not None}
    asked = _asked(words or [], flags, strategies, steps, codecs, weight_codecs)
    asked.refuse_what_cannot_run()
    page: Path | None = None
    try:
        with _folder(runs) as folder:
            session.prepare(asked, folder, say)
            if out or not as_json:
                page = new_page(out or Path("benchmark-results"), wire_report.name_of(asked))
            for findings in session.run(asked, folder, say):
                if page is not None:
                    wire_report.write(findings, page)
    except KeyboardInterrupt:
        raise interrupted(page) from None
    if as_json:
        print(json.dumps(wire_report.document(findings), indent=1))
    else:
        wire_report.print_tables(findings)
    if page is not None:
        say(f"written: {page}")
    raise typer.Exit(1 if wire_report.problems(findings) else 0)


def _asked(
    words: list[str], flags: dict[str, Any], strategies: str, steps: int, codecs: str, weight_codecs: str
) -> "Asked":
    import torch

    from ..bench.wire import Asked, codecs_of, strategies_of
    from ..trainer.checks import completed
    from ..trainer.config import resolve
    from ..trainer.launcher import ranks_here

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigurationError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} that another launcher has started, and "
            "bench wire starts ranks of its own: call it once, without torchrun"
        )
    named = strategies_of(strategies)
    resolved = resolve(words, flags, os.environ)
    for key in DECIDED:
        if resolved.origin[key].startswith("override"):
            instead = {"max_steps": "--steps", "strategy": "--strategies", "output_dir": "--runs"}.get(key)
            raise ConfigurationError(
                f"{key}: is the bench's own for every run; {f'use {instead}' if instead else 'leave it out'}"
            )
    decided = {**DECIDED, "strategy": next(iter(named.values())), "max_steps": steps}
    settings = completed(replace(resolved.settings, **decided), torch.cuda.is_available())
    if settings.nproc_per_node is None and settings.device == "cpu":
        settings = replace(settings, nproc_per_node=NUM_RANKS)
    num_ranks = ranks_here(settings)
    settings = replace(settings, nproc_per_node=num_ranks, node_size=settings.node_size or NODE_SIZE)
    return Asked(settings, named, num_ranks, codecs_of(codecs), codecs_of(weight_codecs))


@contextmanager
def _folder(runs: Path | None) -> Iterator[Path]:
    """For the run folders: this one, if it is empty, or one of which nothing is left."""
    if runs is None:
        with temporary_folder() as own:
            yield own
        return
    if runs.exists() and any(runs.iterdir()):
        raise ConfigurationError(f"--runs {runs} is not empty: name a folder that is, or a new one")
    runs.mkdir(parents=True, exist_ok=True)
    yield runs


def _parameters() -> list[inspect.Parameter]:
    """What typer shall see in place of `**flags`: the trainer's, but for those that the bench decides."""
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(wire).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    settings = {entry.name for entry in fields(Settings)} - {*OWN, *DECIDED}
    return own + [entry for name, entry in inspect.signature(train).parameters.items() if name in settings]


wire.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
