"""Helpers of the subcommands: options of several values, and errors as one line with an exit code."""

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ..environment import within_memory
from ..stopping import Stopped
from ..terminal import show
from ..untrusted import one_line

__all__ = [
    "AsJson",
    "Device",
    "DryRun",
    "Imports",
    "Overrides",
    "Overwrite",
    "Quiet",
    "fail",
    "import_mixers",
    "one_line_errors",
    "output_path",
    "training_errors",
    "values",
]

Value = TypeVar("Value")
LONGEST_ERROR = 1000  # characters: about half a screen
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Module or .py file that registers mixers or tasks of your own; may be repeated.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Delete what this command has written there before, and nothing else, and start again."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what the command would do, and write nothing.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; errors are shown all the same.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Results as one JSON document on standard output, all else on standard error.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A field of the run file, such as model.num_heads=8 for `train` or width=64 for `recall`; may be repeated. The "
        "value is TOML; text needs no quotation marks.",
        show_default=False,
    ),
]


def output_path(text: str) -> Path:
    """The value of an option --output; an empty one, as an unset variable of a shell gives it, is not the current folder."""
    if not str(text).strip():
        raise typer.BadParameter("--output must be the path of a file or folder, got an empty one")
    return Path(text)


def import_mixers(modules: Sequence[str] | None) -> None:
    """Import the modules that the option --import names."""
    if modules:
        from ..layers import import_mixers as import_modules  # here: help must not import torch

        import_modules(modules)


def fail(message: str, code: int, prefix: str | None = "") -> int:
    """Print one short line to stderr, without the system's numbers of errors; returns the exit code. prefix: before the
    message; None prints nothing."""
    line = re.sub(r"\[Errno -?\d+\] ", "", one_line(message, LONGEST_ERROR))
    if prefix is not None:
        show(f"fastweights: error: {prefix}{line}", error=True)
    return code


@contextmanager
def one_line_errors(
    continues: str = "", memory: str = "a smaller model", voice: Callable[[], str | None] = lambda: ""
) -> Iterator[None]:
    """Ends the command with one line and exit code 2 for bad input, 1 for a failure, 130 for Ctrl-C, 128 and the signal's
    number for a signal.
    continues: how to continue after a failure or an interruption, for the message. memory: what needs less memory. voice: asked
    after an error for the `prefix` of its line."""
    remedy = f"; {continues}" if continues else ""
    try:
        with within_memory(memory):
            yield
    except (ValueError, TypeError) as error:
        raise typer.Exit(fail(str(error), 2, voice())) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # bad input: no file or folder can have it
            raise typer.Exit(fail(f"{_reason(error)}; choose a shorter name", 2, voice())) from None
        raise typer.Exit(fail(f"{_reason(error)}{remedy}", 1, voice())) from None
    except Stopped as stopped:
        raise typer.Exit(fail(f"{stopped}{remedy}", stopped.exit_code, voice())) from None
    except KeyboardInterrupt:
        raise typer.Exit(fail(f"stopped{remedy}", 130, voice())) from None


@contextmanager
def training_errors(continues: str, prefix: str = "") -> Iterator[None]:
    """Ends the command with one line and exit code 1 where trainings failed. Above the line stands the traceback of a worker."""
    from ..training import WorkerError  # here: help must not import torch

    try:
        yield
    except WorkerError as error:
        show(error.details, error=True, end="")
        raise typer.Exit(fail(f"{prefix}{error}; {continues}", 1)) from None


def _reason(error: OSError) -> str:
    """Why, and the name of the file once."""
    if error.strerror is None:
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def values(option: str, texts: Sequence[str], kind: Callable[[str], Value]) -> tuple[Value, ...]:
    """The values of an option that may be repeated and may hold several, separated by commas."""
    found = []
    for text in ",".join(texts).split(","):
        try:
            found.append(kind(text.strip()))
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise typer.BadParameter(f"{option} takes {what} separated by commas, got {text.strip()!r}") from None
    return tuple(found)
