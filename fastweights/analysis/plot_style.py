"""How plots look: one colour, line style and marker per mixer in every plot of every experiment, plain axes, PNG files."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import write_bytes
from ..outputs import check_file
from .palette import FAMILIES, LINES, MARKERS, OTHERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

__all__ = [
    "MixerStyle",
    "finish_axes",
    "is_plot",
    "length_axis",
    "log_ticks",
    "mixer_style",
    "mixer_styles",
    "plain_axes",
    "save_figure",
    "spread",
    "titled_figure",
]

SOFTWARE = "fastweights"  # what our PNG files say of themselves; those of earlier versions name Matplotlib alone
LONGEST_TEXT = 2**16  # bytes of a text in a PNG file
HIDDEN = 1.5  # pixels: a line that is nowhere further from another one is not seen beside it
BETWEEN = 4.0  # pixels, at least, between two labels of an axis
NOTE_WIDTH = 46  # characters


@dataclass(frozen=True)
class MixerStyle:
    """Colour, marker and line style, as matplotlib names them."""

    colour: str
    marker: Any
    line: Any

    def describe_curve(self, name: str, markers: Any = None) -> dict[str, Any]:
        """The keywords of `Axes.plot` for the curve of a mixer of this name. markers: which points have one, as in matplotlib's
        markevery; None for no markers."""
        look = {"color": self.colour, "linestyle": self.line, "linewidth": 1.2, "gid": name}
        return look if markers is None else {**look, "marker": self.marker, "markersize": 4.5, "markevery": markers}


def mixer_style(mixer: str) -> MixerStyle:
    """The style of a mixer alone in a plot."""
    return mixer_styles([mixer])[mixer]


def mixer_styles(labels: Iterable[str]) -> dict[str, MixerStyle]:
    """A style for each label, in their order. A mixer of the library has the same one in every plot.

    Other labels (mixers of users, a mixer with options) take one of the colours that are kept for them, by a checksum of the
    label, and the next free one where two fall on the same; after these, colours of mixers that are not in the plot. Up to 32
    labels differ in colour, and up to 68 in line style or marker.
    """
    wanted = list(dict.fromkeys(labels))
    styles = {label: _OWN[label] for label in wanted if label in _OWN}
    for label in sorted(label for label in wanted if label not in _OWN):
        taken = set(styles.values())
        free = (style for pool in (_KEPT, [*_OWN.values()]) for style in _rotate(pool, label) if style not in taken)
        more = (style for place in itertools.count(len(_OWN)) if (style := _pick_style(OTHERS, place)) not in taken)
        styles[label] = next(itertools.chain(free, more))
    return {label: styles[label] for label in wanted}


def _rotate(pool: list[MixerStyle], label: str) -> list[MixerStyle]:
    """The pool, beginning at a place that the label decides."""
    start = zlib.crc32(label.encode()) % len(pool)
    return pool[start:] + pool[:start]


def _pick_style(colours: Sequence[str], place: int) -> MixerStyle:
    return MixerStyle(colours[place % len(colours)], MARKERS[place % len(MARKERS)], LINES[place % len(LINES)])


_COLOURS = {mixer: colour for family in FAMILIES.values() for mixer, colour in family.items()}
_OWN = {mixer: _pick_style([*_COLOURS.values()], place) for place, mixer in enumerate(_COLOURS)}
_KEPT = [_pick_style(OTHERS, place) for place in range(len(_OWN), len(_OWN) + len(OTHERS))]


def spread(values: Sequence[float], step: float) -> list[float]:
    """One factor per value, to draw equal values apart on a logarithmic axis: neighbours differ by a factor 1 + step."""
    factors = []
    for place, value in enumerate(values):
        before, equal = list(values[:place]).count(value), list(values).count(value)
        factors.append((1 + step) ** (before - (equal - 1) / 2))
    return factors


def titled_figure(title: str, described: str, size: tuple[float, float]) -> Figure:
    """A figure of width and height `size`, in inches, with a title and a line below it that describes what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{title}\n", fontsize=13, fontweight="bold", x=0.01, ha="left", linespacing=1.7)
    figure.text(0.01, 1 - 0.4 / figure.get_figheight(), described, fontsize=8.5, va="top")
    return figure


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


def log_ticks(axes: Axes, which: str) -> None:
    """Ticks at whole decades on the logarithmic axis "x" or "y" of what is drawn. An axis without one is extended to the nearest.
    With fewer than two of them the ticks at 2 and 5 have labels too."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis = getattr(axes, f"{which}axis")
    low, high = sorted(getattr(axes, f"get_{which}lim")())
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if last < first:
        below, above = math.log10(low) - last, first - math.log10(high)
        low, high = (10.0**last, high) if below < above else (low, 10.0**first)
        getattr(axes, f"set_{which}lim")(low, high)
    shown = (2, 5) if last - first < 1 else ()

    def format_minor(value: float, place: object = None) -> str:
        return f"{value:,.10g}" if round(value / 10.0 ** math.floor(math.log10(value) + 1e-9)) in shown else ""

    axis.set_major_locator(LogLocator(numticks=99))
    axis.set_major_formatter(FuncFormatter(lambda value, place=None: f"{value:,.10g}"))
    axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=99))
    axis.set_minor_formatter(FuncFormatter(format_minor))


def finish_axes(figure: Figure) -> None:
    """Leaves out labels of ticks that would touch another one, and says below each axes which lines cannot be seen: those that a
    later line with the same points is drawn over. A line has the name of its gid; one that begins with a line break is none."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis, ends in ((axes.xaxis, ("x0", "x1")), (axes.yaxis, ("y0", "y1"))):
            _keep_apart(axis, *ends)
        if hidden := _hidden_lines(axes):
            under = {above: [name for name in hidden if hidden[name] == above] for above in hidden.values()}
            note = "hidden: " + "; ".join(f"{', '.join(names)} under {above}" for above, names in under.items())
            axes.set_xlabel(f"{axes.get_xlabel()}\n{textwrap.fill(note, NOTE_WIDTH)}")


def _hidden_lines(axes: Axes) -> dict[str, str]:
    """The names of lines that cannot be seen, and of the line above each."""
    lines = [(str(line.get_gid()), line) for line in axes.get_lines() if line.get_gid()]
    drawn = [(name, axes.transData.transform(line.get_xydata())) for name, line in lines if name[0] != "\n"]
    hidden = {}
    for place, (name, points) in enumerate(drawn):
        for above, others in drawn[place + 1 :]:
            same = above != name and others.shape == points.shape and len(points) > 1
            if same and np.abs(others - points).max() < HIDDEN:
                hidden[name] = above
    return hidden


def _keep_apart(axis: Axis, begin: str, end: str) -> None:
    low, high = sorted(axis.get_view_interval())
    kept: list[Bbox] = []
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
        label = tick.label1
        if label.get_visible() and label.get_text() and low <= tick.get_loc() <= high:
            box = label.get_window_extent()
            clear = (
                getattr(box, begin) > getattr(other, end) + BETWEEN
                or getattr(other, begin) > getattr(box, end) + BETWEEN
                for other in kept
            )
            if all(clear):
                kept.append(box)
            else:
                label.set_visible(False)


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
