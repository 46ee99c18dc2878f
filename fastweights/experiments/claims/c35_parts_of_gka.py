"""C35: which parts of Gated KalmaNet its language models need."""

from __future__ import annotations

from ..claim import Claim, Measurement, Verdict, lost_trainings, not_finite, paired
from ..trained import gradient_spike, language_models, small_model

MIXERS = {
    "GKA": "gka",
    "without gating": {"name": "gka", "decay": "none"},
    "without alpha": {"name": "gka", "alpha_connection": False},
    "constant ridge": {"name": "gka", "adaptive_ridge": False, "ridge": 0.25},
}
SPIKES = 0.999


def decide(found: Measurement) -> Verdict:
    lost = lost_trainings(found, MIXERS)
    if set(lost) - {"constant ridge"}:
        return not_finite(lost)
    (gating, error), (alpha, _), (ridge, _) = (
        paired(found.values[name], found.values["GKA"])
        for name in ("without gating", "without alpha", "constant ridge")
    )
    spikes = found.mean(gradient_spike("constant ridge", SPIKES)) / found.mean(gradient_spike("GKA", SPIKES))
    gated, spiked = gating >= 0.02 and not gating <= 2 * error, spikes >= 2 or bool(lost)
    reason = (
        f"loss without gating {gating:+.4f} +- {error:.4f}, without alpha {alpha:+.4f}, with a constant ridge {ridge:+.4f}; "
        f"spikes of gradients with a constant ridge over those of GKA {spikes:.2f}"
    )
    if gated and spiked and abs(alpha) < 0.01:
        return Verdict("holds", reason)
    return Verdict("holds weakly" if gated or spiked else "does not hold", reason)


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
        "stay finite; weakly if only gating or only the ridge matters so."
    ),
    measure=language_models("C35", MIXERS, **small_model(layers=4, width=256, log_every=1)),
    decide=decide,
    seeds=(1, 2, 3),
    device="cuda",
    cost="15 minutes of one GPU",
)
