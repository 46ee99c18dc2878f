"""C3: with random unit keys the error of linear attention first falls and then grows; that of the delta rule falls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fastweights.ops import delta_rule, linear_attention

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity

CHANNELS, LENGTH, DRAWS = 16, 64, 20_000
GAINS = (1.0, 0.5)  # beta of the delta rule
TOKENS = (16, 32, 64)


def write_delta(beta: Tensor, k: Tensor, v: Tensor, S: Tensor | None) -> Tensor | None:
    return delta_rule(k, k, v, beta, initial_state=S, output_final_state=True)[1]


def measure(seed: int, device: str) -> Iterator[Number]:
    draws, d = Draws(seed, device), CHANNELS
    target = draws.normal(DRAWS, 1, d, d)
    target = target * d**0.5 / target.flatten(1).norm(dim=-1).view(-1, 1, 1, 1)  # |S*|^2 = d
    keys = draws.unit(DRAWS, LENGTH, 1, d)
    values = torch.einsum("nthk,nhkv->nthv", keys, target)
    ones = torch.ones(DRAWS, 1, 1, dtype=keys.dtype, device=device)

    def measure_errors(write: Callable[[Tensor, Tensor, Tensor | None], Tensor | None]) -> Tensor:
        """The squared error of a memory after every token, [T], on average over the draws."""
        S: Tensor | None = None
        errors = []
        for t in range(LENGTH):
            S = write(keys[:, t : t + 1], values[:, t : t + 1], S)
            assert S is not None
            errors.append(((S - target).square().sum((1, 2, 3)) / d).mean().item())
        return torch.tensor(errors, dtype=torch.float64)

    steps = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    formula = 1 - steps / d + steps * (steps - 1) / d**2
    linear = measure_errors(lambda k, v, S: linear_attention(k, k, v, initial_state=S, output_final_state=True)[1])
    delta, half = (measure_errors(partial(write_delta, gain * ones)) for gain in GAINS)
    yield Number("formula_difference", (linear / formula - 1).abs().max().item())
    yield Number("largest_ratio", (delta / linear)[d:].max().item())
    for measure, errors in (("linear_ratio", delta), ("half_gain_linear_ratio", half)):
        for tokens in TOKENS:
            yield Number(measure, (linear / errors)[tokens - 1].item(), {"tokens": tokens})


def decide(found: Measurement) -> Verdict:
    off, ratio = found.largest("formula_difference"), found.largest("largest_ratio")
    return decided(
        off < 0.03 and ratio <= 1,
        f"the formula is met within {off:.1%}",
        f"after d tokens DeltaNet's error is at most {ratio:.2f} of linear attention's",
    )


CLAIM = Claim(
    name="C3",
    paper="pdn",
    source="Theorem 3.2, appendix C.5.2",
    says=(
        "The error of linear attention is |S*|^2 / d (1 - t / d + t (t - 1) / d^2); DeltaNet's is below it after "
        "d tokens."
    ),
    printed="the formula",
    setting=(
        "d = 16, random unit keys, v = S* k with |S*|^2 = d, means over 20,000 draws (200 at first), 64 tokens, "
        "beta 1 (and 1/2), float64."
    ),
    expected="holds",
    forecast=(
        "0.719, 0.938, 2.875 at t = 8, 16, 32; linear / DeltaNet at d, 2d, 4d: 2.6, 22, 815 (beta 1), 2.0, 13, "
        "280 (1/2)"
    ),
    rule=(
        "holds if the formula is met within 3% at every token and DeltaNet's error is at most linear attention's "
        "for all t > d."
    ),
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "formula_difference": Quantity("largest relative difference from the formula"),
        "largest_ratio": Quantity("largest ratio DeltaNet / linear after d tokens"),
        "linear_ratio": Quantity("linear / DeltaNet at {tokens} tokens"),
        "half_gain_linear_ratio": Quantity("linear / DeltaNet with beta 1/2 at {tokens} tokens"),
    },
    seeds=(0, 1, 2),
    safe="computed before",
)
