"""C9: a larger ridge needs fewer iterations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..ridge_systems import growing_systems
from ..verdict import Verdict, decided
from ..words import Quantity

RIDGES, ITERATIONS = (0.01, 0.02, 0.05, 0.1), 30


def bound(ridge: float) -> float:
    """1 / T_31(1 + 2 a): the iteration starts with one step, so that 30 give a polynomial of degree 31."""
    return 1 / math.cosh((ITERATIONS + 1) * math.acosh(1 + 2 * ridge))


def measure(seed: int, device: str) -> Iterator[Number]:
    systems = growing_systems(Draws(seed, device), 2048, 128, heads=4, ridge=0.0, every=64)
    for ridge in RIDGES:
        yield Number("residual", systems._replace(ridge=ridge).residual("chebyshev", ITERATIONS), {"ridge": ridge})


def decide(found: Measurement) -> Verdict:
    largest = [found.largest("residual", ridge=ridge) for ridge in RIDGES]
    below = all(residual <= bound(a) * (1 + 1e-6) for a, residual in zip(RIDGES, largest))
    by_seed = zip(*(found.values("residual", ridge=ridge) for ridge in RIDGES))
    falling = all(left > right for residuals in by_seed for left, right in pairwise(residuals))
    shown = ", ".join(f"{x:.1e} at {a} (bound {bound(a):.1e})" for a, x in zip(RIDGES, largest))
    return decided(falling and below, f"largest residual {shown}")


CLAIM = Claim(
    name="C9",
    paper="gka",
    source="figure 8",
    says="The largest residual after 30 Chebyshev iterations falls as the ridge factor a grows from 0.01 to 0.1.",
    printed="a falling curve",
    setting="4 heads of random unit keys, D = 128, 2048 tokens, largest residual over every 64th token, float64.",
    expected="holds",
    forecast="strictly falling, below 1 / T_31(1 + 2 a)",
    rule=(
        "holds if the residual falls strictly over a = 0.01, 0.02, 0.05, 0.1 for every seed and none is above its "
        "bound."
    ),
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={"residual": Quantity("ridge {ridge}")},
    seeds=(0, 1, 2),
)
