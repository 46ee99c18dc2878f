"""What the commands print. On a terminal the control characters of texts are written out: a model's text, a name in a stranger's
file or a path could otherwise move the cursor, hide what stands there or set the title."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

import rich.console
from rich.segment import Segment

__all__ = ["Console", "show", "shown", "visible"]

# Control characters but line ends and tabs, what turns the direction of writing around, and halves of characters.
_KEPT = {9, 10}
_CONTROLS = {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)}
_WRITTEN_OUT = {code: repr(chr(code))[1:-1] for code in _CONTROLS - _KEPT}


def visible(text: str) -> str:
    """The text with its control characters written out, as `\\x1b`: a terminal would obey them. Line ends and tabs stay."""
    return text.translate(_WRITTEN_OUT)


def shown(text: str, stream: TextIO) -> str:
    """The text as it is printed on a stream: in a pipe or a file it stays as it is, for whatever reads it there."""
    return visible(text) if stream.isatty() else text


def show(text: str, *, end: str = "\n", error: bool = False) -> None:
    """Print a text, as `shown`.

    Args:
        error: print on standard error, in place of standard output.
    """
    stream: TextIO | None = sys.stderr if error else sys.stdout
    if stream is None:  # it was closed before the process started
        return
    print(shown(text, stream), end=end, file=stream, flush=True)


class Console(rich.console.Console):
    """Rich's console. Rich itself leaves escape sequences in the cells of a table and in the titles of bars."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
