"""C20: how fast the penalty matrix of variational linear attention contracts."""

from __future__ import annotations

import torch

from fastweights.ops import variational_linear_attention

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import RIDGE, SCALES, Draws, penalty_stream

CHANNELS, LENGTH, HEADS = 32, 1000, 8


def measure(seed: int, device: str) -> dict[str, float]:
    k, u = penalty_stream(Draws(seed, device), LENGTH, CHANNELS, HEADS)
    found = {"first": CHANNELS**0.5 / RIDGE}
    for label, scale in SCALES.items():
        _, state = variational_linear_attention(k, k, k, scale(CHANNELS) * u, ridge=RIDGE, output_final_state=True)
        assert state is not None
        found[f"after {LENGTH} tokens, {label}"] = torch.linalg.matrix_norm(state[1]).mean().item()
    return found


def decide(found: Measurement) -> Verdict:
    last = {label: found.mean(f"after {LENGTH} tokens, {label}") for label in SCALES}
    shown = ", ".join(f"{x:.1f} ({label})" for label, x in last.items())
    return decided(
        any(abs(x / 10 - 1) <= 0.2 for x in last.values()), f"|A| falls from {found.mean('first'):.1f} to {shown}"
    )


CLAIM = Claim(
    name="C20",
    paper="vla",
    source="figure 4",
    says="The norm of A falls from 56 to about 10 in 1000 tokens.",
    printed="56 to 10",
    setting=(
        "d = 32, ridge 0.1, penalty directions by a random matrix per head, means over 8 heads, without refresh, "
        "float64."
    ),
    expected="does not hold",
    forecast="56 to 22.3 (u / sqrt d, Algorithm 1) or 7.4 (unit u, equation 8)",
    rule="holds if the last norm is 10 within 20% for one of the two lengths of u.",
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
