"""The registered tasks: a list of all, and a page for each."""

from __future__ import annotations

import inspect
from dataclasses import fields

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..data import TASKS
from ..data.registry import GIVEN, task_class
from ..layers.choice import format_value
from .table_style import add_row, plain_table

__all__ = ["task_page", "tasks_table"]


def tasks_table() -> Table:
    """Every task: its name, what it is measured by, what `pairs` counts, what it is."""
    table = plain_table(
        "Tasks to train on",
        "`fastweights tasks NAME` shows the sequences and options of a task.",
        text=("name", "measure", "pairs counts", "what it is"),
    )
    for name, task in TASKS.items():
        add_row(table, name, task.measure, task.unit, task.summary)
    return table


def task_page(name: str) -> Group:
    """Sequences, source and options of one task, in the words of its docstring.

    Raises:
        ValueError: an unknown task; the message names the nearest.
    """
    task = task_class(name)
    options = plain_table(
        "Options", "In a comparison: --set task_options.OPTION=VALUE. The value is TOML.", text=("option", "default")
    )
    for field in fields(task):
        if field.name not in GIVEN:
            add_row(options, field.name, format_value(field.default))
    return Group(Text(f"{name}: {task.summary}\n", style="bold"), Text(f"{inspect.getdoc(task)}\n"), options)
