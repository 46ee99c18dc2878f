"""C1: preconditioning writes of the delta rule or queries of linear attention gives one memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fastweights.ops import recursive_least_squares

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity

LENGTH, CHANNELS, RIDGE = 256, 16, 0.1


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    q, k, v = (draws.normal(1, LENGTH, 1, CHANNELS) for _ in range(3))
    beta = torch.ones(1, LENGTH, 1, dtype=q.dtype, device=device)
    written, _ = recursive_least_squares(q, k, v, beta, ridge=RIDGE, scale=1.0)
    grams = (k[..., :, None] * k[..., None, :]).cumsum(1) + RIDGE * torch.eye(CHANNELS, dtype=q.dtype, device=device)
    memories = (k[..., :, None] * v[..., None, :]).cumsum(1)

    def compare(query: torch.Tensor) -> float:
        """The largest relative difference from linear attention that is read with these queries."""
        read = torch.einsum("bthk,bthkv->bthv", query, memories)
        return ((written - read).norm(dim=-1) / written.norm(dim=-1)).max().item()

    yield Number("difference", compare(torch.linalg.solve(grams, q)))
    yield Number("plain_difference", compare(q))


def decide(found: Measurement) -> Verdict:
    largest, plain = found.largest("difference"), found.smallest("plain_difference")
    return decided(largest < 1e-9 < plain, f"largest relative difference {largest:.1e} over {LENGTH} tokens")


CLAIM = Claim(
    name="C1",
    paper="pdn",
    source="Theorem 3.1",
    says="The delta rule with write keys P_t k_t and linear attention read with P_t q_t answer the same.",
    printed="equal",
    setting="K = V = 16, 256 tokens, ridge 0.1, beta 1, float64; the second by a linear solve at every token.",
    expected="holds",
    forecast="equal up to rounding",
    rule=(
        "holds if the largest relative difference over all tokens is below 1e-9, and above 1e-9 without a "
        "preconditioner."
    ),
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "difference": Quantity("largest relative difference"),
        "plain_difference": Quantity("the same without a preconditioner"),
    },
    seeds=(0, 1, 2),
    safe="identity",
)
