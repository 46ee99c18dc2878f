"""The block around a memory rule: what every rule is given in a comparison of rules, and what one part of it changes.

In the published block a mixer has the defaults of its layer, which are its paper's or its authors' code's: some have an output
gate, some a skip connection, some windows drawn at random, some no convolution. These parts decide more than the rules do which
memory a short training favours. In the matched block all have the same:

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

from fastweights.checks import check_choice
from fastweights.kinds import checked
from fastweights.layers import MIXERS, MixerChoice

__all__ = ["BLOCKS", "LACKS", "PARTS", "block_options", "in_block"]

NORM_EPSILON = 1e-12
CONVOLUTION = 4  # tokens
NO_DECAY = ("none", "fixed")

MATCHED: Mapping[str, Any] = {
    "conv_size": CONVOLUTION, "conv_init": "uniform", "conv_bias": False, "activation": "silu", "shared_qk": False,
    "output_gate": None, "gate_low_rank": False, "residual": False, "skip_init": None, "long_memory": "windows",
    "output_norm": True, "norm_eps": NORM_EPSILON,
}  # fmt: skip
# What the options of a part are in a block where it differs from the matched one.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "gate": {"output_gate": "silu"},
    "skip": {"residual": True, "skip_init": 1.0},
    "convolution": {"conv_size": None},
    "windows": {"long_memory": None},
}
# By name, the part that differs from the matched block; None for the layer's own options.
BLOCKS: Mapping[str, str | None] = {
    "matched": "", "published": None, "with-gate": "gate", "with-skip": "skip", "without-convolution": "convolution",
    "with-own-windows": "windows",
}  # fmt: skip

NO_GATE_OPTION = "the layer of the paper has no gate, and no option adds one"
NO_DECAY_GATE = "has no decay"
GROWS = {
    "windows": "keeps every token", "norm": "answers are means of values, and softmax attention has no norm after them",
    "gate": NO_GATE_OPTION, "skip": "attends to the token itself",
}  # fmt: skip
VLA = {
    "windows": NO_DECAY_GATE, "gate": NO_GATE_OPTION, "skip": "the layer of the paper has none, and no option adds one",
    "norm": "one LayerNorm over all heads belongs to the rule as printed",
}  # fmt: skip
MAMBA = {"norm": "the norm is over groups of channels, one per head here; q and k have no norm, as in Mamba-2"}
DELTA_PRODUCT = {"skip": "a token has several values and one answer"}
# The parts of the matched block that a mixer does not have as others have it, or cannot be given, and why. Rules without a
# learned decay have no windows.
LACKS: Mapping[str, Mapping[str, str]] = {
    "softmax": GROWS,
    "vla-softmax": GROWS,
    "vla": VLA,
    "vla-conv": VLA,
    "mamba2": MAMBA,
    "palimpsa-m": MAMBA,
    "retnet": {"windows": "the decays are fixed by the rule: 32 tokens in the first head, then twice as many in each"},
    "vla-deltanet": {"windows": "the decay is the sigmoid of a projection without bias: 2 tokens in every head at first"},
    "longhorn-elementwise": {"windows": NO_DECAY_GATE},
    "ttt": {"windows": NO_DECAY_GATE},
    **dict.fromkeys(("linear", "deltanet", "longhorn", "efla", "nlms", "rls", "vla-linear"), {"windows": NO_DECAY_GATE}),
    "deltaproduct": {"windows": NO_DECAY_GATE, **DELTA_PRODUCT},
    "gated-deltaproduct": DELTA_PRODUCT,
    "rwkv7": {
        "convolution": "mixes each token with the one before instead, by one learned number per channel and stream",
        "windows": "the decays come from biases that ramp over the channels, within limits of the rule",
        "gate": "the gate belongs to the layer of the paper, and no option takes it away",
        "skip": "the bonus of the rule is one, which begins at zero",
        "norm": "the norm has a mean too, and an epsilon of 64e-5 for the scale of the rule's answers",
    },
}  # fmt: skip


@checked
def in_block(choice: MixerChoice, block: str, heads: int) -> MixerChoice:
    """A mixer in a block, under the same label. Options that were chosen for it stay as they are, and so does a part that its
    layer has no option for (`LACKS` names those of the library).

    Args:
        block: a key of `BLOCKS`.
        heads: of the model.
    """
    return MixerChoice(choice.name, {**block_options(choice, block, heads), **choice.options}, choice.label)


def block_options(choice: MixerChoice, block: str, heads: int) -> dict[str, Any]:
    """The options that bring a mixer into a block."""
    check_choice("block", block, BLOCKS)
    part, spec = BLOCKS[block], MIXERS[choice.name]
    kind = getattr(spec.layer, "Options", None)
    if part is None or kind is None:
        return {}
    known = {field.name: field.default for field in fields(kind)}
    wanted = {**MATCHED, "norm_groups": heads, **PARTS.get(part, {})}
    options = {name: value for name, value in wanted.items() if name in known}
    if "residual" in known and not options["residual"]:
        del options["skip_init"]  # is of no use to them, and must be a number
    if part == "convolution" and "conv_bias" in known:
        options["conv_size"] = 1  # the layer of Mamba-2 always has filters; these see the token alone
    if part == "skip" and "householders" in known:
        del options["skip_init"]
    if options.get("long_memory") and not _learns_decay({**known, **spec.options, **choice.options}):
        del options["long_memory"]
    return options


def _learns_decay(options: Mapping[str, Any]) -> bool:
    """Whether a layer with these options has a learned decay, of its memory or of its preconditioner."""
    own = options.get("decay") not in NO_DECAY
    return own or (options.get("preconditioner") is not None and not options.get("tie_preconditioner"))
