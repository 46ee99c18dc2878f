"""The figure of docs/performance.md that shows tokens per second of decoding against the context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastweights.analysis.plot_style import length_axis, mixer_styles, plain_axes, save_figure
from fastweights_studies.measure.environment import digest

LABELLED = ("gdn", "kda", "palimpsa-d", "gka", "lattice", "vla")


def draw(content: Mapping[str, Any], path: Path) -> None:
    """A panel per number of sequences: softmax attention, and a line for every memory, which the context does not change."""
    from matplotlib.figure import Figure

    rows = list(content["rows"].values())
    batches = sorted({row["batch"] for row in rows})
    contexts = sorted({row["context"] for row in rows if row["context"] is not None})
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    styles = mixer_styles(mixers)
    figure = Figure(figsize=(3.3 * len(batches), 3.4), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        for mixer in mixers:
            found = [row for row in rows if row["mixer"] == mixer and row["batch"] == batch and "tokens/s" in row]
            grows = any(row["context"] is not None for row in found)
            places = [row["context"] for row in found] if grows else contexts
            speeds = [row["tokens/s"] for row in found] * (1 if grows else len(contexts))
            if not found or not contexts:
                continue
            style = styles[mixer]
            look: dict[str, Any] = {"color": "#cccccc", "linewidth": 0.8, "zorder": 1}
            if grows or mixer in LABELLED:
                look = {"color": style.colour, "linestyle": style.line, "linewidth": 1.6, "zorder": 2, "label": mixer}
            axes.plot(places, speeds, marker=style.marker if grows else None, **look)
        refused = [row["context"] for row in rows if row["batch"] == batch and "refused" in row]
        for context in refused:
            axes.annotate(
                "softmax\ndoes not fit", (context, 0.04), xycoords=("data", "axes fraction"), ha="right", fontsize=7
            )
        length_axis(axes, contexts)
        axes.set_yscale("log")
        axes.set_title(f"{batch} sequence{'s' if batch > 1 else ''}", fontsize=10)
        axes.set_xlabel("tokens of context")
        plain_axes(axes)
    panels[0].set_ylabel("tokens per second")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    save_figure(figure, path, source=digest(content), dpi=130)  # below 100 kB
