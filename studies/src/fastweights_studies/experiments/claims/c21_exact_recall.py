"""C21: are independent keys recalled exactly?"""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.ops import delta_rule, gated_kalmanet, linear_attention, variational_linear_attention

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import RIDGE, Draws

CHANNELS, CANDIDATES, TRIALS = 32, 64, 200
PAIRS = (24, 32, 48)


def answers(k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """What each memory answers to its keys after all pairs, [N, n, V]."""
    ones = torch.ones_like(k[..., 0])
    found = {}
    for label, scale in (("VLA, |u| = d^-1/2", CHANNELS**-0.5), ("VLA, |u| = 1", 1.0)):
        _, state = variational_linear_attention(k.abs(), k, v, scale * k, ridge=RIDGE, output_final_state=True)
        assert state is not None
        found[label] = state[0]
    _, found["delta rule"] = delta_rule(k, k, v, ones, output_final_state=True)  # type: ignore[assignment]
    _, found["linear attention"] = linear_attention(k, k, v, output_final_state=True)  # type: ignore[assignment]
    read = {name: torch.einsum("nthk,nhkv->ntv", k, S) for name, S in found.items()}
    _, ridge_state = gated_kalmanet(k, k, v, 0 * ones, output_final_state=True)
    assert ridge_state is not None
    queries = k.flatten(0, 1)[:, None]  # every key as the next token's query, with a key of zeros
    H, U = (x.repeat_interleave(k.shape[1], 0) for x in ridge_state)
    zeros = torch.zeros_like(queries)
    o, _ = gated_kalmanet(queries, zeros, zeros, zeros[..., 0], scale=1.0, initial_state=(H, U), iterations=60)
    return {**read, "ridge regression": o.view(*k.shape[:2], -1)}


def measure(seed: int, device: str) -> dict[str, float]:
    draws, found = Draws(seed, device), {}
    for pairs in PAIRS:
        keys = draws.unit(TRIALS, pairs, 1, CHANNELS)
        candidates = draws.normal(TRIALS, CANDIDATES, CHANNELS)
        right = draws.uniform(TRIALS, CANDIDATES).argsort(-1)[:, :pairs]
        values = candidates.gather(1, right[..., None].expand(-1, -1, CHANNELS))
        for name, answer in answers(keys, values[:, :, None]).items():
            chosen = (answer @ candidates.mT).argmax(-1)
            found[f"{name}, {pairs} pairs, right"] = (chosen == right).double().mean().item()
            if pairs == PAIRS[0]:
                off = (answer - values).norm(dim=-1) / values.norm(dim=-1)
                found[f"{name}, {pairs} pairs, median relative error"] = off.median().item()
                found[f"{name}, {pairs} pairs, largest relative error"] = off.max().item()
    return found


def decide(found: Measurement) -> Verdict:
    def error(which: str) -> float:
        return min(found.mean(f"VLA, {u}, 24 pairs, {which} relative error") for u in ("|u| = d^-1/2", "|u| = 1"))

    names = ("VLA, |u| = d^-1/2", "VLA, |u| = 1", "delta rule", "linear attention", "ridge regression")
    right = ", ".join(f"{name} {found.mean(f'{name}, 24 pairs, right'):.3f}" for name in names)
    return decided(
        error("largest") < 1e-6,
        f"relative error of VLA at 24 pairs {error('median'):.2f} in the median, {error('largest'):.2f} at worst; right of 64 "
        f"values at 24 pairs: {right}",
    )


CLAIM = Claim(
    name="C21",
    paper="vla",
    source="Proposition 3",
    says="Up to d linearly independent keys are recalled exactly.",
    printed="exact for n <= d = 32; linear attention fails at 24 pairs",
    setting=(
        "d = 32, random unit keys, u along the key, nearest of 64 normal values by product, 200 trials, float64, "
        "nothing trained."
    ),
    expected="does not hold",
    forecast=(
        "at 24 pairs VLA .963 (u / sqrt d) and 1.0 (unit u), delta rule .903, linear .995, ridge 1.0, none of the "
        "first four exact"
    ),
    rule="holds if |S k_i - v_i| / |v_i| is below 1e-6 for all pairs at 24 pairs, for one of the two lengths of u.",
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
