"""Every mixer looks different from every other one, in colour and in grey, and the same in every plot."""

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest

from fastweights.analysis.palette import FAMILIES, OTHERS
from fastweights.analysis.plot_style import mixer_style, mixer_styles
from fastweights.analysis.plots import loss_curves, measure_by_pairs, measure_by_state_size, measure_by_token
from fastweights.layers import MIXERS
from tests.fast_set import slow

from ..results.made_up import made_up

ROOT = Path(__file__).parents[2]
COLOURS = {**{mixer: colour for family in FAMILIES.values() for mixer, colour in family.items()}}
EVERY = [*COLOURS.values(), *OTHERS]
VARIANTS = [f"gdn:conv_size={size}" for size in range(2, 24)]
FAR = 12.0  # in CIELAB, where about 2.3 can just be noticed
APART = 5.0  # of lightness L*, 0 to 100


def lab(colour: str) -> np.ndarray:
    """CIELAB of an sRGB colour, under daylight (D65)."""
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = to_xyz @ linear / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def in_grey(style):
    return style.line, style.marker


def test_lab_of_known_colours():
    assert lab("#FFFFFF") == pytest.approx([100, 0, 0], abs=0.02) and lab("#000000") == pytest.approx([0, 0, 0])
    assert lab("#FF0000") == pytest.approx([53.2, 80.1, 67.2], abs=0.1)


def test_all_mixers_at_once_differ_in_colour_and_in_line_style_or_marker():
    own = [name for name, spec in MIXERS.items() if spec.layer.__module__.startswith("fastweights.")]
    styles = mixer_styles(own).values()
    assert len(styles) == len(own) >= 22 and set(own) == set(COLOURS)
    assert len({style.colour for style in styles}) == len({in_grey(style) for style in styles}) == len(own)


@pytest.mark.parametrize("registered", [0, 2, 12, 18, 24])
def test_up_to_24_mixers_and_variants_differ(registered):
    labels = [*list(COLOURS)[:registered], *VARIANTS, "mine", "hybrid"][:24]
    styles = mixer_styles(labels)
    assert list(styles) == labels
    assert len({style.colour for style in styles.values()}) == len(set(map(in_grey, styles.values()))) == 24


def test_any_two_colours_are_far_apart_and_show_on_white():
    near = [pair for pair in itertools.combinations(EVERY, 2) if np.linalg.norm(lab(pair[0]) - lab(pair[1])) < FAR]
    assert not near
    assert max(lab(colour)[0] for colour in EVERY) < 80


@pytest.mark.parametrize("family", [*FAMILIES, "others"])
def test_members_of_a_family_differ_in_grey(family):
    colours = OTHERS if family == "others" else FAMILIES[family].values()
    grey = sorted(lab(colour)[0] for colour in colours)
    assert all(after - before > APART for before, after in itertools.pairwise(grey))


def test_families_differ_in_grey_too():
    """No two colours of the library have the same lightness."""
    grey = sorted(lab(colour)[0] for colour in COLOURS.values())
    assert min(after - before for before, after in itertools.pairwise(grey)) > 0.3
    for colours in itertools.combinations(COLOURS, 2):
        first, second = map(mixer_style, colours)
        assert in_grey(first) != in_grey(second)


@pytest.mark.parametrize(
    "family", ["linear attention", "delta rule", "delta rule, other gains", "palimpsa", "regression"]
)
def test_a_family_shares_a_hue(family):
    hues = [np.degrees(np.arctan2(*lab(colour)[:0:-1])) for colour in FAMILIES[family].values()]
    turned = (np.array(hues) - hues[0] + 180) % 360 - 180
    assert turned.max() - turned.min() < 60


def test_a_mixer_looks_the_same_in_every_comparison():
    draw = random.Random(0)
    for _ in range(50):
        labels = draw.sample([*COLOURS, *VARIANTS], 12)
        for label, style in mixer_styles(labels).items():
            assert style == mixer_style(label) or label not in COLOURS
        assert mixer_styles(labels) == mixer_styles(reversed(labels))  # whatever the order
    assert mixer_style("softmax").colour == "#000000"


def test_labels_never_run_out():
    labels = [f"label {number}" for number in range(60)]
    assert len(mixer_styles(labels)) == 60
    assert len(set(map(in_grey, mixer_styles(labels).values()))) == 60


