"""How tables look: no frame, columns that explain themselves, text that wraps and is never cut off."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["LENGTHS_PER_TABLE", "add_row", "plain_table"]

LENGTHS_PER_TABLE = 5  # columns of one context length each, which fit 80 characters beside a name


def plain_table(title: str = "", caption: str = "", *, text: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """A table with columns of text, then columns of numbers, by their headers. Where the width is too small, cells wrap."""
    table = Table(
        title=Text(title, style="bold") if title else None,
        caption=Text(caption) if caption else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for place, header in enumerate(text):
        table.add_column(header, overflow="fold", style="bold" if place == 0 else None)
    for header in numbers:
        table.add_column(header, overflow="fold", justify="right")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row whose cells are shown as they are: square brackets in a name are no markup."""
    table.add_row(*map(Text, cells))
