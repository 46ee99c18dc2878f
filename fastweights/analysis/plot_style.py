"""How plots look: one colour and marker per mixer in every plot of every experiment, plain axes, PNG files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write_bytes
from ..layers import MIXERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MixerStyle", "length_axis", "mixer_style", "mixer_styles", "plain_axes", "save_figure", "spread"]

# Okabe and Ito's colours, which stay apart for colour-blind readers, with a wine red for their yellow (too pale on white).
# Colours repeat after 8 mixers and markers after 13, so no two of the first 104 share both.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h", "d")


@dataclass(frozen=True)
class MixerStyle:
    """Colour and marker, as matplotlib names them."""

    colour: str
    marker: str


def mixer_style(mixer: str) -> MixerStyle:
    """Colour and marker of a mixer, from its place in the registry; names that are not in it share the last pair."""
    names = list(MIXERS)
    place = names.index(mixer) if mixer in names else len(names)
    return MixerStyle(_COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)])


def mixer_styles(labels: Iterable[str]) -> dict[str, MixerStyle]:
    """A style for each label. A mixer's name has that mixer's; other labels, such as those of a mixer with options, take the
    styles of mixers that are not among them, as long as there are any."""
    wanted = list(dict.fromkeys(labels))
    own = {label: mixer_style(label) for label in wanted if label in MIXERS}
    colours = {style.colour for style in own.values()}
    free = [style for style in map(mixer_style, MIXERS) if style not in own.values()]
    free.sort(key=lambda style: style.colour in colours)  # stable: first those of a colour that nobody has
    others = iter(free)
    return {label: own[label] if label in own else next(others, mixer_style(label)) for label in wanted}


def spread(values: Sequence[float], step: float) -> list[float]:
    """One factor per value, to draw equal values apart on a logarithmic axis: neighbours differ by a factor 1 + step."""
    factors = []
    for place, value in enumerate(values):
        before, equal = list(values[:place]).count(value), list(values).count(value)
        factors.append((1 + step) ** (before - (equal - 1) / 2))
    return factors


def plain_axes(axes: Axes) -> None:
    """Pale grid lines under the curves, no frame at the top and the right."""
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """A logarithmic x axis with a tick at each of `lengths`, in tokens."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xticks([], minor=True)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG file, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_bytes(path, buffer.getvalue())
