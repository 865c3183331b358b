"""`shardwise train`: train a model, with settings from a file, overrides and flags.

Every field of `Settings` is a flag, with the panel and the help of the field. Values are passed on as text: `config.py`
knows the types, and reports errors in the same way for files, overrides and flags.
"""

import inspect
import json
import os
import re
from collections.abc import Mapping
from dataclasses import Field, fields
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from ..base.errors import ConfigurationError
from ..trainer.settings import Settings
from .shared import documented

PRINTERS = ("--print-slurm", "--print-k8s")


def _flag(entry: Field[Any]) -> inspect.Parameter:
    """Return the flag of a setting. Its value is None if it is not given. For a list, the flag may be repeated."""
    text = entry.metadata["help"]
    if isinstance(entry.default, int | float | str) and entry.default is not False:
        text += f" Default: {'on; off with --no-' + entry.name if entry.default is True else entry.default}."
    metavars = {bool: "true|false", int: "INTEGER", float: "NUMBER"}
    metavar = next((metavars[kind] for kind in (entry.type, *get_args(entry.type)) if kind in metavars), "TEXT")
    option = typer.Option(_name(entry), help=text, rich_help_panel=entry.metadata["panel"], metavar=metavar)
    kind: Any = list[str] | None if get_origin(entry.type) in (tuple, dict) else str | None
    position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(entry.name, position, default=None, annotation=Annotated[kind, option])


def _name(entry: Field[Any]) -> str:
    return f"--{entry.name.replace('_', '-')}"


FLAGS = {entry.name: _flag(entry) for entry in fields(Settings)}
# Flags that may have no value, and their values.
ALONE = {
    _name(entry): ("true", "false", *(get_args(entry.type) if get_origin(entry.type) is Literal else ()))
    for entry in fields(Settings)
    if bool in (entry.type, *get_args(entry.type)) or entry.name in ("gradient_checkpointing", "compile")
}


class TrainCommand(TyperCommand):
    """Adds the value to flags that were given without one, before typer parses them.

    `--compile` becomes `--compile true` and `--no-compile` becomes `--compile false`: the help has one name for both.
    What follows such a flag is its value, unless it is the next flag, a file or key=value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = []
        for arg, after in zip_longest(args, args[1:], fillvalue=""):
            flag = arg.replace("_", "-")
            positive = flag.replace("--no-", "--", 1)
            is_value = after.lower() in ALONE.get(flag, ()) or re.fullmatch(r"\w[\w-]*", after)
            if flag in ALONE and not is_value:
                given += [flag, "true"]
            elif positive in ALONE and flag != positive:
                given += [positive, "false"]
            else:
                given.append(arg)
        ctx.meta["shardwise.words"] = [arg for arg in args if arg.replace("_", "-") not in PRINTERS]
        return super().parse_args(ctx, given)


@partial(documented, more=FLAGS.values())
def train(
    ctx: typer.Context,
    words: list[str] | None = None,
    deepspeed: str | None = None,
    accelerate_config: str | None = None,
    *,
    show_config: bool = False,
    schema: bool = False,
    print_slurm: bool = False,
    print_k8s: bool = False,
    **flags: Any,
) -> None:
    from ..trainer.config import FIELDS, explain, files_in, resolve
    from ..trainer.config import schema as schema_of_settings
    from ..trainer.run_folder import config_of_resumed_run

    if schema:
        print(json.dumps(schema_of_settings(), indent=1))
        return
    words, others = words or [], _settings_of_others(deepspeed, accelerate_config)
    try:
        resolved = resolve(words, flags, os.environ, others=others)
        own = None if files_in(words) else config_of_resumed_run(resolved.settings)
        if own is not None:  # a resumed run keeps its settings, except those given now
            resolved = resolve(words, flags, os.environ, own, others)
    except ConfigurationError:
        from ..migrate.api import refuse_as_ours

        for name in files_in(words):
            refuse_as_ours(Path(name), FIELDS)
        raise
    if show_config:
        print(explain(resolved))
    elif print_slurm or print_k8s:
        from ..trainer.cluster import kubernetes_job, slurm_script

        write = slurm_script if print_slurm else kubernetes_job
        print(write(resolved.settings, ctx.meta["shardwise.words"]))
    else:
        from ..trainer.launcher import launch

        raise typer.Exit(launch(resolved.settings, resolved.origin))


def _settings_of_others(deepspeed: str | None, accelerate_config: str | None) -> dict[str, Mapping[str, Any]]:
    """Return the settings in another library's file, or from Accelerate's launcher, by source."""
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
    from ..migrate.accelerate import read_environment

    launched = read_environment(os.environ)
    return {} if launched is None else {launched.source: launched.require_accepted().settings}
