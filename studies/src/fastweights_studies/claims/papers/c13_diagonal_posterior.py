"""C13: a diagonal posterior is the full one where keys do not overlap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from fastweights.ops import palimpsa

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity

CHANNELS, LENGTH, PRIOR = 16, 64, 1.0
COSINES = (0.0, 0.1, 0.3, 0.6)


def make_keys(cosine: float, device: str) -> Tensor:
    """16 unit keys, each two with this cosine: the rows of the root of (1 - c) I + c 1 1^T."""
    gram = (1 - cosine) * torch.eye(CHANNELS, dtype=torch.float64) + cosine
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.sqrt() @ vectors.T).to(device)


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    order, v = draws.integers(CHANNELS, LENGTH), draws.normal(LENGTH, CHANNELS)
    beta = draws.uniform(LENGTH, 1, low=0.2, high=1.0).expand(LENGTH, CHANNELS)
    for cosine in COSINES:
        k = make_keys(cosine, device)[order]
        given = (k, k, beta * v, beta, torch.zeros_like(k[:, 0]))
        _, state = palimpsa(*(x[None, :, None] for x in given), prior=PRIOR, output_final_state=True)
        assert state is not None
        M, J = (x[0, 0] for x in state)
        precision = (k * beta[:, :1]).T @ k + PRIOR * torch.eye(CHANNELS, dtype=k.dtype, device=device)
        full = torch.linalg.solve(precision, k.T @ (beta * v))
        yield Number("mean_error", ((M / (J + PRIOR) - full).norm() / full.norm()).item(), {"cosine": cosine})


def decide(found: Measurement) -> Verdict:
    errors = [found.mean("mean_error", cosine=cosine) for cosine in COSINES]
    grows = all(left < right for left, right in pairwise(errors))
    shown = ", ".join(f"{error:.1e} at {cosine:g}" for cosine, error in zip(COSINES, errors))
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
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={"mean_error": Quantity("relative error of the mean at cosine {cosine:g}")},
    seeds=(0, 1, 2),
    safe="identity",
)
