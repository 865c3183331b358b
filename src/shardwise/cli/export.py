"""`shardwise export`: a Hugging Face folder from a checkpoint."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigurationError, did_you_mean
from .files import num_bytes_in, require_there, say, streaming

FROM, FORM, PLACE = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("What is exported", "Its form", "Where to")
)
DTYPES = ("auto", "keep", "fp32", "bf16", "fp16")


def export(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint (anybody's), a run folder, a model's folder or an adapter's.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    model: Annotated[
        str | None,
        FROM(help="Hugging Face folder with config and tokenizer. Default: what the run was told in its config.json."),
    ] = None,
    merge: Annotated[
        bool, FROM("--merge", help="Add adapters to the weights they were trained on: a whole model.")
    ] = False,
    dtype: Annotated[
        str, FORM(help="fp32, bf16, fp16; keep: the checkpoint's own; auto: that of the model the training began with.")
    ] = "auto",
    max_shard_size: Annotated[str, FORM(help="Of a file: 5GB, 500MB, 2GiB, or bytes.")] = "5GB",
    overwrite: Annotated[
        bool, PLACE("--overwrite", help="Replace the folder also if shardwise did not export it.")
    ] = False,
) -> None:
    """Write the weights of a checkpoint as a folder that from_pretrained opens.

    Files are read and written a block at a time: no ranks, and no model in
    memory. Tied weights are written once. Config and tokenizer go along.

    From the newest checkpoint of a run:

        shardwise export runs/tiny exported

    From one checkpoint, 16 bits, in files of at most 2 GB:

        shardwise export runs/mine/checkpoints/step-000200 exported \\
          --dtype bf16 --max-shard-size 2GB

    A run with adapters: them alone, for peft, or merged into the model:

        shardwise export runs/lora adapter

        shardwise export runs/lora merged --merge

    From what another program saved:

        shardwise export outputs/dcp-1000 exported --model Qwen/Qwen3-0.6B
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype: unknown {dtype!r}; {did_you_mean(dtype, DTYPES)}")
    max_bytes = num_bytes_in("--max-shard-size", max_shard_size)
    require_there(path)
    from ..base.text import size
    from ..checkpoint.steps import newest_in
    from ..checkpoint.writer import require_free
    from ..trainer.models.export import write_export
    from ..trainer.models.from_checkpoint import Wish, content_of

    place = newest_in(path)
    require_free(out, overwrite, place)
    began = time.perf_counter()
    with content_of(place, Wish(model, dtype, merge, max_bytes)) as content:
        if content.facts.folder is not None:
            require_free(out, overwrite, content.facts.folder)
        with streaming(out.name, content.num_bytes) as tell:
            write_export(content, out.resolve(), tell)
    seconds = time.perf_counter() - began
    what = "adapters" if content.is_adapted and not content.is_merged else "model"
    say(f"{out}: the {what} of {place}, {size(content.num_bytes)}, in {seconds:.1f} s")
    if what == "adapters" and content.facts.has_weights:
        say(f"The weights under them are in {content.facts.origin}; --merge makes a whole model.")
