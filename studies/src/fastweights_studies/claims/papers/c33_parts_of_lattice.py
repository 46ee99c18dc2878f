"""C33: which parts of Lattice lower the loss."""

from __future__ import annotations

from itertools import pairwise

from fastweights.layers import MixerChoice

from ..claim import Claim
from ..measurement import Measurement
from ..trained import LANGUAGE_NUMBERS, language_models, list_lost, small_model
from ..verdict import Verdict, clear_sign, decide_lost, pair_seeds
from ..words import Words

# Each adds a part to the one before.
CHOICES = (
    MixerChoice("deltanet", {"shared_qk": True, "output_gate": "gelu"}, "DeltaNet"),
    MixerChoice("ttt", {}, "TTT"),
    MixerChoice("lattice", {"decay": "none", "normalize": False}, "orthogonal"),
    MixerChoice("lattice", {"decay": "none"}, "normalised"),
    MixerChoice("lattice", {}, "forget gate"),
)
OUTCOMES = {1: "lower loss", 0: "a tie", -1: "higher loss"}


def decide(found: Measurement) -> Verdict:
    lost = list_lost(found, CHOICES)
    if lost:
        return decide_lost(lost)
    rows, gains, signs = [], [], []
    for before, after in pairwise(CHOICES):
        gain, error = pair_seeds(found.values("loss", before), found.values("loss", after))
        gains.append(gain)
        signs.append(clear_sign(gain, error))
        rows.append(f"{after.label} {gain:+.4f} +- {error:.4f} ({OUTCOMES[signs[-1]]})")
    order, parts = signs[:3], signs[1:3]
    reason = "gain in nats of each part: " + ", ".join(rows)
    if min(order) < 0:
        return Verdict("does not hold", reason)
    if min(parts) > 0 and abs(gains[3]) < 0.01:
        return Verdict("holds", reason)
    return Verdict("holds weakly" if max(parts) > 0 else "not resolved", reason)


CLAIM = Claim(
    name="C33",
    paper="lattice",
    source="table 4",
    says=(
        "TTT is no worse than DeltaNet; the orthogonal update and the normalisation lower the perplexity, the forget gate "
        "does not."
    ),
    printed="deltanet 11.62, TTT 11.59, orthogonal 11.26, normalised 10.94, forget gate 10.94 (125M)",
    setting=(
        "4 layers of width 256, 4 heads of 64, Lattice's block for all, rows of 512 tokens, 16M tokens of the source text"
        " of PyTorch, none read twice, paired by seed."
    ),
    expected="not resolved",
    forecast="in nats .003, .029, .029, .000; spread over seeds unknown",
    rule=(
        "holds if orthogonal and normalised gain more than two standard errors each and the gate changes less "
        "than 0.01; weakly if only one of the two gains, or the gate changes more; does not hold if TTT, orthogonal or "
        "normalised loses more than two; not resolved if these are ties. (The half about TTT was added to the claim's sentence "
        "after the run. This rule had it before.)"
    ),
    measure=language_models("C33", CHOICES, **small_model(layers=4, width=256, length=512)),
    decide=decide,
    numbers=LANGUAGE_NUMBERS,
    words=Words(choices=CHOICES),
    seeds=(1, 2, 3),
    device="cuda",
    cost="20 minutes of one GPU",
)
