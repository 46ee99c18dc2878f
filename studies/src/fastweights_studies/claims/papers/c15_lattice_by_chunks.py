"""C15: Lattice leaves a parallel form of its nonlinear recurrence to future work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import lattice

from ..chunks import CHUNK_NUMBERS, compare_chunks
from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed, numbers_of_mixer
from ..verdict import Verdict
from ..words import Words

LENGTH, CHANNELS = 512, 32
OBJECTIVES = ("encode", "similarity")


@torch.no_grad()
def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    q, k, v = (draws.normal(1, LENGTH, 2, CHANNELS) for _ in range(3))
    k, v = F.normalize(k, dim=-1), F.normalize(v, dim=-1)
    gamma, decay = draws.uniform(1, LENGTH, 2), draws.uniform(1, LENGTH, 2, low=0.9)
    for objective in OBJECTIVES:

        def update(backend: str, objective: str = objective) -> Tensor:
            return lattice(q, k, v, gamma, decay=decay, objective=objective, backend=backend)[0]

        yield from numbers_of_mixer(compare_chunks(update), "lattice", objective=objective)


def decide(found: Measurement) -> Verdict:
    difference = found.largest("difference")
    ratio = min(found.mean("time_ratio", objective=objective) for objective in OBJECTIVES)
    statements = (
        f"chunks equal the loop over tokens up to {difference:.1e}",
        f"the loop takes {ratio:.1f} times as long",
    )
    if difference >= 1e-9:
        return Verdict("not resolved", statements)
    return Verdict("holds" if ratio > 1 else "holds weakly", statements)


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
    measure=measure_by_seed(measure),
    decide=decide,
    numbers=CHUNK_NUMBERS,
    words=Words(subject="{objective}"),
    seeds=(0, 1, 2),
    safe="identity",
)
