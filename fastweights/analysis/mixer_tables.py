"""The registered mixers: a list of all, and a page for each."""

from __future__ import annotations

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..layers import MIXERS
from ..layers.choice import described_options
from ..layers.registry import mixer_spec
from .table_style import add_row, plain_table

__all__ = ["mixer_page", "mixers_table"]

SYMBOLS = "H heads of K key and V value channels"


def mixers_table() -> Table:
    """Every mixer: its name, the size of its state, what it is."""
    table = plain_table(
        f"Memory layers. State: numbers per sequence, {SYMBOLS}",
        "`fastweights mixers NAME` shows equation, source, cost and options.",
        text=("name", "state", "what it is"),
    )
    for name, spec in MIXERS.items():
        add_row(table, name, spec.state, spec.summary)
    return table


def mixer_page(name: str) -> Group:
    """Equation, source, state, cost and options of one mixer.

    Raises:
        ValueError: an unknown mixer; the message names the nearest.
    """
    spec = mixer_spec(name, {})
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for fact, text in (
        ("equation", spec.equation),
        ("source", spec.source),
        ("state", spec.state),
        ("cost", spec.cost or "not stated"),
        ("class", f"{spec.layer.__module__}.{spec.layer.__qualname__}"),
    ):
        add_row(facts, fact, text)
    notes = (
        f"{SYMBOLS}. State: numbers per sequence. Cost: multiply-adds of the memory rule per token, forward, where tokens are "
        "read in chunks of C."
    )
    options = plain_table(
        "Options",
        f"In a comparison: fastweights recall --mixers {name},{name}:OPTION=VALUE,... "
        "Values are JSON (None is null, True is true) or text.",
        text=("option", "default", "meaning"),
    )
    for option in described_options(spec):
        add_row(options, option.name, option.default or "required", option.meaning)
    return Group(Text(f"{name}: {spec.summary}\n", style="bold"), facts, Padding(notes, (1, 0)), options)
