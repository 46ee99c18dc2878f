"""How plots look: one colour, line style and marker per mixer in every plot of every experiment, plain axes, PNG files."""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_bytes
from ..outputs import check_file
from .palette import FAMILIES, LINES, MARKERS, OTHERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MixerStyle", "is_plot", "length_axis", "mixer_style", "mixer_styles", "plain_axes", "save_figure", "spread"]

SOFTWARE = "fastweights"  # what our PNG files say of themselves; those of earlier versions name Matplotlib alone
LONGEST_TEXT = 2**16  # bytes of a text in a PNG file


@dataclass(frozen=True)
class MixerStyle:
    """Colour, marker and line style, as matplotlib names them."""

    colour: str
    marker: str
    line: Any


def mixer_style(mixer: str) -> MixerStyle:
    """The style of a mixer alone in a plot."""
    return mixer_styles([mixer])[mixer]


def mixer_styles(labels: Iterable[str]) -> dict[str, MixerStyle]:
    """A style for each label, in their order. A mixer of the library has the same one in every plot.

    Other labels (mixers of users, a mixer with options) take one of the colours that are kept for them, by a checksum of the
    label, and the next free one where two fall on the same; after these, colours of mixers that are not in the plot. Up to 32
    labels differ in colour, and up to 44 in line style or marker.
    """
    wanted = list(dict.fromkeys(labels))
    styles = {label: _OWN[label] for label in wanted if label in _OWN}
    for label in sorted(label for label in wanted if label not in _OWN):
        taken = set(styles.values())
        free = (style for pool in (_KEPT, [*_OWN.values()]) for style in _turned(pool, label) if style not in taken)
        more = (style for place in itertools.count(len(_OWN)) if (style := _style(OTHERS, place)) not in taken)
        styles[label] = next(itertools.chain(free, more))
    return {label: styles[label] for label in wanted}


def _turned(pool: list[MixerStyle], label: str) -> list[MixerStyle]:
    """The pool, beginning at a place that the label decides."""
    start = zlib.crc32(label.encode()) % len(pool)
    return pool[start:] + pool[:start]


def _style(colours: Sequence[str], place: int) -> MixerStyle:
    return MixerStyle(colours[place % len(colours)], MARKERS[place % len(MARKERS)], LINES[place % len(LINES)])


_COLOURS = {mixer: colour for family in FAMILIES.values() for mixer, colour in family.items()}
_OWN = {mixer: _style([*_COLOURS.values()], place) for place, mixer in enumerate(_COLOURS)}
_KEPT = [_style(OTHERS, place) for place in range(len(_OWN), len(_OWN) + len(OTHERS))]


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


def save_figure(figure: Figure, path: Path, source: str = "", dpi: int = 150, *, own: bool = False) -> None:
    """Write a PNG file, atomically.

    Args:
        source: a text that the file keeps, such as a checksum of what is drawn.
        own: whether a file at `path` is surely a plot of ours, as its folder belongs to a command.

    Raises:
        ValueError: a link, or a file that is no plot of Matplotlib's, is at `path`.
    """
    check_file("plot", path, lambda there: own or is_plot(there, earlier=True), "plot")
    buffer = io.BytesIO()
    metadata = {"Software": SOFTWARE, **({"Source": source} if source else {})}
    figure.savefig(buffer, format="png", dpi=dpi, metadata=metadata)
    write_bytes(path, buffer.getvalue())


def is_plot(path: Path, *, earlier: bool) -> bool:
    """Whether a file is one of our plots. earlier: also one of Matplotlib's, as earlier versions wrote them."""
    with path.open("rb") as file:
        if file.read(8) != b"\x89PNG\r\n\x1a\n":
            return False
        while len(head := file.read(8)) == 8:  # chunks: length, kind, content, checksum
            length, kind = int.from_bytes(head[:4], "big"), head[4:]
            if kind == b"tEXt" and length < LONGEST_TEXT:
                name, _, value = file.read(length).partition(b"\0")
                if name == b"Software":
                    return value.startswith(SOFTWARE.encode()) or (earlier and value.startswith(b"Matplotlib"))
                length = 0
            file.seek(length + 4, io.SEEK_CUR)
    return False
