"""Plots of a recall experiment: accuracy (or error) against pairs, state size and the place in a sequence; loss curves.

matplotlib (the `viz` extra) is imported when a plot is drawn. Figures are made without pyplot: no window, no global state.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import check_some
from ..kinds import checked
from ..results import RecallResult, RecallSummary, summarize
from ..results.experiment import best_results, describe_experiment
from .naming import find_task, short_unit
from .plot_style import (
    MixerStyle,
    finish_axes,
    log_ticks,
    mixer_styles,
    plain_axes,
    save_figure,
    spread,
    titled_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PLOT_FILES", "loss_curves", "measure_by_pairs", "measure_by_state_size", "measure_by_token", "save_plots"]

_DODGE = 0.02  # mixers at the same place are drawn this fraction apart,
_WIDEST = 0.3  # and all of them together at most about this fraction
_LEGEND_LINE = 0.215  # inches
_GUESS: dict[str, Any] = {
    "color": "#555555",
    "linestyle": (0, (2, 2)),
    "linewidth": 1.0,
    "zorder": 1,
    "gid": "\nchance",
}
_BEST: dict[str, Any] = {**_GUESS, "linestyle": (0, (6, 2)), "gid": "\nbest", "label": "best predictor"}


@checked
def save_plots(results: Sequence[RecallResult], folder: Path) -> list[Path]:
    """Draw all plots into `folder` as PNG files, each written atomically; their paths.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no results; a link, or a file that is no plot, is at one of the paths.
        WriteError: the folder does not exist or cannot be written to.
    """
    check_some("results", results, "result")
    measure = results[0].measure
    plots = {
        f"{measure}-by-pairs.png": measure_by_pairs,
        f"{measure}-by-state-size.png": measure_by_state_size,
        "loss-curves.png": loss_curves,
    }
    if any(result.by_token for result in results):
        plots["by-token.png"] = measure_by_token
    own = (folder / "experiment.json").exists()  # a folder of `run_recall`
    for name, draw in plots.items():
        save_figure(draw(results), folder / name, own=own)
    return [folder / name for name in plots]


def measure_by_pairs(results: Sequence[RecallResult]) -> Figure:
    """One line per mixer: accuracy (or error) at its best learning rate over the number of key-value pairs (logarithmic)."""
    figure, (axes,) = _panels(1, f"{_measure(results)} against the number of {find_task(results).unit}", results)
    rows = summarize(results)
    pairs = sorted({row.pairs for row in rows})
    styles = _styles(results)
    dodge = spread([0] * len(styles), min(_DODGE, _WIDEST / len(styles)))
    for (mixer, style), factor in zip(styles.items(), dodge, strict=True):
        own = sorted((row for row in rows if row.mixer == mixer), key=lambda row: row.pairs)
        x = [row.pairs * factor for row in own]
        axes.plot(x, [_height(row) for row in own], zorder=2, **style.describe_curve(mixer))
        for place, row in zip(x, own, strict=True):
            _draw_point(axes, place, row, style)
    first = [next(row for row in rows if row.pairs == count) for count in pairs]
    _draw_references(axes, pairs, first)
    _scale_logarithmically(axes, pairs, f"{find_task(results).unit} in a sequence (mixers spread)", margin=1.3)
    _label_measure(axes, first)
    return _finish(figure, [axes], results, hollow=any(row.undertrained for row in rows))


def measure_by_state_size(results: Sequence[RecallResult]) -> Figure:
    """One panel for each number of pairs, one point per mixer: accuracy (or error) over the size of its state."""
    rows, styles = summarize(results), _styles(results)
    figure, panels = _panels_by_pairs(f"{_measure(results)} against state size", results)
    for count, axes in panels.items():
        own = [row for row in rows if row.pairs == count]
        sizes = [row.state_size for row in own]
        _scale_logarithmically(
            axes, sorted(set(sizes)), "state size: numbers per sequence\n(equal ones spread)", margin=2.0
        )
        log_ticks(axes, "x")
        low, high = axes.get_xlim()
        for row, factor in zip(own, spread(sizes, (high / low) ** 0.025 - 1), strict=True):
            _draw_point(axes, row.state_size * factor, row, styles[row.mixer])
        _draw_references(axes, axes.get_xlim(), own[:1] * 2)
        _label_measure(axes, own)
    return _finish(figure, [*panels.values()], results, hollow=any(row.undertrained for row in rows))


def loss_curves(results: Sequence[RecallResult]) -> Figure:
    """One panel for each number of pairs: training loss over steps, every seed at the mixer's best learning rate."""
    is_error = results[0].measure == "error"
    figure, panels = _panels_by_pairs("Training loss", results)
    for count, axes in panels.items():
        for mixer, style in _styles(results).items():
            for run in _best_runs(results, mixer, count):
                if points := len(run.losses):
                    look = style.describe_curve(mixer, (points // 10, max(1, points // 5)))
                    axes.plot(run.loss_steps, run.losses, **look)
        chance = next(result.chance_level for result in results if result.run["pairs"] == count)
        # Where the chance depends on the position, its mean does not give the loss of guessing.
        if is_error or (chance < 1 and not find_task(results).by_token):
            axes.axhline(chance if is_error else -math.log(chance), **_GUESS)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("squared error" if is_error else "cross-entropy, nats per query")
        axes.set_yscale("log")
    for axes in panels.values():  # which share the axis
        log_ticks(axes, "y")
    return _finish(figure, [*panels.values()], results, hollow=False)


def measure_by_token(results: Sequence[RecallResult]) -> Figure:
    """One panel for each number of pairs: accuracy over the tokens of a sequence, or error over its examples, one line per
    mixer at its best learning rate (the mean over seeds), and the errors of exact predictors."""
    place = "example" if results[0].measure == "error" else "token"
    figure, panels = _panels_by_pairs(f"{_measure(results)} by {place}", results)
    for count, axes in panels.items():
        exact: dict[str, list[float]] = {}
        for mixer, style in _styles(results).items():
            columns = [run.by_token for run in _best_runs(results, mixer, count) if run.by_token]
            if columns:
                exact = {name: np.mean([column[name] for column in columns], axis=0).tolist() for name in columns[0]}
                x, y = exact.pop(place), exact.pop(results[0].measure)
                axes.plot(x, y, **style.describe_curve(mixer, max(1, len(x) // 12)))
        for name, errors in exact.items():
            axes.plot(x, errors, **_BEST)
            axes.annotate(name, (x[-1], errors[-1]), fontsize=8, ha="right", va="bottom", color=_BEST["color"])
        rows = [row for row in summarize(results) if row.pairs == count]
        axes.axhline(rows[0].chance, **_GUESS)
        axes.set_xlabel(f"{place} in the sequence")
        _label_measure(axes, rows)
    return _finish(figure, [*panels.values()], results, hollow=False)


PLOT_FILES = (
    *(f"{measure}-by-{what}.png" for measure in ("accuracy", "error") for what in ("pairs", "state-size")),
    *("loss-curves.png", "by-token.png"),
)


def _measure(results: Sequence[RecallResult]) -> str:
    return results[0].measure.capitalize()


def _height(row: RecallSummary) -> float:
    """Where a row is drawn: as a model that answers nothing right where all its runs diverged."""
    if row.value is None:
        return row.chance if row.measure == "error" else 0.0
    return row.value


def _draw_references(axes: Axes, places: Sequence[float], rows: Sequence[RecallSummary]) -> None:
    """What guessing has at these places, and for errors what the best predictor has."""
    axes.plot(places, [row.chance for row in rows], **_GUESS)
    bests = [row.best_error for row in rows if row.best_error is not None]
    if len(bests) == len(places):
        axes.plot(places, bests, **_BEST)


def _styles(results: Sequence[RecallResult]) -> dict[str, MixerStyle]:
    return mixer_styles(result.mixer for result in results)


def _best_runs(results: Sequence[RecallResult], mixer: str, pairs: int) -> list[RecallResult]:
    """The runs of a mixer at its best learning rate; none where it has no run with this number of pairs."""
    own = [result for result in results if result.mixer == mixer and result.run["pairs"] == pairs]
    return best_results(own) if own else []


def _panels(count: int, title: str, results: Sequence[RecallResult]) -> tuple[Figure, list[Axes]]:
    columns = count if count <= 3 else math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    figure = titled_figure(title, describe_experiment(results), (max(7.5, 4.2 * columns + 1.6), 3.7 * rows + 1.1))
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten().tolist()
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _panels_by_pairs(title: str, results: Sequence[RecallResult]) -> tuple[Figure, dict[int, Axes]]:
    """A panel for each number of pairs."""
    pairs = sorted({result.run["pairs"] for result in results})
    figure, panels = _panels(len(pairs), title, results)
    for axes, count in zip(panels, pairs, strict=True):
        axes.set_title(f"{count} {short_unit(results)}", fontsize=10)
    return figure, dict(zip(pairs, panels, strict=True))


def _draw_point(axes: Axes, x: float, row: RecallSummary, style: MixerStyle) -> None:
    axes.errorbar(
        x,
        _height(row),
        yerr=row.value_std,
        color=style.colour,
        marker=style.marker,
        markersize=8,
        markerfacecolor="white" if row.undertrained else style.colour,
        markeredgecolor=style.colour if row.undertrained else "white",
        markeredgewidth=1.4 if row.undertrained else 0.6,
        capsize=3,
        zorder=3,
        gid=row.mixer,
    )


def _label_measure(axes: Axes, rows: Sequence[RecallSummary]) -> None:
    is_error = rows[0].measure == "error"
    axes.set_ylabel(f"{'squared error' if is_error else 'accuracy'} on held-out sequences")
    highest = max([1.0, *(_height(row) + (row.value_std or 0.0) for row in rows), *(row.chance for row in rows)])
    axes.set_ylim(-0.03, 1.05 * highest)


def _scale_logarithmically(axes: Axes, values: Sequence[int], label: str, *, margin: float) -> None:
    """A logarithmic x axis over `values` (ascending), with a tick at each."""
    axes.set_xscale("log")
    axes.set_xlim(values[0] / margin, values[-1] * margin)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(label)


def _finish(figure: Figure, panels: Sequence[Axes], results: Sequence[RecallResult], *, hollow: bool) -> Figure:
    """Grid lines, and one legend for what the panels show."""
    from matplotlib.lines import Line2D

    for axes in panels:
        place = axes.get_subplotspec()
        if place is not None and not place.is_first_col():
            axes.set_ylabel("")
        plain_axes(axes)
    drawn = {line.get_gid() for axes in panels for line in axes.get_lines()}
    curves = {line.get_gid() for axes in panels for line in axes.get_lines() if np.size(line.get_xdata()) > 1}
    entries = []
    for mixer, style in _styles(results).items():
        if mixer in drawn:
            look = style.describe_curve(mixer, ()) | {"markersize": 7, "linewidth": 1.2 * (mixer in curves)}
            entries.append(Line2D([], [], label=mixer, **look))
    if hollow:
        label = "hollow: loss still\nfalling, or too\nshort to tell"
        entries.append(Line2D([], [], color="#555555", marker="o", markerfacecolor="white", linewidth=0, label=label))
    if "\nchance" in drawn:
        entries.append(Line2D([], [], label=textwrap.fill(find_task(results).guess, 16), **_GUESS))
    if "\nbest" in drawn:
        entries.append(Line2D([], [], **_BEST))
    lines = sum(1 + str(entry.get_label()).count("\n") for entry in entries)
    columns = math.ceil(_LEGEND_LINE * lines / (figure.get_figheight() - 0.2))
    figure.set_figwidth(figure.get_figwidth() + 2.1 * (columns - 1))
    look = {"fontsize": 9, "frameon": False, "labelspacing": 0.7, "handlelength": 3.2}
    figure.legend(ncols=columns, handles=entries, loc="outside right upper", **look)
    finish_axes(figure)
    return figure
