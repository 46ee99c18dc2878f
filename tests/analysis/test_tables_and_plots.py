"""Tables and plots show every mixer, the marks, the chance level and the units."""

import io
import math

import pytest
from rich.console import Console

from fastweights.analysis import recall_table, save_plots
from fastweights.analysis.plot_style import mixer_style, mixer_styles, spread
from fastweights.analysis.plots import (
    PLOT_FILES,
    loss_curves,
    measure_by_pairs,
    measure_by_state_size,
    measure_by_token,
)
from fastweights.layers import MIXERS

from ..results.made_up import made_up

RESULTS = [
    made_up(mixer, pairs, rate, seed, accuracy=0.9 - pairs / 40 - rate, undertrained=mixer == "gla")
    for mixer in ("linear", "gla", "gdn")
    for pairs in (4, 16)
    for rate in (0.003, 0.01)
    for seed in (0, 1)
]


def printed(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_table_is_sorted_by_difficulty_and_accuracy():
    results = [made_up("linear", 4, accuracy=0.2), made_up("gdn", 4, accuracy=0.7), made_up("gla", 16, accuracy=0.9)]
    words = [line.split() for line in printed(recall_table(results)).splitlines()]
    shown = [row[:2] for row in words if row and row[0] in ("gdn", "linear", "gla", "4", "16")]
    assert shown == [["4", "pairs"], ["gdn", "0.700"], ["linear", "0.200"], ["16", "pairs"], ["gla", "0.900"]]


def test_table_shows_spread_learning_rate_sizes_and_marks():
    text = printed(recall_table([*RESULTS, made_up("kda", 4, accuracy=None)]))
    assert "0.797 ± 0.000" in text and "0.003" in text and "1,000" in text and "256" in text
    (gla,) = [line for line in text.splitlines() if "gla" in line and "0.797" in line]
    assert "undertrained" in gla
    (kda,) = [line for line in text.splitlines() if "kda" in line]
    assert "1 of 1 runs diverged" in kda


def test_table_says_where_a_mixer_only_guesses_and_where_it_does_worse():
    results = {"gdn": 0.25, "gla": 0.3, "kda": 0.008}
    text = printed(recall_table([made_up(mixer, 4, accuracy=accuracy) for mixer, accuracy in results.items()]))
    (gdn,), (gla,), (kda,) = ([line for line in text.splitlines() if line.split()[:1] == [mixer]] for mixer in results)
    assert "at chance" in gdn and "chance" not in gla and "below chance" in kda
    assert "Below chance: worse than guessing" in " ".join(text.split())


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_accuracy_by_pairs_has_a_line_a_mixer_and_the_chance_level():
    figure = measure_by_pairs(RESULTS)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and "pairs" in axes.get_xlabel() and "accuracy" in axes.get_ylabel()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["4", "16"]
    chance = axes.get_lines()[-1]
    assert list(chance.get_ydata()) == [1 / 4, 1 / 16]
    linear = next(line for line in axes.get_lines() if line.get_color() == mixer_style("linear").colour)
    assert list(linear.get_ydata()) == pytest.approx([0.797, 0.497])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        "linear",
        "gla",
        "gdn",
        "hollow: loss still\nfalling, or too\nshort to tell",
        "guessing among\nthe values shown",
    ]


def test_every_axis_spans_the_field_it_is_named_after():
    """pairs, state sizes and steps that no other field holds, so that no other field can stand in for them."""
    results = [
        made_up(mixer, pairs, state_size=size, accuracy=0.9, loss_steps=[30, 60, 90], losses=[3.0, 2.0, 1.0])
        for mixer, size in (("linear", 7), ("gdn", 7000))
        for pairs in (5, 500)
    ]
    (axes,) = measure_by_pairs(results).axes
    assert axes.get_xlim() == pytest.approx((5 / 1.3, 500 * 1.3))
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 2]  # the chance level, and a line per mixer
    assert len(lines) == 3 and all(list(line.get_xdata()) == pytest.approx([5, 500], rel=0.05) for line in lines)
    for axes in measure_by_state_size(results).axes:
        assert axes.get_xlim() == pytest.approx((7 / 2, 7000 * 2))
        places = sorted({line.get_xdata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 1})
        assert places == pytest.approx([7, 7000])
    for axes in loss_curves(results).axes:
        curves = [line for line in axes.get_lines() if len(set(line.get_ydata())) > 1]
        assert [list(line.get_xdata()) for line in curves] == [[30, 60, 90]] * 2
        low, high = axes.get_xlim()
        assert 0 < low <= 30 and 90 <= high < 120


def test_accuracy_by_state_size_spreads_equal_sizes():
    figure = measure_by_state_size(RESULTS)
    assert [axes.get_title() for axes in figure.axes] == ["4 pairs", "16 pairs"]
    for axes in figure.axes:
        places = sorted({line.get_xdata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 1})
        assert len(places) == 3
        assert places[1] == pytest.approx(256)
        assert axes.get_xscale() == "log" and "numbers" in axes.get_xlabel()


def test_loss_curves_show_the_best_learning_rate_of_every_seed():
    results = [
        made_up(rate=rate, seed=seed, accuracy=rate, losses=[rate, seed]) for rate in (0.1, 0.2) for seed in (1, 2)
    ]
    (axes,) = loss_curves(results).axes
    curves = [list(line.get_ydata()) for line in axes.get_lines() if len(set(line.get_ydata())) > 1]
    assert curves == [[0.2, 1], [0.2, 2]]
    assert "nats" in axes.get_ylabel() and "step" in axes.get_xlabel()


