"""C23: a penalty that does not adapt, which the authors predicted and did not run."""

from __future__ import annotations

from fastweights.layers import MixerChoice

from ..claim import Claim
from ..readings import (
    BETTER_OUTCOME,
    READING_TERMS,
    SECOND_NOTE,
    SECOND_READING,
    MeanAccuracy,
    decide_readings,
    with_second_reading,
)
from ..trained import RECALL_NUMBERS, VLA_SETTINGS, Part, recall_experiment
from ..verdict import Verdict, decided
from ..words import Words

PAIRS = 16
FULL, FIXED = MixerChoice("vla"), MixerChoice("vla", {"adaptive": False}, "A fixed")
WORDS = Words(subject="{mixer}, {pairs} pairs, {initializer_range}", terms=READING_TERMS, choices=(FULL, FIXED))


def decide(mean: MeanAccuracy) -> Verdict:
    full, fixed = (mean(choice, PAIRS) for choice in (FULL, FIXED))
    reason = f"vla {full:.3f}, with A fixed {fixed:.3f}"
    if fixed <= 0.2 and full < 0.95:
        return Verdict("not resolved", f"{reason}: vla has not learnt to recall either")
    return decided(fixed <= 0.2, reason)


CLAIM = Claim(
    name="C23",
    paper="vla",
    source="table 4",
    says="With A fixed at 10 I the recall of VLA collapses.",
    printed="about .091 (predicted, not run)",
    setting=(
        "As C22 with 16 pairs and 1000 steps; vla with adaptive=False, which is the delta rule with gain 1. "
        f"{SECOND_READING}"
    ),
    expected="does not hold",
    forecast="near VLA; the second reading likewise",
    rule=(
        "holds if it has at most 0.2 while vla has 0.95 or more; does not hold if it has more than 0.2; not resolved if vla "
        "itself has less than 0.95 and it at most 0.2. "
        f"{BETTER_OUTCOME}"
    ),
    measure=recall_experiment(
        "C23",
        with_second_reading({"": Part({**VLA_SETTINGS, "pairs": (PAIRS,), "steps": 1000, "mixers": (FULL, FIXED)})}),
    ),
    decide=decide_readings(decide, WORDS),
    numbers=RECALL_NUMBERS,
    words=WORDS,
    seeds=(42, 123, 999),
    device="cuda",
    cost="a minute of one GPU",
    note=SECOND_NOTE,
)
