"""C10: the weights of the Chebyshev iteration, and what the misprinted first one would do."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.ops.shared.ridge.iterations import chebyshev_weights

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import Draws

CHANNELS, ITERATIONS, RIDGE = 128, 30, 0.02
LOW, HIGH = RIDGE, 1 + RIDGE
RHO = (HIGH - LOW) / (HIGH + LOW)


def weights(first: float) -> list[float]:
    """omega_0, omega_1, ... with the recursion of Algorithm 1."""
    found = [first]
    for _ in range(ITERATIONS):
        found.append(4 / (4 - RHO**2 * found[-1]))
    return found


def residual(eigenvalues: Tensor, b: Tensor, first: float) -> float:
    """Of Algorithm 1 with this omega_0, for a diagonal matrix."""
    step = 2 / (HIGH + LOW)
    before, x = torch.zeros_like(b), step * b
    for omega in weights(first)[1:]:
        before, x = x, x - omega * step * (eigenvalues * x - b) + (omega - 1) * (x - before)
    return ((b - eigenvalues * x).norm() / b.norm()).item()


def measure(seed: int, device: str) -> dict[str, float]:
    b = Draws(seed, device).normal(CHANNELS)
    omega = torch.stack(
        [torch.tensor(2.0, dtype=b.dtype), *chebyshev_weights(torch.tensor(RHO, dtype=b.dtype), ITERATIONS)]
    )
    place = torch.linspace(0, 1, CHANNELS, dtype=b.dtype, device=device)
    spectra = {"uniform": LOW + (HIGH - LOW) * place, "both ends": torch.where(place < 0.5, LOW, HIGH)}
    found = {
        "largest step of omega": omega.diff().max().item(),
        "smallest omega": omega.min().item(),
        "largest difference from Algorithm 1": (omega - torch.tensor(weights(2.0), dtype=b.dtype)).abs().max().item(),
    }
    for name, eigenvalues in spectra.items():
        for first in (2.0, 0.0):
            found[f"residual, {name}, omega_0 = {first:g}"] = residual(eigenvalues, b, first)
    return found


def decide(found: Measurement) -> Verdict:
    falls = found.largest("largest step of omega") < 1e-12
    above = found.smallest("smallest omega") > 1
    same = found.largest("largest difference from Algorithm 1") < 1e-12
    worst = {
        first: max(found.largest(name) for name in found.values if name.endswith(f"omega_0 = {first}"))
        for first in (2, 0)
    }
    return decided(
        falls and above and same,
        f"omega falls from 2 to {found.mean('smallest omega'):.3f}; worst residual after 30 iterations {worst[2]:.1e}, with the "
        f"printed omega_0 = 0 {worst[0]:.1e}",
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
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
