"""C7: a ridge in proportion to the norm of the Gram matrix bounds its condition number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.ops import gated_kalmanet

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity, Words

CHANNELS, RIDGES = 32, (0.01, 0.02, 0.1)
LENGTH = 512


def condition_over_bound(gram: Tensor, ridge: float) -> float:
    A = gram + ridge * torch.linalg.matrix_norm(gram) * torch.eye(CHANNELS, dtype=gram.dtype, device=gram.device)
    values = torch.linalg.eigvalsh(A)
    return (values[-1] / values[0]).item() * ridge / (ridge + 1)


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    plane = draws.unit(1, 1, 2, CHANNELS)
    keys = {
        "random": draws.unit(1, LENGTH, 1, CHANNELS),
        "equal": draws.unit(1, 1, 1, CHANNELS).expand(1, LENGTH, 1, CHANNELS),
        "rank_2": (draws.normal(1, LENGTH, 2, 1) * plane).sum(2, keepdim=True),
    }
    for name, k in keys.items():
        grams = []
        for taken in (1, 8, LENGTH):
            g = torch.full_like(k[:, :taken, :, 0], -0.01)
            _, state = gated_kalmanet(k[:, :taken], k[:, :taken], k[:, :taken], g, output_final_state=True)
            assert state is not None
            grams.append(state[0][0, 0])
        for ridge in RIDGES:
            largest = max(condition_over_bound(gram, ridge) for gram in grams)
            yield Number("condition_over_bound", largest, {"keys": name, "ridge": ridge})


def decide(found: Measurement) -> Verdict:
    largest = found.largest("condition_over_bound")
    return decided(largest <= 1 + 1e-9, f"the condition number reaches at most {largest:.9f} of (a + 1) / a")


CLAIM = Claim(
    name="C7",
    paper="gka",
    source="equation 4",
    says="With the ridge a |H|_F the condition number is at most (a + 1) / a.",
    printed="51 at a = 0.02",
    setting=(
        "K = 32, Gram matrices of 1, 8 and 512 keys that are random, all equal or of rank 2; a = 0.01, 0.02, 0.1; "
        "float64."
    ),
    expected="holds",
    forecast="the bound is reached by equal keys and never passed",
    rule="holds if no condition number is above (a + 1) / a (up to 1e-9 of it).",
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={"condition_over_bound": Quantity("{keys}, ridge {ridge}: condition number over its bound")},
    words=Words(terms={"keys": {"random": "random keys", "equal": "equal keys", "rank_2": "keys of rank 2"}}),
    seeds=(0, 1, 2),
    safe="identity",
)
