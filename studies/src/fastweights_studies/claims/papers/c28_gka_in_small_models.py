"""C28: Gated KalmaNet without gates recalls more than gated and delta rules."""

from __future__ import annotations

from typing import Any

from fastweights.layers import MixerChoice

from ..claim import Claim
from ..measurement import UNDERTRAINED, Measurement
from ..trained import RECALL_NUMBERS, ZOOLOGY_SETTINGS, Part, recall_experiment, train_best_rates
from ..verdict import INTERVALS, Verdict, compare_seeds
from ..words import Words

BARE = {"decay": "none", "gain": "none", "alpha_connection": False, "output_gate": "none"}
OTHERS = ("gdn", "deltanet", "mamba2", "gla")
HEAD = 64  # channels
CEILING = 0.99  # accuracy
CELLS = [(width, length, pairs) for width in (64, 128) for length, pairs in ((128, 32), (256, 64))]


def decide(found: Measurement) -> Verdict:
    cells: list[dict[str, Any]] = [{"width": width, "length": length} for width, length, _ in CELLS]
    means = [{name: found.mean("accuracy", name, **cell) for name in ("gka", *OTHERS)} for cell in cells]
    best = [max(OTHERS, key=lambda name: own[name]) for own in means]
    gains = compare_seeds(
        {
            place: (found.by_seed("accuracy", "gka", **cell), found.by_seed("accuracy", best[place], **cell))
            for place, cell in enumerate(cells)
        }
    )
    rows = []
    for place, (width, length, pairs) in enumerate(CELLS):
        cell, own, other = cells[place], means[place], best[place]
        learning = " (still learning)" * bool(found.select(UNDERTRAINED, other, **cell))
        guessing = [name for name in OTHERS if found.largest("accuracy", name, **cell) < 1 / pairs]
        rows.append(
            f"({width}, {length}) gka {own['gka']:.3f}, {other} {own[other]:.3f}{learning}, difference {gains[place]}"
            + ", both at the ceiling" * (min(own["gka"], own[other]) >= CEILING)
            + f", {', '.join(guessing)} guess{'es' * (len(guessing) == 1)}" * bool(guessing)
        )
    signs = [gain.sign for gain in gains.values()]
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
        "holds if the best other mixer is better in no cell, and gka is in one; not resolved if all cells are ties. "
        f"{INTERVALS}"
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
    to_decide=(
        "one block for all five (convolutions, first windows, no gates), gka with its decay and without, states in which the "
        "best other mixer recalls half, trainings until .99 or 8,000 steps, five seeds"
    ),
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
