"""Every table of every command on a narrow terminal: no number is split over two lines, and none is lost."""

import io
import re

import pytest
from fastweights_studies.claims import claims_of, committed_records
from fastweights_studies.claims.tables import claim_page, claims_table
from fastweights_studies.leaderboard import PARTS, part_rows, table_of
from fastweights_studies.leaderboard.run import rows_beside
from fastweights_studies.leaderboard.terminal import parts_table, plain
from rich.console import Console, Group
from rich.table import Table

from fastweights.analysis.table_style import add_row, plain_table
from fastweights.layers import MIXERS

from ..analysis.terminal_tables import TABLES
from ..documentation.site import ROOT

MEASUREMENTS = ROOT / "benchmarks" / "results"


def board(name, size, tmp_path):
    part = PARTS[name]
    rows = part_rows(part, size, tmp_path, MEASUREMENTS)
    rows = [*rows_beside(part, size, rows), *rows]
    assert rows
    return [plain(part, *table_of(part, size, rows, list(MIXERS)))]


def claims():
    records = committed_records()
    for claim in [*claims_of(None), *claims_of("own")]:
        if claim.name in records:
            yield claim_page(claim, records[claim.name])


def every_table(name, tmp_path):
    if name in TABLES:
        yield from TABLES[name][0]()
    elif name in PARTS:
        for size in ("small", "full"):
            yield from board(name, size, tmp_path)
    elif name == "leaderboard --list":
        yield parts_table(list(PARTS.values()), "full", tmp_path, MEASUREMENTS)
    elif name == "reproduce --list":
        yield claims_table(list(claims_of(None)), committed_records())
    else:
        yield from claims()


def lines(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()


def plain_tables(found):
    for one in found:
        if isinstance(one, Group):
            yield from (part for part in one.renderables if isinstance(part, Table) and part.columns[0].header)
        else:
            yield one


@pytest.mark.parametrize("width", [pytest.param(80, marks=pytest.mark.slow), 60])
@pytest.mark.parametrize("name", [*TABLES, *PARTS, "leaderboard --list", "reproduce --list", "reproduce"])
def test_no_number_is_split(name, width, tmp_path):
    tables = list(plain_tables(every_table(name, tmp_path)))
    assert tables
    for table in tables:
        numbers = [
            word
            for column in table.columns
            for text in (column.header, *column.cells)
            for word in str(text).split()
            if column.justify == "right" or re.fullmatch(r"[\d.,()±%]+", word)
        ]
        shown = lines(table, width)
        assert all(len(line) <= width for line in shown)
        words = {}
        for word in " ".join(shown).split():
            words[word] = words.get(word, 0) + 1
        for word in set(numbers):
            assert words.get(word, 0) >= numbers.count(word), (word, "\n".join(shown))


def test_columns_that_do_not_fit_are_shown_below_with_the_names_of_the_rows():
    table = plain_table("Title", "A caption.", text=("mixer",), numbers=[f"column {n}" for n in range(6)])
    for name in ("linear", "gdn"):
        add_row(table, name, *(f"{place}2,345,678.{place}" for place in range(6)))
    shown = lines(table, 60)
    assert sum(line.startswith("mixer ") for line in shown) == 2
    text = "\n".join(shown)
    assert text.count("Title") == text.count("A caption.") == 1
    assert text.index("Title") < text.index("column 0") < text.index("column 5") < text.index("A caption.")
    for name in ("linear", "gdn"):
        assert len(re.findall(rf"^{name} ", text, re.MULTILINE)) == 2


def test_a_wide_terminal_shows_one_table():
    table = plain_table(text=("mixer",), numbers=[f"column {n}" for n in range(6)])
    add_row(table, "gdn", *(f"{place}2,345,678.{place}" for place in range(6)))
    assert sum("mixer" in line for line in lines(table, 200)) == 1
