"""Plots of trained language models: loss over tokens read, held-out perplexity over context length.

matplotlib (the `viz` extra) is imported when a plot is drawn. Figures are made without pyplot: no window, no global state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..results import LanguageResult
from .plot_style import finish_axes, length_axis, mixer_styles, plain_axes, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PLOT_FILES", "loss_plot", "perplexity_plot", "save_language_plots"]

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
    styles = mixer_styles(result.name for result in results)
    for result in results:
        style, tokens = styles[result.name], result.tokens / result.steps
        axes.plot(
            [s * tokens for s in result.loss_steps],
            result.losses,
            color=style.colour,
            linestyle=style.line,
            linewidth=1,
            alpha=0.7,
            gid=result.name,
        )
        axes.plot(
            [s * tokens for s in result.held_out_steps],
            result.held_out_losses,
            color=style.colour,
            marker=style.marker,
            markersize=7,
            linestyle="none",
            label=f"{result.name}: {result.held_out_loss:.3f} held out",
        )
    axes.set_xlabel("tokens read")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.xaxis.set_major_formatter(_short_number)
    return _finished(figure, axes)


def perplexity_plot(results: Sequence[LanguageResult]) -> Figure:
    """Held-out perplexity over context length: of whole texts (solid), and of their last tokens alone (dashed)."""
    figure, axes = _panel("Held-out perplexity by context length", results)
    styles = mixer_styles(result.name for result in results)
    for result in results:
        style = styles[result.name]
        lengths = [entry["length"] for entry in result.perplexities]
        for key, line, label in (("loss", "-", result.name), ("last_loss", "--", f"{result.name}, last 256 tokens")):
            values = [math.exp(entry[key]) for entry in result.perplexities]
            axes.plot(
                lengths, values, line, color=style.colour, marker=style.marker, markersize=6, label=label, gid=label
            )
    length_axis(axes, sorted({entry["length"] for result in results for entry in result.perplexities}))
    trained = results[0].run["length"]
    axes.axvline(trained, color="#555555", linestyle=(0, (2, 2)), linewidth=1, label=f"trained at {trained:,}")
    axes.set_xlabel("tokens of context and prediction")
    axes.set_ylabel("perplexity per token")
    return _finished(figure, axes)


def _panel(title: str, results: Sequence[LanguageResult]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    run, parameters = results[0].run, max(result.parameters for result in results)
    figure.suptitle(f"{title}\n", fontsize=13, fontweight="bold", x=0.01, ha="left", linespacing=1.7)
    described = f"up to {parameters:,} parameters, rows of {run['length']:,} tokens, {results[0].steps:,} steps"
    figure.text(0.01, 1 - 0.4 / figure.get_figheight(), described, fontsize=8.5, va="top")
    return figure, figure.subplots()


def _finished(figure: Figure, axes: Axes) -> Figure:
    plain_axes(axes)
    axes.legend(fontsize=9, frameon=False)
    finish_axes(figure)
    return figure


def _short_number(value: float, position: object = None) -> str:
    """1.5M for 1500000"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
