"""The plots of a language training hold the recorded numbers, in the units that their axes name."""

import dataclasses
import math

import pytest

from fastweights.analysis.language_plots import loss_plot, perplexity_plot
from fastweights.analysis.plot_style import mixer_style

from ..results.made_up import TRAINED as GDN

pytest.importorskip("matplotlib")

PGDN = dataclasses.replace(GDN, name="pgdn", steps=15, tokens=15 * 256)  # a batch twice as large


def test_losses_stand_over_the_tokens_that_were_read():
    (axes,) = loss_plot([GDN, PGDN]).axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    assert lines == [
        (pytest.approx([1280, 2560, 3840]), GDN.losses),
        (pytest.approx([1920, 3840]), GDN.held_out_losses),
        (pytest.approx([2560, 5120, 7680]), PGDN.losses),
        (pytest.approx([3840, 7680]), PGDN.held_out_losses),
    ]
    assert "tokens" in axes.get_xlabel() and "nats" in axes.get_ylabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "gdn: 1.500 held out",
        "pgdn: 1.500 held out",
    ]
    assert axes.xaxis.get_major_formatter()(1_500_000) == "1.5M"


def test_perplexities_stand_over_the_lengths_that_were_measured():
    (axes,) = perplexity_plot([GDN]).axes
    whole, last, trained = axes.get_lines()
    assert list(whole.get_xdata()) == list(last.get_xdata()) == [256, 1024]
    assert list(whole.get_ydata()) == pytest.approx([math.exp(2), math.exp(1)])
    assert list(last.get_ydata()) == pytest.approx([math.exp(1), math.exp(0.5)])
    assert list(trained.get_xdata()) == [64, 64]
    assert whole.get_color() == last.get_color() == mixer_style("gdn").colour
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["256", "1,024"]
    assert axes.get_xscale() == "log"
