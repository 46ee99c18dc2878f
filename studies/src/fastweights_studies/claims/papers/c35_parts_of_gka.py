"""C35: which parts of Gated KalmaNet its language models need."""

from __future__ import annotations

import statistics

from fastweights.layers import MixerChoice

from ..claim import Claim
from ..measurement import Measurement
from ..trained import LANGUAGE_NUMBERS, language_models, list_lost, small_model
from ..verdict import Verdict, decide_lost, pair_seeds
from ..words import Words

WHOLE = MixerChoice("gka", {}, "GKA")
UNGATED = MixerChoice("gka", {"decay": "none"}, "without gating")
WITHOUT_ALPHA = MixerChoice("gka", {"alpha_connection": False}, "without alpha")
CONSTANT_RIDGE = MixerChoice("gka", {"adaptive_ridge": False, "ridge": 0.25}, "constant ridge")
CHOICES = (WHOLE, UNGATED, WITHOUT_ALPHA, CONSTANT_RIDGE)
SPIKES = 0.999
LEAST, HARDLY, LARGER = 0.02, 0.01, 2.0  # nats by gating, nats by alpha, times by the ridge


def decide(found: Measurement) -> Verdict:
    lost = list_lost(found, CHOICES)
    if set(lost) - {CONSTANT_RIDGE.label}:
        return decide_lost(lost)
    whole = found.values("loss", WHOLE)
    (gating, error), (alpha, alpha_error), (ridge, ridge_error) = (
        pair_seeds(found.values("loss", choice), whole) for choice in CHOICES[1:]
    )
    theirs, ours = (found.values("gradient_spike", choice, share=SPIKES) for choice in (CONSTANT_RIDGE, WHOLE))
    spikes = statistics.fmean(theirs) / statistics.fmean(ours)
    by_seed = ", ".join(f"{x / y:.2f}" for x, y in zip(theirs, ours))
    gated, spiked = gating >= LEAST and not gating <= 2 * error, spikes >= LARGER or bool(lost)
    hardly = abs(alpha) < HARDLY
    # On pages the parts about gating and alpha stand in one line.
    statements = (
        f"loss without gating {gating:+.4f} +- {error:.4f} ({say_whether(gated)}: gating matters); without alpha {alpha:+.4f} +- "
        f"{alpha_error:.4f}, limit {HARDLY} ({say_whether(hardly)}: alpha hardly matters)",
        f"spikes of gradients with a constant ridge over those of GKA {spikes:.2f} ({by_seed} by seed), limit {LARGER:g} "
        f"({say_whether(spiked)}: the ridge makes gradients spike)",
        f"loss with a constant ridge {ridge:+.4f} +- {ridge_error:.4f}",
    )
    if gated and spiked and hardly:
        return Verdict("holds", statements)
    return Verdict("holds weakly" if gated or spiked else "does not hold", statements)


def say_whether(holds: bool) -> str:
    return "holds" if holds else "fails"


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
        "holds if the loss is .02 higher without gating (and by more than two standard errors), alpha changes less than .01, "
        "and the 99.9% quantile of gradient norms over the median is twice as large with a constant ridge, or its loss does not "
        "stay finite; weakly if only gating or only the ridge matters so. (Added after the run: the outcome gives "
        "every difference its standard error and says of each part whether it holds. The rule is the same.)"
    ),
    measure=language_models("C35", CHOICES, **small_model(layers=4, width=256, log_every=1)),
    decide=decide,
    numbers=LANGUAGE_NUMBERS,
    words=Words(choices=CHOICES),
    seeds=(1, 2, 3),
    device="cuda",
    cost="15 minutes of one GPU",
)
