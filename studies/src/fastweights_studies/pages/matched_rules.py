"""The rules in one block on docs/block.md: accuracies of the recall part, and which of them its seeds tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fastweights_studies.leaderboard import PARTS, SIZES
from fastweights_studies.leaderboard.entries import Entry
from fastweights_studies.leaderboard.part import BoardPart
from fastweights_studies.leaderboard.standing import compare_entries, visible_difference
from fastweights_studies.pages.rendering import describe_runs, joined, list_item, table
from fastweights_studies.paired import Difference, compare_with_one

GROWING, REFERENCE = "softmax", "linear"  # keeps every token; the memory without a correction and a decay

TEXT = """## The rules in one block, so far

{done} of the {declared} columns of `fastweights leaderboard recall --size full` have been trained: {rules} rules with the same
convolutions, no output gate, no skip connection, the same first windows, and states and parameters of equal size. Pairs from 16
to 256 take turns for 8,000 steps. The first seed takes all rates of a grid that is widened until the best lies inside, and
validation sequences choose among them; this seed is one of those shown. In *mqar-shuffled* the queries of a sequence come in
random order. A rule has two heads of so many channels, or as many as its state allows. The table has the mean accuracy over the
numbers of pairs on test sequences and half the range of {seeds} seeds (±), and the rules that each is better than: the interval
of the paired differences leaves out zero, with Holm's correction over all comparisons of the column. Guessing has {chance:.3f}.
"""

FILE = "Every number of pairs and every seed: [recall-full.json](../studies/results/leaderboard/recall-full.json)."


def find_better(entries: Sequence[Entry], *, lower: bool = False) -> dict[str, list[str]]:
    """By mixer, those that it is better than. lower: whether lower values are better."""
    found: dict[str, list[str]] = {entry.label: [] for entry in entries}
    for (one, other), difference in compare_entries(entries).items():
        if not difference.tied:
            better, worse = (one, other) if (difference.mean > 0) != lower else (other, one)
            found[entries[better].label].append(entries[worse].label)
    return found


def list_names(names: Sequence[str]) -> str:
    return joined([f"`{name}`" for name in names]) or "none"


def mean_and_spread(entry: Entry) -> str:
    """The mean, and half the range of the seeds where there are several."""
    spread = f" ±{(max(entry.values) - min(entry.values)) / 2:.3f}" if len(entry.values) > 1 else " (one seed)"
    return f"{entry.mean:.3f}{spread}"


def compare_with_reference(entries: Sequence[Entry]) -> dict[str, Difference]:
    """How far each memory of a column is above linear attention. One statement is made of these comparisons, so they are a
    family; {} without linear attention."""
    return compare_with_one({one.label: one.by_seed for one in entries if one.label != GROWING}, REFERENCE)


def readings(better: dict[str, dict[str, list[str]]], entries: dict[str, list[Entry]]) -> list[str]:
    """What the table says, by title of its columns."""
    memories = {title: [one.label for one in own if one.label != GROWING] for title, own in entries.items()}
    of_softmax = [f"{len(better[title][GROWING])} of {len(memories[title])} ({title})" for title in better]
    beside = {title: compare_with_reference(own) for title, own in entries.items()}
    above = sorted({label for found in beside.values() for label, one in found.items() if one.sign > 0})
    below = [
        f"{list_names([label for label, one in found.items() if one.sign < 0])} ({title})"
        for title, found in beside.items()
    ]
    cells = [one for own in entries.values() for one in own]
    visible = [f"{visible_difference(own) or 0:.2f}" for own in entries.values()]
    return [
        f"Softmax attention, which keeps every token, is better than {joined(of_softmax)} of the memories.",
        f"**Memories of constant size that are better than linear attention: {list_names(above)}.** Compared with it alone, with "
        f"Holm's correction over these comparisons of a column, it is better than {', and than '.join(below)}. Nothing has to be "
        "forgotten in this task, which favours rules without a decay; whether that is the reason was not tested.",
        f"Most pairs of memories are ties. Half of the comparisons could only have shown differences above "
        f"{joined(visible)}: the seeds of a rule lie far apart.",
        f"In {sum(one.undertrained for one in cells)} of {len(cells)} cells the loss was still falling at the end: the table "
        "says what is learnt in these steps, and not what a memory can hold.",
    ]


def render_rules(entries: Sequence[Entry]) -> str:
    """The section; "" without results. entries: of the accuracy in each column."""
    by_column: dict[str, list[Entry]] = {}
    for entry in entries:
        by_column.setdefault(entry.column, []).append(entry)
    if not by_column:
        return ""
    better = {title: find_better(own) for title, own in by_column.items()}
    cells = {(entry.column, entry.label): entry for entry in entries}
    labels = list(dict.fromkeys(entry.label for entry in entries))

    def mean(label: str) -> float:
        return fmean(cells[title, label].mean for title in by_column if (title, label) in cells)

    rows = [
        [f"`{label}`", *(text for title in by_column for text in _cell(cells.get((title, label)), better[title]))]
        for label in sorted(labels, key=mean, reverse=True)
    ]
    head = ["rule", *(text for title in by_column for text in (title, "better than"))]
    said = {
        "done": len(by_column), "declared": len(SIZES["full"].task("recall").columns), "rules": len(labels),
        "seeds": max(len(entry.values) for entry in entries), "chance": entries[0].run["chance"],
    }  # fmt: skip
    points = "".join(list_item(point) for point in readings(better, by_column))
    runs = describe_runs(row for entry in entries for row in entry.rows)
    return "\n".join([TEXT.format(**said), table(head, rows), points, f"{FILE} {runs}\n"])


def list_missing(entries: Sequence[Entry]) -> str:
    """The declared columns without results, as the end of a sentence."""
    there = {entry.column for entry in entries}
    part = PARTS["recall"]
    assert isinstance(part, BoardPart)
    titles = [part.name_column(column.parameters) for column in part.setting("full")]
    return "; ".join(title for title in titles if title not in there) or "none"


def _cell(entry: Entry | None, better: dict[str, list[str]]) -> list[str]:
    if entry is None:
        return ["", ""]
    worse = better[entry.label]
    others = len(better) - 1
    return [
        mean_and_spread(entry),
        "all" if len(worse) == others else ", ".join(f"`{name}`" for name in worse),
    ]
