"""C10: the weights of the Chebyshev iteration, and what the misprinted first one would do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.ops.shared.ridge.iterations import chebyshev_weights

from ..claim import Claim
from ..draws import Draws
from ..measurement import Column, Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity, Words

CHANNELS, ITERATIONS, RIDGE = 128, 30, 0.02
LOW, HIGH = RIDGE, 1 + RIDGE
RHO = (HIGH - LOW) / (HIGH + LOW)
FIRST, MISPRINTED = 2.0, 0.0  # omega_0


def compute_weights(first: float) -> list[float]:
    """omega_0, omega_1, ... with the recursion of Algorithm 1."""
    found = [first]
    for _ in range(ITERATIONS):
        found.append(4 / (4 - RHO**2 * found[-1]))
    return found


def find_residual(eigenvalues: Tensor, b: Tensor, first: float) -> float:
    """Of Algorithm 1 with this omega_0, for a diagonal matrix."""
    step = 2 / (HIGH + LOW)
    before, x = torch.zeros_like(b), step * b
    for omega in compute_weights(first)[1:]:
        before, x = x, x - omega * step * (eigenvalues * x - b) + (omega - 1) * (x - before)
    return ((b - eigenvalues * x).norm() / b.norm()).item()


def measure(seed: int, device: str) -> Iterator[Number]:
    b = Draws(seed, device).normal(CHANNELS)
    omega = torch.stack(
        [torch.tensor(FIRST, dtype=b.dtype), *chebyshev_weights(torch.tensor(RHO, dtype=b.dtype), ITERATIONS)]
    )
    place = torch.linspace(0, 1, CHANNELS, dtype=b.dtype, device=device)
    spectra = {"uniform": LOW + (HIGH - LOW) * place, "both_ends": torch.where(place < 0.5, LOW, HIGH)}
    printed = torch.tensor(compute_weights(FIRST), dtype=b.dtype)
    yield Number("largest_step", omega.diff().max().item())
    yield Number("smallest_weight", omega.min().item())
    yield Number("difference", (omega - printed).abs().max().item())
    for spectrum, eigenvalues in spectra.items():
        for first in (FIRST, MISPRINTED):
            column: Column = {"spectrum": spectrum, "first_weight": first}
            yield Number("residual", find_residual(eigenvalues, b, first), column)


def decide(found: Measurement) -> Verdict:
    falls = found.largest("largest_step") < 1e-12
    above = found.smallest("smallest_weight") > 1
    same = found.largest("difference") < 1e-12
    worst, worst_misprinted = (found.largest("residual", first_weight=first) for first in (FIRST, MISPRINTED))
    return decided(
        falls and above and same,
        f"omega falls from 2 to {found.mean('smallest_weight'):.3f}",
        f"worst residual after 30 iterations {worst:.1e}, with the printed omega_0 = 0 {worst_misprinted:.1e}",
    )


CLAIM = Claim(
    name="C10",
    paper="gka",
    source="Lemma 3, Algorithm 1",
    says="The weights of the Chebyshev iteration fall from 2 and stay above 1. (Algorithm 1 prints omega_0 = 0.)",
    printed="omega_0 = 2 in appendix B, 0 in Algorithm 1",
    setting=(
        "Eigenvalues between 0.02 and 1.02, uniform or half at each end, 128 channels, 30 iterations, float64; "
        "both first weights."
    ),
    expected="holds",
    forecast="falling to above 1; the misprint costs no accuracy: 1.6e-4 against 2.2e-4",
    rule=(
        "holds if no weight is above the one before (up to 1e-12) and all are above 1; what the misprint does is "
        "reported."
    ),
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "largest_step": Quantity("largest step of omega"),
        "smallest_weight": Quantity("smallest omega"),
        "difference": Quantity("largest difference from Algorithm 1"),
        "residual": Quantity("residual, {spectrum}, omega_0 = {first_weight:g}"),
    },
    words=Words(terms={"spectrum": {"both_ends": "both ends"}}),
    seeds=(0, 1, 2),
    safe="computed before",
)
