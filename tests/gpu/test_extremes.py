"""Tokens that a trained model seldom has, mixed at random: keys, queries and values that are zero or tiny, decays that leave
nothing, gains of 0 and 1, at first tokens and everywhere. Whole sequences, forward and backward, and decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.testing import CASES
from fastweights.testing.contract.compare import mix_extremes, relative_error, values_and_gradients
from tests.kernels.cases import KERNEL_CASES
from tests.ops.decoding import BY_KERNEL, exact, in_place

from .judging import TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
SEEDS = range(4)
SIZES = {"batch": 1, "time": 130, "heads": 2, "key": 64, "value": 16}  # two chunks and a bit of a third
# What a rule writes for a tiny key, and its gradient, leave float16's range.
SCALES = {torch.float16: (0.0,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_sequences(name: str, dtype: torch.dtype) -> None:
    """Against the chunkwise form in float64."""
    case = KERNEL_CASES[name]
    for seed in SEEDS:
        options = {"scales": SCALES[dtype]} if dtype in SCALES else {}
        inputs = mix_extremes(case, case.draw(dtype=dtype, seed=seed, **SIZES), seed, **options).map(Tensor.cuda)
        got, gradients = values_and_gradients(case, inputs, backend="triton")
        wanted, wanted_gradients = values_and_gradients(case, inputs.map(Tensor.double), backend="torch")
        names = ["o", *case.states, *(f"gradient of {given}" for given in (*inputs.tokens, *inputs.parameters))]
        sizes, gradient_sizes = ([float(w.double().norm()) for w in ws] for ws in (wanted, wanted_gradients))
        tolerance = 2 * TOLERANCE[dtype]
        budgets = [tolerance * size for size in sizes]
        budgets += [5 * tolerance * max(size, 1e-2 * max(gradient_sizes)) for size in gradient_sizes]
        pairs = list(zip(names, (*got, *gradients), (*wanted, *wanted_gradients), budgets, strict=True))
        if dtype == torch.float16 and max(float(w.abs().max()) for w in wanted_gradients) > 1000:
            del pairs[len(got) :]  # terms of the gradients may leave float16's range
        for what, g, w, budget in pairs:
            assert float((g.double() - w).norm()) <= budget, f"{what}, seed {seed}"


@pytest.mark.parametrize("name", BY_KERNEL)
def test_decoding(name: str) -> None:
    """From a memory that has read nothing, five tokens at a time."""
    case = CASES[name]
    for seed in SEEDS:
        inputs = mix_extremes(case, case.draw(dtype=torch.bfloat16, seed=seed, **SIZES), seed)
        _, states = case(inputs.at((slice(None), slice(0, 0))).map(Tensor.double), backend="reference")
        held, outputs = states, []
        for t in range(0, SIZES["time"], 5):
            o, held = in_place(case, inputs.at((slice(None), slice(t, t + 5))).map(Tensor.cuda), held)
            outputs.append(o.cpu())
        wanted, final = exact(case, inputs, states)
        errors = [relative_error(torch.cat(outputs, 1), wanted)]
        errors += [relative_error(g.cpu(), w) for g, w in zip(held, final, strict=True)]
        assert errors[0] <= 1e-2 and all(error <= 1e-4 for error in errors[1:]), f"seed {seed}: {errors}"
