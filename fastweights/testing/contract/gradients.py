"""Gradients by finite differences in float64, states in and out included."""

from __future__ import annotations

import pytest
import torch

from ..cases import OpCase
from .compare import random_states


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_gradcheck(case: OpCase, backend: str, packed: bool) -> None:
    if not case.exact_gradient:
        pytest.skip("the gradient is an approximation by design")
    inputs = case.draw(batch=1, time=5, heads=1, key=3, value=2)
    states = random_states(
        case, case.draw(batch=2 if packed else 1, time=3, heads=1, key=3, value=2), backend="reference"
    )
    keywords = {"cu_seqlens": torch.tensor([0, 2, 5])} if packed else {}
    tensors = {**inputs.tokens, **inputs.parameters}
    floats = [s for s in states if s.is_floating_point()]

    def call(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(tensors, values))
        given = iter(values[len(tensors) :])
        begin = tuple(next(given) if s.is_floating_point() else s for s in states)
        o, final = case.op(
            **named, **inputs.options, initial_state=case.initial_state(begin), output_final_state=True, backend=backend,
            **keywords,
        )  # fmt: skip
        final = final if isinstance(final, tuple) else (final,)
        return (o, *(s for s in final if s.is_floating_point()))

    leaves = [x.clone().requires_grad_() for x in (*tensors.values(), *floats)]
    torch.autograd.gradcheck(call, leaves, fast_mode=True, atol=1e-6, rtol=1e-4)


def test_gradients_reach_through_segments(case: OpCase, backend: str) -> None:
    """The gradient of a late output in an early token, through the carried state, is that of the whole."""
    inputs = case.draw(time=20).map(lambda x: x.requires_grad_())
    leaves = list(inputs.tokens.values())
    whole = torch.autograd.grad(case(inputs, backend=backend)[0][:, 15:].sum(), leaves)
    _, states = case(inputs.at((slice(None), slice(0, 15))), backend=backend)
    o, _ = case(inputs.at((slice(None), slice(15, 20))), initial_state=case.initial_state(states), backend=backend)
    for a, b in zip(torch.autograd.grad(o.sum(), leaves), whole):
        assert (a - b).norm() <= 1e-9 * max(1.0, float(b.norm()))
