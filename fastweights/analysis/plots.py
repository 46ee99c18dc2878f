"""Plots of a recall experiment: accuracy against pairs, accuracy against state size, loss curves.

matplotlib (the `viz` extra) is imported when a plot is drawn. Figures are made without pyplot: no window, no global state.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import RecallResult, RecallSummary, summarize
from ..results.experiment import best_results, describe_experiment
from .naming import short_unit, task_of
from .plot_style import MixerStyle, mixer_styles, plain_axes, save_figure, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PLOT_FILES", "accuracy_by_pairs", "accuracy_by_state_size", "loss_curves", "save_plots"]

_DODGE = 0.02  # mixers at the same place are drawn this fraction apart
_GUESS: dict[str, Any] = {
    "color": "#555555",
    "linestyle": (0, (2, 2)),
    "linewidth": 1.0,
    "zorder": 1,
}


def save_plots(results: Sequence[RecallResult], folder: Path) -> list[Path]:
    """Draw all plots into `folder` as PNG files, each written atomically; their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    for name, draw in _PLOTS.items():
        save_figure(draw(results), folder / name)
    return [folder / name for name in _PLOTS]


def accuracy_by_pairs(results: Sequence[RecallResult]) -> Figure:
    """One line per mixer: accuracy at its best learning rate over the number of key-value pairs (logarithmic)."""
    figure, (axes,) = _panels(1, f"Accuracy against the number of {task_of(results).unit}", results)
    rows = summarize(results)
    pairs = sorted({row.pairs for row in rows})
    mixers = list(dict.fromkeys(row.mixer for row in rows))
    styles = mixer_styles(mixers)
    dodge = dict(zip(mixers, spread([0] * len(mixers), _DODGE), strict=True))
    for mixer in mixers:
        own = sorted((row for row in rows if row.mixer == mixer), key=lambda row: row.pairs)
        x = [row.pairs * dodge[mixer] for row in own]
        axes.plot(x, [row.accuracy or 0.0 for row in own], color=styles[mixer].colour, linewidth=1.2, zorder=2)
        for place, row in zip(x, own, strict=True):
            _draw_point(axes, place, row, styles[mixer])
    axes.plot(pairs, [next(row.chance for row in rows if row.pairs == count) for count in pairs], **_GUESS)
    _logarithmic(axes, pairs, f"{task_of(results).unit} in a sequence (mixers spread)", margin=1.3)
    _accuracy_axis(axes)
    return _finished(figure, [axes], mixers, results, hollow=any(row.undertrained for row in rows))


def accuracy_by_state_size(results: Sequence[RecallResult]) -> Figure:
    """One panel for each number of pairs, one point per mixer: accuracy over the size of its state."""
    rows = summarize(results)
    pairs = sorted({row.pairs for row in rows})
    mixers = list(dict.fromkeys(row.mixer for row in rows))
    styles = mixer_styles(mixers)
    figure, panels = _panels(len(pairs), "Accuracy against state size", results)
    for axes, count in zip(panels, pairs, strict=True):
        own = [row for row in rows if row.pairs == count]
        sizes = [row.state_size for row in own]
        _logarithmic(axes, sorted(set(sizes)), "state size: numbers per sequence (equal ones spread)", margin=2.0)
        low, high = axes.get_xlim()
        for row, factor in zip(own, spread(sizes, (high / low) ** 0.025 - 1), strict=True):
            _draw_point(axes, row.state_size * factor, row, styles[row.mixer])
        axes.axhline(own[0].chance, **_GUESS)
        axes.set_title(f"{count} {short_unit(results)}", fontsize=10)
        _accuracy_axis(axes)
    return _finished(figure, panels, mixers, results, hollow=any(row.undertrained for row in rows))


