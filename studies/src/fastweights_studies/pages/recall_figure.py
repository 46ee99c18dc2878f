"""Draws docs/images/recall.png, accuracy of recall against the size of the state, from results of heads of several sizes.

LIST is linear:head_dim=4@linear-4,linear:head_dim=8@linear-8 and so on, for linear, deltanet and rls, each with 4, 8 and 16.
The first seed takes both rates, the others the better one: LOW are those of LIST whose better rate is .003, HIGH those with .01.
fastweights recall --mixers LIST --pairs 16 --block published --output runs/recall-states
fastweights recall --mixers LOW --pairs 16 --block published --learning-rates 0.003 --seeds 1,2 --output runs/recall-states-low
fastweights recall --mixers HIGH --pairs 16 --block published --learning-rates 0.01 --seeds 1,2 --output runs/recall-states-high
The results.json of each is studies/results/commands/recall_states.json, recall_states_low.json and recall_states_high.json.
python -m fastweights_studies.pages.recall_figure
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastweights.analysis.plot_style import mixer_styles, plain_axes, save_figure
from fastweights.results import RecallResult, load_results
from fastweights.results.experiment import best_results
from fastweights_studies.measure.environment import digest
from fastweights_studies.places import RESULTS, ROOT

FILES = [RESULTS / "commands" / f"recall_states{part}.json" for part in ("", "_low", "_high")]
PICTURE = ROOT / "docs" / "images" / "recall.png"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A mixer with one size of state: the accuracy of every seed, and whether the loss of one was still falling."""

    state: int
    values: tuple[float, ...]
    undertrained: bool

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def read(files: Sequence[Path]) -> list[RecallResult]:
    return [result for file in files for result in load_results(file)]


def source(files: Sequence[Path]) -> str:
    """A checksum of what the figure shows."""
    return digest([json.loads(file.read_text()) for file in files])


def lines(results: Sequence[RecallResult]) -> dict[str, list[Point]]:
    """By mixer, its sizes from the smallest state on, at the rate that its first seed has chosen; a label is the mixer's name and
    the channels of a head."""
    found: dict[str, list[Point]] = {}
    for label in dict.fromkeys(result.mixer for result in results):
        own = [result for result in results if result.mixer == label]
        first = min(result.run["seed"] for result in own)
        rate = best_results([result for result in own if result.run["seed"] == first])[0].run["learning_rate"]
        chosen = [result for result in own if result.run["learning_rate"] == rate]
        point = Point(
            state=chosen[0].state_size,
            values=tuple(result.counted_value for result in chosen),
            undertrained=any(result.undertrained for result in chosen),
        )
        found.setdefault(label.rpartition("-")[0], []).append(point)
    return {mixer: sorted(points, key=lambda point: point.state) for mixer, points in found.items()}


def draw(files: Sequence[Path] = tuple(FILES), path: Path = PICTURE) -> None:
    from matplotlib.figure import Figure

    results = read(files)
    found = lines(results)
    styles = mixer_styles(found)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for mixer, points in found.items():
        style, places = styles[mixer], [point.state for point in points]
        axes.plot(
            places, [point.mean for point in points], color=style.colour, linestyle=style.line, marker=style.marker, label=mixer
        )  # fmt: skip
        for point in points:
            axes.plot([point.state] * 2, [min(point.values), max(point.values)], color=style.colour, linewidth=1)
        hollow = [point for point in points if point.undertrained]
        axes.plot(
            [point.state for point in hollow], [point.mean for point in hollow], color=style.colour, marker=style.marker,
            markerfacecolor="white", linestyle="none", zorder=3,
        )  # fmt: skip
    axes.axhline(results[0].chance_level, color="#555555", linestyle=(0, (2, 2)), linewidth=1, label="guessing")
    sizes = sorted({point.state for points in found.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("state: numbers per sequence")
    axes.set_ylabel(f"accuracy on {results[0].run['pairs']} pairs")
    plain_axes(axes)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    save_figure(figure, path, source=source(files))


if __name__ == "__main__":
    draw()
    print(f"written to {PICTURE}")
