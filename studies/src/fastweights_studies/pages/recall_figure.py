"""Draws docs/images/recall.png, accuracy of recall against the size of the state, from results of heads of several sizes.

LIST is linear:head_dim=4@linear-4,linear:head_dim=8@linear-8 and so on, for linear, deltanet and rls, each with 4, 8 and 16:
fastweights recall --mixers LIST --pairs 16 --block published --output runs/recall-states
cp runs/recall-states/results.json studies/results/commands/recall_states.json
python -m fastweights_studies.pages.recall_figure
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from fastweights.analysis.plot_style import mixer_styles, plain_axes, save_figure
from fastweights.results import RecallSummary, load_results, summarize
from fastweights_studies.measure.environment import digest
from fastweights_studies.places import RESULTS, ROOT

RESULTS = RESULTS / "commands" / "recall_states.json"
PICTURE = ROOT / "docs" / "images" / "recall.png"


def lines(results: Path) -> dict[str, list[RecallSummary]]:
    """By mixer, its sizes from the smallest state on; a label is the mixer's name and the channels of a head."""
    found: dict[str, list[RecallSummary]] = {}
    for row in summarize(load_results(results)):
        found.setdefault(row.mixer.rpartition("-")[0], []).append(row)
    return {mixer: sorted(rows, key=lambda row: row.state_size) for mixer, rows in found.items()}


def draw(results: Path = RESULTS, path: Path = PICTURE) -> None:
    from matplotlib.figure import Figure

    found = lines(results)
    styles = mixer_styles(found)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for mixer, rows in found.items():
        style, places = styles[mixer], [row.state_size for row in rows]
        accuracies = [math.nan if row.accuracy is None else row.accuracy for row in rows]
        axes.plot(
            places, accuracies, color=style.colour, linestyle=style.line, marker=style.marker, label=mixer
        )  # fmt: skip
        hollow = [place for place, row in enumerate(rows) if row.undertrained]
        axes.plot(
            [places[place] for place in hollow], [accuracies[place] for place in hollow], color=style.colour,
            marker=style.marker, markerfacecolor="white", linestyle="none", zorder=3,
        )  # fmt: skip
    first = next(iter(found.values()))[0]
    axes.axhline(first.chance, color="#555555", linestyle=(0, (2, 2)), linewidth=1, label="guessing")
    sizes = sorted({row.state_size for rows in found.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("state: numbers per sequence")
    axes.set_ylabel(f"accuracy on {first.pairs} pairs")
    plain_axes(axes)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    save_figure(figure, path, source=digest(json.loads(results.read_text())))


if __name__ == "__main__":
    draw()
    print(f"written to {PICTURE}")
