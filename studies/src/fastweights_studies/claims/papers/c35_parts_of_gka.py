"""C35: which parts of Gated KalmaNet its language models need."""

from __future__ import annotations

import math
import statistics

from fastweights.layers import MixerChoice

from ..claim import Claim
from ..measurement import Measurement
from ..trained import LANGUAGE_NUMBERS, language_models, list_lost, small_model
from ..verdict import INTERVALS, Status, Verdict, compare_seeds, decide_lost, settle
from ..words import Words

WHOLE = MixerChoice("gka", {}, "GKA")
UNGATED = MixerChoice("gka", {"decay": "none"}, "without gating")
WITHOUT_ALPHA = MixerChoice("gka", {"alpha_connection": False}, "without alpha")
CONSTANT_RIDGE = MixerChoice("gka", {"adaptive_ridge": False, "ridge": 0.25}, "constant ridge")
CHOICES = (WHOLE, UNGATED, WITHOUT_ALPHA, CONSTANT_RIDGE)
SPIKES = 0.999
OUTCOMES = {1: "holds", -1: "fails", 0: "open"}
LEAST, HARDLY, LARGER = 0.02, 0.01, 2.0  # nats by gating, nats by alpha, times by the ridge


def decide(found: Measurement) -> Verdict:
    lost = list_lost(found, CHOICES)
    if set(lost) - {CONSTANT_RIDGE.label}:
        return decide_lost(lost)
    theirs, ours = (found.by_seed("gradient_spike", choice, share=SPIKES) for choice in (CONSTANT_RIDGE, WHOLE))
    by_limit = {seed: math.log(x / LARGER) for seed, x in theirs.items()}
    compared = compare_seeds(
        {
            **{choice.label: (found.by_seed("loss", choice), found.by_seed("loss", WHOLE)) for choice in CHOICES[1:]},
            "spikes": (by_limit, {seed: math.log(x) for seed, x in ours.items()}),
        }
    )
    gating, alpha, ridge, above_limit = compared.values()
    spikes = statistics.fmean(theirs.values()) / statistics.fmean(ours.values())
    by_seed = ", ".join(f"{theirs[seed] / ours[seed]:.2f}" for seed in theirs)
    gated = 1 if gating.sign > 0 and gating.mean >= LEAST else -int(gating.high < LEAST)
    spiked, hardly = 1 if lost else above_limit.sign, alpha.within(HARDLY)
    # On pages the parts about gating and alpha stand in one line.
    statements = (
        f"loss without gating {gating} ({OUTCOMES[gated]}: gating matters); without alpha {alpha}, limit {HARDLY} "
        f"({OUTCOMES[hardly]}: alpha hardly matters)",
        f"spikes of gradients with a constant ridge over those of GKA {spikes:.2f} ({by_seed} by seed), limit {LARGER:g} "
        f"({OUTCOMES[spiked]}: the ridge makes gradients spike)",
        f"loss with a constant ridge {ridge}",
    )
    return Verdict(settle(outcome, gated, spiked, hardly), statements)


def outcome(gated: bool, spiked: bool, hardly: bool) -> Status:
    if gated and spiked and hardly:
        return "holds"
    return "holds weakly" if gated or spiked else "does not hold"


CLAIM = Claim(
    name="C35",
    paper="gka",
    source="appendix F",
    says="Gating matters, the alpha connection hardly; a constant ridge makes gradients spike.",
    printed="50.45 without gating, 58.39 without alpha, 58.89 with both (averages)",
    setting=(
        "4 layers of width 256, 4 heads of 64, rows of 1024 tokens, 16M tokens of the source text of PyTorch, none read "
        "twice, bfloat16, Chebyshev; without gating, without alpha, with a constant ridge of .25; the norm of every "
        "step's gradient before it is scaled down to 1."
    ),
    expected="not resolved",
    forecast="none",
    rule=(
        "holds if the loss is clearly higher without gating, by .02 or more, alpha changes less than .01, "
        "and the 99.9% quantile of gradient norms over the median is twice as large with a constant ridge, or its loss does not "
        "stay finite; weakly if only gating or only the ridge matters so. (Added after the run: the outcome says of each part "
        f"whether it holds.) {INTERVALS}"
    ),
    measure=language_models("C35", CHOICES, **small_model(layers=4, width=256, log_every=1)),
    decide=decide,
    to_decide=("100M tokens, three rates for every mixer, five seeds"),
    numbers=LANGUAGE_NUMBERS,
    words=Words(choices=CHOICES),
    seeds=(1, 2, 3),
    device="cuda",
    cost="15 minutes of one GPU",
)
