"""Errors against a float64 computation, and the budgets that a timing must meet before it is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# Largest RMS of the difference over RMS of the reference, in bfloat16.
GRADIENT_BUDGET = {"q": 8e-3, "k": 8e-3, "write_key": 8e-3, "v": 8e-3}
OUTPUT_BUDGET, GATE_BUDGET, FLOAT32_BUDGET = 5e-3, 2e-2, 1e-4

Call = Callable[[Mapping[str, Tensor]], Tensor]


def outputs(call: Call, inputs: Mapping[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    """o and the gradient in every input, by name."""
    o = call(inputs)
    gradients = torch.autograd.grad(o, list(inputs.values()), do.to(o.dtype))
    return {"o": o.detach(), **{f"d{name}": x for name, x in zip(inputs, gradients)}}


def errors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    def relative(x: Tensor, y: Tensor) -> float:
        return float((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt().clamp_min(1e-30))

    return {name: relative(got[name], wanted[name]) for name in got}


def budget(name: str, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return FLOAT32_BUDGET
    return OUTPUT_BUDGET if name == "o" else GRADIENT_BUDGET.get(name[1:], GATE_BUDGET)


def over_budget(found: Mapping[str, float], dtype: torch.dtype) -> list[str]:
    """What exceeds its budget, in words; an error that is no number does."""
    return [
        f"{name} {error:.1e} (budget {budget(name, dtype):.0e})"
        for name, error in found.items()
        if not error <= budget(name, dtype)
    ]
