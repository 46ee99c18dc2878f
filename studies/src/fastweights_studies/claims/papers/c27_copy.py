"""C27: all four memories of the paper learn to copy."""

from __future__ import annotations

from ..claim import Claim
from ..readings import (
    APART,
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

TOKENS = 32  # to copy
WORDS = Words(subject="{mixer}, {pairs} pairs, {initializer_range}", terms=READING_TERMS)


def decide(mean: MeanAccuracy) -> Verdict:
    found = {name: mean(name, TOKENS) for name in VLA_SETTINGS["mixers"]}
    return decided(min(found.values()) >= 0.99, ", ".join(f"{name} {x:.3f}" for name, x in found.items()))


CLAIM = Claim(
    name="C27",
    paper="vla",
    source="table 7",
    says="All four memories copy 64 tokens without an error by step 150.",
    printed="100% by step 150",
    setting=(
        f"As C22, task copy with 32 tokens (T = 64), batches of 32, 150 steps of a cosine over 150. {SECOND_READING}"
    ),
    expected="not resolved",
    forecast="none: a cosine over 1500 steps would be at its peak where ours ends",
    rule=f"holds if all four have 0.99 or more after 150 steps, in one of the readings. {APART}",
    measure=recall_experiment(
        "C27",
        with_second_reading(
            {"": Part({**VLA_SETTINGS, "task": "copy", "pairs": (TOKENS,), "batch_size": 32, "steps": 150})}
        ),
    ),
    decide=decide_readings(decide, WORDS),
    numbers=RECALL_NUMBERS,
    words=WORDS,
    seeds=(42, 123, 999),
    device="cpu",
    cost="5 minutes",
    note=SECOND_NOTE,
)
