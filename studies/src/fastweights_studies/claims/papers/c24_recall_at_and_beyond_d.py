"""C24: recall of as many pairs as a head has channels, and of more."""

from __future__ import annotations

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

AT, BEYOND = 32, 48  # pairs
WORDS = Words(subject="{mixer}, {pairs} pairs, {initializer_range}", terms=READING_TERMS)


def decide(mean: MeanAccuracy) -> Verdict:
    at, beyond = (mean("vla", pairs) for pairs in (AT, BEYOND))
    return decided(abs(at - 0.62) <= 0.15 and beyond < 0.1, f"{at:.3f} at 32 pairs, {beyond:.3f} at 48")


CLAIM = Claim(
    name="C24",
    paper="vla",
    source="tables 10 and 11",
    says="At 32 pairs VLA recalls part of them, at 48 none.",
    printed=".623 at 32 (others .056), .044 at 48",
    setting=f"As C22 with 32 and 48 pairs and 1000 steps. {SECOND_READING}",
    expected="not resolved",
    forecast="none: 1000 steps may stop before or after the model finds out how to recall",
    rule=f"holds if vla has 0.62 within 0.15 at 32 pairs and less than 0.1 at 48. {BETTER_OUTCOME}",
    measure=recall_experiment(
        "C24",
        with_second_reading(
            {"": Part({**VLA_SETTINGS, "pairs": (AT, BEYOND), "steps": 1000, "mixers": ("vla", "vla-softmax")})}
        ),
    ),
    decide=decide_readings(decide, WORDS),
    to_decide=(
        "the first weights of the paper, which it does not print; or three rates, five seeds, and trainings that end where the "
        "validation accuracy no longer rises"
    ),
    numbers=RECALL_NUMBERS,
    words=WORDS,
    seeds=(42, 123, 999),
    device="cuda",
    cost="2 minutes of one GPU",
    note=SECOND_NOTE,
)
