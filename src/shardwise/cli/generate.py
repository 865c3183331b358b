"""`shardwise generate`: text from what a run has left."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import printable

# All that moves the cursor, but for tabs and ends of lines, and what turns the direction of the text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def generate(
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint in it, or an export (folder or adapter).")],
    prompt: Annotated[str, typer.Option(help="What the text begins with. Default: the beginning of a document.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that are made, at most.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among so many of the likeliest tokens; 0: all.", min=0)] = 50,
    seed: Annotated[int, typer.Option(help="Of the choices.", min=0)] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, id or 'bytes', where the model has none of its own.")
    ] = None,
) -> None:
    """Continue a text with a trained model, in one process.

    From a run, its export or its newest checkpoint:

        shardwise generate runs/tiny --prompt "The with statement"

    From one checkpoint, always the likeliest token:

        shardwise generate runs/tiny/checkpoints/step-000200 --temperature 0

    From any Hugging Face folder or PEFT adapter:

        shardwise generate runs/lora-8b/export --prompt "Once upon a time"
    """
    from ..mesh import leave
    from ..train.models.restore import restore
    from ..train.models.sample import sample

    try:
        found = restore(path, "ddp", tokenizer)
        text = sample(
            found.model,
            found.tokenizer,
            prompt,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            max_seq=found.max_seq,
        )
    finally:
        leave()
    # On a terminal a model's words are no commands; elsewhere they stay as they are.
    print(CONTROL.sub(lambda found: printable(found[0]), prompt + text) if sys.stdout.isatty() else prompt + text)
