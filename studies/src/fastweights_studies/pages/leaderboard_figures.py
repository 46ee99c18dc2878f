"""The figures of docs/leaderboard.md and docs/untrained.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastweights.analysis.plot_style import mixer_styles, plain_axes
from fastweights_studies.leaderboard import PARTS
from fastweights_studies.leaderboard.entries import EXACT, Entry, columns_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELLED = ("linear", "pla", "deltanet", "pdn", "lattice", "longhorn", "vla", "gka", "mesa", "rls")
LEAST = 1e-4  # of a logarithmic axis: smaller distances are drawn there


def draw_parts(parts: Mapping[str, Sequence[Entry]]) -> Figure:
    """A panel per column: every mixer with the mean and the range of its seeds, hollow where it is undertrained."""
    from matplotlib.figure import Figure

    panels = [(part, column) for part, entries in parts.items() for column in columns_of(entries)]
    mixers = list(dict.fromkeys(entry.label for entries in parts.values() for entry in entries))
    styles = mixer_styles(mixers)
    figure = Figure(figsize=(2.9 * max(1, len(panels)) + 1.2, 0.24 * len(mixers) + 1.4), layout="constrained")
    axes_of = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    for axes, (part, column) in zip(axes_of, panels):
        own = {entry.label: entry for entry in parts[part] if entry.column == column and entry.values}
        for place, mixer in enumerate(mixers):
            if mixer not in own:
                continue
            entry, style = own[mixer], styles[mixer]
            axes.plot([min(entry.values), max(entry.values)], [place, place], color=style.colour, linewidth=2)
            axes.plot(
                entry.mean, place, marker=style.marker, color=style.colour, markersize=6,
                markerfacecolor="white" if entry.undertrained else style.colour,
            )  # fmt: skip
        references = {entry.run["chance"] for entry in own.values()}
        references |= {statistics.fmean(exact) for entry in own.values() if (exact := entry.of(EXACT))}
        for reference in references:
            axes.axvline(reference, color="#555555", linestyle=(0, (2, 2)), linewidth=1, zorder=0)
        axes.set_title(f"{part}\n{column}", fontsize=8)
        axes.set_xlabel(f"{PARTS[part].measure} ({PARTS[part].better} is better)", fontsize=8)
        axes.set_yticks(range(len(mixers)), mixers, fontsize=8)
        axes.set_ylim(len(mixers) - 0.5, -0.5)
        plain_axes(axes)
    figure.supxlabel("bars: range of seeds; hollow: undertrained; dashed: guessing, exact regression", fontsize=8)
    return figure


def draw_rules(entries: Sequence[Entry]) -> Figure:
    """A panel per stream: distance from exact least squares by numbers of state, a line per rule."""
    from matplotlib.figure import Figure

    lines: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        lines.setdefault((str(entry.rows[0].column["stream"]), entry.label), []).append(entry)
    streams = list(dict.fromkeys(stream for stream, _ in lines))
    rules = list(dict.fromkeys(rule for _, rule in lines))
    styles = mixer_styles([rule for rule in rules if rule in LABELLED])
    figure = Figure(figsize=(2.1 * max(1, len(streams)) + 0.4, 2.7), layout="constrained")
    axes_of = figure.subplots(1, max(1, len(streams)), squeeze=False, sharey=True)[0]
    for axes, stream in zip(axes_of, streams):
        for rule in rules:
            own = sorted(lines[stream, rule], key=lambda entry: entry.count("state"))
            means = [statistics.fmean(min(x, 9.0) for x in entry.values) for entry in own]
            look: dict[str, Any] = {"color": "#d4d4d4", "linewidth": 0.9, "zorder": 1}
            if rule in styles:
                style = styles[rule]
                look = {
                    "color": style.colour, "linestyle": style.line, "marker": style.marker, "markersize": 3.5, "linewidth": 1.1,
                    "zorder": 2, "label": rule,
                }  # fmt: skip
            axes.plot([entry.count("state") for entry in own], [max(mean, LEAST) for mean in means], **look)
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
