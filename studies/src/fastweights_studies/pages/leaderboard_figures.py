"""The figures of docs/leaderboard.md and docs/untrained.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastweights.analysis.plot_style import mixer_styles, plain_axes
from fastweights_studies.leaderboard import PARTS
from fastweights_studies.leaderboard.tables import columns_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELLED = ("linear", "pla", "deltanet", "pdn", "lattice", "longhorn", "vla", "gka", "mesa", "rls")
LEAST = 1e-4  # of a logarithmic axis: smaller distances are drawn there


def draw_parts(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """A panel per column: every mixer with the mean and the range of its seeds, hollow where it is undertrained."""
    from matplotlib.figure import Figure

    panels = [(part, column) for part, rows in parts.items() for column in columns_of(rows)]
    mixers = list(dict.fromkeys(row["mixer"] for rows in parts.values() for row in rows))
    styles = mixer_styles(mixers)
    figure = Figure(figsize=(2.9 * max(1, len(panels)) + 1.2, 0.24 * len(mixers) + 1.4), layout="constrained")
    axes_of = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    for axes, (part, column) in zip(axes_of, panels):
        own = {row["mixer"]: row for row in parts[part] if row["column"] == column and row["values"]}
        for place, mixer in enumerate(mixers):
            if mixer not in own:
                continue
            row, style = own[mixer], styles[mixer]
            axes.plot([min(row["values"]), max(row["values"])], [place, place], color=style.colour, linewidth=2)
            axes.plot(
                statistics.fmean(row["values"]), place, marker=style.marker, color=style.colour, markersize=6,
                markerfacecolor="white" if row["undertrained"] else style.colour,
            )  # fmt: skip
        references = [row[name] for row in own.values() for name in ("chance", "exact") if row[name] is not None]
        for reference in set(references):
            axes.axvline(reference, color="#555555", linestyle=(0, (2, 2)), linewidth=1, zorder=0)
        axes.set_title(f"{part}\n{column}", fontsize=8)
        axes.set_xlabel(f"{PARTS[part].measure} ({PARTS[part].better} is better)", fontsize=8)
        axes.set_yticks(range(len(mixers)), mixers, fontsize=8)
        axes.set_ylim(len(mixers) - 0.5, -0.5)
        plain_axes(axes)
    figure.supxlabel("bars: range of seeds; hollow: undertrained; dashed: guessing, exact regression", fontsize=8)
    return figure


def draw_rules(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel per stream: distance from exact least squares by numbers of state, a line per rule."""
    from matplotlib.figure import Figure

    streams = list(dict.fromkeys(row["stream"] for row in rows))
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    styles = mixer_styles([rule for rule in rules if rule in LABELLED])
    figure = Figure(figsize=(2.1 * max(1, len(streams)) + 0.4, 2.7), layout="constrained")
    axes_of = figure.subplots(1, max(1, len(streams)), squeeze=False, sharey=True)[0]
    for axes, stream in zip(axes_of, streams):
        for rule in rules:
            own = sorted(
                (row for row in rows if row["stream"] == stream and row["rule"] == rule), key=lambda row: row["state"]
            )
            means = [statistics.fmean(9.0 if x is None else min(x, 9.0) for x in row["distance"]) for row in own]
            look: dict[str, Any] = {"color": "#d4d4d4", "linewidth": 0.9, "zorder": 1}
            if rule in styles:
                style = styles[rule]
                look = {
                    "color": style.colour, "linestyle": style.line, "marker": style.marker, "markersize": 3.5, "linewidth": 1.1,
                    "zorder": 2, "label": rule,
                }  # fmt: skip
            axes.plot([row["state"] for row in own], [max(mean, LEAST) for mean in means], **look)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(LEAST / 1.5, 2)
        axes.set_title(stream, fontsize=9)
        axes.set_xlabel("numbers of state", fontsize=8)
        axes.tick_params(labelsize=7)
        plain_axes(axes)
    axes_of[0].set_ylabel("distance from exact\nleast squares", fontsize=8)
    handles, labels = axes_of[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7, frameon=False)
    return figure
