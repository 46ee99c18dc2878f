"""C3: with random unit keys the error of linear attention first falls and then grows; that of the delta rule falls."""

from __future__ import annotations

import torch

from fastweights.ops import delta_rule, linear_attention

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import Draws

CHANNELS, LENGTH, DRAWS = 16, 64, 200


def measure(seed: int, device: str) -> dict[str, float]:
    draws, d = Draws(seed, device), CHANNELS
    target = draws.normal(DRAWS, 1, d, d)
    target = target * d**0.5 / target.flatten(1).norm(dim=-1).view(-1, 1, 1, 1)  # |S*|^2 = d
    keys = draws.unit(DRAWS, LENGTH, 1, d)
    values = torch.einsum("nthk,nhkv->nthv", keys, target)
    gain = torch.ones(DRAWS, 1, 1, dtype=keys.dtype, device=device)
    states: dict[str, torch.Tensor | None] = {"linear": None, "delta": None, "half": None}
    errors: dict[str, list[float]] = {name: [] for name in states}
    for t in range(LENGTH):
        k, v = keys[:, t : t + 1], values[:, t : t + 1]
        _, states["linear"] = linear_attention(k, k, v, initial_state=states["linear"], output_final_state=True)
        for name, beta in (("delta", gain), ("half", gain / 2)):
            _, states[name] = delta_rule(k, k, v, beta, initial_state=states[name], output_final_state=True)
        for name, S in states.items():
            assert S is not None
            errors[name].append(((S - target).square().sum((1, 2, 3)) / d).mean().item())
    steps = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    formula = 1 - steps / d + steps * (steps - 1) / d**2
    linear, delta, half = (torch.tensor(errors[name], dtype=torch.float64) for name in ("linear", "delta", "half"))
    found = {
        "largest relative difference from the formula": (linear / formula - 1).abs().max(),
        "largest ratio DeltaNet / linear after d tokens": (delta / linear)[d:].max(),
        **{f"linear / DeltaNet at {t} tokens": (linear / delta)[t - 1] for t in (16, 32, 64)},
        **{f"linear / DeltaNet with beta 1/2 at {t} tokens": (linear / half)[t - 1] for t in (16, 32, 64)},
    }
    return {name: x.item() for name, x in found.items()}


def decide(found: Measurement) -> Verdict:
    off = found.largest("largest relative difference from the formula")
    ratio = found.largest("largest ratio DeltaNet / linear after d tokens")
    return decided(
        off < 0.03 and ratio <= 1,
        f"the formula is met within {off:.1%}; after d tokens DeltaNet's error is at most {ratio:.2f} of linear attention's",
    )


CLAIM = Claim(
    name="C3",
    paper="pdn",
    source="Theorem 3.2, appendix C.5.2",
    says=(
        "The error of linear attention is |S*|^2 / d (1 - t / d + t (t - 1) / d^2); DeltaNet's is below it after "
        "d tokens."
    ),
    printed="the formula",
    setting=(
        "d = 16, random unit keys, v = S* k with |S*|^2 = d, means over 200 draws, 64 tokens, beta 1 (and 1/2), "
        "float64."
    ),
    expected="holds",
    forecast=(
        "0.719, 0.938, 2.875 at t = 8, 16, 32; linear / DeltaNet at d, 2d, 4d: 2.6, 22, 815 (beta 1), 2.0, 13, "
        "280 (1/2)"
    ),
    rule=(
        "holds if the formula is met within 3% at every token and DeltaNet's error is at most linear attention's "
        "for all t > d."
    ),
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
