"""Helpers of the subcommands: options of several values, and errors as one line with an exit code."""

import errno
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer

from ..stopping import Stopped

__all__ = ["Imports", "fail", "import_mixers", "one_line_errors", "values"]

Value = TypeVar("Value")
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Module or .py file that registers mixers of your own; may be repeated.",
        show_default=False,
    ),
]


def import_mixers(modules: Sequence[str] | None) -> None:
    """Import the modules that the option --import names."""
    if modules:
        from ..layers import import_mixers as import_modules  # here: help must not import torch

        import_modules(modules)


def fail(message: str, code: int) -> int:
    """Print one line to stderr, without the system's numbers of errors; returns the exit code."""
    line = re.sub(r"\[Errno -?\d+\] ", "", " ".join(message.split()))
    print(f"fastweights: error: {line}", file=sys.stderr)
    return code


@contextmanager
def one_line_errors(continues: str = "") -> Iterator[None]:
    """Ends the command with one line and exit code 2 for bad input, 1 for a failure, 130 for Ctrl-C, 128 and the signal's
    number for a signal.
    continues: how to continue after a failure or an interruption, for the message."""
    remedy = f"; {continues}" if continues else ""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.Exit(fail(str(error), 2)) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # bad input: no file or folder can have it
            raise typer.Exit(fail(f"{_reason(error)}; choose a shorter name", 2)) from None
        raise typer.Exit(fail(f"{_reason(error)}{remedy}", 1)) from None
    except Stopped as stopped:
        raise typer.Exit(fail(f"{stopped}{remedy}", stopped.exit_code)) from None
    except KeyboardInterrupt:
        raise typer.Exit(fail(f"stopped{remedy}", 130)) from None


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
