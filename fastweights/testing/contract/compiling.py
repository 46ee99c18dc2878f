"""torch.compile(fullgraph=True) goes through forward and backward and changes no number."""

from __future__ import annotations

import pytest
import torch

from ..cases import OpCase
from .compare import assert_close
from .forms import first_form_is_fast


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@first_form_is_fast
def test_fullgraph(case: OpCase, packed: bool) -> None:
    """With the eager backend of torch.compile: what is tested is that the whole op is one graph."""
    inputs = case.draw(batch=1, heads=1, time=70).map(lambda x: x.requires_grad_())
    arguments = inputs.arguments()
    if packed:
        arguments["cu_seqlens"] = torch.tensor([0, 30, 70])
    leaves = [*inputs.tokens.values(), *inputs.parameters.values()]

    def call(**arguments: torch.Tensor) -> list[torch.Tensor]:
        o, states = case.op(**arguments, output_final_state=True)
        return [o, *(states if isinstance(states, tuple) else (states,))]

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(**arguments), call(**arguments)
    assert_close([x.detach() for x in got], [x.detach() for x in wanted], 1e-12)
    totals = [torch.stack([x.sum() for x in results if x.is_floating_point()]).sum() for results in (got, wanted)]
    # Some forms do without an input, such as the centre, whose gradient is then zero.
    grads, wanted_grads = (torch.autograd.grad(total, leaves, materialize_grads=True) for total in totals)
    assert_close(grads, wanted_grads, 1e-11)


@first_form_is_fast
def test_positive_decay_is_refused_in_a_graph_too(case: OpCase) -> None:
    name = next((name for name, kind in case.tokens.items() if kind in ("decay", "slow decay")), None)
    if name is None:
        pytest.skip("the rule has no decay")
    inputs = case.draw(batch=1, heads=1, time=3)
    torch.compiler.reset()
    compiled = torch.compile(lambda **arguments: case.op(**arguments)[0], fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="must be a log decay"):
        compiled(**{**inputs.arguments(), name: inputs.tokens[name] + 20})
