"""The language models in one block on docs/block.md: losses of the smaller ones, and which rules their seeds tell apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fastweights.layers import MIXERS
from fastweights_studies.leaderboard import PARTS, SIZES
from fastweights_studies.leaderboard.entries import Entry
from fastweights_studies.leaderboard.matched_language import FOUND, MatchedLanguagePart
from fastweights_studies.pages.matched_rules import GROWING, REFERENCE, list_names
from fastweights_studies.pages.rendering import describe_runs, list_item, table
from fastweights_studies.paired import Difference, compare_family

__all__ = ["LANGUAGE_PART", "behind", "entries_by_column", "render_language"]

LANGUAGE_PART = "language-proxies"
TEST, LONGEST = "30M: test text", "30M: context 65536"
SHOWN = {TEST: "test text", LONGEST: "contexts of 65,536 tokens"}

TEXT = """## Language models in one block, so far

Models of {million} million parameters with {rules} rules have read {tokens} million tokens of source code
(`fastweights leaderboard language-proxies --size full`). They have {layers} layers of width {width} in the same block, states of
equal size (softmax attention keeps every token), the same rows in the same order, and the same first weights in what they share.
The first seed takes four rates, and validation text chooses among them; this seed is one of those shown. The table has the loss
of test text in nats per token, the mean and half the range of {seeds} seeds (±), and how far it is above that with `{reference}`.
Differences are paired by seed. Each interval is at the level at which Holm's method decides it over its column:
"""

POINTS = (
    "**Better than linear attention on test text: {better}.** A tie with it: {tied}. Worse: {worse}.",
    "Softmax attention, which keeps every token, is better than {ahead} on rows as long as in training ({length:,} tokens), "
    "compared with each memory. In contexts of 65,536 tokens it is better than {far_ahead}, and worse than {far_behind}.",
    "A number that was hidden in 2,048 or 8,192 tokens of text was said by {found} of {models} models.",
    "These models have read about one token per parameter. A larger model or a longer training can come out differently: "
    "`language-matched`, with 98 million parameters, has not been run. Nor have these rules, with the smaller ones: {missing}.",
)


def entries_by_column(entries: Sequence[Entry]) -> dict[str, dict[str, Entry]]:
    """Those of the columns that the page shows, by column and mixer."""
    return {title: {one.label: one for one in entries if one.column == title} for title in SHOWN}


def behind(entries: Mapping[str, Entry], reference: str) -> dict[str, Difference]:
    """How far the loss of each other mixer of a column is above that of one, as one family; {} without the one."""
    values = {label: one.by_seed for label, one in entries.items()}
    given = values.pop(reference, {})
    return compare_family({label: (own, given) for label, own in values.items() if len(own.keys() & given.keys()) > 1})


def render_language(entries: Sequence[Entry]) -> str:
    """The section; "" without results. entries: of the losses in each column."""
    by_column = entries_by_column(entries)
    if not by_column[TEST]:
        return ""
    size = SIZES["full"].matched_language[LANGUAGE_PART]
    beside = {title: behind(own, REFERENCE) for title, own in by_column.items()}
    of_softmax = {title: behind(own, GROWING) for title, own in by_column.items()}
    first = next(iter(by_column[TEST].values()))
    ((tokens, budget),) = size.budgets.items()
    rows = [
        [
            f"`{label}`",
            f"{by_column[TEST][label].learning_rate:g}",
            *(text for title in SHOWN for text in _cells(by_column[title].get(label), beside[title].get(label))),
        ]
        for label in sorted(by_column[TEST], key=lambda label: by_column[TEST][label].mean)
    ]
    head = ["rule", "rate", *(text for name in SHOWN.values() for text in (name, f"above `{REFERENCE}`"))]
    said = {
        "rules": len(by_column[TEST]), "million": round(first.count("parameters") / 1e6), "tokens": tokens // 10**6,
        "layers": size.model["num_hidden_layers"], "width": size.model["hidden_size"], "seeds": len(budget.seeds),
        "reference": REFERENCE,
    }  # fmt: skip
    points = {
        "better": _names(beside[TEST], -1), "tied": _names(beside[TEST], 0),
        "worse": _names(beside[TEST], 1), "length": size.training["length"],
        "ahead": _names(of_softmax[TEST], 1), "far_ahead": _names(of_softmax[LONGEST], 1),
        "far_behind": _names(of_softmax[LONGEST], -1), "missing": _missing(by_column[TEST]),
        "found": len(_models(entries, FOUND, above=0)) or "none", "models": len(_models(entries, "loss")),
    }  # fmt: skip
    file = f"Rows: [{LANGUAGE_PART}-full.json](../studies/results/leaderboard/{LANGUAGE_PART}-full.json)."
    runs = describe_runs(row for one in by_column[TEST].values() for row in one.rows)
    return "\n".join(
        [
            TEXT.format(**said), table(head, rows), "".join(list_item(point.format(**points)) for point in POINTS),
            f"{file} {runs}\n",
        ]
    )  # fmt: skip


def _cells(entry: Entry | None, difference: Difference | None) -> list[str]:
    """The loss with the spread of its seeds, and the difference from the reference."""
    if entry is None:
        return ["", ""]
    spread = (max(entry.values) - min(entry.values)) / 2
    return [f"{entry.mean:.3f} ±{spread:.3f}", "" if difference is None else str(difference)]


def _names(found: Mapping[str, Difference], sign: int) -> str:
    return list_names([label for label, one in found.items() if one.sign == sign])


def _models(entries: Sequence[Entry], measure: str, above: float = -math.inf) -> set[tuple[str, int | None]]:
    """Label and seed of the models with a number above this one, of a measure in any column."""
    return {
        (entry.label, row.seed)
        for entry in entries
        for row in entry.rows
        if row.measure == measure and row.value is not None and row.value > above
    }


def _missing(there: Mapping[str, Entry]) -> str:
    part = PARTS[LANGUAGE_PART]
    assert isinstance(part, MatchedLanguagePart)
    return list_names([label for label in part.listed([*MIXERS]) if label not in there])
