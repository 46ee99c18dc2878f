"""C31: memory windows grow before the loss falls."""

from __future__ import annotations

from ..claim import Claim

CLAIM = Claim(
    name="C31",
    paper="palimpsa",
    source="figure 3",
    says=(
        "The metaplasticity ratio settles near 40; memory windows grow exponentially early, and the loss falls "
        "once they reach T."
    ),
    printed="ratio to about 40, below 2 in the first 200 steps",
    setting="The run of C30 with D, the ratio (Imax - Imin) / Imin and the windows N_t = 1 / (1 - a_t) every 50 steps.",
    expected="not resolved",
    forecast="none",
    rule="holds if the last ratio is 20 to 80 and log N_t ranks with the step above 0.9 before the loss falls.",
    measure=None,
    decide=None,
    device="cuda",
    cost="5 minutes of one GPU",
    needs=(
        "a recall training that looks at g and J while it trains; `fastweights inspect` looks at the trained "
        "model alone"
    ),
)
