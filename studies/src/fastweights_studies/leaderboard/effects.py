"""What a part of the block adds to each rule: paired differences from the matched block."""

from __future__ import annotations

from collections.abc import Iterable

from fastweights.layers import BLOCKS

from ..paired import Difference, compare_family
from .entries import Entry

__all__ = ["MATCHED", "block_effects"]

MATCHED = "matched"
Place = tuple[str, object, object]  # label, layout and head size of the reference


def block_effects(entries: Iterable[Entry]) -> dict[tuple[str, str], Difference]:
    """The difference from the matched block of every mixer in every other one, by its label and the block, as one family.

    entries: of recall parts in several blocks. Counted are those of one layout and size of state that the matched block has too,
    with two seeds of both at least.
    """
    found = {(_place(entry), str(entry.rows[0].column["block"])): entry for entry in entries if entry.values}
    pairs = {}
    for (place, block), entry in found.items():
        base = found.get((place, MATCHED))
        if block != MATCHED and base is not None and len(entry.by_seed.keys() & base.by_seed.keys()) > 1:
            pairs[place[0], block] = (entry.by_seed, base.by_seed)
    order = list(BLOCKS)
    return dict(sorted(compare_family(pairs).items(), key=lambda one: order.index(one[0][1])))


def _place(entry: Entry) -> Place:
    column = entry.rows[0].column
    return entry.label, column["task"], column["head_dim"]
