"""The command `fastweights`: options in, library calls, tables out. One file a subcommand, no logic of its own.

Bad input ends with one line on stderr and exit code 2, a failure while working with exit code 1, Ctrl-C with 130.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from .._version import __version__
from ._options import fail
from .convert import convert
from .evaluate import evaluate
from .generate import generate
from .recall import recall
from .train import train

__all__ = ["app", "main"]

# What typer raises for wrong options; it has no public name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train and compare fast-weight memory layers.")
for command in (recall, train, convert, evaluate, generate):
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on `arguments` (those of the process when None) and return its exit code."""
    try:
        return app(arguments, prog_name="fastweights", standalone_mode=False) or 0
    except USAGE_ERROR as error:
        return fail(error.format_message(), 2)  # type: ignore[attr-defined]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fastweights {__version__}")
        raise typer.Exit


@app.callback()
def _fastweights(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...
