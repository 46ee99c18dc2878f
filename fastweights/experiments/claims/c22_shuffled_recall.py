"""C22: variational linear attention alone recalls 24 shuffled pairs."""

from __future__ import annotations

from ..claim import Claim, Measurement, Verdict
from ..trained import VLA_DOUBT, VLA_SETTINGS, accuracy, recall_experiment

FAIR = ("vla-conv", "softmax", "linear", "deltanet")
OTHERS = ("vla-softmax", "vla-linear", "vla-deltanet")


def decide(found: Measurement) -> Verdict:
    paper = {name: found.mean(accuracy(name, 24, "paper")) for name in ("vla", *OTHERS)}
    fair = {name: found.mean(accuracy(name, 24, "convolutions")) for name in FAIR}
    reason = ", ".join(f"{name} {x:.3f}" for name, x in {**paper, **fair}.items())
    if not (paper["vla"] >= 0.98 and max(paper[name] for name in OTHERS) <= 0.2):
        return Verdict("does not hold", reason)
    return Verdict("holds weakly" if max(fair[name] for name in FAIR[1:]) >= 0.9 else "holds", reason)


CLAIM = Claim(
    name="C22",
    paper="vla",
    source="tables 9, 11 and 12",
    says="VLA recalls 24 shuffled pairs; softmax attention, linear attention and DeltaNet do not.",
    printed="VLA 1.000, softmax .081, linear .074, DeltaNet .011",
    setting=(
        "2 layers, width 128, 4 heads, MLP 256, 128 tokens, tied, no convolutions, batches of 64, 2000 steps at "
        "3e-4. Second reading: short convolutions for all and rates from 3e-4, 1e-3, 3e-3."
    ),
    expected="holds weakly",
    forecast="the paper's ranking in its setting, deltanet, linear or softmax above 0.9 in the second",
    rule=(
        "holds if VLA has 0.98 or more and all others at most 0.2; weakly if in the second reading softmax, "
        "linear or deltanet has 0.9 or more."
    ),
    measure=recall_experiment(
        "C22",
        {
            "paper": {**VLA_SETTINGS, "pairs": (24,)},
            "convolutions": {**VLA_SETTINGS, "pairs": (24,), "mixers": FAIR, "learning_rates": (3e-4, 1e-3, 3e-3)},
        },
    ),
    decide=decide,
    seeds=(42, 123, 999),
    device="cuda",
    cost="10 minutes of one GPU",
    doubt=VLA_DOUBT,
)
