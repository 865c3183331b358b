"""`shardwise report` shows the predicted and measured figures of a run; `shardwise generate` lets its model write."""

import json
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

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
    prompts: Path | None = None,
    out: Path | None = None,
    batch_size: int = 8,
    chat: bool | None = None,
    tokenizer: str | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    stop: list[str] | None = None,
    seed: int = 0,
    precision: str | None = None,
    quantize: str | None = None,
    offload: list[str] | None = None,
    strategy: str | None = None,
    nproc_per_node: int | None = None,
) -> None:
    if chat and not prompt and prompts is None:
        raise ConfigurationError("--chat needs a message: give one with --prompt")
    if prompts is not None and prompt:
        raise ConfigurationError("--prompt and --prompts: leave one out")
    if out is not None and prompts is None:
        raise ConfigurationError(f"--out {out} is for the answers to --prompts: a single answer is printed")
    from ..trainer.answers import Request, prepare
    from ..trainer.launcher import run_ranks
    from ..trainer.models.generation import Sampling
    from ..trainer.start_status import StartStatus

    started = "RANK" in os.environ
    if started and nproc_per_node is not None:
        raise ConfigurationError(f"--nproc-per-node {nproc_per_node}, but torchrun has started the ranks: leave it out")
    is_sharded = offload or int(os.environ.get("WORLD_SIZE", nproc_per_node or 1)) > 1
    sampling = Sampling(temperature, top_k, top_p, seed, max_new_tokens, tuple(stop or ()))
    questions, answers = (None if file is None else str(file) for file in (prompts, out))
    strategy = strategy or ("zero3" if is_sharded else "ddp")
    request = Request(
        str(path), strategy, sampling, prompt, questions, answers, batch_size, chat, tokenizer, offload or (),
        precision, quantize,
    )  # fmt: skip
    if started or (nproc_per_node or 1) == 1:
        code = generate_on_rank(request.to_json())
    else:
        prepare(request)  # a wrong request ends here, before any rank is started
        with TemporaryDirectory(prefix="shardwise-") as logs, StartStatus() as status:
            entry = f"{__name__}:generate_on_rank"
            code = run_ranks(nproc_per_node or 1, entry, request.to_json(), Path(logs), status)
    raise typer.Exit(code)


def generate_on_rank(text: str) -> int:
    """Generate as one rank, and return the exit code."""
    from ..core.mesh import is_first, leave
    from ..trainer.answers import Request, answer_file, answer_prompt, prepare
    from ..trainer.signals import Requests, has_launcher, listen

    request = Request.from_json(text)
    try:
        prepared = prepare(request)
        if not has_launcher():
            listen(has_launcher=False)
        requests = Requests(None)
        if request.prompts is not None:
            answer_file(prepared, lambda: requests.read()[0] is not None)
        else:
            answer = answer_prompt(prepared, lambda: requests.read()[0] is not None)
            if answer is not None and is_first():
                text = answer if prepared.is_chat else request.prompt + answer
                # On a terminal, control characters in a model's output are escaped.
                print(CONTROL.sub(lambda found: printable(found[0]), text) if sys.stdout.isatty() else text)
        return requests.read()[0] or 0
    finally:
        leave()
