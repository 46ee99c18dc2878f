"""The measured part of docs/layers.md: what parts of the block around a rule do to recall.

`python -m fastweights_studies.pages.page_parts` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fastweights_studies.measure.block_effects import TASK, differences, sides_of
from fastweights_studies.pages.rendering import describe_origins, table
from fastweights_studies.pages.results import read_measured
from fastweights_studies.paired import Difference
from fastweights_studies.record import Row

__all__ = ["measured", "sentence"]

DEVICE = "NVIDIA H200"  # whose size the page speaks of
# What is changed, by the effect.
CHANGES: Mapping[str, str] = {
    "softmax-convolution": "`softmax`, 32 pairs: with the convolution and SiLU that the memories have",
    "palimpsa-d-skip": "`palimpsa-d`, 16 pairs: `skip_init=0` in place of 1",
    "palimpsa-d-gate": "`palimpsa-d`, 16 pairs: `output_gate=None`",
    "gdn-windows": '`gdn`, 16 pairs: `long_memory="windows"` in place of drawn decays',
    "mamba2-epsilon": '`mamba2` with `long_memory="windows"`, 16 pairs: `norm_eps=1e-12` in place of 1e-6',
}


def measured(results: Path) -> str:
    rows = _rows(results)
    found = differences(rows)
    lines = [[CHANGES[name], *_cells(rows, name), _say(found[name])] for name in found]
    head = ["changed", "before", "after", "difference, 95% interval of the family"]
    return f"{table(head, lines)}\n{describe_origins(rows, lambda row: None)}\n"


def sentence(results: Path) -> str:
    """What the README says of them. The effects that it names are decided."""
    rows = _rows(results)
    found = differences(rows)
    decided = ("softmax-convolution", "palimpsa-d-skip", "palimpsa-d-gate")
    assert not any(found[name].tied for name in decided)
    (softmax, convolved), (skipped, plain), (_, ungated) = (_cells(rows, name) for name in decided)
    return (
        "What surrounds a rule can decide more than the rule. In a short training softmax attention recalls "
        f"{softmax} of 32 pairs, and {convolved} with the convolution that the memories have; `palimpsa-d` recalls {skipped} of "
        f"16 pairs, {plain} without its skip connection and {ungated} without its output gate ({found[decided[0]].seeds} seeds, "
        "[intervals](docs/layers.md#what-the-block-around-a-rule-does-to-recall)). So `fastweights recall` compares rules in one "
        "block."
    )


def _rows(results: Path) -> list[Row]:
    return [row for row in read_measured("block-effects", TASK, results) if row.origin.device == DEVICE]


def _cells(rows: Sequence[Row], name: str) -> list[str]:
    return [f"{fmean(own.values()):.2f}" for own in sides_of(rows, name)]


def _say(difference: Difference) -> str:
    tie = f", a tie; {difference.visible:.2f} could have been seen" if difference.tied else ""
    return f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]{tie}"
