"""Every table of every command on a narrow terminal: no number is split over two lines, and none is lost."""

import re

import pytest

from fastweights.analysis.table_style import add_row, plain_table

from ..analysis.terminal_tables import TABLES, check_no_number_is_split, lines


@pytest.mark.parametrize("width", [pytest.param(80, marks=pytest.mark.slow), 60])
@pytest.mark.parametrize("name", TABLES)
def test_no_number_is_split(name, width):
    check_no_number_is_split(TABLES[name][0](), width)


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
