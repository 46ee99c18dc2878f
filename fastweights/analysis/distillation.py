"""Tables and plots of a distillation: the ranking of layers, and teacher and student side by side.

matplotlib (the `viz` extra) is imported when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..results.distillation import Distillation, LayerRanking, ModelMeasures
from .language_plots import draw_perplexities, finish_plot, short_number
from .plot_style import (
    MixerStyle,
    finish_axes,
    length_axis,
    mixer_style,
    plain_axes,
    save_figure,
    titled_figure,
)
from .table_style import add_row, plain_table
from .tables import format_answers, format_perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "distillation_plot",
    "distillation_table",
    "ranking_plot",
    "ranking_table",
    "save_distillation_plot",
    "save_ranking_plot",
]

ATTENTION = "softmax"  # the teacher and kept layers have its colour
MEMORY, STUDENT = "#BBBBBB", "student"


def ranking_table(ranking: LayerRanking, kept: Collection[int] = ()) -> Table:
    """One row per layer, the best one first. kept: layers that were chosen."""
    table = plain_table(
        f"Layers by what their attention is worth, over {ranking.tokens:,} tokens",
        "KL: KL(teacher || student) on held-out text in nats per token, with the teacher's attention in this layer alone. Gain: "
        f"how much lower that is than {ranking.base_kl:.4f}, without any.",
        numbers=("rank", "layer", "KL", "gain"),
    )
    table.add_column("attention")
    for one in ranking.layers:
        cells = (f"{one.rank}", f"{one.layer}", f"{one.kl_with_it_kept:.4f}", f"{one.gain:+.4f}")
        add_row(table, *cells, "kept" if one.layer in kept else "")
    return table


def save_ranking_plot(ranking: LayerRanking, path: Path, kept: Collection[int] = ()) -> list[Path]:
    """Draw `ranking_plot` into a PNG file, written atomically; its path.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a link, or a file that is no plot, is at `path`.
    """
    save_figure(ranking_plot(ranking, kept), path)
    return [path]


def ranking_plot(ranking: LayerRanking, kept: Collection[int] = ()) -> Figure:
    """A bar per layer, as high as its gain. kept: layers that were chosen, which are dark."""
    described = (
        f"KL(teacher || student) is {ranking.base_kl:.4f} without attention; {ranking.tokens:,} tokens of held-out text"
    )
    figure = titled_figure("What attention in one layer is worth", described, (7.5, 4))
    axes = figure.subplots()
    layers = sorted(ranking.layers, key=lambda one: one.layer)
    for name, chosen, colour in (("kept", True, mixer_style(ATTENTION).colour), ("has a memory", False, MEMORY)):
        own = [one for one in layers if (one.layer in kept) is chosen]
        if own:
            axes.bar([one.layer for one in own], [one.gain for one in own], color=colour, label=name)
    axes.axhline(0, color="#555555", linewidth=0.8)
    axes.set_xticks([one.layer for one in layers])
    axes.set_xlabel("layer")
    axes.set_ylabel("KL lower by, nats per token")
    if kept:
        axes.legend(fontsize=9, frameon=False)
    plain_axes(axes)
    finish_axes(figure)
    return figure


def distillation_table(result: Distillation) -> Table:
    """One row per measure and length, one column per model."""
    table = plain_table(
        f"Teacher and student: KL {result.held_out_kl:.4f} nats per token of held-out text",
        "Cache: numbers per sequence. Needles: part of the answers found over all depths, and in brackets the loss of the right "
        "answer in nats per token.",
        text=("measure",),
        numbers=("tokens of context", "teacher", "student"),
    )
    rows = zip(_measures(result.teacher), _measures(result.student), strict=True)
    for (measure, length, teacher), (_, _, student) in rows:
        add_row(table, measure, length, teacher, student)
    return table


def _measures(model: ModelMeasures) -> Iterator[tuple[str, str, str]]:
    """Name, length and value of every measure of a model."""
    yield "parameters", "", f"{model.parameters:,}"
    for context, numbers in model.state_sizes.items():
        yield "cache", f"{int(context):,}", f"{numbers:,}"
    for row in model.perplexities:
        yield "perplexity", f"{row.length:,}", format_perplexity(row.loss)
    for task, length in dict.fromkeys((row.task, row.length) for row in model.needles):
        own = [row for row in model.needles if (row.task, row.length) == (task, length)]
        yield task, f"{length:,}", format_answers(own)


def save_distillation_plot(result: Distillation, path: Path) -> list[Path]:
    """Draw `distillation_plot` into a PNG file, written atomically; its path.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a link, or a file that is no plot, is at `path`.
    """
    save_figure(distillation_plot(result), path)
    return [path]


def distillation_plot(result: Distillation) -> Figure:
    """The held-out KL while training, and perplexity and needles by length of teacher and student, as far as they were measured.

    Raises:
        ValueError: none was.
    """
    teacher = result.teacher
    panels = ((_draw_curve, result.kls), (_draw_needles, teacher.needles), (_draw_lengths, teacher.perplexities))
    drawn = [draw for draw, measured in panels if measured]
    if not drawn:
        raise ValueError("result must have perplexities, needles or a curve of the KL while training, got none to draw")
    described = f"KL(teacher || student) at the end: {result.held_out_kl:.4f} nats per token of held-out text"
    figure = titled_figure("Teacher and student", described, (3 + 4 * len(drawn), 4.5))
    for draw, axes in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        draw(axes, result)
    if teacher.perplexities:
        finish_plot(figure, figure.axes[-1], label="the last tokens before the length")
    return figure


def _draw_curve(axes: Axes, result: Distillation) -> None:
    style = mixer_style(STUDENT)
    axes.plot(result.kl_tokens, result.kls, color=style.colour, marker=style.marker, linewidth=1.2)
    axes.set_xlabel("tokens read")
    axes.set_ylabel("held-out KL, nats per token")
    axes.xaxis.set_major_formatter(short_number)
    plain_axes(axes)


def _draw_needles(axes: Axes, result: Distillation) -> None:
    """A line per model and task: the part of the answers found, the mean over depths."""
    lengths = sorted({row.length for row in result.teacher.needles})
    for name, style in _styles().items():
        rows = getattr(result, name).needles
        for task, dashes in zip(dict.fromkeys(row.task for row in rows), ("-", "--", ":"), strict=False):
            found = [fmean(row.found for row in rows if (row.task, row.length) == (task, one)) for one in lengths]
            look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linewidth": 1.2}
            axes.plot(lengths, found, linestyle=dashes, label=f"{name}, {task}", **look)
    length_axis(axes, lengths)
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("needles: part of the answers found")
    axes.legend(fontsize=8, frameon=False)
    plain_axes(axes)


def _draw_lengths(axes: Axes, result: Distillation) -> None:
    models = {"teacher": result.teacher.perplexities, "student": result.student.perplexities}
    draw_perplexities(axes, models, _styles())


def _styles() -> dict[str, MixerStyle]:
    return {"teacher": mixer_style(ATTENTION), "student": mixer_style(STUDENT)}
