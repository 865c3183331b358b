"""The command line: one small file per verb. Nothing here imports torch before the verb is known.

Exit codes: 0 all is well, 1 something failed, 2 what was asked for cannot be done, 130 interrupted.
"""

import sys

import typer

from ..errors import ConfigurationError
from .bench import bench

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


@app.callback()
def _verbs() -> None:
    """One engine for every way of sharding data-parallel training."""


app.command()(bench)


def main() -> None:
    try:
        app()
    except ConfigurationError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        sys.exit(2)
