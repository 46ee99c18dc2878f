"""How tables look: no frame, columns that explain themselves, text that wraps and numbers that are never split over lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

__all__ = ["LENGTHS_PER_TABLE", "add_row", "plain_table"]

LENGTHS_PER_TABLE = 5  # columns of one context length each, which fit 80 characters beside a name
LONGEST_WORDS = (16, 12, 8)  # of a column of text: longer ones may be split, the more the less room there is
PADDING, GAP = 1, 2  # right of every column; between two, where a divider of one more space is
LOOK: dict[str, Any] = {
    "title_justify": "left",
    "caption_justify": "left",
    "box": box.SIMPLE_HEAD,
    "show_edge": False,
    "pad_edge": False,
    "padding": (0, PADDING, 0, 0),
}


def plain_table(title: str = "", caption: str = "", *, text: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """A table with columns of text, then columns of numbers, by their headers. Where the width is too small, cells wrap. Words of
    numbers stay whole: where they do not fit beside each other, the columns of numbers are shown in several tables."""
    table = _PlainTable(
        title=Text(title, style="bold") if title else None,
        caption=Text(caption) if caption else None,
        **LOOK,
    )
    for place, header in enumerate(text):
        table.add_column(header, overflow="fold", style="bold" if place == 0 else None)
    for header in numbers:
        table.add_column(header, overflow="fold", justify="right")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row whose cells are shown as they are: square brackets in a name are no markup."""
    table.add_row(*map(Text, cells))


class _PlainTable(Table):
    """Shown as several tables where its columns do not fit the width. Each has the first column, which names the rows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = list(_split_columns(self.columns, options.max_width))
        for number, part in enumerate(parts):
            if number:
                yield Text()
            title = self.title if number == 0 else None
            caption = self.caption if number == len(parts) - 1 else None
            yield from Table.__rich_console__(self._make_part(part, title, caption), console, options)

    def _make_part(self, widths: dict[int, int], title: Any, caption: Any) -> Table:
        """These columns with these widths."""
        part = Table(title=title, caption=caption, **LOOK)
        cells = []
        for place, width in widths.items():
            column = self.columns[place]
            part.add_column(
                column.header, overflow="fold", justify=column.justify, style=column.style or None, width=width
            )
            cells.append(list(column.cells))
        for row, texts in zip(self.rows, zip(*cells, strict=True), strict=True):
            part.add_row(*texts, end_section=row.end_section)
        return part


def _split_columns(columns: Sequence[Column], width: int) -> Iterator[dict[int, int]]:
    """The columns of each table by their places, with their widths."""
    texts = [[str(column.header), *map(str, column.cells)] for column in columns]
    most = [max(map(cell_len, own)) for own in texts]
    words = [max(cell_len(word) for text in own for word in text.split() or [""]) for own in texts]
    numbers = [column.justify == "right" for column in columns]
    leasts = [
        [word if number else min(word, longest) for word, number in zip(words, numbers, strict=True)]
        for longest in LONGEST_WORDS
    ]
    least = next((one for one in leasts if _total_width(one) <= width), leasts[0])
    parts: list[list[int]] = [[0]]
    for place in range(1, len(columns)):
        fits = _total_width([least[other] for other in (*parts[-1], place)]) <= width
        if numbers[place] and len(parts[-1]) > 1 and not fits:
            parts.append([0])
        parts[-1].append(place)
    for part in parts:
        yield _share_width([least[place] for place in part], [most[place] for place in part], width, part)


def _share_width(least: list[int], most: list[int], width: int, places: list[int]) -> dict[int, int]:
    """Each column gets its least width. The narrowest columns that need more then share the remaining width first."""
    widths = list(least)
    left = width - _total_width(widths)
    while left > 0 and widths != most:
        place = min((place for place in range(len(widths)) if widths[place] < most[place]), key=widths.__getitem__)
        widths[place] += 1
        left -= 1
    return dict(zip(places, widths, strict=True))


def _total_width(widths: list[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1) + PADDING
