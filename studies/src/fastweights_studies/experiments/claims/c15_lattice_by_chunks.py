"""C15: Lattice leaves a parallel form of its nonlinear recurrence to future work."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import lattice

from ..claim import Claim, Measurement, Verdict, over_seeds
from ..draws import Draws
from .c05_sherman_morrison_by_chunks import seconds

LENGTH, CHANNELS = 512, 32


@torch.no_grad()
def measure(seed: int, device: str) -> dict[str, float]:
    draws, found = Draws(seed, device), {}
    q, k, v = (draws.normal(1, LENGTH, 2, CHANNELS) for _ in range(3))
    k, v = F.normalize(k, dim=-1), F.normalize(v, dim=-1)
    gamma, decay = draws.uniform(1, LENGTH, 2), draws.uniform(1, LENGTH, 2, low=0.9)
    for objective in ("encode", "similarity"):

        def outputs(backend: str, objective: str = objective) -> Tensor:
            return lattice(q, k, v, gamma, decay=decay, objective=objective, backend=backend)[0]

        loop, chunks = outputs("reference"), outputs("torch")
        found[f"{objective}, relative difference"] = ((loop - chunks).norm() / loop.norm()).item()
        times = seconds(lambda: outputs("reference"), 1), seconds(lambda: outputs("torch"), 3)  # noqa: B023
        found[f"{objective}, time of the loop over that of chunks"] = times[0] / times[1]
    return found


def decide(found: Measurement) -> Verdict:
    difference = max(found.largest(name) for name in found.values if "difference" in name)
    ratio = min(found.mean(name) for name in found.values if "time" in name)
    reason = f"chunks equal the loop over tokens up to {difference:.1e}; the loop takes {ratio:.1f} times as long"
    if difference >= 1e-9:
        return Verdict("not resolved", reason)
    return Verdict("holds" if ratio > 1 else "holds weakly", reason)


CLAIM = Claim(
    name="C15",
    paper="lattice",
    source="Remark 3.4",
    says="A parallel form of the recurrence can be found in future work.",
    printed="left open",
    setting=(
        "Objectives encode and similarity with a forget gate, 2 heads, K = V = 32, 512 tokens, float64, loop "
        "against chunks."
    ),
    expected="holds",
    forecast="equal to rounding; 5 times as fast on a CPU",
    rule=(
        "holds (the question is resolved) if the exact chunkwise form equals the loop to 1e-9; weakly if it is no "
        "faster."
    ),
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
