"""What a measure gives for a layer: panels, each with one line per head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.kinds import checked

__all__ = ["Panel", "make_histogram", "make_curve"]

BINS = 60


@checked
@dataclass(frozen=True, kw_only=True)
class Panel:
    """One line per head over a common x.

    Attributes:
        name: of the arrays, a word in lower case.
        x: [n], float64.
        y: [n, heads], float64; NaN where there is nothing to show.
        x_label, y_label: what the axes show, with the unit.
        log_x, log_y: whether an axis is logarithmic.
    """

    name: str
    x: Tensor
    y: Tensor
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False


def make_curve(name: str, ends: Sequence[int], y: Tensor, y_label: str, *, log_y: bool = False) -> Panel:
    """y [P, heads] at the tokens `ends`, counted from 1."""
    x = torch.tensor(ends, dtype=torch.float64)
    return Panel(name=name, x=x, y=y.double(), x_label="tokens read", y_label=y_label, log_y=log_y)


def make_histogram(name: str, values: Tensor, x_label: str, *, log_x: bool = False) -> Panel:
    """Share of each head's values [tokens, heads, channels] in equal bins. With log_x the bins are equal on a logarithmic
    axis, and values that are not positive are left out."""
    values = values.double()
    if log_x:
        values = torch.where(values > 0, values, torch.nan).log10()
    finite = values[values.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 1.0)
    if high - low < 1e-9 * max(1.0, abs(low)):
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    shares = []
    for head in values.unbind(1):
        own = head[head.isfinite()]
        counts = torch.histogram(own, edges).hist
        shares.append(counts / max(1, len(own)))
    middle = (edges[1:] + edges[:-1]) / 2
    x = 10**middle if log_x else middle
    return Panel(name=name, x=x, y=torch.stack(shares, 1), x_label=x_label, y_label="share", log_x=log_x)
