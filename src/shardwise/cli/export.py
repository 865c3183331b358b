"""`shardwise export`: write the weights of a checkpoint as a Hugging Face folder."""

import time
from pathlib import Path
from typing import Annotated

import typer

from .shared import num_bytes_in, panels, progress_bar, require_exists, require_known, say

FROM, FORM, PLACE = panels("What is exported", "Format", "Destination")
DTYPES = ("auto", "keep", "fp32", "bf16", "fp16")


def export(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint of any library, a run folder, a model's folder or an adapter's.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    model: Annotated[
        str | None,
        FROM(help="Hugging Face folder with config and tokenizer. Default: the model of the run."),
    ] = None,
    merge: Annotated[
        bool, FROM("--merge", help="Merge adapters into their base model, and write a whole model.")
    ] = False,
    dtype: Annotated[
        str,
        FORM(help="fp32, bf16, fp16; keep: as in the checkpoint; auto: as in the original model."),
    ] = "auto",
    max_shard_size: Annotated[str, FORM(help="Maximum size of a file: 5GB, 500MB, 2GiB, or bytes.")] = "5GB",
    overwrite: Annotated[
        bool, PLACE("--overwrite", help="Replace the folder even if shardwise did not write it.")
    ] = False,
) -> None:
    """Write the weights of a checkpoint as a folder that from_pretrained opens.

    Files are read and written block by block, without ranks and without the
    model in memory. Tied weights are written once. Config and tokenizer are
    included.

    From the newest checkpoint of a run:

        shardwise export runs/tiny exported

    From one checkpoint, 16 bits, in files of at most 2 GB:

        shardwise export runs/mine/checkpoints/step-000200 exported \\
          --dtype bf16 --max-shard-size 2GB

    A run with adapters: the adapters for peft, or the merged model:

        shardwise export runs/lora adapter

        shardwise export runs/lora merged --merge

    From a checkpoint of another program:

        shardwise export outputs/dcp-1000 exported --model Qwen/Qwen3-0.6B
    """
    require_known("--dtype", dtype, DTYPES)
    max_bytes = num_bytes_in("--max-shard-size", max_shard_size)
    require_exists(path)
    from ..base.text import size
    from ..checkpoint.steps import newest_in
    from ..checkpoint.writer import require_free
    from ..trainer.models.export import write_export
    from ..trainer.models.from_checkpoint import ExportOptions, content_of

    place = newest_in(path)
    require_free(out, overwrite, place)
    began = time.perf_counter()
    with content_of(place, ExportOptions(model, dtype, merge, max_bytes)) as content:
        if content.facts.folder is not None:
            require_free(out, overwrite, content.facts.folder)
        with progress_bar(out.name, content.num_bytes) as advance:
            write_export(content, out.resolve(), advance)
    seconds = time.perf_counter() - began
    what = "adapters" if content.is_adapted and not content.is_merged else "model"
    say(f"{out}: the {what} of {place}, {size(content.num_bytes)}, in {seconds:.1f} s")
    if what == "adapters" and content.facts.has_weights:
        say(f"Their base model is in {content.facts.origin}; --merge writes a whole model.")
