"""own-1c: what a smaller ridge of the exact recursion, with which own-1b comes near the best predictor, costs in recall."""

from __future__ import annotations

import statistics
from typing import Any

from ..claims.claim import OWN, Claim
from ..claims.measurement import Measurement
from ..claims.trained import RECALL_NUMBERS, Part, recall_experiment
from ..claims.verdict import INTERVALS, Status, Verdict, compare_seeds, settle
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
    first, *_, last = RIDGES
    values = {
        steps: {ridge: found.by_seed("accuracy", options={"ridge": ridge}, steps=steps) for ridge in RIDGES}
        for steps in (SHORT, LONG)
    }
    less = compare_seeds({steps: (own[first], own[last]) for steps, own in values.items()})
    means = {steps: {ridge: statistics.fmean(x.values()) for ridge, x in own.items()} for steps, own in values.items()}
    rows = [
        f"{steps} steps: {', '.join(f'{NAMES[ridge]} {mean:.3f}' for ridge, mean in own.items())}, "
        f"{NAMES[first]} - {NAMES[last]} {less[steps]}"
        for steps, own in means.items()
    ]
    short, long = means.values()
    learned = less[LONG].sign <= 0 and long[last] >= LEARNED
    halved = long[first] - long[last] <= (short[first] - short[last]) / 2

    def outcome(slower: bool) -> Status:
        if not slower:
            return "does not hold"
        return "holds" if learned else "holds weakly" if halved else "does not hold"

    return Verdict(settle(outcome, less[SHORT].sign), [f"accuracy on {PAIRS} pairs", *rows])


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
        "Of differences paired by seed: holds if ridge 1 is clearly better than 0.01 after 300 steps, not better "
        f"after 1500, and 0.01 has {LEARNED} there; weakly if the difference of the means has at least halved by then; not "
        f"resolved if the first is a tie; otherwise it does not hold. {INTERVALS}"
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
