"""`shardwise convert`: write a checkpoint, or another library's configuration, in another format."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigurationError
from .shared import num_bytes_in, panels, progress_bar, require_exists, require_known, say, write_file

FORM, WHAT, PLACE = panels("Format", "Content", "Destination")
FORMATS = ("shardwise", "dcp", "hugging-face")


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A checkpoint of any library, a run folder, or a configuration file."),
    ],
    target: Annotated[Path | None, typer.Argument(metavar="[DST]", help="The folder or file to write.")] = None,
    to: Annotated[
        str, FORM(help="shardwise; dcp: for torch.distributed.checkpoint; hugging-face: weights only.")
    ] = "shardwise",
    whole: Annotated[bool, FORM("--whole", help="One file of weights under plain names, and one of state.")] = False,
    max_shard_size: Annotated[str, FORM(help="Maximum size of a file: 5GB, 500MB, 2GiB, or bytes.")] = "5GB",
    model_only: Annotated[bool, WHAT("--model-only", help="Leave out the optimizer and the trainer's notes.")] = False,
    output: Annotated[Path | None, PLACE("--output", "-o", help="The same as DST.")] = None,
    overwrite: Annotated[bool, PLACE("--overwrite", help="Replace an existing destination.")] = False,
) -> None:
    """Write a checkpoint or a configuration in another format.

    Reads checkpoints of shardwise, torch DCP, Accelerate, DeepSpeed and
    Hugging Face folders. Weights, buffers and optimizer state are copied bit
    for bit, and checksums are compared. The folder appears when it is
    complete.

    One file that every safetensors reader opens:

        shardwise convert runs/tiny/checkpoints/step-000200 whole --whole

    A DeepSpeed run, to continue it here:

        shardwise convert ds-run/global_step500 runs/mine-from-ds

    For a trainer that loads torch DCP:

        shardwise convert runs/tiny as-dcp --to dcp

    A configuration of DeepSpeed, Accelerate or Hugging Face, as a file for
    `shardwise train` (`shardwise check` explains every key):

        shardwise convert ds_config.json -o mine.yaml
    """
    if target is not None and output is not None:
        raise ConfigurationError(f"DST {target} and --output {output}: give one of them")
    target = target or output
    if target is None:
        raise ConfigurationError(f"where should {source} be written? give DST, or --output")
    if source.is_file():
        _convert_configuration(source, target, overwrite)
        return
    form = to.replace("_", "-")
    require_known("--to", form, FORMATS)
    if whole and form != "shardwise":
        raise ConfigurationError(f"--whole is for shardwise checkpoints, not for --to {form}: leave it out")
    max_bytes = num_bytes_in("--max-shard-size", max_shard_size)
    require_exists(source)
    from ..base.text import size
    from ..checkpoint import writer
    from ..checkpoint.opened import open_checkpoint

    opened = open_checkpoint(source)
    if model_only or form == "hugging-face":
        opened = writer.without_optimizer(opened)
    writer.require_free(target, overwrite, opened.folder, replaces_own=False)
    num_bytes = writer.num_bytes_of(opened)
    began = time.perf_counter()
    with progress_bar(target.name, num_bytes) as advance:
        if form == "shardwise":
            writer.write_own(opened, target.resolve(), None if whole else max_bytes, advance)
        elif form == "dcp":
            from ..checkpoint.interop.dcp_write import write_dcp

            write_dcp(opened, target.resolve(), advance)
        else:
            writer.write_bare_weights(opened, target.resolve(), max_bytes, advance)
    say(f"{target}: {opened.folder} as {form}, {size(num_bytes)}, in {time.perf_counter() - began:.1f} s")
    if form == "dcp" and opened.index.extra:
        say(f"torch DCP cannot store {', '.join(opened.index.extra)}: left out")


def _convert_configuration(source: Path, target: Path, overwrite: bool) -> None:
    from ..migrate.api import read
    from ..migrate.migrated import yaml_of

    if target.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigurationError(f"{target}: a configuration is YAML; give a name that ends in .yaml")
    if target.exists() and not overwrite:
        raise ConfigurationError(f"{target} exists already; give --overwrite to replace it")
    migrated = read(source)
    migrated.require_accepted()
    write_file(target, yaml_of(migrated))
    fates = [entry.fate for entry in migrated.entries]
    say(f"{target}: {fates.count('used')} keys of {source} used, {fates.count('ignored')} ignored (listed in it)")
    if "train_file" in migrated.settings:
        say(f"its data is not included: name yours as train_file in {target}, or with --train-file or --dataset")
