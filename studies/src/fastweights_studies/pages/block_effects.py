"""What parts of the block around a rule do to recall: the table of docs/layers.md, docs/block.md and a sentence of the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fastweights.analysis.plot_style import mixer_style, plain_axes, save_figure
from fastweights_studies.measure.block_effects import EFFECTS, TASK, differences, sides_of
from fastweights_studies.measure.environment import digest
from fastweights_studies.pages.rendering import describe_origins, table
from fastweights_studies.pages.results import read_measured
from fastweights_studies.paired import Difference
from fastweights_studies.record import Row

__all__ = ["draw", "measured", "say_difference", "seeds_of", "sentence", "source"]

DEVICE = "NVIDIA H200"  # of the larger size, of which docs/layers.md and the README speak
# What is changed, by the effect.
CHANGES: Mapping[str, str] = {
    "softmax-convolution": "`softmax`, 32 pairs: with the convolution and SiLU that the memories have",
    "palimpsa-d-skip": "`palimpsa-d`, 16 pairs: `skip_init=0` in place of 1",
    "palimpsa-d-gate": "`palimpsa-d`, 16 pairs: `output_gate=None`",
    "gdn-windows": '`gdn`, 16 pairs: `long_memory="windows"` in place of drawn decays',
    "mamba2-epsilon": '`mamba2` with `long_memory="windows"`, 16 pairs: `norm_eps=1e-12` in place of 1e-6',
    "mamba2-gate-and-windows": '`mamba2`, 32 pairs: `output_gate=None`, `long_memory="windows"` in place of drawn decays',
    "gdn-short-windows": "gated DeltaNet, 16 pairs: first windows of 4 tokens in all heads in place of 100",
}


# The same, below the axis of a figure.
SHORT: Mapping[str, str] = {
    "softmax-convolution": "convolution", "palimpsa-d-skip": "no skip", "palimpsa-d-gate": "no gate",
    "gdn-windows": "even windows", "mamba2-epsilon": "small epsilon", "mamba2-gate-and-windows": "no gate,\neven windows",
    "gdn-short-windows": "short windows",
}  # fmt: skip


def measured(results: Path, *, large: bool = True) -> str:
    """The table of the effects on a GPU, or of those at the smaller size of a CPU; "" where there are none."""
    rows = _rows(results, large)
    if not rows:
        return ""
    found = differences(rows)
    lines = [[CHANGES[name], *_cells(rows, name), say_difference(found[name])] for name in found]
    head = ["changed", "before", "after", "difference and interval"]
    return f"{table(head, lines)}\n{describe_origins(rows, lambda row: None)}\n"


def sentence(results: Path) -> str:
    """What the README says of them. The effects that it names are decided."""
    rows = _rows(results)
    found = differences(rows)
    decided = ("softmax-convolution", "palimpsa-d-skip", "palimpsa-d-gate")
    assert not any(found[name].tied for name in decided)
    (softmax, convolved), (skipped, plain), (_, ungated) = (_cells(rows, name) for name in decided)
    return (
        "**The block around a rule** can decide more than the rule. In a short training softmax attention recalls "
        f"{softmax} of 32 pairs, and {convolved} with the convolution that the memories have; `palimpsa-d` recalls {skipped} of "
        f"16 pairs, {plain} without its skip connection and {ungated} without its output gate ({found[decided[0]].seeds} seeds, "
        "[intervals](docs/block.md#what-one-part-changes)). So `fastweights recall` compares rules in one "
        "block."
    )


def source(results: Path) -> str:
    """A checksum of what the figure shows."""
    return digest([[*map(str, row.column.values()), row.seed, row.value] for row in _rows(results)])


def draw(results: Path, path: Path) -> None:
    """A panel per effect of the larger size: a line per seed from its accuracy before the change to that after it."""
    from matplotlib.figure import Figure

    rows = _rows(results)
    names = list(differences(rows))
    figure = Figure(figsize=(1.9 * len(names), 2.9), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names):
        mixer = EFFECTS[name].mixer
        style = mixer_style(mixer)
        before, after = sides_of(rows, name)
        for seed in before.keys() & after.keys():
            axes.plot(
                [0, 1],
                [before[seed], after[seed]],
                color=style.colour,
                marker="o",
                markersize=4,
                linewidth=0.8,
                alpha=0.7,
            )
        axes.set_xticks([0, 1], ["before", SHORT[name]], fontsize=8)
        axes.set_xlim(-0.25, 1.25)
        axes.set_ylim(-0.03, 1.05)
        axes.set_title(f"{mixer}, {EFFECTS[name].pairs} pairs", fontsize=9)
        plain_axes(axes)
        if name == names[0]:
            axes.set_ylabel("accuracy")
    save_figure(figure, path, source=source(results), dpi=120)


def seeds_of(results: Path, *, large: bool = True) -> int:
    """How many seeds an effect has, the fewest of all."""
    return min(difference.seeds for difference in differences(_rows(results, large)).values())


def _rows(results: Path, large: bool = True) -> list[Row]:
    return [row for row in read_measured("block-effects", TASK, results) if (row.origin.device == DEVICE) == large]


def _cells(rows: Sequence[Row], name: str) -> list[str]:
    return [f"{fmean(own.values()):.2f}" for own in sides_of(rows, name)]


def say_difference(difference: Difference, digits: int = 2) -> str:
    """The mean and interval of a difference of accuracies; of a tie also what could have been seen."""
    seen = f"{difference.visible:.2f} could have been seen" if difference.visible <= 1 else "too few seeds to see any"
    tie = f", a tie; {seen}" if difference.tied else ""
    mean, low, high = (f"{x:+.{digits}f}" for x in (difference.mean, difference.low, difference.high))
    return f"{mean} [{low}, {high}]{tie}"
