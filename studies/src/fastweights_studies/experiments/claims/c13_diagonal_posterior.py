"""C13: a diagonal posterior is the full one where keys do not overlap."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.ops import palimpsa

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import Draws

CHANNELS, LENGTH, PRIOR = 16, 64, 1.0
OVERLAPS = (0.0, 0.1, 0.3, 0.6)


def keys_of_overlap(overlap: float, device: str) -> Tensor:
    """16 unit keys, each two with this cosine: the rows of the root of (1 - c) I + c 1 1^T."""
    gram = (1 - overlap) * torch.eye(CHANNELS, dtype=torch.float64) + overlap
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.sqrt() @ vectors.T).to(device)


def measure(seed: int, device: str) -> dict[str, float]:
    draws, found = Draws(seed, device), {}
    order, v = draws.integers(CHANNELS, LENGTH), draws.normal(LENGTH, CHANNELS)
    beta = draws.uniform(LENGTH, 1, low=0.2, high=1.0).expand(LENGTH, CHANNELS)
    for overlap in OVERLAPS:
        k = keys_of_overlap(overlap, device)[order]
        given = (k, k, beta * v, beta, torch.zeros_like(k[:, 0]))
        _, state = palimpsa(*(x[None, :, None] for x in given), prior=PRIOR, output_final_state=True)
        assert state is not None
        M, J = (x[0, 0] for x in state)
        precision = (k * beta[:, :1]).T @ k + PRIOR * torch.eye(CHANNELS, dtype=k.dtype, device=device)
        full = torch.linalg.solve(precision, k.T @ (beta * v))
        found[f"relative error of the mean at cosine {overlap:g}"] = (
            (M / (J + PRIOR) - full).norm() / full.norm()
        ).item()
    return found


def decide(found: Measurement) -> Verdict:
    errors = [found.mean(f"relative error of the mean at cosine {overlap:g}") for overlap in OVERLAPS]
    grows = all(left < right for left, right in zip(errors, errors[1:]))
    shown = ", ".join(f"{error:.1e} at {overlap:g}" for overlap, error in zip(OVERLAPS, errors))
    return decided(errors[0] < 1e-12 and grows, f"relative error of the mean by the cosine of two keys: {shown}")


CLAIM = Claim(
    name="C13",
    paper="palimpsa",
    source="appendix A.5",
    says="The diagonal posterior is exact for one-hot keys; its error grows with the overlap of the keys.",
    printed="exact; no number for other keys",
    setting=(
        "K = V = 16, 64 tokens of 16 keys with equal cosines of 0 (one-hot), 0.1, 0.3 and 0.6, prior 1, no decay, "
        "float64."
    ),
    expected="holds",
    forecast="rounding for one-hot keys, growing errors beyond",
    rule="holds if the mean is off by less than 1e-12 for one-hot keys and the error grows with the cosine.",
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
