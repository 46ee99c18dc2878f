"""C35: which parts of Gated KalmaNet its language models need."""

from __future__ import annotations

from ..claim import Claim

CLAIM = Claim(
    name="C35",
    paper="gka",
    source="appendix F",
    says="Gating matters, the alpha connection hardly; a constant ridge makes gradients spike.",
    printed="50.45 without gating, 58.39 without alpha, 58.89 with both (averages)",
    setting=(
        "Small language models, 1000 steps in bfloat16, Chebyshev; without gating, without alpha, with a constant "
        "ridge of .25."
    ),
    expected="not resolved",
    forecast="none",
    rule=(
        "holds if the loss is .02 higher without gating, alpha changes less than .01, and the 99.9% quantile of "
        "gradient norms over the median is twice as large with a constant ridge."
    ),
    measure=None,
    decide=None,
    device="cuda",
    cost="15 minutes of one GPU",
    needs="the gradient norm of every step in the results of `fastweights train`, and 15 minutes of one GPU",
)
