"""Subcommands of other packages, by the entry point group `fastweights.commands`: a name and the function that typer runs."""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points
from typing import Any

import typer

from ._help import Command
from ._options import fail

__all__ = ["GROUP", "add_commands"]

GROUP = "fastweights.commands"
# What is there without a package that brings it: what it does, and the package.
ELSEWHERE = {
    "inspect": ("What the memories of a trained model do.", "fastweights-studies"),
    "reproduce": ("Measure the papers' claims again.", "fastweights-studies"),
    "leaderboard": ("Every memory on the same tasks.", "fastweights-studies"),
}


def add_commands(app: typer.Typer) -> None:
    """Add the commands that are installed, and for those of `ELSEWHERE` that are not one that says what to install.

    A command that does not load is named in a warning of one line; the others are added.
    """
    missing = dict(ELSEWHERE)
    for point in sorted(entry_points(group=GROUP), key=lambda point: [*ELSEWHERE, point.name].index(point.name)):
        try:
            command = point.load()
        except Exception as error:
            warnings.warn(
                f"command {point.name} ({point.value}) does not load: {type(error).__name__}: {error}", stacklevel=2
            )
            continue
        missing.pop(point.name, None)
        app.command(point.name, cls=Command)(command)
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, (does, package) in missing.items():
        app.command(name, cls=Command, help=f"{does} Needs pip install {package}.", context_settings=anything)(
            _refuser(name, package)
        )


def _refuser(name: str, package: str) -> Any:
    def refuse(context: typer.Context) -> None:
        raise typer.Exit(fail(f"{name} needs {package}; install it with pip install {package}", 2))

    return refuse
