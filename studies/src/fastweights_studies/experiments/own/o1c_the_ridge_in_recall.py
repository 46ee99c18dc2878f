"""own-1c: what a smaller ridge of the exact recursion, with which own-1b comes near the best predictor, costs in recall."""

from __future__ import annotations

from typing import Any

from fastweights.layers import MixerChoice

from ..claim import OWN, Claim, Measurement, Verdict, clear_sign, paired
from ..trained import accuracy, recall_experiment
from .o1_least_squares_as_layers import EXACT
from .o1b_the_ridge_of_the_exact_recursion import NAMES, RIDGES

PAIRS, SHORT, LONG = 4, 300, 1500
LEARNED = 0.9
SETTINGS: dict[str, Any] = {
    "task": "mqar-shuffled", "vocab_size": 64, "pairs": (PAIRS,), "width": 32, "heads": 2, "layers": 2, "batch_size": 32,
    "initializer_range": 0.05, "learning_rates": (3e-3, 1e-2), "test_examples": 512, "evaluations": 1,
    "mixers": tuple(MixerChoice(EXACT, {"ridge": ridge}, name) for name, ridge in zip(NAMES, RIDGES)),
}  # fmt: skip


def part(steps: int) -> str:
    return f"{steps} steps"


def decide(found: Measurement) -> Verdict:
    rows, signs, means = [], [], []
    for steps in (SHORT, LONG):
        values = [found.values[accuracy(name, PAIRS, part(steps))] for name in NAMES]
        means.append([sum(row) / len(row) for row in values])
        less, error = paired(values[0], values[-1])
        signs.append(clear_sign(less, error))
        rows.append(
            f"{part(steps)}: {', '.join(f'{name} {mean:.3f}' for name, mean in zip(NAMES, means[-1]))}, "
            f"{NAMES[0]} - {NAMES[-1]} {less:+.3f} +- {error:.3f}"
        )
    reason = f"accuracy on {PAIRS} pairs; {'; '.join(rows)}"
    (early, later), (short, long) = signs, means
    if early <= 0:
        return Verdict("does not hold", reason)
    if later <= 0 and long[-1] >= LEARNED:
        return Verdict("holds", reason)
    return Verdict("holds weakly" if long[0] - long[-1] <= (short[0] - short[-1]) / 2 else "does not hold", reason)


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
    measure=recall_experiment("own-1c", {part(steps): {**SETTINGS, "steps": steps} for steps in (SHORT, LONG)}),
    decide=decide,
    seeds=(0, 1, 2),
    cost="6 minutes of two cores",
)
