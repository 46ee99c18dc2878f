"""C25: keys that training never had as keys."""

from __future__ import annotations

from itertools import pairwise

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

PRINTED = {8: 5.5, 16: 21.8, 24: 31.2}
LEARNT = 0.5  # accuracy on seen keys below which a loss of points says nothing
TASKS = {"seen": "mqar-shuffled", "unseen": "mqar-shuffled-ood"}  # by what training has seen of the keys of the test
WORDS = Words(subject="{mixer}, {pairs} pairs, {keys}, {initializer_range}", terms=READING_TERMS)


def decide(mean: MeanAccuracy) -> Verdict:
    seen, unseen = ({n: mean("vla", n, keys=keys) for n in PRINTED} for keys in TASKS)
    drops = {pairs: 100 * (seen[pairs] - unseen[pairs]) for pairs in PRINTED}
    near = all(abs(drops[pairs] - printed) <= 8 for pairs, printed in PRINTED.items())
    rising = all(left < right for left, right in pairwise(drops.values()))
    reason = "drops in points: " + ", ".join(f"{x:.1f} from {seen[n]:.3f} at {n} pairs" for n, x in drops.items())
    if min(seen.values()) < LEARNT:
        return Verdict("not resolved", [reason, "too few of the seen keys are recalled to lose any"])
    return decided(near and rising, reason)


CLAIM = Claim(
    name="C25",
    paper="vla",
    source="table 13",
    says="On keys outside the training keys VLA loses points, more with more pairs.",
    printed="5.5, 21.8 and 31.2 points at 8, 16 and 24 pairs",
    setting=(
        "As C22, 1000 steps; test keys are never keys in training (they are values there), where the paper tests "
        "keys 64 to 126. "
        f"{SECOND_READING}"
    ),
    expected="not resolved",
    forecast="none",
    rule=(
        "holds if each drop is within 8 points of the paper's and they rise; not resolved if vla recalls less than half of the "
        f"seen keys at 8, 16 or 24 pairs. {BETTER_OUTCOME}"
    ),
    measure=recall_experiment(
        "C25",
        with_second_reading(
            {
                keys: Part(
                    {**VLA_SETTINGS, "task": task, "pairs": tuple(PRINTED), "steps": 1000, "mixers": ("vla",)},
                    {"keys": keys},
                )
                for keys, task in TASKS.items()
            }
        ),
    ),
    decide=decide_readings(decide, WORDS),
    numbers=RECALL_NUMBERS,
    words=WORDS,
    seeds=(42, 123, 999),
    device="cuda",
    cost="3 minutes of one GPU",
    note=SECOND_NOTE,
)
