"""C5: two papers say that Sherman-Morrison recursions cannot be computed by chunks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.ops import recursive_least_squares, variational_linear_attention

from ..claim import Claim, Measurement, Verdict, decided, over_seeds
from ..draws import Draws, penalty_stream

LENGTH, CHANNELS = 2048, 32


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` calls."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


@torch.no_grad()
def measure(seed: int, device: str) -> dict[str, float]:
    draws, shape = Draws(seed, device), (1, LENGTH, 1, CHANNELS)
    q, v = draws.normal(*shape), draws.normal(*shape)
    beta = draws.uniform(1, LENGTH, 1)
    k, u = penalty_stream(draws, LENGTH, CHANNELS)

    def least_squares(backend: str) -> Tensor:
        return recursive_least_squares(q, k, v, beta, backend=backend)[0]

    def penalized(backend: str) -> Tensor:
        return variational_linear_attention(q.abs(), k, v, u, refresh_every=20, backend=backend)[0]

    found = {}
    for name, op in (("RLS", least_squares), ("VLA", penalized)):
        loop, chunks = op("reference"), op("torch")
        found[f"{name}, relative difference"] = ((loop - chunks).norm() / loop.norm()).item()
        times = seconds(lambda op=op: op("reference"), 1), seconds(lambda op=op: op("torch"), 3)  # type: ignore[misc]
        found[f"{name}, time of the loop over that of chunks"] = times[0] / times[1]
    return found


def decide(found: Measurement) -> Verdict:
    difference = max(found.largest(name) for name in found.values if "difference" in name)
    ratio = min(found.smallest(name) for name in found.values if "time" in name)
    return decided(
        not (difference < 1e-9 and ratio >= 10),
        f"chunks equal the loop over tokens up to {difference:.1e} and take at most 1/{ratio:.0f} of its time",
    )


CLAIM = Claim(
    name="C5",
    paper="pdn",
    source="sections 3.2 and C.4; Variational Linear Attention, section 3.4",
    says="The Sherman-Morrison recursion of the exact inverse precludes a chunkwise form.",
    printed="no chunkwise form",
    setting=(
        "RLS and VLA (with a refresh every 20 tokens), 2048 tokens, K = V = 32, float64, chunks of 64 and a loop "
        "over tokens."
    ),
    expected="does not hold",
    forecast="equal to rounding and 48 to 50 times as fast on a CPU (float32, 4 heads of 64)",
    rule="does not hold if both chunkwise forms equal the loop to 1e-9 in at most a tenth of its time.",
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
