"""C26: 8 pairs in longer and longer sequences."""

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
from ..verdict import Verdict
from ..words import Words

PAIRS, LENGTHS = 8, (64, 128, 256, 512)
WORDS = Words(subject="{mixer}, {pairs} pairs, length {length}, {initializer_range}", terms=READING_TERMS)


def decide(mean: MeanAccuracy) -> Verdict:
    vla, delta, true = (
        [mean(mixer, PAIRS, length=length) for length in LENGTHS] for mixer in ("vla", "vla-deltanet", "deltanet")
    )
    statements = (
        f"lowest of VLA {min(vla):.3f}",
        f"highest of the paper's DeltaNet {max(delta):.3f}, of the delta rule with unit keys {max(true):.3f}",
    )
    if min(vla) < 0.98:
        return Verdict("does not hold", statements)
    return Verdict("holds" if max(true) <= 0.1 else "holds weakly", statements)


CLAIM = Claim(
    name="C26",
    paper="vla",
    source="figure 6",
    says="VLA recalls 8 pairs at any length from 64 to 512, DeltaNet at none.",
    printed="VLA 1.000, DeltaNet about .01",
    setting=(
        "As C22 with 8 pairs at 64, 128, 256 and 512 tokens, one seed; beside the paper's DeltaNet the delta rule "
        f"with unit keys. {SECOND_READING}"
    ),
    expected="holds weakly",
    forecast="VLA 0.98 or more; the delta rule with unit keys far above 0.1",
    rule=(
        "holds if VLA has 0.98 or more at all lengths and the delta rule at most 0.1; weakly if only the first. "
        f"{BETTER_OUTCOME}"
    ),
    measure=recall_experiment(
        "C26",
        with_second_reading(
            {
                f"length {length}": Part(
                    {
                        **VLA_SETTINGS,
                        "pairs": (PAIRS,),
                        "length": length,
                        "mixers": ("vla", "vla-deltanet", "deltanet"),
                    },
                    {"length": length},
                )
                for length in LENGTHS
            }
        ),
    ),
    decide=decide_readings(decide, WORDS),
    numbers=RECALL_NUMBERS,
    words=WORDS,
    seeds=(42,),
    device="cuda",
    cost="4 minutes of one GPU",
    note=SECOND_NOTE,
    to_decide="five seeds: one was trained, and in C25 seeds of vla lie far apart on 8 pairs",
)
