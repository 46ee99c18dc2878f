"""The help of the subcommands, shown as it is written."""

import inspect
from typing import Any

from rich.markup import escape
from typer.core import TyperCommand

__all__ = ["Command"]


class Command(TyperCommand):
    """A subcommand of which the help is plain text: square brackets are no markup, and a paragraph is broken into lines by the
    width of the terminal alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(escape(" ".join(paragraph.split())) for paragraph in paragraphs)
        for parameter in self.params:
            if text := getattr(parameter, "help", None):
                parameter.help = escape(text)  # type: ignore[attr-defined]
