"""C5: two papers say that Sherman-Morrison recursions cannot be computed by chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.ops import recursive_least_squares, variational_linear_attention

from ..chunks import CHUNK_NUMBERS, compare_chunks
from ..claim import Claim
from ..draws import Draws, penalty_stream
from ..measurement import Measurement, Number, measure_by_seed, numbers_of_mixer
from ..verdict import Verdict, decided
from ..words import Words

LENGTH, CHANNELS = 2048, 32


@torch.no_grad()
def measure(seed: int, device: str) -> Iterator[Number]:
    draws, shape = Draws(seed, device), (1, LENGTH, 1, CHANNELS)
    q, v = draws.normal(*shape), draws.normal(*shape)
    beta = draws.uniform(1, LENGTH, 1)
    k, u = penalty_stream(draws, LENGTH, CHANNELS)

    def regress(backend: str) -> Tensor:
        return recursive_least_squares(q, k, v, beta, backend=backend)[0]

    def penalize(backend: str) -> Tensor:
        return variational_linear_attention(q.abs(), k, v, u, refresh_every=20, backend=backend)[0]

    for mixer, op in (("rls", regress), ("vla", penalize)):
        yield from numbers_of_mixer(compare_chunks(op), mixer)


def decide(found: Measurement) -> Verdict:
    difference, ratio = found.largest("difference"), found.smallest("time_ratio")
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
    measure=measure_by_seed(measure),
    decide=decide,
    numbers=CHUNK_NUMBERS,
    words=Words(subject="{mixer}", terms={"mixer": {"rls": "RLS", "vla": "VLA"}}),
    seeds=(0, 1, 2),
)
