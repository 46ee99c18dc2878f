"""Draws docs/images/recall.png, accuracy of recall against the size of the state, from the recall part of the leaderboard.

fastweights leaderboard recall --size full --device cuda --output studies/results/leaderboard
python -m fastweights_studies.pages recall_figure
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fastweights.analysis.plot_style import mixer_styles, plain_axes, save_figure
from fastweights_studies.leaderboard.entries import Entry
from fastweights_studies.measure.environment import digest
from fastweights_studies.pages.evidence import full_entries
from fastweights_studies.places import RESULTS, ROOT

PICTURE = ROOT / "docs" / "images" / "recall.png"
TASK = "mqar-shuffled"


def read(results: Path = RESULTS) -> list[Entry]:
    """The cells of the columns with shuffled queries, one per rule and size of state."""
    entries = full_entries("recall", results)
    return [entry for entry in entries if entry.values and entry.rows[0].column["task"] == TASK]


def source(entries: Sequence[Entry]) -> str:
    """A checksum of what the figure shows."""
    return digest([[entry.label, entry.count("state"), *entry.values] for entry in entries])


def lines(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """By rule, its cells from the smallest state on; the rule with the highest mean over them first."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.count("state")):
        found.setdefault(entry.label, []).append(entry)
    return dict(sorted(found.items(), key=lambda one: -sum(entry.mean for entry in one[1]) / len(one[1])))


def draw(results: Path = RESULTS, path: Path = PICTURE) -> None:
    from matplotlib.figure import Figure

    entries = read(results)
    found = lines(entries)
    growing = {label for label, own in found.items() if own[0].run["grows"]}
    styles = mixer_styles(found)
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    sizes = sorted({entry.count("state") for label in found.keys() - growing for entry in found[label]})
    for label, own in found.items():
        if label in growing:  # its state depends on the length: it has the accuracy of its best heads at any state
            axes.axhline(
                max(entry.mean for entry in own), color="#555555", linewidth=1, label=f"{label} (keeps every token)"
            )
            continue
        style, places = styles[label], [entry.count("state") for entry in own]
        axes.plot(
            places, [entry.mean for entry in own], color=style.colour, linestyle=style.line, marker=style.marker, label=label,
            linewidth=1.3, markersize=4.5,
        )  # fmt: skip
        dots = [(place, value) for place, entry in zip(places, own) for value in entry.values]
        axes.plot(*zip(*dots), color=style.colour, marker=".", markersize=3, linestyle="none", alpha=0.45)
    chance = entries[0].run["chance"]
    assert isinstance(chance, float)
    axes.axhline(chance, color="#555555", linestyle=(0, (2, 2)), linewidth=1, label="guessing")
    axes.set_xscale("log", base=2)
    ticks = sorted({2 ** round(math.log2(size)) for size in sizes})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("state: numbers per sequence, both layers")
    axes.set_ylabel("accuracy, mean over 16 to 256 pairs")
    plain_axes(axes)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    save_figure(figure, path, source=source(entries), dpi=110)


if __name__ == "__main__":
    draw()
    print(f"written to {PICTURE}")
