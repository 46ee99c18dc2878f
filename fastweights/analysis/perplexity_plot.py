"""Plot of perplexity against context length. matplotlib (the `viz` extra) is imported when it is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import write_bytes
from ..layers import MIXERS
from .plot_style import mixer_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..evaluation import LengthPerplexity

__all__ = ["perplexity_plot", "save_perplexity_plot"]


def save_perplexity_plot(models: Mapping[str, Sequence[LengthPerplexity]], path: Path) -> None:
    """Draw `perplexity_plot` into a PNG file, written atomically.

    Raises:
        ImportError: matplotlib is not installed.
    """
    buffer = io.BytesIO()
    perplexity_plot(models).savefig(buffer, format="png", dpi=150)
    write_bytes(path, buffer.getvalue())


def perplexity_plot(models: Mapping[str, Sequence[LengthPerplexity]]) -> Figure:
    """Two lines a model over the context length (logarithmic): all tokens up to it, and the last ones before it (dashed).

    models: rows of each model by its name; a mixer's name gets the mixer's colour.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    taken = {mixer_style(name).colour for name in models if name in MIXERS}
    others = (mixer for mixer in MIXERS if mixer_style(mixer).colour not in taken)
    for name, rows in models.items():
        style = mixer_style(name if name in MIXERS else next(others, name))
        lengths = [row.length for row in rows]
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linewidth": 1.2}
        axes.plot(lengths, [row.perplexity for row in rows], label=name, **look)
        axes.plot(lengths, [row.last_perplexity for row in rows], linestyle="--", markerfacecolor="white", **look)
    ticks = sorted({row.length for rows in models.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("perplexity on held-out text")
    axes.set_title("Perplexity by context length", fontsize=13, fontweight="bold", loc="left")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    meaning = Line2D([], [], color="#555555", linestyle="--", label="the last tokens\nbefore the length")
    handles = [*axes.get_legend_handles_labels()[0], meaning]
    figure.legend(handles=handles, loc="outside right upper", fontsize=9, frameon=False, labelspacing=0.7)
    return figure
