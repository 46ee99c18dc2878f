"""Plot of perplexity against context length. matplotlib (the `viz` extra) is imported when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import LengthPerplexity
from .plot_style import finish_axes, length_axis, mixer_styles, plain_axes, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["perplexity_plot", "save_perplexity_plot"]


def save_perplexity_plot(models: Mapping[str, Sequence[LengthPerplexity]], path: Path) -> None:
    """Draw `perplexity_plot` into a PNG file, written atomically.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a link, or a file that is no plot, is at `path`.
    """
    save_figure(perplexity_plot(models), path)


def perplexity_plot(models: Mapping[str, Sequence[LengthPerplexity]]) -> Figure:
    """Two lines per model over the context length (logarithmic): all tokens up to it, and the last ones before it (dashed).

    models: rows of each model by its name; a mixer's name gets the mixer's colour.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = mixer_styles(models)
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
    axes.set_title("Perplexity by context length", fontsize=13, fontweight="bold", loc="left")
    plain_axes(axes)
    meaning = Line2D([], [], color="#555555", linestyle="--", label="the last tokens\nbefore the length")
    handles = [*axes.get_legend_handles_labels()[0], meaning]
    figure.legend(handles=handles, loc="outside right upper", fontsize=9, frameon=False, labelspacing=0.7)
    finish_axes(figure)
    return figure
