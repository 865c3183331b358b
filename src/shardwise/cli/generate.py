"""`shardwise generate`: generate text with a trained model."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigurationError, printable

# Characters that move the cursor (without tabs and newlines) or change the direction of the text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def generate(
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint, or an exported model or adapter.")],
    prompt: Annotated[str, typer.Option(help="Beginning of the text. Default: the beginning of a document.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of generated tokens.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="Temperature; 0 always takes the most likely token.", min=0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the K most likely tokens; 0 for all.", min=0)] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer the prompt as a message, with the tokenizer's chat template; or continue it as "
            "plain text. Default: a chat if the tokenizer has a template and there is a prompt.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or id of a tokenizer, or 'bytes', for a model without one.")
    ] = None,
) -> None:
    """Continue a text, or answer a message, with a trained model, in one process.

    From the export or the newest checkpoint of a run:

        shardwise generate runs/tiny --prompt "The with statement"

    From one checkpoint, always the most likely token:

        shardwise generate runs/tiny/checkpoints/step-000200 --temperature 0

    An answer of a chat model, and the same prompt as plain text:

        shardwise generate runs/chat --prompt "What is 2 + 2?"

        shardwise generate runs/chat --prompt "What is 2 + 2?" --raw

    From any Hugging Face folder or PEFT adapter:

        shardwise generate runs/lora-8b/export --prompt "Once upon a time"
    """
    if chat and not prompt:
        raise ConfigurationError("--chat needs a message: give one with --prompt")
    from ..core.mesh import leave
    from ..trainer.models.restore import restore
    from ..trainer.models.sample import Sampling, sample

    try:
        restored = restore(path, "ddp", tokenizer)
        is_chat = bool(prompt and restored.tokenizer.template) if chat is None else chat
        text, stop_id = restored.tokenizer.question(prompt) if is_chat else (prompt, None)
        generated = sample(
            restored.model,
            restored.tokenizer,
            text,
            max_new_tokens,
            Sampling(temperature, top_k, seed),
            max_seq=restored.max_seq,
            stop_id=stop_id,
        )
    finally:
        leave()
    answer = generated if is_chat else prompt + generated
    # On a terminal, control characters in a model's output are escaped.
    print(CONTROL.sub(lambda found: printable(found[0]), answer) if sys.stdout.isatty() else answer)
