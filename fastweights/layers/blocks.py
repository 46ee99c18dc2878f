"""The block around a memory rule: what every rule is given in a comparison of rules, and what one part of it changes.

In the published block a mixer has what its paper or its authors' code has: some have an output gate, some a skip connection, some
windows drawn at random, some no convolution. These are the defaults of its layer, but for first values that the library has
changed (docs/layers.md). These parts decide more than the rules do which memory a short training favours. In the matched block
all have the same:

- short convolutions of four tokens with SiLU on q, k and v, from projections of their own,
- no output gate and no skip connection,
- first windows 1 / (1 - decay) that rise over the heads from 16 to 4,096 tokens, where the rule has a learned decay,
- an RMSNorm of the answer of each head, whose epsilon is below the mean square of every rule's first answers: mamba2's begin at
  3e-12, a layer's usual epsilon is 1e-6.

The other blocks are the matched one with one part added or taken away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..checks import check_choice
from ..kinds import checked
from .choice import MixerChoice
from .registry import MIXERS

__all__ = ["BLOCKS", "in_block"]

NORM_EPSILON = 1e-12
CONVOLUTION = 4  # tokens
NO_DECAY = ("none", "fixed")

MATCHED: Mapping[str, Any] = {
    "conv_size": CONVOLUTION, "conv_init": "uniform", "conv_bias": False, "activation": "silu", "shared_qk": False,
    "output_gate": None, "gate_low_rank": False, "residual": False, "skip_init": None, "long_memory": "windows",
    "output_norm": True, "norm_eps": NORM_EPSILON,
}  # fmt: skip
# What authors have where the library's default is another first value: decays in all layers, and the skip of one.
OWN_DECAYS: Mapping[str, Any] = {"long_memory": "own"}
OWN_SKIPS: Mapping[str, Mapping[str, Any]] = {"palimpsa-d": {"skip_init": 1.0}}
# What the options of a part are in a block where it differs from the matched one.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "gate": {"output_gate": "silu"},
    "skip": {"residual": True, "skip_init": 1.0},
    "convolution": {"conv_size": None},
    "windows": OWN_DECAYS,
}
# By name, the part that differs from the matched block; None for what authors have.
BLOCKS: Mapping[str, str | None] = {
    "matched": "", "published": None, "with-gate": "gate", "with-skip": "skip", "without-convolution": "convolution",
    "with-own-windows": "windows",
}  # fmt: skip


@checked
def in_block(choice: MixerChoice, block: str, heads: int) -> MixerChoice:
    """A mixer in a block, under the same label. Options that were chosen for it stay as they are, and so does a part that its
    layer has no option for: a mixer of your own without `Options` is the same in every block.

    Args:
        block: a key of `BLOCKS`.
        heads: of the model.

    Raises:
        ValueError: an unknown block.
    """
    return MixerChoice(choice.name, {**_options(choice, block, heads), **choice.options}, choice.label)


def _options(choice: MixerChoice, block: str, heads: int) -> dict[str, Any]:
    """The options that bring a mixer into a block."""
    check_choice("block", block, BLOCKS)
    part, spec = BLOCKS[block], MIXERS[choice.name]
    kind = getattr(spec.layer, "Options", None)
    if kind is None:
        return {}
    known = {field.name: field.default for field in fields(kind)}
    if part is None:
        wanted = {**OWN_DECAYS, **OWN_SKIPS.get(choice.name, {})}
    else:
        wanted = {**MATCHED, "norm_groups": heads, **PARTS.get(part, {})}
    options = {name: value for name, value in wanted.items() if name in known}
    if options.get("residual") is False:
        del options["skip_init"]  # is of no use to them, and must be a number
    if part == "convolution" and "conv_bias" in known:
        options["conv_size"] = 1  # the layer of Mamba-2 always has filters; these see the token alone
    if part == "skip" and "householders" in known:
        del options["skip_init"]
    if "long_memory" in options and not _learns_decay({**known, **spec.options, **choice.options}):
        del options["long_memory"]
    return options


def _learns_decay(options: Mapping[str, Any]) -> bool:
    """Whether a layer with these options has a learned decay, of its memory or of its preconditioner."""
    own = options.get("decay") not in NO_DECAY
    return own or (options.get("preconditioner") is not None and not options.get("tie_preconditioner"))
