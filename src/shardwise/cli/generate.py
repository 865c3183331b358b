"""`shardwise generate`: text from what a run has left."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigurationError, printable

# All that moves the cursor, but for tabs and ends of lines, and what turns the direction of the text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def generate(
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint in it, or an export (folder or adapter).")],
    prompt: Annotated[str, typer.Option(help="What the text begins with. Default: the beginning of a document.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that are made, at most.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among so many of the likeliest tokens; 0: all.", min=0)] = 50,
    seed: Annotated[int, typer.Option(help="Of the choices.", min=0)] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="The prompt is a user's message, in the tokenizer's chat template, and the answer is printed; or text "
            "that is continued as it is. Default: a chat where the tokenizer has a template and there is a prompt.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, id or 'bytes', where the model has none of its own.")
    ] = None,
) -> None:
    """Continue a text, or answer a message, with a trained model, in one process.

    From a run, its export or its newest checkpoint:

        shardwise generate runs/tiny --prompt "The with statement"

    From one checkpoint, always the likeliest token:

        shardwise generate runs/tiny/checkpoints/step-000200 --temperature 0

    An answer of a chat model, and the same words as plain text:

        shardwise generate runs/chat --prompt "What is 2 + 2?"

        shardwise generate runs/chat --prompt "What is 2 + 2?" --raw

    From any Hugging Face folder or PEFT adapter:

        shardwise generate runs/lora-8b/export --prompt "Once upon a time"
    """
    if chat and not prompt:
        raise ConfigurationError("--chat: there is no message to answer: give one with --prompt")
    from ..core.mesh import leave
    from ..trainer.models.restore import restore
    from ..trainer.models.sample import sample

    try:
        found = restore(path, "ddp", tokenizer)
        is_chat = bool(prompt and found.tokenizer.template) if chat is None else chat
        asked, stop_id = found.tokenizer.question(prompt) if is_chat else (prompt, None)
        text = sample(
            found.model,
            found.tokenizer,
            asked,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            max_seq=found.max_seq,
            stop_id=stop_id,
        )
    finally:
        leave()
    answer = text if is_chat else prompt + text
    # On a terminal a model's words are no commands; elsewhere they stay as they are.
    print(CONTROL.sub(lambda found: printable(found[0]), answer) if sys.stdout.isatty() else answer)
