"""C6: the gradient in the query by implicit differentiation is exact for the Chebyshev iteration, however few its steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.ops import gated_kalmanet
from fastweights.testing.unrolled import unrolled_solutions

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity

LENGTH, CHANNELS = 48, 32
CASES = (("chebyshev", 3), ("chebyshev", 10), ("chebyshev", 30), ("conjugate_gradient", 3))


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    k, v, weight = draws.unit(1, LENGTH, 2, CHANNELS), *(draws.normal(1, LENGTH, 2, CHANNELS) for _ in range(2))
    query, g = draws.unit(1, LENGTH, 2, CHANNELS), -0.1 * draws.uniform(1, LENGTH, 2)
    for solver, iterations in CASES:
        implicit, unrolled = (query.clone().requires_grad_() for _ in range(2))
        o, _ = gated_kalmanet(implicit, k, v, g, solver=solver, iterations=iterations, scale=1.0)
        (o * weight).sum().backward()
        x = unrolled_solutions(unrolled, k, g, solver=solver, iterations=iterations)
        (read_memory(x, k, v, g) * weight).sum().backward()
        assert implicit.grad is not None and unrolled.grad is not None
        difference = (implicit.grad - unrolled.grad).norm() / unrolled.grad.norm()
        yield Number("difference", difference.item(), {"solver": solver, "iterations": iterations})


def read_memory(x: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """U_t^T x_t with U_t = e^g_t U_(t-1) + k_t v_t^T."""
    U, outputs = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :]), []
    for t in range(k.shape[1]):
        U = g[:, t, :, None, None].exp() * U + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", x[:, t], U))
    return torch.stack(outputs, 1)


def decide(found: Measurement) -> Verdict:
    exact = found.largest("difference", solver="chebyshev")
    other = found.smallest("difference", solver="conjugate_gradient", iterations=3)
    return decided(
        exact < 1e-11 and other > 1e-2,
        f"relative difference at most {exact:.1e} for Chebyshev",
        f"{other:.2f} for 3 conjugate gradient iterations",
    )


CLAIM = Claim(
    name="C6",
    paper="gka",
    source="Lemma 2",
    says="For the Chebyshev iteration, dq by implicit differentiation equals dq by automatic differentiation.",
    printed="equal",
    setting=(
        "K = V = 32, 2 heads, 48 tokens, decay down to 0.9, float64; 3, 10 and 30 iterations. Conjugate "
        "gradients, 3 iterations, beside it, where the two must differ."
    ),
    expected="holds",
    forecast="equal to rounding for any number of iterations",
    rule=(
        "holds if the relative difference is below 1e-11 for 3, 10 and 30 iterations, and above 1e-2 for 3 of "
        "conjugate gradients."
    ),
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={"difference": Quantity("{solver}, {iterations} iterations")},
    seeds=(0, 1, 2),
    safe="identity",
)
