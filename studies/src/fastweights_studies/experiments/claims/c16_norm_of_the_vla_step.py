"""C16: is the Jacobian of a step of variational linear attention of norm exactly 1?"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import SCALES, Draws, penalized_keys, step_norms

LENGTH = 1000


def measure(seed: int, device: str) -> dict[str, float]:
    found = {}
    for label, scale in SCALES.items():
        for channels in (32, 128):
            k, y = penalized_keys(Draws(seed, device), LENGTH, channels, scale(channels))
            k, alpha = k[:, 0], F.normalize(y[:, 0], dim=-1)
            seen = torch.cat([torch.arange(60), torch.arange(60, LENGTH, 100 if channels == 128 else 10)])
            norms = step_norms(k[seen], alpha[seen])
            found[f"largest norm, d = {channels}, {label}"] = norms.max().item()
            found[f"smallest norm, d = {channels}, {label}"] = norms.min().item()
            if channels == 32:
                gradient = Draws(seed + 1, device).normal(channels, channels)
                gradient, largest = gradient / gradient.norm(), 1.0
                for t in range(LENGTH - 1, -1, -1):  # dL/dS_(t-1) = (I - alpha k^T)^T dL/dS_t
                    gradient = gradient - k[t][:, None] * (alpha[t] @ gradient)
                    largest = max(largest, gradient.norm().item())
                found[f"largest |dL/dS_t| / |dL/dS_T|, d = {channels}, {label}"] = largest
                found[f"|dL/dS_0| / |dL/dS_T|, d = {channels}, {label}"] = gradient.norm().item()
    return found


def decide(found: Measurement) -> Verdict:
    largest = max(found.largest(name) for name in found.values if name.startswith("largest norm"))
    between, last = (
        max(found.largest(name) for name in found.values if name.startswith(f"{start}|dL"))
        for start in ("largest ", "")
    )
    return decided(
        largest <= 1 + 1e-6,
        f"norm of a step up to {largest:.3f}; a gradient in S_0 has at most {last:.2f} of the norm of that in S_T, so that this "
        f"half of the claim {'holds' if last <= 1 else 'does not hold'} here; on the way back it reaches {between:.2f}",
    )


CLAIM = Claim(
    name="C16",
    paper="vla",
    source="Proposition 2, Corollary 1",
    says=(
        "The Jacobian I - alpha k' of a step has spectral norm exactly 1, so gradients in S_0 are no larger than "
        "those in S_T."
    ),
    printed="1",
    setting=(
        "Keys ELU + 1 of normal numbers brought to length 1, penalty directions by a random matrix, of either "
        "length that the paper has, ridge 0.1, 1000 tokens, d = 32 and 128, float64."
    ),
    expected="does not hold",
    forecast="norms from 1.0004 to 1.28 at d = 32, 1.002 at 128",
    rule=(
        "holds if no norm is above 1 + 1e-6. (The half about gradients is reported; its outcome in words was added after the "
        "run.)"
    ),
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
    cost="10 seconds",
)
