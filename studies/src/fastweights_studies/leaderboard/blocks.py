"""Which parts of the matched block (`fastweights.layers.blocks`) a mixer does not have as others have it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LACKS"]

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
