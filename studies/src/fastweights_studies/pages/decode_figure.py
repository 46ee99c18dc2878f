"""The figure of docs/performance.md that shows tokens per second of decoding against the context."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastweights.analysis.plot_style import length_axis, mixer_styles, plain_axes, save_figure
from fastweights_studies.measure.environment import digest
from fastweights_studies.record import Row, select

__all__ = ["draw", "source"]

LABELLED = ("gdn", "kda", "palimpsa-d", "gka", "lattice", "vla")


def source(rows: Sequence[Row]) -> str:
    """A checksum of what the figure shows."""
    shown = [[row.mixer, dict(row.column), row.measure, row.value] for row in rows]
    return digest(json.loads(json.dumps(shown)))


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel per number of sequences: softmax attention, and a line for every memory, which the context does not change."""
    from matplotlib.figure import Figure

    batches = sorted({int(row.column["batch"]) for row in rows})  # type: ignore[arg-type]
    contexts = sorted({int(context) for row in rows if (context := row.column["context"]) is not None})  # type: ignore[arg-type]
    mixers = list(dict.fromkeys(str(row.mixer) for row in rows))
    styles = mixer_styles(mixers)
    figure = Figure(figsize=(3.3 * len(batches), 3.4), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        for mixer in mixers:
            found = select(rows, mixer=mixer, measure="tokens_per_second", column={"batch": batch})
            grows = any(row.column["context"] is not None for row in found)
            places = [row.column["context"] for row in found] if grows else contexts
            speeds = [row.value for row in found] * (1 if grows else len(contexts))
            if not found or not contexts:
                continue
            style = styles[mixer]
            look: dict[str, Any] = {"color": "#cccccc", "linewidth": 0.8, "zorder": 1}
            if grows or mixer in LABELLED:
                look = {"color": style.colour, "linestyle": style.line, "linewidth": 1.6, "zorder": 2, "label": mixer}
            axes.plot(places, speeds, marker=style.marker if grows else None, **look)
        for row in select(rows, measure="fits", column={"batch": batch}):
            axes.annotate(
                "softmax\ndoes not fit",
                (row.column["context"], 0.04),
                xycoords=("data", "axes fraction"),
                ha="right",
                fontsize=7,
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
    save_figure(figure, path, source=source(rows), dpi=120)  # below 100 kB
