"""C20: how fast the penalty matrix of variational linear attention contracts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fastweights.ops import variational_linear_attention

from ..claim import Claim
from ..draws import RIDGE, SCALE_TERMS, SCALES, Draws, penalty_stream
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity, Words

CHANNELS, LENGTH, HEADS = 32, 1000, 8


def measure(seed: int, device: str) -> Iterator[Number]:
    k, u = penalty_stream(Draws(seed, device), LENGTH, CHANNELS, HEADS)
    yield Number("first_norm", CHANNELS**0.5 / RIDGE)
    for scale in SCALES:
        given = (k, k, k, SCALES[scale](CHANNELS) * u)
        _, state = variational_linear_attention(*given, ridge=RIDGE, output_final_state=True)
        assert state is not None
        yield Number("last_norm", torch.linalg.matrix_norm(state[1]).mean().item(), {"scale": scale})


def decide(found: Measurement) -> Verdict:
    last = {scale: found.mean("last_norm", scale=scale) for scale in SCALES}
    shown = ", ".join(f"{x:.1f} ({SCALE_TERMS['scale'][scale]})" for scale, x in last.items())
    return decided(
        any(abs(x / 10 - 1) <= 0.2 for x in last.values()), f"|A| falls from {found.mean('first_norm'):.1f} to {shown}"
    )


CLAIM = Claim(
    name="C20",
    paper="vla",
    source="figure 4",
    says="The norm of A falls from 56 to about 10 in 1000 tokens.",
    printed="56 to 10",
    setting=(
        "d = 32, ridge 0.1, penalty directions by a random matrix per head, means over 8 heads, without refresh, "
        "float64."
    ),
    expected="does not hold",
    forecast="56 to 22.3 (u / sqrt d, Algorithm 1) or 7.4 (unit u, equation 8)",
    rule="holds if the last norm is 10 within 20% for one of the two lengths of u.",
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "first_norm": Quantity("first"),
        "last_norm": Quantity(f"after {LENGTH} tokens, {{scale}}"),
    },
    words=Words(terms=SCALE_TERMS),
    seeds=(0, 1, 2),
    safe="computed before",
)
