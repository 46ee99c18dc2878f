"""What each part of the block adds to a rule in one block: the recall-blocks part beside the recall part."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fastweights_studies.leaderboard import PARTS, part_rows
from fastweights_studies.leaderboard.effects import MATCHED, block_effects
from fastweights_studies.leaderboard.entries import Entry
from fastweights_studies.pages.rendering import describe_runs, joined, list_item, table
from fastweights_studies.paired import Difference

__all__ = ["BLOCKS_PART", "describe_clearest", "entries_of", "find_added", "render_added", "table_of_effects"]

BLOCKS_PART = "recall-blocks"
SAID = {
    "with-gate": "with an output gate", "with-skip": "with a skip connection",
    "without-convolution": "without the convolution", "with-own-windows": "with the first windows of its own layer",
}  # fmt: skip

TEXT = """## What each part adds to a rule in one block, so far

`fastweights leaderboard recall-blocks --size full` changes one part of the matched block and trains again:
{rules}.
Queries are shuffled and heads have 32 channels. All else is as in that column of the table above: {seeds} seeds, equal
parameters, and a grid of rates that is widened until the best lies inside. *with-gate* adds an output gate, *with-skip* adds
D v of the same token to an answer, *without-convolution* takes the short convolutions of q, k and v away, and *with-own-windows*
leaves the first decays to the layer, which may draw them. Mean accuracy, and in parentheses that of every seed; ° marks a mean
within three standard errors of guessing ({chance:.3f}) over the 512 sequences of a test:
"""
FILE = "Rows: [recall-blocks-full.json](../studies/results/leaderboard/recall-blocks-full.json)."
EFFECTS = """Differences from the matched block are paired by seed. Each interval is at the level at which Holm's method decides
it over the whole table:
"""
READINGS = (
    "**Seeds that learn lie beside seeds that do not.** The intervals assume normal differences, which these are not, and may "
    "reach beyond what an accuracy can be. A test of signs alone cannot come below p = 1/16 with five seeds. Read the seeds "
    "first.",
    "The first seed has chosen the learning rate by validation sequences, and is one of those shown.",
    "In {falling} of {cells} changed cells the loss was still falling after 8,000 steps: what is lost may be the time that "
    "learning takes, and not what a memory can hold.",
)

CLEAREST = """For example: two layers of width 128 with two heads of 32 channels learn to recall 16 to 256 shuffled pairs for
8,000 steps. Within one block `{label}` recalls {matched:.2f} of them (mean of {seeds} seeds; guessing has {chance:.3f}), and
{parts}
([every seed](#what-each-part-adds-to-a-rule-in-one-block-so-far)). Other numbers of pairs and channels can come out differently.
"""


def entries_of(size: str, boards: Path, measurements: Path) -> list[Entry]:
    """Of both parts, each by itself: the columns of one are sizes of state, those of the other blocks."""
    parts = [PARTS[name] for name in ("recall", BLOCKS_PART)]
    return [entry for part in parts for entry in part.entries(part_rows(part, size, boards, measurements))]


def table_of_effects(effects: dict[tuple[str, str], Difference]) -> str:
    blocks, labels = dict.fromkeys(block for _, block in effects), dict.fromkeys(label for label, _ in effects)
    lines = [[f"`{x}`", *(str(effects[x, block]) if (x, block) in effects else "" for block in blocks)] for x in labels]
    return table(["mixer", *blocks], lines)


class Added(NamedTuple):
    """effects: by mixer and block. cells: by the same, those that have one, and that of the matched block with their layout and
    size of state."""

    effects: dict[tuple[str, str], Difference]
    cells: dict[tuple[str, str], Entry]

    @property
    def changed(self) -> list[Entry]:
        return [self.cells[place] for place in self.effects]

    @property
    def chance(self) -> float:
        chance = self.changed[0].run["chance"]
        assert isinstance(chance, float)
        return chance


def find_added(boards: Path, measurements: Path) -> Added:
    entries = entries_of("full", boards, measurements)
    effects = block_effects(entries)
    places = {place_of(one) for one in entries if (one.label, block_of(one)) in effects}
    if len(places) > len({label for label, _ in effects}):
        raise ValueError(
            f"{BLOCKS_PART} must have one layout and size of state per mixer for this page, and has several; give each a table"
        )
    return Added(effects, {(one.label, block_of(one)): one for one in entries if place_of(one) in places})


def render_added(added: Added) -> str:
    """The section of docs/block.md; "" without results."""
    if not added.effects:
        return ""
    labels, blocks = (list(dict.fromkeys(names)) for names in zip(*added.effects))
    shown = [MATCHED, *blocks]
    lines = [
        [
            f"`{label}`",
            *(describe_seeds(added.cells[label, block]) if (label, block) in added.cells else "" for block in shown),
        ]
        for label in labels
    ]
    said = {
        "rules": joined([f"`{x}`" for x in labels]), "seeds": max(len(one.values) for one in added.changed),
        "chance": added.chance,
    }  # fmt: skip
    falling = {"falling": sum(one.undertrained for one in added.changed), "cells": len(added.changed)}
    rows = [
        row
        for label in labels
        for block in shown
        for one in [added.cells.get((label, block))]
        if one
        for row in one.rows
    ]
    return "\n".join(
        [
            TEXT.format(**said), table(["mixer", *shown], lines), EFFECTS, table_of_effects(added.effects),
            "".join(list_item(point.format(**falling)) for point in READINGS), f"{FILE} {describe_runs(rows)}\n",
        ]
    )  # fmt: skip


def describe_seeds(entry: Entry) -> str:
    """The mean of a cell, the mark of guessing, and the value of every seed."""
    seeds = ", ".join(f"{value:.2f}" for value in entry.values)
    return f"{entry.mean:.3f}{'°' * PARTS[BLOCKS_PART].guesses(entry)} ({seeds})"


def describe_clearest(added: Added) -> str:
    """Of the mixer that a part changes most, all parts whose effect is no tie, in a sentence; "" without results."""
    clear = {cell: abs(effect.mean) for cell, effect in added.effects.items() if not effect.tied}
    if not clear:
        return ""
    label, _ = max(clear, key=lambda cell: clear[cell])
    own = sorted((added.cells[cell] for cell in clear if cell[0] == label), key=lambda one: one.mean)
    parts = joined([f"{one.mean:.2f} {SAID[block_of(one)]}" for one in own])
    matched = added.cells[label, MATCHED]
    return CLEAREST.format(
        label=label, parts=parts, matched=matched.mean, seeds=len(matched.values), chance=added.chance
    )


def block_of(entry: Entry) -> str:
    return str(entry.rows[0].column["block"])


def place_of(entry: Entry) -> tuple[str, object, object]:
    column = entry.rows[0].column
    return entry.label, column["task"], column["head_dim"]
