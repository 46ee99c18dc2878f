"""How much of the differences between mixers the block around their rules explains, without looking at the rules.

The numbers of a column are regressed on three parts of the published blocks: whether there is an output gate, whether there are
short convolutions, and how the decay begins. Mixers differ in their rules as they differ in their blocks, so that a share is no
cause; changing one part is (`fastweights_studies.measure.block_effects`).

Symbols: y_1 .. y_M numbers of M mixers, X [M, 1 + P] ones and the indicators of P parts, H = X X^+.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import nn

from fastweights.layers import MIXERS, MixerChoice, build_mixer, in_block
from fastweights.layers.decay import FixedDecay, GLADecay, SoftplusDecay
from fastweights.layers.projections import ShortConvolution

from ..paired import adjust_holm
from .entries import Entry

__all__ = ["BASELINES", "BlockParts", "Share", "at_upper_edge", "block_parts", "explain", "explain_columns"]

# Of one paper, of which two fail by what they compute (docs/rules.md#built-to-fail).
BASELINES = ("vla-softmax", "vla-linear", "vla-deltanet")
SHUFFLES = 9999
WIDTH, HEADS = 128, 2  # of the layers that are looked at; their parts are the same at any size
First = Literal["none", "drawn", "bias", "fixed"]


@dataclass(frozen=True)
class BlockParts:
    """The parts of the block that a mixer's layer was published with.

    Attributes:
        decay: how the decay of the memory begins: "drawn" at random as in Mamba-2, by a "bias", "fixed" by the rule, or "none".
    """

    gate: bool
    convolution: bool
    decay: First

    def indicators(self) -> list[float]:
        return [
            float(x) for x in (self.gate, self.convolution, *(self.decay == one for one in ("drawn", "bias", "fixed")))
        ]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What the parts explain of one column.

    Attributes:
        mixers: M. share: 1 - |y - H y|^2 / |y - mean(y)|^2. by_chance: its mean where numbers are dealt to the mixers at random.
        p: probability of a share as large by chance; after Holm's correction in a family.
        without_baselines: the share among the mixers that are none of `BASELINES`.
        fewest, most: seeds of a mixer.
    """

    mixers: int
    share: float
    by_chance: float
    p: float
    without_baselines: float
    fewest: int
    most: int


@cache
def block_parts(name: str) -> BlockParts:
    """Those of a mixer, read from its layer."""
    choice = in_block(MixerChoice(name), "published", HEADS)
    with torch.device("meta"):
        layer = build_mixer(name, hidden_size=WIDTH, num_heads=HEADS, **choice.options)
    modules = list(layer.modules())
    gate = name == "rwkv7" or bool(getattr(layer.options, "output_gate", None))
    return BlockParts(
        gate, any(isinstance(one, ShortConvolution) for one in modules), _first_decay(name, layer, modules)
    )


def _first_decay(name: str, layer: nn.Module, modules: Iterable[nn.Module]) -> First:
    if name in ("vla-deltanet", "rwkv7"):
        return "bias"  # a sigmoid of a projection, which is no module of its own
    if getattr(layer.options, "decay", None) == "none":
        return "none"  # a preconditioner may have one
    kinds: tuple[tuple[type[nn.Module], First], ...] = (
        (GLADecay, "bias"),
        (FixedDecay, "fixed"),
        (SoftplusDecay, "drawn"),
    )
    found = {first for one in modules for kind, first in kinds if isinstance(one, kind)}
    return next((first for _, first in kinds if first in found), "none")


def explain(values: Mapping[str, float]) -> tuple[float, float, float]:
    """Share, its mean by chance and the probability of one as large, from finite numbers by mixer.

    Chance: the numbers dealt to the mixers in `SHUFFLES` random orders, from one fixed stream.
    """
    y = np.array(list(values.values()))
    y = y - y.mean()
    parts = np.array([[1.0, *block_parts(name).indicators()] for name in values])
    onto = parts @ np.linalg.pinv(parts)
    draws = np.random.default_rng(0)
    dealt = np.stack([y, *(draws.permutation(y) for _ in range(SHUFFLES))], 1)
    shares = np.square(onto @ dealt).sum(0) / np.square(y).sum()
    found, chance = float(shares[0]), shares[1:]
    return found, float(chance.mean()), float((1 + (chance >= found - 1e-12).sum()) / (1 + SHUFFLES))


def explain_columns(entries: Iterable[Entry]) -> dict[str, Share]:
    """The share of every column, as one family. A mixer without a finite number in a column is left out of it."""
    columns: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        if entry.values and entry.label in MIXERS:
            columns.setdefault(entry.column, {})[entry.label] = entry
    found = {}
    for column, of in columns.items():
        means = {name: entry.mean for name, entry in of.items()}
        share, by_chance, p = explain(means)
        rest, _, _ = explain({name: mean for name, mean in means.items() if name not in BASELINES})
        seeds = [len(entry.values) for entry in of.values()]
        found[column] = Share(
            mixers=len(means), share=share, by_chance=by_chance, p=p, without_baselines=rest, fewest=min(seeds), most=max(seeds)
        )  # fmt: skip
    adjusted = dict(zip(found, adjust_holm([one.p for one in found.values()])))
    return {column: Share(**{**vars(one), "p": adjusted[column]}) for column, one in found.items()}


def at_upper_edge(entries: Iterable[Entry]) -> tuple[int, int]:
    """In how many cells the chosen learning rate is the highest of its grid, and how many have one."""
    chosen = [(rate, entry.run["learning_rates"]) for entry in entries if (rate := entry.learning_rate) is not None]
    return sum(rate == max(grid) for rate, grid in chosen), len(chosen)  # type: ignore[arg-type]
