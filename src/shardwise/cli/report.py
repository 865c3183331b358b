"""`shardwise report`: predicted and measured figures of a run, as text and as a page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .shared import say, write_file

PAGE = "report.html"


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished or running run.")],
    html: Annotated[Path | None, typer.Option(help=f"File for the page. Default: {PAGE} in the run folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; write a page only with --html.")] = False,
) -> None:
    """Compare memory, traffic and time of a run with its plan.

    Prints a table and writes one self-contained page: the loss curve,
    predicted and measured figures, and the planned step over time.

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
    write_file(file, render(plan, run))
    if not as_json:
        say("", f"page: {file}")
