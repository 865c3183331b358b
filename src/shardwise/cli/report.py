"""`shardwise report`: what a run did beside what was planned for it, as text and as a page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigurationError
from .files import say

PAGE = "report.html"


def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, of a run that is over or still going on.")],
    html: Annotated[Path | None, typer.Option(help=f"Where the page goes. Default: {PAGE} in the run folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON to the standard output; a page only if asked.")] = False,
) -> None:
    """Set memory, traffic and time of a run beside its plan, with the loss.

    Prints a table and writes one page that needs no network: the loss curve,
    planned and seen, and the planned step over time.

        shardwise report runs/tiny

        shardwise report runs/tiny --html tiny.html

        shardwise report runs/tiny --json
    """
    from ..report.comparison import text
    from ..report.run import read_run

    run, plan = read_run(folder)
    say(*(json.dumps(run, indent=1) if as_json else text(run)).split("\n"))
    if html is None and as_json:
        return
    from ..report.page import render

    file = html or folder / PAGE
    draft = file.with_name(f"{file.name}.draft")
    try:
        draft.write_text(render(plan, run))
        draft.replace(file)
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be written: {error.strerror or error}") from error
    if not as_json:
        say("", f"page: {file}")
