"""C18: how the memory of linear attention grows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fastweights.ops import linear_attention

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict
from ..words import Quantity

CHANNELS, PRINTED = 32, 1630.0
LENGTHS = (100, 1000)
NEAR = 0.15  # relative difference from the printed number


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    k = F.elu(draws.normal(1, LENGTHS[-1], 8, CHANNELS)) + 1
    noise = draws.normal(1, LENGTHS[-1], 8, CHANNELS)
    for mean in (0, 1):
        norms = []
        for length in LENGTHS:
            v = (noise + mean)[:, :length]
            _, S = linear_attention(k[:, :length], k[:, :length], v, output_final_state=True)
            assert S is not None
            norms.append(torch.linalg.matrix_norm(S).mean().item())
        slope = math.log(norms[1] / norms[0]) / math.log(LENGTHS[1] / LENGTHS[0])
        yield Number("norm", norms[-1], {"mean_value": mean})
        yield Number("slope", slope, {"mean_value": mean})


def decide(found: Measurement) -> Verdict:
    norms = found.values("norm", mean_value=0)
    norm, slope, other = found.mean("norm", mean_value=0), *(found.mean("slope", mean_value=x) for x in (0, 1))
    number, growth = abs(norm / PRINTED - 1) <= NEAR, slope >= 0.7
    limit = min((PRINTED * (1 - NEAR), PRINTED * (1 + NEAR)), key=lambda x: abs(norm - x))
    at_limit = f", at the limit of {limit:.1f} and inside the spread of the seeds" * (min(norms) <= limit <= max(norms))
    statements = (
        f"|S_1000| = {norm:.0f} ({', '.join(f'{x:.0f}' for x in norms)} by seed{at_limit})",
        f"|S| grows as T^{slope:.2f} for values of mean 0, T^{other:.2f} for values of mean 1",
    )
    if number and growth:
        return Verdict("holds", statements)
    return Verdict("holds weakly" if number or growth else "does not hold", statements)


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
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "norm": Quantity(f"|S| after {LENGTHS[-1]} tokens, values of mean {{mean_value}}"),
        "slope": Quantity("slope of log |S| over log T, values of mean {mean_value}"),
    },
    seeds=(0, 1, 2),
    safe="computed before",
)
