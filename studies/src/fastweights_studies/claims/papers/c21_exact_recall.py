"""C21: are independent keys recalled exactly?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fastweights.ops import delta_rule, gated_kalmanet, linear_attention, variational_linear_attention

from ..claim import Claim
from ..draws import RIDGE, SCALE_TERMS, SCALES, Draws
from ..measurement import Column, Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity, Words

CHANNELS, CANDIDATES, TRIALS = 32, 64, 200
PAIRS = (24, 32, 48)
# The memories, and for variational linear attention the length of its penalty directions.
MEMORIES: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("vla", {"scale": "inverse_root"}),
    ("vla", {"scale": "unit"}),
    ("deltanet", {}),
    ("linear", {}),
    ("gka", {}),
)
NAMES = {"vla": "VLA", "deltanet": "delta rule", "linear": "linear attention", "gka": "ridge regression"}


def answer_keys(mixer: str, k: Tensor, v: Tensor, scale: str = "unit") -> Tensor:
    """What a memory answers to its keys after all pairs, [N, n, V]."""
    ones = torch.ones_like(k[..., 0])
    if mixer == "gka":
        return solve_keys(k, v)
    if mixer == "vla":
        u = SCALES[scale](CHANNELS) * k
        _, state = variational_linear_attention(k.abs(), k, v, u, ridge=RIDGE, output_final_state=True)
        S = None if state is None else state[0]
    elif mixer == "deltanet":
        _, S = delta_rule(k, k, v, ones, output_final_state=True)
    else:
        _, S = linear_attention(k, k, v, output_final_state=True)
    assert S is not None
    return torch.einsum("nthk,nhkv->ntv", k, S)


def solve_keys(k: Tensor, v: Tensor) -> Tensor:
    """What ridge regression answers: every key as the next token's query, with a key of zeros."""
    _, state = gated_kalmanet(k, k, v, torch.zeros_like(k[..., 0]), output_final_state=True)
    assert state is not None
    queries = k.flatten(0, 1)[:, None]
    H, U = (x.repeat_interleave(k.shape[1], 0) for x in state)
    zeros = torch.zeros_like(queries)
    o, _ = gated_kalmanet(queries, zeros, zeros, zeros[..., 0], scale=1.0, initial_state=(H, U), iterations=60)
    return o.view(*k.shape[:2], -1)


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    for pairs in PAIRS:
        keys = draws.unit(TRIALS, pairs, 1, CHANNELS)
        candidates = draws.normal(TRIALS, CANDIDATES, CHANNELS)
        right = draws.uniform(TRIALS, CANDIDATES).argsort(-1)[:, :pairs]
        values = candidates.gather(1, right[..., None].expand(-1, -1, CHANNELS))
        for mixer, options in MEMORIES:
            column: Column = {**options, "pairs": pairs}
            answer = answer_keys(mixer, keys, values[:, :, None], **options)
            chosen = (answer @ candidates.mT).argmax(-1)
            yield Number("accuracy", (chosen == right).double().mean().item(), column, mixer=mixer)
            if pairs == PAIRS[0]:
                off = (answer - values).norm(dim=-1) / values.norm(dim=-1)
                yield Number("median_error", off.median().item(), column, mixer=mixer)
                yield Number("largest_error", off.max().item(), column, mixer=mixer)


def decide(found: Measurement) -> Verdict:
    median, largest = (
        min(found.mean(which, "vla", scale=scale) for scale in SCALES) for which in ("median_error", "largest_error")
    )
    right = ", ".join(
        ", ".join([NAMES[mixer], *(SCALE_TERMS["scale"][x] for x in options.values())])
        + f" {found.mean('accuracy', mixer, pairs=PAIRS[0], **options):.3f}"
        for mixer, options in MEMORIES
    )
    return decided(
        largest < 1e-6,
        f"relative error of VLA at 24 pairs {median:.2f} in the median, {largest:.2f} at worst",
        f"right of 64 values at 24 pairs: {right}",
    )


CLAIM = Claim(
    name="C21",
    paper="vla",
    source="Proposition 3",
    says="Up to d linearly independent keys are recalled exactly.",
    printed="exact for n <= d = 32; linear attention fails at 24 pairs",
    setting=(
        "d = 32, random unit keys, u along the key, nearest of 64 normal values by product, 200 trials, float64, "
        "nothing trained."
    ),
    expected="does not hold",
    forecast=(
        "at 24 pairs VLA .963 (u / sqrt d) and 1.0 (unit u), delta rule .903, linear .995, ridge 1.0, none of the "
        "first four exact"
    ),
    rule="holds if |S k_i - v_i| / |v_i| is below 1e-6 for all pairs at 24 pairs, for one of the two lengths of u.",
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "accuracy": Quantity("{subject}, right"),
        "median_error": Quantity("{subject}, median relative error"),
        "largest_error": Quantity("{subject}, largest relative error"),
    },
    words=Words(subject="{mixer}, {scale}, {pairs} pairs", terms={**SCALE_TERMS, "mixer": NAMES}),
    seeds=(0, 1, 2),
    safe="computed before",
)
