"""How far Gated KalmaNet's kernels are from a dense solution in float64, at decays of any speed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import gated_kalmanet
from fastweights.testing.contract.compare import relative_error

HALF_LIVES = (100.0, 10.0, 1.0)


class Errors(NamedTuple):
    """Of o against the dense solution, by the kernels and by the iteration itself in float64; of each gradient, by the kernels
    against the implicit one in float64."""

    o: float
    truncation: float
    gradients: dict[str, float]


def draw(half_life: float, time: int, heads: int, width: int) -> dict[str, Tensor]:
    """Unit queries and keys, decays that differ by token."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, time, heads, *shape, generator=generator, dtype=torch.float64)

    q, k = F.normalize(normal(width), dim=-1), F.normalize(normal(width), dim=-1)
    g = -math.log(2) / half_life * torch.exp(0.3 * normal())
    return {"q": q, "k": k, "v": normal(width), "g": g, "mix": normal().sigmoid()}


def errors(
    half_life: float, dtype: torch.dtype, device: str, time: int, heads: int, width: int, iterations: int = 30
) -> Errors:
    inputs = {name: x.to(device, dtype) for name, x in draw(half_life, time, heads, width).items()}
    inputs |= {name: inputs[name].float() for name in ("g", "mix")}
    exact = {name: x.double() for name, x in inputs.items()}
    do = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        device, dtype
    )

    def run(x: dict[str, Tensor], backend: str, solver: str = "chebyshev") -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
        o, _ = gated_kalmanet(**leaves, iterations=iterations, solver=solver, backend=backend)
        return o.detach(), torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))

    o, gradients = run(inputs, "triton")
    iterated, wanted = run(exact, "torch")
    dense, _ = run(exact, "torch", "exact")
    by_name = {name: relative_error(g, w) for name, g, w in zip(inputs, gradients, wanted)}
    return Errors(relative_error(o, dense), relative_error(iterated, dense), by_name)


def check(found: Errors) -> None:
    """The budget of 16-bit inputs at a ridge of 0.02."""
    assert found.o <= 1.2 * found.truncation + 8e-3, found
    assert max(found.gradients.values()) <= 2e-2, found
