"""C7: a ridge in proportion to the norm of the Gram matrix bounds its condition number."""

from __future__ import annotations

import torch

from fastweights.ops import gated_kalmanet

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import Draws

CHANNELS, RIDGES = 32, (0.01, 0.02, 0.1)


def measure(seed: int, device: str) -> dict[str, float]:
    draws = Draws(seed, device)
    found: dict[str, float] = {}
    length = 512
    plane = draws.unit(1, 1, 2, CHANNELS)
    keys = {
        "random keys": draws.unit(1, length, 1, CHANNELS),
        "equal keys": draws.unit(1, 1, 1, CHANNELS).expand(1, length, 1, CHANNELS),
        "keys of rank 2": (draws.normal(1, length, 2, 1) * plane).sum(2, keepdim=True),
    }
    for name, k in keys.items():
        for taken in (1, 8, length):
            g = torch.full_like(k[:, :taken, :, 0], -0.01)
            _, state = gated_kalmanet(k[:, :taken], k[:, :taken], k[:, :taken], g, output_final_state=True)
            assert state is not None
            H = state[0][0, 0]
            for ridge in RIDGES:
                A = H + ridge * torch.linalg.matrix_norm(H) * torch.eye(CHANNELS, dtype=H.dtype, device=device)
                values = torch.linalg.eigvalsh(A)
                share = (values[-1] / values[0]).item() * ridge / (ridge + 1)
                label = f"{name}, ridge {ridge}: condition number over its bound"
                found[label] = max(share, found.get(label, 0.0))
    return found


def decide(found: Measurement) -> Verdict:
    largest = max(map(found.largest, found.values))
    return decided(largest <= 1 + 1e-9, f"the condition number reaches at most {largest:.9f} of (a + 1) / a")


CLAIM = Claim(
    name="C7",
    paper="gka",
    source="equation 4",
    says="With the ridge a |H|_F the condition number is at most (a + 1) / a.",
    printed="51 at a = 0.02",
    setting=(
        "K = 32, Gram matrices of 1, 8 and 512 keys that are random, all equal or of rank 2; a = 0.01, 0.02, 0.1; "
        "float64."
    ),
    expected="holds",
    forecast="the bound is reached by equal keys and never passed",
    rule="holds if no condition number is above (a + 1) / a (up to 1e-9 of it).",
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
