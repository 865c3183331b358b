"""`shardwise convert`: a checkpoint in another form, or another library's configuration in ours."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigurationError, did_you_mean
from .files import num_bytes_in, require_there, say, streaming

FORM, WHAT, PLACE = (partial(typer.Option, rich_help_panel=panel) for panel in ("Its form", "What of it", "Where to"))
FORMATS = ("shardwise", "dcp", "hugging-face")


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A checkpoint, whoever wrote it, or a run folder; or a configuration file."),
    ],
    target: Annotated[Path | None, typer.Argument(metavar="[DST]", help="The folder to write.")] = None,
    to: Annotated[
        str, FORM(help="shardwise; dcp: as torch.distributed.checkpoint has it; hugging-face: weights alone.")
    ] = "shardwise",
    whole: Annotated[bool, FORM("--whole", help="One file of weights under plain names, and one of state.")] = False,
    max_shard_size: Annotated[str, FORM(help="Of a file otherwise: 5GB, 500MB, 2GiB, or bytes.")] = "5GB",
    model_only: Annotated[
        bool, WHAT("--model-only", help="Without the optimizer, and what the trainer noted.")
    ] = False,
    output: Annotated[Path | None, PLACE("--output", "-o", help="The same as DST.")] = None,
    overwrite: Annotated[bool, PLACE("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write a checkpoint, or a configuration, in another form.

    Read are checkpoints of shardwise, torch DCP, Accelerate, DeepSpeed and
    Hugging Face folders. Weights, buffers and the optimizer's state stay
    what they are, to the bit; checksums are compared on the way. The folder
    is there when it is complete.

    One file that every safetensors reader opens:

        shardwise convert runs/tiny/checkpoints/step-000200 whole --whole

    A DeepSpeed run, to go on with here:

        shardwise convert ds-run/global_step500 runs/mine-from-ds

    For a trainer that loads torch DCP:

        shardwise convert runs/tiny as-dcp --to dcp

    A configuration of DeepSpeed, Accelerate or Hugging Face, as ours; what
    became of every key, `shardwise check` tells:

        shardwise convert ds_config.json -o mine.yaml
    """
    if target is not None and output is not None:
        raise ConfigurationError(f"DST {target} and --output {output}: give one of them")
    target = target or output
    if target is None:
        raise ConfigurationError(f"{source} is to be written where? give DST, or --output")
    if source.is_file():
        _convert_configuration(source, target, overwrite)
        return
    form = to.replace("_", "-")
    if form not in FORMATS:
        raise ConfigurationError(f"--to: unknown {to!r}; {did_you_mean(form, FORMATS)}")
    if whole and form != "shardwise":
        raise ConfigurationError(f"--whole is a form of our own checkpoints, and --to {form} is not: leave it out")
    max_bytes = num_bytes_in("--max-shard-size", max_shard_size)
    require_there(source)
    from ..base.text import size
    from ..checkpoint import writer
    from ..checkpoint.opened import open_checkpoint

    opened = open_checkpoint(source)
    if model_only or form == "hugging-face":
        opened = writer.without_optimizer(opened)
    writer.require_free(target, overwrite, opened.folder, replaces_own=False)
    num_bytes = writer.num_bytes_of(opened)
    began = time.perf_counter()
    with streaming(target.name, num_bytes) as tell:
        if form == "shardwise":
            writer.write_own(opened, target.resolve(), None if whole else max_bytes, tell)
        elif form == "dcp":
            from ..checkpoint.interop.dcp_write import write_dcp

            write_dcp(opened, target.resolve(), tell)
        else:
            writer.write_bare_weights(opened, target.resolve(), max_bytes, tell)
    say(f"{target}: {opened.folder} as {form}, {size(num_bytes)}, in {time.perf_counter() - began:.1f} s")
    if form == "dcp" and opened.index.extra:
        say(f"torch DCP has no place for {', '.join(opened.index.extra)}: they are not in it")


def _convert_configuration(source: Path, target: Path, overwrite: bool) -> None:
    from ..migrate.api import read
    from ..migrate.migrated import yaml_of

    if target.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigurationError(f"{target}: a configuration is YAML; give a name that ends in .yaml")
    if target.exists() and not overwrite:
        raise ConfigurationError(f"{target} is there already; give --overwrite to replace it")
    migrated = read(source)
    migrated.require_accepted()
    try:
        target.write_text(yaml_of(migrated))
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror or error}") from error
    fates = [entry.fate for entry in migrated.entries]
    say(f"{target}: {fates.count('used')} keys of {source} used, {fates.count('ignored')} ignored (listed in it)")
    if "train_file" in migrated.settings:
        say(f"its data is not taken over: name yours as train_file in {target}, or with --train-file or --dataset")
