"""Plots of language models: loss over tokens read, perplexity over context length.

matplotlib (the `viz` extra) is imported when a plot is drawn. Figures are made without pyplot: no window, no global state.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import LanguageResult, LengthPerplexity
from .plot_style import MixerStyle, finish_axes, length_axis, mixer_styles, plain_axes, save_figure, titled_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "PLOT_FILES",
    "draw_perplexities",
    "finish_plot",
    "length_plot",
    "loss_plot",
    "perplexity_plot",
    "save_language_plots",
    "save_perplexity_plot",
    "short_number",
]

PLOT_FILES = ("loss.png", "perplexity.png")


def save_language_plots(results: Sequence[LanguageResult], folder: Path) -> list[Path]:
    """Draw loss.png and, where it was measured, perplexity.png into `folder`, each written atomically; their paths.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a link, or a file that is no plot, is at one of the paths.
    """
    figures = [loss_plot(results)]
    if all(result.perplexities for result in results):
        figures.append(perplexity_plot(results))
    names = PLOT_FILES[: len(figures)]
    for name, figure in zip(names, figures, strict=True):
        save_figure(figure, folder / name, own=(folder / "run.json").exists())  # a folder of `train_language`
    return [folder / name for name in names]


def loss_plot(results: Sequence[LanguageResult]) -> Figure:
    """Training loss (lines) and held-out loss (markers) over the tokens read."""
    figure, axes = _panel("Training loss (lines) and held-out loss (markers)", results)
    styles = mixer_styles(result.label for result in results)
    before: dict[str, int] = {}  # tokens that earlier stages of a model have read
    for result in results:
        style, start = styles[result.label], before.get(result.name, 0)
        look = style.describe_curve(result.label) | {"linewidth": 1, "alpha": 0.7}
        axes.plot(
            [start + read for read in _tokens(result, result.loss_tokens, result.loss_steps)], result.losses, **look
        )
        look = {"color": style.colour, "marker": style.marker, "markersize": 7, "linestyle": "none"}
        read = [start + read for read in _tokens(result, result.held_out_tokens, result.held_out_steps)]
        label = f"{result.label}: {result.held_out_loss:.3f} held out"
        axes.plot(read, result.held_out_losses, label=label, **look)
        before[result.name] = start + result.tokens
    axes.set_xlabel("tokens read")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.xaxis.set_major_formatter(short_number)
    return finish_plot(figure, axes)


def _tokens(result: LanguageResult, tokens: Sequence[int], steps: Sequence[int]) -> Sequence[float]:
    """Those read up to the points of a curve."""
    return tokens or [step * result.tokens / result.steps for step in steps]


def perplexity_plot(results: Sequence[LanguageResult]) -> Figure:
    """Held-out perplexity over context length: of whole texts (solid), and of their last tokens alone (dashed)."""
    figure, axes = _panel("Held-out perplexity by context length", results)
    draw_perplexities(
        axes, {result.label: [LengthPerplexity(**entry) for entry in result.perplexities] for result in results}
    )
    for trained in sorted({result.run["length"] for result in results}):
        axes.axvline(trained, color="#555555", linestyle=(0, (2, 2)), linewidth=1, label=f"trained at {trained:,}")
    return finish_plot(figure, axes, label="the last 256 tokens before the length")


def save_perplexity_plot(models: Mapping[str, Sequence[LengthPerplexity]], path: Path) -> list[Path]:
    """Draw `length_plot` into a PNG file, written atomically; its path.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a link, or a file that is no plot, is at `path`.
    """
    save_figure(length_plot(models), path)
    return [path]


def length_plot(models: Mapping[str, Sequence[LengthPerplexity]]) -> Figure:
    """Two lines per model over the context length (logarithmic): all tokens up to it, and the last ones before it (dashed).

    models: rows of each model by its name; a mixer's name gets the mixer's colour.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    draw_perplexities(axes, models)
    axes.set_title("Perplexity by context length", fontsize=13, fontweight="bold", loc="left")
    return finish_plot(figure, axes, label="the last tokens before the length")


def draw_perplexities(
    axes: Axes, models: Mapping[str, Sequence[LengthPerplexity]], styles: Mapping[str, MixerStyle] | None = None
) -> None:
    """The two lines of each model of `length_plot`. styles: of each; those of `mixer_styles` when None."""
    styles = mixer_styles(models) if styles is None else styles
    for name, rows in models.items():
        style = styles[name]
        lengths = [row.length for row in rows]
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linewidth": 1.2}
        axes.plot(lengths, [row.perplexity for row in rows], label=name, gid=name, **look)
        look |= {"linestyle": "--", "markerfacecolor": "white", "gid": f"{name}, last tokens"}
        axes.plot(lengths, [row.last_perplexity for row in rows], **look)
    length_axis(axes, sorted({row.length for rows in models.values() for row in rows}))
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("perplexity on held-out text")


def _panel(title: str, results: Sequence[LanguageResult]) -> tuple[Figure, Axes]:
    run, parameters = results[0].run, max(result.parameters for result in results)
    described = f"up to {parameters:,} parameters, rows of {run['length']:,} tokens, {results[0].steps:,} steps"
    figure = titled_figure(title, described, (7.5, 4.8))
    return figure, figure.subplots()


def finish_plot(figure: Figure, axes: Axes, label: str = "") -> Figure:
    """Grid lines and a legend. label: what dashed lines mean; the legend then stands beside the plot."""
    from matplotlib.lines import Line2D

    plain_axes(axes)
    look: dict[str, Any] = {"fontsize": 9, "frameon": False}
    if label:
        dashed = Line2D([], [], color="#555555", linestyle="--", label=textwrap.fill(label, 20))
        handles = [*axes.get_legend_handles_labels()[0], dashed]
        figure.legend(handles=handles, loc="outside right upper", labelspacing=0.7, **look)
    else:
        axes.legend(**look)
    finish_axes(figure)
    return figure


def short_number(value: float, position: object = None) -> str:
    """1.5M for 1500000"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
