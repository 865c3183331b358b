"""`shardwise report` shows the predicted and measured figures of a run; `shardwise generate` lets its model write."""

import json
import re
import sys
from pathlib import Path

from ..base.errors import ConfigurationError, printable
from .shared import documented, say, write_file

PAGE = "report.html"
# Control characters, except tabs and newlines, and characters that change the direction of the text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@documented
def report(
    folder: Path,
    html: Path | None = None,
    as_json: bool = False,
) -> None:
    from ..report.run import read_run, text

    run, plan = read_run(folder)
    say(*(json.dumps(run, indent=1) if as_json else text(run)).split("\n"))
    if html is None and as_json:
        return
    from ..report.page import render

    file = html or folder / PAGE
    write_file(file, render(plan, run))
    if not as_json:
        say("", f"page: {file}")


@documented
def generate(
    path: Path,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    chat: bool | None = None,
    tokenizer: str | None = None,
) -> None:
    if chat and not prompt:
        raise ConfigurationError("--chat needs a message: give one with --prompt")
    from ..core.mesh import leave
    from ..trainer.models.restore import restore
    from ..trainer.models.sample import Sampling, sample

    try:
        model, loaded, max_seq = restore(path, "ddp", tokenizer)
        is_chat = bool(prompt and loaded.template) if chat is None else chat
        text, stop_id = loaded.question(prompt) if is_chat else (prompt, None)
        sampling = Sampling(temperature, top_k, seed)
        generated = sample(model, loaded, text, max_new_tokens, sampling, max_seq=max_seq, stop_id=stop_id)
    finally:
        leave()
    answer = generated if is_chat else prompt + generated
    # On a terminal, control characters in a model's output are escaped.
    print(CONTROL.sub(lambda found: printable(found[0]), answer) if sys.stdout.isatty() else answer)
