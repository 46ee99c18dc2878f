"""C18: how the memory of linear attention grows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fastweights.ops import linear_attention

from ..claim import Claim, Measurement, Verdict, over_seeds
from ..draws import Draws

CHANNELS, PRINTED = 32, 1630.0
LENGTHS = (100, 1000)
NEAR = 0.15  # relative difference from the printed number


def measure(seed: int, device: str) -> dict[str, float]:
    draws, found = Draws(seed, device), {}
    k = F.elu(draws.normal(1, LENGTHS[-1], 8, CHANNELS)) + 1
    noise = draws.normal(1, LENGTHS[-1], 8, CHANNELS)
    for label, v in (("values of mean 0", noise), ("values of mean 1", noise + 1)):
        norms = []
        for length in LENGTHS:
            _, S = linear_attention(k[:, :length], k[:, :length], v[:, :length], output_final_state=True)
            assert S is not None
            norms.append(torch.linalg.matrix_norm(S).mean().item())
        found[f"|S| after {LENGTHS[-1]} tokens, {label}"] = norms[-1]
        found[f"slope of log |S| over log T, {label}"] = math.log(norms[1] / norms[0]) / math.log(
            LENGTHS[1] / LENGTHS[0]
        )
    return found


def decide(found: Measurement) -> Verdict:
    norm, slope = (
        found.mean(f"{name}, values of mean 0") for name in ("|S| after 1000 tokens", "slope of log |S| over log T")
    )
    other = found.mean("slope of log |S| over log T, values of mean 1")
    smallest, largest = (of("|S| after 1000 tokens, values of mean 0") for of in (found.smallest, found.largest))
    number, growth = abs(norm / PRINTED - 1) <= NEAR, slope >= 0.7
    seeds = ", ".join(f"{x:.0f}" for x in found.values["|S| after 1000 tokens, values of mean 0"])
    limit = min((PRINTED * (1 - NEAR), PRINTED * (1 + NEAR)), key=lambda x: abs(norm - x))
    at_limit = f", at the limit of {limit:.1f} and inside the spread of the seeds" * (smallest <= limit <= largest)
    reason = (
        f"|S_1000| = {norm:.0f} ({seeds} by seed{at_limit}); "
        f"|S| grows as T^{slope:.2f} for values of mean 0, T^{other:.2f} for values of mean 1"
    )
    if number and growth:
        return Verdict("holds", reason)
    return Verdict("holds weakly" if number or growth else "does not hold", reason)


CLAIM = Claim(
    name="C18",
    paper="vla",
    source="section 6.2",
    says="The norm of linear attention's memory grows as O(T), to 1630 after 1000 tokens.",
    printed="1630",
    setting="d = 32, keys ELU + 1 of normal numbers, normal values, means over 8 heads, 100 to 1000 tokens, float64.",
    expected="holds weakly",
    forecast="1531, and a slope of 0.56: values of mean 0 add as a random walk",
    rule=(
        "The number holds within 15%, O(T) if the slope is at least 0.7 for values of mean 0; weakly if only one does."
    ),
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
