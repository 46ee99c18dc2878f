"""C33: which parts of Lattice lower the loss."""

from __future__ import annotations

import math
import statistics

from ..claim import Claim, Measurement, Verdict
from ..trained import language_models, small_model

MIXERS = {
    "DeltaNet": {"name": "deltanet", "shared_qk": True, "output_gate": "gelu"},
    "TTT": "ttt",
    "orthogonal": {"name": "lattice", "decay": "none", "normalize": False},
    "normalised": {"name": "lattice", "decay": "none"},
    "forget gate": "lattice",
}


def decide(found: Measurement) -> Verdict:
    names, rows, gains = list(MIXERS), [], []
    for before, after in zip(names, names[1:]):
        paired = [x - y for x, y in zip(found.values[before], found.values[after])]
        error = statistics.stdev(paired) / math.sqrt(len(paired)) if len(paired) > 1 else math.inf
        gains.append((statistics.fmean(paired), error))
        rows.append(f"{after} {gains[-1][0]:+.4f} +- {error:.4f}")
    clear = all(mean > 2 * error for mean, error in gains[1:3])
    small_gate = abs(gains[3][0]) < 0.01
    reason = "gain in nats of each part: " + ", ".join(rows)
    if clear and small_gate:
        return Verdict("holds", reason)
    return Verdict("does not hold" if any(mean < -2 * error for mean, error in gains[1:3]) else "not resolved", reason)


CLAIM = Claim(
    name="C33",
    paper="lattice",
    source="table 4",
    says="The orthogonal update and the normalisation lower the perplexity, the forget gate does not.",
    printed="deltanet 11.62, TTT 11.59, orthogonal 11.26, normalised 10.94, forget gate 10.94 (125M)",
    setting=(
        "4 layers of width 256, 4 heads of 64, Lattice's block for all, rows of 512 tokens, 33M tokens, paired by seed."
    ),
    expected="not resolved",
    forecast="in nats .003, .029, .029, .000; spread over seeds unknown",
    rule=(
        "holds if orthogonal and normalised gain more than two standard errors each and the gate changes less "
        "than 0.01."
    ),
    measure=language_models("C33", MIXERS, **small_model(layers=4, width=256, length=512)),
    decide=decide,
    seeds=(1, 2, 3),
    device="cuda",
    cost="20 minutes of one GPU",
)
