"""The language models in one block on docs/block.md: losses of the smaller ones, and which rules their seeds tell apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastweights.layers import MIXERS
from fastweights_studies.leaderboard.entries import Entry
from fastweights_studies.leaderboard.matched_language import FOUND
from fastweights_studies.leaderboard.parts import PROXIES
from fastweights_studies.pages.matched_rules import (
    GROWING,
    REFERENCE,
    compare_with_reference,
    find_better,
    list_names,
    mean_and_spread,
)
from fastweights_studies.pages.rendering import describe_runs, list_item, table
from fastweights_studies.paired import Difference, compare_with_one

__all__ = ["LANGUAGE_PART", "find_columns", "render_language"]

LANGUAGE_PART = PROXIES.name

TEXT = """## Language models in one block, so far

Models of {million} million parameters with {rules} rules have read {tokens} million tokens
(`fastweights leaderboard language-proxies --size full`): source code and its documentation, and in {recall:.0%} of the rows
documents that ask for what stands in them. The models have {layers} layers of width {width} in the same block, states of {state}
numbers (softmax attention keeps every token), MLPs whose widths make the parameters equal to within {spread:.1%}, the same rows
in the same order, and the same first weights in all modules of the same name and size. The first seed takes {rates} rates, and
validation text chooses among them; this seed is one of those shown. The table has the loss of test text in nats per token, the
mean and half the range of the seeds (±), in rows of {length:,} tokens as in training, and in texts of {longest:,} tokens, for
which documents are joined.
Differences are paired by seed, and a negative one is better. In each column the comparisons of memories with `linear` are a
family, and those with `softmax` another one; an interval is at the level at which Holm's method decides it in its family:
"""

POINTS = (
    "**Better than linear attention in rows of {length:,} tokens: {better}.** Ties: {tied}. Worse: {worse}.",
    "Softmax attention, compared with each memory there, is better than {ahead}, ties with {even} and is worse than {behind}. In "
    "texts of {longest:,} tokens it is better than {far_ahead}, ties with {far_even} and is worse than {far_behind}.",
    "Over all pairs of rules, as on the leaderboard, fewer differences are significant in rows of {length:,} tokens: {pairs}.",
    "A number that was hidden in {needles} tokens of text was said by {found} of {models} models.",
    "These models have read {each:.1f} tokens per parameter. A larger model or a longer training can come out differently: "
    "`language-matched` has not been run. Nor have these rules: {missing}.",
)


class Columns(NamedTuple):
    """Entries by mixer: of the loss in rows as long as in training, and in the longest texts. Rules whose models diverged, or of
    which not all seeds are measured yet, have none."""

    test: dict[str, Entry]
    longest: dict[str, Entry]


def find_columns(entries: Sequence[Entry]) -> Columns:
    size = PROXIES.size("full")
    ((tokens, budget),) = size.budgets.items()
    common = {"tokens": tokens, "softmax_every": 0}
    titles = (
        PROXIES.name_column({**common, "what": what, "at": at})
        for what, at in (("test", None), ("context", size.contexts[-1]))
    )
    whole = [one for one in entries if {*one.seeds} >= {*budget.seeds}]
    return Columns(*({one.label: one for one in whole if one.column == title} for title in titles))


def render_language(entries: Sequence[Entry]) -> str:
    """The section; "" without results of two rules. entries: of the losses in each column."""
    columns = find_columns(entries)
    entries = [one for one in entries if one.label in columns.test]
    if len(columns.test) < 2:
        return ""
    size = PROXIES.size("full")
    to_linear = [compare_with_reference([*own.values()]) for own in columns]
    to_softmax = [compare_with_one({label: one.by_seed for label, one in own.items()}, GROWING) for own in columns]
    ranked = sorted(columns.test.values(), key=lambda one: one.mean)
    rows = [
        [
            f"`{one.label}`",
            f"{one.learning_rate:g}",
            *(
                text
                for own, *compared in zip(columns, to_linear, to_softmax)
                for text in (
                    mean_and_spread(own[one.label]) if one.label in own else "",
                    *(str(found.get(one.label, "")) for found in compared),
                )
            ),
        ]
        for one in ranked
    ]
    differences = [f"minus `{REFERENCE}`", f"minus `{GROWING}`"]
    length, longest = size.training["length"], size.contexts[-1]
    head = ["rule", "rate", "test text", *differences, f"texts of {longest:,} tokens", *differences]
    states = sorted({one.count("state") for label, one in columns.test.items() if label != GROWING})
    (tokens,), parameters = size.budgets, sorted(one.count("parameters") for one in columns.test.values())
    said = {
        "rules": len(columns.test), "million": round(parameters[0] / 1e6), "tokens": tokens // 10**6,
        "spread": math.ceil(1e3 * (parameters[-1] / parameters[0] - 1)) / 1e3, "recall": size.recall_part,
        "layers": size.model["num_hidden_layers"], "width": size.model["hidden_size"], "rates": len(size.rates),
        "state": " to ".join(dict.fromkeys(f"{one:,}" for one in (states[0], states[-1]))), "length": length, "longest": longest,
    }  # fmt: skip
    better = find_better(ranked, lower=True)
    told = [f"`{label}` is better than {list_names(names)}" for label, names in better.items() if names]
    points = {
        **said, "better": _names(to_linear[0], -1), "tied": _names(to_linear[0], 0), "worse": _names(to_linear[0], 1),
        "ahead": _names(to_softmax[0], 1), "even": _names(to_softmax[0], 0), "behind": _names(to_softmax[0], -1),
        "far_ahead": _names(to_softmax[1], 1), "far_even": _names(to_softmax[1], 0), "far_behind": _names(to_softmax[1], -1),
        "pairs": "; ".join(told) or "none", "needles": " or ".join(f"{one:,}" for one in size.needles),
        "found": len(_models(entries, FOUND, above=0)) or "none", "models": len(_models(entries, "loss")),
        "each": tokens / parameters[0], "missing": _missing(columns.test),
    }  # fmt: skip
    file = f"Rows: [{LANGUAGE_PART}-full.json](../studies/results/leaderboard/{LANGUAGE_PART}-full.json)."
    runs = describe_runs(row for one in columns.test.values() for row in one.rows)
    return "\n".join(
        [
            TEXT.format(**said), table(head, rows), "".join(list_item(point.format(**points)) for point in POINTS),
            f"{file} {runs}\n",
        ]
    )  # fmt: skip


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
    return list_names([label for label in PROXIES.listed([*MIXERS]) if label not in there])
