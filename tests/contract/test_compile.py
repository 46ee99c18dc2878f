"""torch.compile(fullgraph=True) goes through forward and backward and changes no number."""

from __future__ import annotations

import pytest
import torch

from fastweights.testing import OpCase

from .compare import assert_close


@pytest.mark.parametrize("backend", ["torch"])
def test_fullgraph(case: OpCase, backend: str) -> None:
    """With the eager backend of torch.compile: what is tested is that the whole op is one graph."""
    inputs = case.draw(batch=1, heads=1, time=70).map(lambda x: x.requires_grad_())
    arguments = inputs.arguments()
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor)]

    def call(**arguments: torch.Tensor) -> list[torch.Tensor]:
        o, states = case.op(**arguments, output_final_state=True, backend=backend)
        return [o, *(states if isinstance(states, tuple) else (states,))]

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(**arguments), call(**arguments)
    assert_close([x.detach() for x in got], [x.detach() for x in wanted], 1e-12)
    got_gradients = torch.autograd.grad(got[0].sum(), leaves)
    wanted_gradients = torch.autograd.grad(wanted[0].sum(), leaves)
    assert_close(got_gradients, wanted_gradients, case.tolerance(1e-11))