@pytest.mark.parametrize(
    "pairs",
    [pytest.param((1,), marks=pytest.mark.slow), (4,), pytest.param((2, 4, 8, 16), marks=pytest.mark.slow)],
    ids=len,
)
def test_plots_are_png_files_of_a_readable_size(tmp_path, pairs):
    results = [made_up(mixer, count) for mixer in MIXERS for count in pairs]
    paths = save_plots(
        [*results, made_up("retired mixer", pairs[0], accuracy=None, losses=[], loss_steps=[])], tmp_path
    )
    assert [path.name for path in paths] == ["accuracy-by-pairs.png", "accuracy-by-state-size.png", "loss-curves.png"]
    assert {path.name for path in paths} <= set(PLOT_FILES)
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000
        assert int.from_bytes(content[16:20], "big") > 900 and int.from_bytes(content[20:24], "big") > 500


def test_the_units_and_the_chance_level_are_those_of_the_task():
    results = [made_up(mixer, 40, accuracy=0.5, chance=0.19) for mixer in ("linear", "gdn")]
    for result in results:
        result.run["task"] = "s3"
    text = " ".join(printed(recall_table(results)).split())
    assert "tokens" in text and "pairs" not in text and "Chance: answering every token with itself" in text
    (axes,) = measure_by_pairs(results).axes
    assert "tokens in a sequence" in axes.get_xlabel() and list(axes.get_lines()[-1].get_ydata()) == [0.19]
    assert "0.190" in text
    (axes,) = loss_curves(results).axes
    assert axes.get_title() == "40 tokens" and len(axes.get_lines()) == 2  # no loss of guessing


def test_the_loss_of_guessing():
    (axes,) = loss_curves([made_up("gdn", 4, chance=1 / 4)]).axes
    assert list(axes.get_lines()[-1].get_ydata()) == [math.log(4)] * 2


def made_up_error(mixer: str, error: float | None, **changes):
    columns = {"example": [1.0, 2.0], "error": [1.0, 0.1], "ridge": [1.0, 0.05], "kalman": [1.0, 0.03]}
    given = {"measure": "error", "error": error, "best_error": 0.2, "chance": 1.25, "by_token": columns, **changes}
    result = made_up(mixer, accuracy=None, status="diverged" if error is None else "finished", **given)
    result.run["task"] = "regression"
    return result


ERRORS = [made_up_error(mixer, error) for mixer, error in (("gdn", 1.3), ("linear", 0.5), ("gla", 0.9), ("kda", None))]


def test_a_lower_error_is_better_and_none_is_last():
    text = printed(recall_table(ERRORS))
    row_of = {line.split()[0]: line for line in text.splitlines() if line.split()}
    order = [name for name in row_of if name in ("gdn", "linear", "gla", "kda")]
    assert order == ["linear", "gla", "gdn", "kda"]
    assert "best 0.200" in text and "4 examples" in text and "0.500" in text and "accuracy" not in text
    assert ["at chance" in row_of[mixer] for mixer in order] == [False, False, True, False]


def test_plots_of_errors(tmp_path):
    (axes,) = measure_by_pairs(ERRORS).axes
    assert "squared error" in axes.get_ylabel() and axes.get_ylim()[1] > 1.3
    heights = {line.get_ydata()[0] for line in axes.get_lines()}
    # Three mixers; predicting zero, where kda is drawn too; the best predictor.
    assert heights == {1.3, 0.5, 0.9, 1.25, 0.2}
    (axes,) = measure_by_token(ERRORS).axes
    curves = [list(line.get_ydata()) for line in axes.get_lines()]
    assert curves.count([1.0, 0.1]) == 4 and [1.0, 0.05] in curves and [1.0, 0.03] in curves and [1.25, 1.25] in curves
    assert {text.get_text() for text in axes.texts} == {"ridge", "kalman"} and "example" in axes.get_xlabel()
    names = [path.name for path in save_plots(ERRORS, tmp_path)]
    assert names == ["error-by-pairs.png", "error-by-state-size.png", "loss-curves.png", "by-token.png"]
    assert set(names) <= set(PLOT_FILES)


def test_variants_of_a_mixer_look_different_and_are_named():
    variants = [{"name": "gdn", "options": {"conv_size": size}, "label": f"gdn:conv_size={size}"} for size in (2, 3)]
    results = [made_up(mixer, 4, accuracy=0.5) for mixer in ("gdn", *variants)]
    labels = ["gdn", "gdn:conv_size=2", "gdn:conv_size=3"]
    styles = mixer_styles(labels)
    assert styles["gdn"] == mixer_style("gdn") and len({style.colour for style in styles.values()}) == 3
    assert [text.get_text() for text in measure_by_pairs(results).legends[0].get_texts()][:3] == labels
    for draw in (measure_by_pairs, measure_by_state_size, loss_curves):
        colours = {line.get_color() for axes in draw(results).axes for line in axes.get_lines()}
        assert {style.colour for style in styles.values()} <= colours
    assert all(label in printed(recall_table(results)) for label in labels)


def test_spread_keeps_single_values_and_centres_equal_ones():
    assert spread([5.0, 7.0], 0.1) == [1.0, 1.0]
    assert spread([5.0, 7.0, 5.0, 5.0], 0.1) == pytest.approx([1 / 1.1, 1.0, 1.0, 1.1])
