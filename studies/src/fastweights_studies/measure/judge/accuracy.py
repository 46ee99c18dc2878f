"""Errors against a float64 computation, and what they may be.

An error is the RMS of the difference over the RMS of the reference. It may be at most its budget, and in half precision at most
twice that of the twin: the same chunkwise computation in PyTorch with matrix products of operands in the input dtype. Of a
centre's few numbers, or of a gradient in which few outweigh the others, chance decides which of two errors is larger: then the
errors of several draws are pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import Case

# The largest error in half precision: outputs and final states; gradients of q, k, write_key, v and of initial states of
# that kind (S, H, U); gradients of gates and parameters.
OUTPUT_BUDGET, GRADIENT_BUDGET, GATE_BUDGET = 5e-3, 8e-3, 2e-2
VECTORS = {"dq", "dk", "dwrite_key", "dv", "du", "dS", "dH", "dU"}
FLOAT32_BUDGET = 1e-4

# The gradient of a preconditioner's first state passes a logarithm and the tokens before the first forgetting only, so that
# there the twin itself may err by several percent: it is held to the twin alone.
NO_BUDGET = {"dA"}

# A result is stored with this relative rounding, so that a twin that gets less error by luck, or computes a gate's gradient in
# float32, asks for no more than twice that.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}

# Cotangents have size 1 or a tenth of it. A reference below this is nothing: a gradient through a memory that was forgotten.
NOTHING = 1e-6


Call = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Failure:
    """Why an op is not as exact as it must be.

    Attributes:
        reason: "budget", "twin", "repeat" where two runs differ, or the name of an exception.
        result: what exceeds its limit: "o", "dq"; "" for an exception. error, limit: of it.
        words: what is printed.
    """

    reason: str
    words: str
    result: str = ""
    error: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        return self.words

    @classmethod
    def of_error(cls, error: BaseException, longest: int = 300, place: str = "") -> Failure:
        """An exception, by its first line."""
        message = (str(error).strip() or "no message").splitlines()[0][:longest]
        return cls(type(error).__name__, f"{type(error).__name__}: {message}{place}")


def cotangents(case: Case, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Random numbers in the place of do and of the gradients in the final states, these a tenth, as they would otherwise
    outweigh what comes from the outputs."""
    generator = torch.Generator(inputs["v"].device).manual_seed(seed)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, device=x.device, generator=generator)

    of_states = {name: 0.1 * like(x) for name, x in states.items() if x.is_floating_point()}
    return {"o": like(inputs["v"]).to(inputs["v"].dtype), **of_states}


def results(
    case: Case,
    inputs: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    backend: str = "auto",
    **more: Any,
) -> dict[str, Tensor]:
    """o, the final states, and the gradient of <o, do> + <final, dfinal> in every input and initial state, by name."""
    initial = next(iter(states.values())) if len(states) == 1 else tuple(states.values())
    o, final = case.ours(inputs, backend=backend, initial_state=initial, output_final_state=True, **more)
    values = dict(zip(("o", *states), (o, *(final if isinstance(final, tuple) else (final,)))))
    leaves = {name: x for name, x in {**inputs, **states}.items() if x.is_floating_point()}  # a count has no gradient
    reached = {name: x for name, x in values.items() if x.is_floating_point()}
    gradients = torch.autograd.grad(
        list(reached.values()), list(leaves.values()), [given[name].to(x.dtype) for name, x in reached.items()]
    )
    return {**{name: x.detach() for name, x in values.items()}, **{f"d{n}": x for n, x in zip(leaves, gradients)}}


def in_float64(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in tensors.items()
    }


def errors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    def relative(x: Tensor, y: Tensor) -> float:
        if x.shape != y.shape:
            return float("inf")
        if not y.numel():
            return 0.0
        y = y.double()
        return float((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt().clamp_min(NOTHING))

    return {name: relative(got[name], y) for name, y in wanted.items() if name in got}


def budget(name: str, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return FLOAT32_BUDGET
    if name in NO_BUDGET:
        return float("inf")
    if not name.startswith("d"):
        return OUTPUT_BUDGET
    return GRADIENT_BUDGET if name in VECTORS else GATE_BUDGET


def over_budget(found: Mapping[str, float], dtype: torch.dtype) -> dict[str, Failure]:
    """By result what exceeds its budget; an error that is no number does."""
    return {
        name: Failure(
            "budget", f"{name} {error:.1e} (budget {budget(name, dtype):.0e})", name, error, budget(name, dtype)
        )
        for name, error in found.items()
        if not error <= budget(name, dtype)
    }


def over_twin(found: Mapping[str, float], twin: Mapping[str, float], dtype: torch.dtype) -> dict[str, Failure]:
    """By result what exceeds twice the twin's error, or twice the rounding of a result."""
    return {
        name: Failure("twin", f"{name} {error:.1e} (over 2x the twin's {twin[name]:.1e})", name, error, 2 * twin[name])
        for name, error in found.items()
        if not error <= 2 * max(twin[name], ROUNDING[dtype])
    }


def pooled(draws: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The RMS over draws of every error."""
    return {name: (sum(found[name] ** 2 for found in draws) / len(draws)) ** 0.5 for name in draws[0]}


def token_results(call: Call, inputs: Mapping[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    """o and the gradient in every input that has one, without states: what peers are asked for."""
    o = call(inputs)
    gradients = torch.autograd.grad(o, list(inputs.values()), do.to(o.dtype), allow_unused=True)
    return {"o": o.detach(), **{f"d{name}": x for name, x in zip(inputs, gradients) if x is not None}}
