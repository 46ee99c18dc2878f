"""C26: 8 pairs in longer and longer sequences."""

from __future__ import annotations

from ..claim import Claim, Verdict
from ..readings import (
    BETTER_OUTCOME,
    SECOND_NOTE,
    SECOND_READING,
    MeanAccuracy,
    decide_readings,
    with_second_reading,
)
from ..trained import VLA_SETTINGS, recall_experiment

LENGTHS = (64, 128, 256, 512)


def decide(mean: MeanAccuracy) -> Verdict:
    vla = min(mean("vla", 8, f"length {length}") for length in LENGTHS)
    delta = max(mean("vla-deltanet", 8, f"length {length}") for length in LENGTHS)
    true = max(mean("deltanet", 8, f"length {length}") for length in LENGTHS)
    reason = f"lowest of VLA {vla:.3f}; highest of the paper's DeltaNet {delta:.3f}, of the delta rule with unit keys {true:.3f}"
    if vla < 0.98:
        return Verdict("does not hold", reason)
    return Verdict("holds" if true <= 0.1 else "holds weakly", reason)


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
                f"length {length}": {
                    **VLA_SETTINGS,
                    "pairs": (8,),
                    "length": length,
                    "mixers": ("vla", "vla-deltanet", "deltanet"),
                }
                for length in LENGTHS
            }
        ),
    ),
    decide=decide_readings(decide),
    seeds=(42,),
    device="cuda",
    cost="4 minutes of one GPU",
    note=SECOND_NOTE,
)
