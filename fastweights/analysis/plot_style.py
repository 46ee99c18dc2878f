"""How mixers look in plots: one colour and marker each, the same in every plot of every experiment."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..layers import MIXERS

__all__ = ["MixerStyle", "mixer_style", "spread"]

# Okabe and Ito's colours, which stay apart for colour-blind readers, with a wine red for their yellow (too pale on white).
# Colours repeat after 8 mixers and markers after 13, so that no two of the first 104 share both.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h", "d")


@dataclass(frozen=True)
class MixerStyle:
    """Colour and marker, as matplotlib names them."""

    colour: str
    marker: str


def mixer_style(mixer: str) -> MixerStyle:
    """The look of a mixer, from its place in the registry; names that are no longer there share the last look."""
    names = list(MIXERS)
    place = names.index(mixer) if mixer in names else len(names)
    return MixerStyle(_COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)])


def spread(values: Sequence[float], step: float) -> list[float]:
    """Factors, one a value, that pull equal values apart on a logarithmic axis: neighbours differ by a factor 1 + step."""
    factors = []
    for place, value in enumerate(values):
        before, equal = list(values[:place]).count(value), list(values).count(value)
        factors.append((1 + step) ** (before - (equal - 1) / 2))
    return factors