def loss_curves(results: Sequence[RecallResult]) -> Figure:
    """One panel for each number of pairs: training loss over steps, every seed at the mixer's best learning rate."""
    from matplotlib.ticker import LogLocator, NullLocator

    pairs = sorted({result.run["pairs"] for result in results})
    mixers = list(dict.fromkeys(result.mixer for result in results))
    styles = mixer_styles(mixers)
    figure, panels = _panels(len(pairs), "Training loss", results)
    for axes, count in zip(panels, pairs, strict=True):
        for mixer in mixers:
            own = [result for result in results if result.mixer == mixer and result.run["pairs"] == count]
            style = styles[mixer]
            for result in best_results(own) if own else []:
                axes.plot(
                    result.loss_steps,
                    result.losses,
                    color=style.colour,
                    linewidth=1.2,
                    marker=style.marker,
                    markersize=4.5,
                    markevery=(len(result.losses) // 10, max(1, len(result.losses) // 5)),
                )
        chance = next(result.chance_level for result in results if result.run["pairs"] == count)
        if chance < 1:
            axes.axhline(-math.log(chance), **_GUESS)
        axes.set_title(f"{count} {short_unit(results)}", fontsize=10)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("cross-entropy, nats per query")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    return _finished(figure, panels, mixers, results, hollow=False)


_PLOTS = {
    "accuracy-by-pairs.png": accuracy_by_pairs,
    "accuracy-by-state-size.png": accuracy_by_state_size,
    "loss-curves.png": loss_curves,
}
PLOT_FILES = tuple(_PLOTS)


def _panels(count: int, title: str, results: Sequence[RecallResult]) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = count if count <= 3 else math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(7.5, 4.2 * columns + 1.6), 3.7 * rows + 1.1), layout="constrained")
    figure.suptitle(f"{title}\n", fontsize=13, fontweight="bold", x=0.01, ha="left", linespacing=1.7)
    figure.text(0.01, 1 - 0.4 / figure.get_figheight(), describe_experiment(results), fontsize=8.5, va="top")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten().tolist()
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _draw_point(axes: Axes, x: float, row: RecallSummary, style: MixerStyle) -> None:
    axes.errorbar(
        x,
        row.accuracy or 0.0,
        yerr=row.accuracy_std,
        color=style.colour,
        marker=style.marker,
        markersize=8,
        markerfacecolor="white" if row.undertrained else style.colour,
        markeredgecolor=style.colour if row.undertrained else "white",
        markeredgewidth=1.4 if row.undertrained else 0.6,
        capsize=3,
        zorder=3,
    )


def _accuracy_axis(axes: Axes) -> None:
    axes.set_ylabel("accuracy on held-out sequences")
    axes.set_ylim(-0.03, 1.05)


def _logarithmic(axes: Axes, values: Sequence[int], label: str, *, margin: float) -> None:
    """A logarithmic x axis over `values` (ascending), with a tick at each that is not too close to the one before."""
    axes.set_xscale("log")
    low, high = values[0] / margin, values[-1] * margin
    axes.set_xlim(low, high)
    ticks: list[int] = []
    for value in values:
        if not ticks or math.log(value / ticks[-1]) > 0.1 * math.log(high / low):
            ticks.append(value)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(label)


def _finished(
    figure: Figure, panels: Sequence[Axes], mixers: Sequence[str], results: Sequence[RecallResult], *, hollow: bool
) -> Figure:
    """Grid lines, and one legend for all panels."""
    from matplotlib.lines import Line2D

    for axes in panels:
        place = axes.get_subplotspec()
        if place is not None and not place.is_first_col():
            axes.set_ylabel("")
        plain_axes(axes)
    entries = [
        Line2D([], [], color=style.colour, marker=style.marker, markersize=7, linewidth=1.2, label=mixer)
        for mixer, style in mixer_styles(mixers).items()
    ]
    if hollow:
        label = "hollow: loss\nstill falling"
        entries.append(Line2D([], [], color="#555555", marker="o", markerfacecolor="white", linewidth=0, label=label))
    entries.append(Line2D([], [], label=textwrap.fill(task_of(results).guess, 16), **_GUESS))
    figure.legend(handles=entries, loc="outside right upper", fontsize=9, frameon=False, labelspacing=0.7)
    return figure
