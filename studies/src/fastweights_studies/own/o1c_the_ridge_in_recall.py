"""own-1c: what a smaller ridge of the exact recursion, with which own-1b comes near the best predictor, costs in recall."""

from __future__ import annotations

import statistics
from typing import Any

from ..claims.claim import OWN, Claim
from ..claims.measurement import Measurement
from ..claims.trained import RECALL_NUMBERS, Part, recall_experiment
from ..claims.verdict import Verdict, clear_sign, pair_seeds
from ..claims.words import Words
from .o1b_the_ridge_of_the_exact_recursion import NAMES, RIDGES, WORDS

PAIRS, SHORT, LONG = 4, 300, 1500
LEARNED = 0.9
SETTINGS: dict[str, Any] = {
    "task": "mqar-shuffled",
    "vocab_size": 64,
    "pairs": (PAIRS,),
    "width": 32,
    "heads": 2,
    "layers": 2,
    "batch_size": 32,
    "initializer_range": 0.05,
    "learning_rates": (3e-3, 1e-2),
    "test_examples": 512,
    "evaluations": 1,
    "mixers": WORDS.choices,
}


def decide(found: Measurement) -> Verdict:
    rows, signs, means = [], [], []
    first, *_, last = RIDGES
    for steps in (SHORT, LONG):
        values = {ridge: found.values("accuracy", options={"ridge": ridge}, steps=steps) for ridge in RIDGES}
        means.append({ridge: statistics.fmean(row) for ridge, row in values.items()})
        less, error = pair_seeds(values[first], values[last])
        signs.append(clear_sign(less, error))
        shown = ", ".join(f"{NAMES[ridge]} {mean:.3f}" for ridge, mean in means[-1].items())
        rows.append(f"{steps} steps: {shown}, {NAMES[first]} - {NAMES[last]} {less:+.3f} +- {error:.3f}")
    statements = [f"accuracy on {PAIRS} pairs", *rows]
    (early, later), (short, long) = signs, means
    if early <= 0:
        return Verdict("does not hold", statements)
    if later <= 0 and long[last] >= LEARNED:
        return Verdict("holds", statements)
    halved = long[first] - long[last] <= (short[first] - short[last]) / 2
    return Verdict("holds weakly" if halved else "does not hold", statements)


CLAIM = Claim(
    name="own-1c",
    paper=OWN,
    source="own-1b, where the ridge of 0.01 was the best of three in regression",
    says="The ridge that is best in regression makes recall slower to learn, and not worse once it is learned.",
    printed="none; no paper compares ridges of the exact recursion",
    setting=(
        f"Shuffled associative recall of {PAIRS} pairs of 64 words, 2 layers of width 32, 2 heads of 16 channels, {SHORT} and "
        f"{LONG} steps of 32, the better of the rates 3e-3 and 1e-2 by the mean over the seeds, ridges of 1, 0.1 and 0.01. "
        "Declared after trainings of 200 steps in which ridge 0.01 had learned nothing."
    ),
    expected="holds weakly",
    forecast="300 steps: ridge 1 0.95, 0.1 0.6, 0.01 0.1; 1500 steps: 1.0, 1.0, 0.8",
    rule=(
        "Of differences paired by seed: holds if ridge 1 is better than 0.01 by two standard errors after 300 steps, not better "
        f"after 1500, and 0.01 has {LEARNED} there; weakly if the difference of the means has at least halved by then; otherwise "
        "it does not hold."
    ),
    measure=recall_experiment(
        "own-1c",
        {f"{steps} steps": Part({**SETTINGS, "steps": steps}, {"steps": steps}) for steps in (SHORT, LONG)},
    ),
    decide=decide,
    numbers=RECALL_NUMBERS,
    words=Words(subject="{mixer}, {pairs} pairs, {steps} steps", choices=WORDS.choices),
    seeds=(0, 1, 2),
    cost="6 minutes of two cores",
)
