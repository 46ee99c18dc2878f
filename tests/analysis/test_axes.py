"""Axes that can be read: ticks at whole decades, labels that do not touch, lines below others named."""

import dataclasses
import itertools
import math

import pytest

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from fastweights.analysis.language_plots import length_plot, loss_plot
from fastweights.analysis.language_plots import perplexity_plot as perplexity_of_trainings
from fastweights.analysis.plot_style import log_ticks
from fastweights.analysis.plots import loss_curves, measure_by_pairs, measure_by_state_size, measure_by_token
from fastweights.results import LengthPerplexity

from ..results.made_up import TRAINED, made_up

LENGTHS = [2**power for power in range(6, 18)]
STEPS = [6 * step for step in range(1, 101)]


def curve(last):
    return [4.0 * (last / 4.0) ** (step / 99) for step in range(100)]


def recall_results(lasts=(("linear", 0.02), ("gdn", 0.3), ("kda", 2.0)), pairs=(4, 8, 10, 16, 17, 1024)):
    return [
        made_up(
            mixer, count, accuracy=0.5, state_size=1000 + 30 * place, loss_steps=STEPS, losses=curve(last),
            by_token={"token": list(range(1, 41)), "accuracy": [0.5 + last / 100] * 40},
        )
        for place, (mixer, last) in enumerate(lasts)
        for count in pairs
    ]  # fmt: skip


def trainings(*names):
    entries = [{"length": length, "loss": 4.0, "last_loss": 3.0, "texts": 3, "joined": 0} for length in LENGTHS]
    return [dataclasses.replace(TRAINED, name=name, perplexities=entries) for name in names]


def lengths():
    return [LengthPerplexity(length=length, loss=4.0, last_loss=3.0, texts=3, joined=0) for length in LENGTHS]


FIGURES = {
    "pairs": lambda: measure_by_pairs(recall_results()),
    "state size": lambda: measure_by_state_size(recall_results()),
    "loss curves": lambda: loss_curves(recall_results()),
    "tokens": lambda: measure_by_token(recall_results()),
    "loss": lambda: loss_plot(trainings("linear", "gdn")),
    "perplexity": lambda: perplexity_of_trainings(trainings("linear", "gdn")),
    "evaluation": lambda: length_plot({"linear": lengths()}),
}


def boxes(axis):
    """The places of the labels of ticks in view."""
    low, high = sorted(axis.get_view_interval())
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
        if tick.label1.get_visible() and tick.label1.get_text() and low <= tick.get_loc() <= high:
            yield tick.label1.get_window_extent()


@pytest.mark.parametrize(
    "name", [name if name == "loss curves" else pytest.param(name, marks=pytest.mark.slow) for name in FIGURES]
)
def test_no_two_labels_touch(name):
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    found = [box for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for box in boxes(axis)]
    found += [
        label.get_window_extent()
        for axes in figure.axes
        for label in (axes.xaxis.label, axes.yaxis.label)
        if label.get_text()
    ]
    assert len(found) > 4
    for first, second in itertools.combinations(found, 2):
        assert not first.overlaps(second)
    names = sorted(
        (label.get_window_extent() for label in (axes.xaxis.label for axes in figure.axes)), key=lambda box: box.x0
    )
    for first, second in itertools.pairwise(names):
        assert first.y0 != second.y0 or second.x0 - first.x1 > 20  # pixels


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), [("loss curves", "y"), ("state size", "x")])
def test_ticks_of_logarithmic_axes_are_whole_decades(name, which):
    for axes in FIGURES[name]().axes:
        low, high = sorted(getattr(axes, f"get_{which}lim")())
        ticks = [tick for tick in getattr(axes, f"get_{which}ticks")() if low <= tick <= high]
        assert ticks and all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.02, 400.0, ["0.1", "1", "10", "100"]),
        (0.5, 4.0, ["0.5", "1", "2"]),
        (1.5, 3.5, ["1", "2"]),  # extended
        (300.0, 800.0, ["500", "1,000"]),
    ],
)
def test_an_axis_has_a_decade(low, high, labels):
    figure = Figure()
    axes = figure.subplots()
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    log_ticks(axes, "y")
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    shown = sorted(
        (t.get_loc(), t.label1.get_text()) for t in ticks if low <= t.get_loc() <= high and t.label1.get_text()
    )
    assert [text for _, text in shown] == labels


@pytest.mark.slow
def test_hidden_lines_are_named():
    same = (("linear", 0.3), ("gdn", 0.3), ("kda", 0.3), ("gla", 2.0))
    for axes in loss_curves(recall_results(same, (4,))).axes:
        assert axes.get_xlabel() == "optimizer step\nhidden: linear, gdn under kda"
    for axes in loss_curves(recall_results(pairs=(4,))).axes:
        assert axes.get_xlabel() == "optimizer step"
    for axes in measure_by_token(recall_results(same, (4,))).axes:
        assert "hidden: linear, gdn under kda" in axes.get_xlabel()
    assert "hidden: gdn under linear" in loss_plot(trainings("gdn", "linear")).axes[0].get_xlabel()
    for names in (("gdn", "linear"),):
        label = " ".join(perplexity_of_trainings(trainings(*names)).axes[0].get_xlabel().split())
        assert "hidden: gdn under linear; gdn, last tokens under linear, last tokens" in label
    label = length_plot({"gdn": lengths(), "linear": lengths()}).axes[0].get_xlabel()
    assert "hidden: gdn under linear" in label
