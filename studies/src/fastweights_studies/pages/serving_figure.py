"""Draws docs/images/serving.png, throughput and time per token of `vllm bench serve` against the length of the prompts.

The rows are those of `python -m fastweights_studies.measure.serving_bench` on an H200, compiled, as vLLM is by itself.
python -m fastweights_studies.pages serving_figure
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastweights.analysis.plot_style import length_axis, mixer_styles, plain_axes, save_figure
from fastweights_studies.measure.environment import digest
from fastweights_studies.measure.rows import find_rows
from fastweights_studies.places import RESULTS, ROOT
from fastweights_studies.record import Row, select

FILE = RESULTS / "serving-bench-nvidia-h200.json"
PICTURE = ROOT / "docs" / "images" / "serving.png"
PANELS = {"tokens_per_second": "tokens per second, read and written", "step_ms": "ms per written token, median"}


def read(file: Path = FILE) -> list[Row]:
    return [row for row in find_rows(file) if not row.column["launched"]]


def source(rows: Sequence[Row]) -> str:
    """A checksum of what the figure shows."""
    shown = [
        [row.mixer, int(row.column["prompt"]), row.measure, row.value]  # type: ignore[arg-type]
        for measure in PANELS
        for row in select(rows, measure=measure)
    ]
    return digest(shown)


def draw(file: Path = FILE, path: Path = PICTURE) -> None:
    from matplotlib.figure import Figure

    rows = read(file)
    mixers = list(dict.fromkeys(str(row.mixer) for row in rows))
    styles = mixer_styles(mixers)
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    for axes, (measure, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        lengths = set()
        for mixer in mixers:
            found = select(rows, mixer=mixer, measure=measure)
            points = sorted((int(row.column["prompt"]), row.value) for row in found)  # type: ignore[arg-type]
            style = styles[mixer]
            axes.plot(*zip(*points), color=style.colour, linestyle=style.line, marker=style.marker, label=mixer)
            lengths |= {length for length, _ in points}
        length_axis(axes, sorted(lengths))
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens of a prompt")
        axes.set_title(title, fontsize=10)
        plain_axes(axes)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    save_figure(figure, path, source=source(rows), dpi=120)


if __name__ == "__main__":
    draw()
    print(f"written to {PICTURE}")
