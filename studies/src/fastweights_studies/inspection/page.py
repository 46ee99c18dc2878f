"""An inspection as files: arrays, one PNG per measure, and one HTML page that holds everything it shows."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastweights.analysis.plot_style import log_ticks, plain_axes
from fastweights.checks import check_unicode
from fastweights.files import Own, is_own, staged_folder, write_bytes, write_json
from fastweights.kinds import checked
from fastweights.outputs import check_file, described_files, listed_files

from .inspect import MEASURES, Inspection
from .panels import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save_inspection", "written_inspection"]

DESCRIPTION = "inspection.json"


STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "img{max-width:100%;height:auto}table{border-collapse:collapse}td,th{padding:.1rem .8rem .1rem 0;text-align:right}"
    "td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}.source{color:#666}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}img{background:#fff}}"
)


@checked
def save_inspection(inspection: Inspection, folder: Path, *, title: str, facts: dict[str, Any]) -> list[Path]:
    """Write arrays.npz (x and y of every panel under "measure/layer/panel/x" and "/y"), inspection.json (what they are),
    a PNG per measure and index.html, each atomically. The files of an earlier inspection go, all others stay.

    Args:
        title: heading of the page.
        facts: what the page and inspection.json say of model and text, by name.

    Raises:
        ImportError: matplotlib is not installed. Nothing is written.
        ValueError: a link, or a file that no inspection wrote, is at one of the paths. Nothing is written.
        OSError: a file cannot be written.
    """
    check_unicode("title", title)
    pictures = {name: _picture(name, inspection) for name in inspection.panels}
    own = written_inspection(folder)
    for name in _names(inspection.panels):
        check_file("folder", folder / name, lambda path: is_own(path, own.get(path.name)), "inspection")
    arrays: dict[str, Any] = {}
    described = {}
    for name, layers in inspection.panels.items():
        for index, panels in layers.items():
            for panel in panels:
                key = f"{name}/{index}/{panel.name}"
                arrays[f"{key}/x"], arrays[f"{key}/y"] = panel.x.numpy(), panel.y.numpy()
                described[key] = {"x": panel.x_label, "y": panel.y_label}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    written = {"arrays.npz": buffer.getvalue(), **{f"{name}.png": picture for name, picture in pictures.items()}}
    written["index.html"] = _page(inspection, pictures, title, facts).encode()
    with staged_folder(folder, own) as staged:
        for file, content in written.items():
            write_bytes(staged / file, content)
        facts = {**facts, "layers": inspection.layers, "panels": described, "files": listed_files(staged)}
        write_json(staged / DESCRIPTION, facts)
    return [folder / file for file in (*written, DESCRIPTION)]


def _names(measures: Iterable[str]) -> list[str]:
    return [*(f"{name}.png" for name in measures), "arrays.npz", "index.html", DESCRIPTION]


def written_inspection(folder: Path) -> Own:
    """What an earlier inspection wrote in a folder."""
    return described_files(folder / DESCRIPTION, "layers", "panels", earlier=_names(MEASURES))


def _picture(name: str, inspection: Inspection) -> bytes:
    """A row of panels per layer, a line per head."""
    from matplotlib.figure import Figure

    layers = inspection.panels[name]
    columns = max(map(len, layers.values()))
    # In inches. A layout engine takes a minute for many layers.
    width, height = 4.0 * columns + 0.8, 2.6 * len(layers) + 0.2
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(0.6 / width, 0.5 / height, 1 - 0.9 / width, 1 - 0.5 / height, wspace=0.25, hspace=0.7)
    grid = figure.subplots(len(layers), columns, squeeze=False)
    for row, (index, panels) in zip(grid, layers.items()):
        for axes, panel in zip(row, panels):
            _draw(axes, panel)
            axes.set_title(f"\n{panel.y_label}", loc="left", fontsize=9)
        for axes in row[len(panels) :]:
            axes.set_visible(False)
        row[0].set_title(f"{inspection.layers[index]}\n{panels[0].y_label}", loc="left", fontsize=9)
    handles, labels = max((axes.get_legend_handles_labels() for axes in grid.flat), key=lambda found: len(found[0]))
    if 1 < len(handles) <= 16:
        figure.legend(handles, labels, loc="upper right", fontsize=8, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _draw(axes: Axes, panel: Panel) -> None:
    from matplotlib import colormaps

    heads = panel.y.shape[1]
    y = panel.y.numpy()
    shades = colormaps["viridis"](np.linspace(0, 0.85, heads))
    for head in range(heads):
        marker = "o" if len(panel.x) == 1 else None
        place = panel.x.numpy() if marker is None else np.array([head])
        axes.plot(place, y[:, head], color=shades[head], linewidth=1.2, marker=marker, label=f"head {head}")
    if len(panel.x) == 1:
        axes.set_xticks(range(heads))
        axes.set_xlabel(f"head, {panel.x_label}", fontsize=9)
    else:
        axes.set_xlabel(panel.x_label, fontsize=9)
    axes.tick_params(labelsize=8, which="both")
    if panel.log_x:
        axes.set_xscale("log")
        log_ticks(axes, "x")
    finite = y[np.isfinite(y) & (y > 0)]
    low, high = (finite.min(), finite.max()) if len(finite) else (1.0, 1.0)
    if high < 1.001 * low:  # one value but for rounding
        axes.set_ylim(0.9 * low, 1.1 * high)
    elif panel.log_y and high > 5 * low:
        axes.set_yscale("log")
        log_ticks(axes, "y")
    plain_axes(axes)


def _page(inspection: Inspection, pictures: dict[str, bytes], title: str, facts: dict[str, Any]) -> str:
    """HTML without scripts and without anything to fetch."""
    links = " · ".join(f'<a href="#{name}">{escape(MEASURES[name].title)}</a>' for name in pictures)
    known = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value if isinstance(value, str) else json.dumps(value))}</td></tr>"
        for name, value in facts.items()
    )
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1><table>{known}</table><p>{links}</p>",
    ]
    for name, picture in pictures.items():
        measure, encoded = MEASURES[name], base64.b64encode(picture).decode()
        parts += [
            f'<h2 id="{name}">{escape(measure.title)}</h2><p class="source">{escape(measure.source)}</p>',
            f'<img alt="{escape(measure.title)}, by layer and head" src="data:image/png;base64,{encoded}">',
            _last_values(inspection, name),
        ]
    return "\n".join([*parts, "</body></html>", ""])


def _last_values(inspection: Inspection, name: str) -> str:
    """A table of what stands at the end of the text, by layer; distributions have no end."""
    rows = [
        (inspection.layers[index], panel)
        for index, panels in inspection.panels[name].items()
        for panel in panels
        if panel.x_label == "tokens read"
    ]
    if not rows:
        return ""
    cells = "".join(
        f"<tr><td>{escape(layer)}</td><td>{escape(panel.y_label)}</td>"
        + "".join(f"<td>{value:.3g}</td>" for value in (panel.y[-1].min(), panel.y[-1].mean(), panel.y[-1].max()))
        + "</tr>"
        for layer, panel in rows
    )
    head = "<tr><th>layer</th><th>at the end of the text</th><th>least head</th><th>mean</th><th>largest head</th></tr>"
    return f"<table>{head}{cells}</table>"
