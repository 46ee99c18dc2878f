"""Every table fits its width, with nothing cut off."""

import io

import pytest
from rich.console import Console

from .terminal_tables import TABLES, evaluations, recall_tables, trainings


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_and_nothing_is_cut_off(name, width):
    make, _ = TABLES[name]
    console = Console(file=io.StringIO(), width=width)
    console.print(*make())
    text = console.file.getvalue()
    assert "…" not in text and all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("name", TABLES)
def test_no_cell_is_lost_at_80_columns(name):
    """The same characters stand in the wide table and in the one of 80 columns, where cells wrap."""
    make, cells = TABLES[name]
    texts = []
    for width in (400, 80):
        console = Console(file=io.StringIO(), width=width)
        console.print(*make())
        texts.append(console.file.getvalue())
    wide, narrow = (sorted("".join(text.split()).replace("─", "")) for text in texts)
    assert wide == narrow and all(cell in texts[0] for cell in cells)


def test_column_names_explain_themselves():
    console = Console(file=io.StringIO(), width=200)
    console.print(*recall_tables(), *trainings(), *evaluations())
    headers = console.file.getvalue()
    for header in ("learning rate", "state size", "parameters", "accuracy", "512 tokens", "perplexity of last tokens"):
        assert header in headers
    assert not {"lr", "params"} & {
        word for line in headers.splitlines() if line.startswith("mixer") for word in line.split()
    }
