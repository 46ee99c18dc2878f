"""C17: how large the Jacobian of a step of variational linear attention is without normalisation."""

from __future__ import annotations

import torch.nn.functional as F

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import SCALES, Draws, penalized_keys, step_norms

PRINTED = {32: 5.36, 64: 13.50, 96: 20.48, 128: 26.47}
TOKENS = 25
# Which of khat and alpha have length 1.
VARIANTS = {
    "alpha not normalised": (True, False),
    "keys not normalised": (False, True),
    "neither normalised": (False, False),
}


def measure(seed: int, device: str) -> dict[str, float]:
    found = {}
    for name, (unit_keys, unit_writes) in VARIANTS.items():
        for label, scale in SCALES.items():
            for channels in PRINTED:
                k, alpha = penalized_keys(Draws(seed, device), TOKENS, channels, scale(channels), unit_keys, heads=8)
                alpha = F.normalize(alpha, dim=-1) if unit_writes else alpha
                found[f"{name}, {label}, d = {channels}"] = step_norms(k, alpha).mean().item()
    return found


def decide(found: Measurement) -> Verdict:
    off = {
        f"{name}, {label}": max(abs(found.mean(f"{name}, {label}, d = {d}") / x - 1) for d, x in PRINTED.items())
        for name in VARIANTS
        for label in SCALES
    }
    nearest = min(off, key=lambda variant: off[variant])
    shown = ", ".join(f"{found.mean(f'{nearest}, d = {d}'):.2f}" for d in PRINTED)
    return decided(off[nearest] <= 0.2, f"nearest variant: {nearest}: {shown}, off by up to {off[nearest]:.0%}")


CLAIM = Claim(
    name="C17",
    paper="vla",
    source="table 2",
    says="Without normalisation the norm of the Jacobian grows as d / lambda.",
    printed="5.36, 13.50, 20.48, 26.47 at d = 32, 64, 96, 128",
    setting="As C16, means over the first 25 tokens of 8 heads; without unit alpha, without unit keys, without both.",
    expected="does not hold",
    forecast="8.2, 8.7, 8.9, 8.9 without unit alpha (flat), 609 to 2549 without both",
    rule="holds if one of the variants is within 20% of all four numbers.",
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
