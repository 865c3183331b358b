"""`shardwise train`: train a model, with settings from a file, overrides and flags.

Every field of `Settings` is a flag, with the panel and the help of the field. Values are passed on as text: `config.py`
knows the types, and reports errors in the same way for files, overrides and flags.
"""

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import Field, fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from ..base.errors import ConfigurationError
from ..trainer.settings import SHARDING, Settings

if TYPE_CHECKING:
    from ..trainer.config import Resolved

INSTEAD = "Instead of training"
FROM_OTHERS = {
    "deepspeed": "Use the settings of a DeepSpeed configuration. Flags and KEY=VALUE override them.",
    "accelerate_config": "Use the settings of an Accelerate configuration, likewise.",
}
PRINTERS = ("--print-slurm", "--print-k8s")


class TrainCommand(TyperCommand):
    """Adds the value to flags that were given without one, before typer parses them.

    `--compile` becomes `--compile true` and `--no-compile` becomes `--compile false`: the help has one name for both.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = []
        for arg, after in zip_longest(args, args[1:], fillvalue=""):
            flag = arg.replace("_", "-")
            positive = flag.replace("--no-", "--", 1)
            if flag in ALONE and after.lower() not in ALONE[flag]:
                given += [flag, "true"]
            elif positive in ALONE and flag != positive:
                given += [positive, "false"]
            else:
                given.append(arg)
        ctx.meta["shardwise.words"] = [arg for arg in args if arg.replace("_", "-") not in PRINTERS]
        return super().parse_args(ctx, given)


def train(
    ctx: typer.Context,
    words: list[str] | None,
    show_config: bool,
    schema: bool,
    print_slurm: bool,
    print_k8s: bool,
    deepspeed: str | None,
    accelerate_config: str | None,
    **flags: Any,
) -> None:
    """Train a model, sharded over the ranks of this machine or of many.

    Settings come from flags, KEY=VALUE arguments, a YAML or TOML FILE, the
    environment (SHARDWISE_KEY), values that suit the model, and defaults.
    Earlier sources override later ones; --show-config prints the source of
    every setting. Boolean flags need no value: --compile, --no-compile.

    A small model on Python's manual, on two CPU ranks:

        shardwise train

    The same, smaller and shorter:

        shardwise train shape.layers=2 max_steps=50 --strategy zero3

    A file, and changes to it:

        shardwise train examples/finetune-8b-8gpu.yaml \\
          --learning-rate 1e-5 --train-file mine.jsonl

    Adapters for a chat model, on four GPUs:

        shardwise train --model meta-llama/Llama-3.1-8B-Instruct \\
          --lora r=16,alpha=32,targets=q_proj+v_proj --nproc-per-node 4 \\
          --train-file chats.jsonl --gradient-checkpointing

    A model larger than its GPU, with the optimizer offloaded to the host:

        shardwise train --model meta-llama/Llama-3.1-8B \\
          --strategy zero2 --offload optimizer=host,grads=host

    Two machines on a slow network, with gradients in 4 bits:

        shardwise train examples/pretrain-1b.yaml --nnodes 2 \\
          --strategy hpz --wire params=int8,grads=int4

    With a configuration of DeepSpeed or Accelerate (see check):

        shardwise train --deepspeed examples/migrating/ds_zero3.json

    Resume a run on another number of ranks, with another strategy:

        shardwise train --output-dir runs/mine --strategy zero2 \\
          --resume-from-checkpoint latest --nproc-per-node 4

    Print a Slurm script for four machines:

        shardwise train examples/pretrain-1b.yaml --nnodes 4 --print-slurm
    """
    from ..trainer.config import explain, files_in
    from ..trainer.config import schema as schema_of_settings
    from ..trainer.run_folder import config_to_go_on_with

    if schema:
        print(json.dumps(schema_of_settings(), indent=1))
        return
    others = _settings_of_others(deepspeed, accelerate_config)
    resolved = _resolved(words or [], flags, others)
    own = None if files_in(words or []) else config_to_go_on_with(resolved.settings)
    if own is not None:  # a resumed run keeps its settings, except those given now
        resolved = _resolved(words or [], flags, others, own)
    if show_config:
        print(explain(resolved))
    elif print_slurm or print_k8s:
        from ..trainer.cluster import kubernetes_job, slurm_script

        write = slurm_script if print_slurm else kubernetes_job
        print(write(resolved.settings, ctx.meta["shardwise.words"]))
    else:
        from ..trainer.launcher import launch

        raise typer.Exit(launch(resolved.settings, resolved.origin))


def _resolved(
    words: list[str],
    flags: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]],
    file: tuple[str, str] | None = None,
) -> "Resolved":
    from ..trainer.config import FIELDS, files_in, resolve

    try:
        return resolve(words, flags, os.environ, file, others)
    except ConfigurationError:
        from ..migrate.api import refuse_as_ours

        for name in files_in(words):
            refuse_as_ours(Path(name), FIELDS)
        raise


def _settings_of_others(deepspeed: str | None, accelerate_config: str | None) -> dict[str, Mapping[str, Any]]:
    """Settings by source: one of two files, or the launcher that started this rank."""
    if deepspeed is not None and accelerate_config is not None:
        raise ConfigurationError(
            f"--deepspeed {deepspeed} and --accelerate-config {accelerate_config} both choose a strategy: leave one out"
        )
    if deepspeed is not None or accelerate_config is not None:
        from ..migrate.api import from_accelerate, from_deepspeed

        found = [(from_deepspeed, deepspeed), (from_accelerate, accelerate_config)]
        return {f"file {file}": read(file).settings for read, file in found if file is not None}
    if not any(name.startswith("ACCELERATE_") for name in os.environ):
        return {}
    from ..migrate.environment import read_environment

    launched = read_environment(os.environ)
    if launched is None:
        return {}
    launched.require_accepted()
    return {launched.source: launched.settings}


def _parameters() -> list[inspect.Parameter]:
    """The signature for typer, with the fields of `Settings` in place of `**flags`."""
    instead: dict[str, str] = {
        "show_config": "Print every setting with its source, as a configuration file.",
        "schema": "Print the JSON schema of a configuration file.",
        "print_slurm": "Print a script for sbatch.",
        "print_k8s": "Print a job for kubectl apply.",
    }
    words = typer.Argument(metavar="FILE|KEY=VALUE", help="A configuration file, and changes to it.")
    return [
        _parameter("ctx", typer.Context, inspect.Parameter.empty),
        _parameter("words", Annotated[list[str] | None, words], None),
        *(
            _parameter(
                name,
                Annotated[str | None, typer.Option(_flag(name), help=text, rich_help_panel=SHARDING, metavar="FILE")],
                None,
            )
            for name, text in FROM_OTHERS.items()
        ),
        *(_parameter(entry.name, Annotated[_flag_type(entry), _option(entry)], None) for entry in fields(Settings)),
        *(
            _parameter(
                name,
                Annotated[bool, typer.Option(_flag(name), help=text, rich_help_panel=INSTEAD)],
                False,
            )
            for name, text in instead.items()
        ),
    ]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_type(entry: Field[Any]) -> Any:
    """The type for typer. None means that the flag was not given; a list may be given in several flags."""
    return list[str] | None if get_origin(entry.type) in (tuple, dict) else str | None


def _option(entry: Field[Any]) -> Any:
    text, panel = entry.metadata["help"], entry.metadata["panel"]
    if isinstance(entry.default, int | float | str) and entry.default is not False:
        text += f" Default: {'on; off with --no-' + entry.name if entry.default is True else entry.default}."
    metavars = {bool: "true|false", int: "INTEGER", float: "NUMBER"}
    metavar = next((metavars[kind] for kind in (entry.type, *get_args(entry.type)) if kind in metavars), "TEXT")
    return typer.Option(_flag(entry.name), help=text, rich_help_panel=panel, metavar=metavar)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# Flags that need no value, and the words that count as their value if they follow.
ALONE = {
    _flag(entry.name): ("true", "false", *(get_args(entry.type) if get_origin(entry.type) is Literal else ()))
    for entry in fields(Settings)
    if bool in (entry.type, *get_args(entry.type)) or entry.name == "gradient_checkpointing"
}
train.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