def shown(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def drawn(figure):
    """What curves and points are of, by colour."""
    return {line.get_color() for axes in figure.axes for line in axes.get_lines() if len(line.get_xdata())}


@pytest.mark.parametrize("draw", [measure_by_pairs, *slow(measure_by_state_size), loss_curves, *slow(measure_by_token)])
def test_the_legend_shows_what_is_drawn_and_nothing_else(draw):
    pytest.importorskip("matplotlib")
    curve = {"token": [1.0, 2.0], "accuracy": [0.5, 0.6]}
    results = [
        made_up(mixer, pairs, by_token=curve) for mixer in ("gdn", "linear", "gdn:conv_size=2") for pairs in (4, 8)
    ]
    results += [made_up("kda", pairs, accuracy=None, losses=[], loss_steps=[]) for pairs in (4, 8)]
    figure = draw(results)
    colours = drawn(figure)
    styles = mixer_styles(["gdn", "linear", "gdn:conv_size=2", "kda"])
    mixers = [label for label, style in styles.items() if style.colour in colours]
    assert mixers == list(styles)[: 4 if draw in (measure_by_pairs, measure_by_state_size) else 3]
    assert shown(figure) == [*mixers, "guessing among\nthe values shown"]
    for handle, label in zip(figure.legends[0].legend_handles, mixers):
        assert (handle.get_color(), handle.get_marker()) == (styles[label].colour, styles[label].marker)


def test_curves_have_the_line_styles_of_the_legend():
    pytest.importorskip("matplotlib")
    for draw in (measure_by_pairs, loss_curves):
        figure = draw([made_up(mixer, pairs) for mixer in ("gdn", "linear", "gla") for pairs in (4, 8)])
        handles = dict(zip(shown(figure), figure.legends[0].legend_handles))
        for mixer in ("gdn", "linear", "gla"):
            lines = [line for axes in figure.axes for line in axes.get_lines() if line.get_gid() == mixer]
            curves = {line._unscaled_dash_pattern for line in lines if len(line.get_xdata()) > 1}
            assert curves == {handles[mixer]._unscaled_dash_pattern}
        assert len({handles[mixer]._unscaled_dash_pattern for mixer in ("gdn", "linear", "gla")}) > 1


def test_no_reference_line_no_entry():
    pytest.importorskip("matplotlib")
    assert shown(loss_curves([made_up("gdn", 1)])) == ["gdn"]  # one value shown: nothing to guess
    assert shown(measure_by_state_size([made_up("gdn", undertrained=True)]))[1].startswith("hollow")
    assert shown(loss_curves([made_up("gdn", undertrained=True)])) == ["gdn", "guessing among\nthe values shown"]


def test_points_alone_have_no_line_in_the_legend():
    pytest.importorskip("matplotlib")
    assert measure_by_state_size([made_up("gdn")]).legends[0].legend_handles[0].get_linewidth() == 0


@pytest.mark.parametrize("pairs", slow((4,), (4, 8, 16)), ids=len)
def test_a_legend_of_24_fits_the_figure(pairs):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    labels = [*list(COLOURS)[:18], *VARIANTS[:6]]
    results = [made_up(label, count, undertrained=True) for label in labels for count in pairs]
    for draw in (measure_by_pairs, measure_by_state_size, loss_curves):
        figure = draw(results)
        FigureCanvasAgg(figure).draw()
        box = figure.legends[0].get_window_extent()
        assert box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert all(axes.get_window_extent().width > 100 for axes in figure.axes)


COMPARISONS = sorted(
    {
        tuple(re.findall(r"[\w-]+", names))
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.toml"))
        for found in re.findall(r"--mixers ([\w,-]+)|mixers = (\[[^]:]*\])", page.read_text())
        for names in found
        if "," in names
    }
)


def test_what_guides_and_examples_compare_differs_in_shape():
    """Different mixers have different markers, which tell points apart, and lines that are drawn alike."""
    assert ("linear", "gdn", "rls") in COMPARISONS and len(COMPARISONS) > 5
    for names in [*COMPARISONS, ("linear", "gla", "deltanet", "gdn"), tuple(list(COLOURS)[:17])]:
        markers = [mixer_style(name).marker for name in dict.fromkeys(names) if name in COLOURS]
        assert len(set(markers)) == len(markers), names
