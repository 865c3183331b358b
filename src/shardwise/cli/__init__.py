"""The command line. Options and help texts are in help.toml. Nothing here imports torch before the command is known.

Exit codes: 0 success, 1 failure, 2 invalid request, 3 out of memory, 4 the training diverged, 5 a checkpoint is
unusable, 130 and 143 interrupted. An error of the user is reported in one sentence.
"""

import sys
from typing import Annotated, Any

import typer

from ..base.errors import ShardwiseError, printable_lines
from ..version import VERSION
from .bench import app as bench
from .check import check
from .convert import convert, export
from .data import data
from .doctor import app as doctor
from .inspect import inspect, verify
from .plan import plan
from .report import generate, report
from .train import TrainCommand, train

# The base class of errors of the parser. Newer versions of typer contain their own click; this finds either.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="shardwise",
    help="One engine for every way of sharding data-parallel training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"shardwise {VERSION}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """One engine for every way of sharding data-parallel training."""


app.command()(plan)
app.command(cls=TrainCommand)(train)
app.command()(data)
app.command()(report)
app.add_typer(bench, name="bench")
app.command()(generate)
app.command()(inspect)
app.command()(verify)
app.command()(export)
app.command()(convert)
app.command()(check)
app.add_typer(doctor, name="doctor")


def main() -> None:
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        message = error.format_message().rstrip(".")
        if message:  # empty if no command was given: the help was printed
            _print_error(f"{message} (see {error.ctx.command_path if error.ctx else 'shardwise'} --help)")
        code = 2
    except ShardwiseError as error:
        _print_error(str(error))
        code = error.exit_code
    sys.exit(code)


def _print_error(message: str) -> None:
    print(printable_lines(f"shardwise: {message}"), file=sys.stderr)
