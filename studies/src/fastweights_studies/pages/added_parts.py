"""What each part of the block adds to a rule in one block: the recall-blocks part beside the recall part."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fastweights_studies.leaderboard import PARTS, part_rows
from fastweights_studies.leaderboard.effects import MATCHED, block_effects
from fastweights_studies.leaderboard.entries import Entry
from fastweights_studies.pages.rendering import joined, list_item, table
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
parameters, and a grid of rates that is widened until the best lies inside. Differences in accuracy from the matched block are
paired by seed, with 95% intervals for the whole table (Holm):
"""
MEANS = "In the matched block {matched}. Changed, {changed}."
FALLING = (
    "In {falling} of {cells} cells the loss was still falling after 8,000 steps: what is lost may be the time that learning "
    "takes, and not what a memory can hold."
)

CLEAREST = """Within one block `{label}` recalls {matched:.2f}, and in the same steps {parts}
([all that was changed](#what-each-part-adds-to-a-rule-in-one-block-so-far)).
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
    """effects: by mixer and block. changed: the cells that have one. matched: by mixer, the mean in the matched block with the
    layout and the size of state of the changed ones."""

    effects: dict[tuple[str, str], Difference]
    changed: list[Entry]
    matched: dict[str, float]


def find_added(boards: Path, measurements: Path) -> Added:
    entries = entries_of("full", boards, measurements)
    effects = block_effects(entries)
    changed = [one for one in entries if (one.label, str(one.rows[0].column["block"])) in effects]
    places = {place_of(one) for one in changed}
    base = [one for one in entries if one.rows[0].column["block"] == MATCHED and place_of(one) in places]
    return Added(effects, changed, {one.label: one.mean for one in base})


def render_added(added: Added) -> str:
    """The section of docs/block.md; "" without results."""
    if not added.effects:
        return ""
    labels, blocks = (list(dict.fromkeys(names)) for names in zip(*added.effects))
    told = [
        f"{SAID[block]} "
        + joined([f"`{one.label}` has {one.mean:.3f}" for one in added.changed if one.column == block])
        for block in blocks
    ]
    points = (
        MEANS.format(
            matched=joined([f"`{label}` has {added.matched[label]:.3f}" for label in labels]), changed="; ".join(told)
        ),
        FALLING.format(falling=sum(one.undertrained for one in added.changed), cells=len(added.changed)),
    )
    said = {"rules": joined([f"`{x}`" for x in labels]), "seeds": max(len(one.values) for one in added.changed)}
    return "\n".join([TEXT.format(**said), table_of_effects(added.effects), "".join(map(list_item, points))])


def describe_clearest(added: Added) -> str:
    """Of the mixer that a part changes most, all parts whose effect is no tie, in a sentence; "" without results."""
    clear = {cell: abs(effect.mean) for cell, effect in added.effects.items() if not effect.tied}
    if not clear:
        return ""
    label, _ = max(clear, key=lambda cell: clear[cell])
    means = {one.column: one.mean for one in added.changed if one.label == label and (label, one.column) in clear}
    parts = joined([f"{means[block]:.2f} {SAID[block]}" for block in sorted(means, key=lambda x: means[x])])
    return CLEAREST.format(label=label, parts=parts, matched=added.matched[label])


def place_of(entry: Entry) -> tuple[str, object, object]:
    column = entry.rows[0].column
    return entry.label, column["task"], column["head_dim"]
