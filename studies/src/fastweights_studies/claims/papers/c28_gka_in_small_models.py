"""C28: Gated KalmaNet without gates recalls more than gated and delta rules."""

from __future__ import annotations

import math
from typing import Any

from fastweights.layers import MixerChoice

from ..claim import Claim
from ..measurement import UNDERTRAINED, Measurement
from ..trained import RECALL_NUMBERS, ZOOLOGY_SETTINGS, Part, recall_experiment, train_best_rates
from ..verdict import Verdict, clear_sign
from ..words import Words

BARE = {"decay": "none", "gain": "none", "alpha_connection": False, "output_gate": "none"}
OTHERS = ("gdn", "deltanet", "mamba2", "gla")
HEAD = 64  # channels
CEILING = 0.99  # accuracy
CELLS = [(width, length, pairs) for width in (64, 128) for length, pairs in ((128, 32), (256, 64))]


def decide(found: Measurement) -> Verdict:
    signs, rows = [], []
    for width, length, pairs in CELLS:
        cell: dict[str, Any] = {"width": width, "length": length}
        means = {name: found.mean("accuracy", name, **cell) for name in ("gka", *OTHERS)}
        best = max(OTHERS, key=lambda name: means[name])
        error = math.hypot(*(found.error("accuracy", name, **cell) for name in ("gka", best)))
        learning = " (still learning)" * bool(found.select(UNDERTRAINED, best, **cell))
        guessing = [name for name in OTHERS if found.largest("accuracy", name, **cell) < 1 / pairs]
        rows.append(
            f"({width}, {length}) gka {means['gka']:.3f}, {best} {means[best]:.3f}{learning}, difference +- {error:.3f}"
            + ", both at the ceiling" * (min(means["gka"], means[best]) >= CEILING)
            + f", {', '.join(guessing)} guess{'es' * (len(guessing) == 1)}" * bool(guessing)
        )
        signs.append(clear_sign(means["gka"] - means[best], error, errors=1))
    if min(signs) < 0:
        return Verdict("does not hold", rows)
    return Verdict("holds" if max(signs) > 0 else "not resolved", rows)


CLAIM = Claim(
    name="C28",
    paper="gka",
    source="figure 3a",
    says="Gated KalmaNet recalls more than GDN, DeltaNet, Mamba-2 and GLA at every width and length.",
    printed="best in every cell, widths 64 to 256, (T, n) = (256, 64) and (512, 128)",
    setting=(
        "Zoology's MQAR, 2 layers without MLP, heads of 64 channels, no gates and no alpha connection in gka; widths 64 and "
        "128, (T, n) = (128, 32) and (256, 64), 8192 tokens, 2000 steps of 64 (4000 of 128 until it was cut before the "
        "run, to fit 20 minutes), rates 3e-4 to 1e-2, of which the first seed chooses."
    ),
    expected="holds",
    forecast="best where keys overlap: as many pairs as channels, or more",
    rule=(
        "holds if no other mixer is better by more than one standard error of the difference in any cell, and gka is in one; "
        "not resolved if all cells are ties."
    ),
    measure=recall_experiment(
        "C28",
        {
            f"width {width}, length {length}": Part(
                {
                    **ZOOLOGY_SETTINGS,
                    "heads": width // HEAD,
                    "intermediate_size": 0,
                    "width": width,
                    "length": length,
                    "pairs": (pairs,),
                    "mixers": (MixerChoice("gka", BARE, "gka"), *OTHERS),
                },
                {"width": width, "length": length},
            )
            for width, length, pairs in CELLS
        },
        train_best_rates,
    ),
    decide=decide,
    numbers=RECALL_NUMBERS,
    words=Words(subject="{mixer}, {pairs} pairs, width {width}, length {length}"),
    seeds=(1, 2, 3),
    device="cuda",
    cost="16 minutes of one GPU",
    note=(
        "three of the four cells are at the ceiling for gka and the best other mixer; in the other one, (64, 256), deltanet was "
        "still learning and the others guess, so that it shows who learns first in a short training rather than who recalls more"
    ),
)
