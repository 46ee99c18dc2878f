"""The command `fastweights`: options in, library calls, tables out. One file per subcommand, without logic of its own.

Bad input ends with one line on stderr and exit code 2, a failure while working with exit code 1, Ctrl-C with 130.
torch and what builds on it are imported by the subcommands when they run: `--help` needs neither.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .._version import __version__
from ..environment import process_index
from ..untrusted import one_line
from ._help import Command
from ._options import fail
from .convert import convert
from .distill import distill
from .evaluate import evaluate
from .generate import generate
from .mixers import mixers
from .plugins import add_commands
from .recall import recall
from .serve import serve
from .tasks import tasks
from .train import train

__all__ = ["app", "load_app", "main"]

# The class of typer's errors for wrong options; it has no public name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


@contextmanager
def _stoppable() -> Iterator[None]:
    """Handles Ctrl-C where a subcommand does not, as in its imports; typer itself would end without a message."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(fail("stopped", 130)) from None


class _Stoppable(TyperGroup):
    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        with _stoppable():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _stoppable():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Stoppable,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    help="Train and compare fast-weight memory layers.",
)
for command in (recall, train, convert, distill, evaluate, generate, mixers, tasks):
    app.command(cls=Command)(command)
app.command(cls=Command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


@cache
def load_app() -> typer.Typer:
    """`app` with the commands of other packages. They are loaded late, as a module of theirs may be what imports this one."""
    add_commands(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on `arguments` (those of the process when None) and return its exit code."""
    with _short_warnings():
        try:
            return load_app()(arguments, prog_name="fastweights", standalone_mode=False) or 0
        except SystemExit as ended:  # how typer ends the options of completion
            return int(ended.code or 0)
        except USAGE_ERROR as error:
            return fail(error.format_message(), 2)  # type: ignore[attr-defined]


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Each warning is printed once, without the file and line of the library that gives it. Of several processes each but rank 0
    writes its rank before it."""
    usual, lines = warnings.formatwarning, set()
    rank = f"rank {process_index()}: " if process_index() else ""

    def new_line(message: Warning | str, *where: object, **others: object) -> str:
        line = f"fastweights: warning: {rank}{one_line(message)}\n"
        is_new = line not in lines
        lines.add(line)
        return line if is_new else ""

    warnings.formatwarning = new_line
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fastweights {__version__}")
        raise typer.Exit


@app.callback()
def _fastweights(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
