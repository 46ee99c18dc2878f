"""Graphs: torch.compile(fullgraph=True) goes through forward and backward and changes no number, and every node that ops leave in
a traced graph is what torch.library expects of an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...ops.framework.in_torch import Arguments, InPyTorch
from ..cases import OpCase
from .compare import assert_close
from .forms import first_form_is_fast, last_form_only


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


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[InPyTorch, Arguments]]:
    """The calls that reach a backend in PyTorch, those of the ops inside a composition among them."""
    calls: list[tuple[InPyTorch, Arguments]] = []
    run = InPyTorch.run

    def record(self: InPyTorch, x: Arguments) -> Any:
        calls.append((self, x))
        return run(self, x)

    monkeypatch.setattr(InPyTorch, "run", record)
    return calls


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "torch"])
@last_form_only
def test_opcheck(case: OpCase, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch)
    inputs = case.draw(batch=1, time=9, heads=1, value_heads=2, key=3, value=4).map(lambda x: x.requires_grad_())
    case(inputs, backend=backend, cu_seqlens=torch.tensor([0, 4, 9]))
    assert calls
    utilities = ("test_schema", "test_faketensor", *["test_aot_dispatch_dynamic"] * (backend == "torch"))
    for served_by, x in calls:
        node, options = served_by.node, list(x.options.values())
        tensors = [
            t.detach().requires_grad_() if t is not None and t.is_floating_point() else t
            for t in (*x.inputs.values(), *x.states.values(), x.cu_seqlens)
        ]
        torch.library.opcheck(node.op, (*tensors, *options), test_utils=(*utilities, "test_autograd_registration"))
        needed = [t is not None and t.requires_grad for t in tensors]
        output_grads = [torch.randn_like(t.detach()) for t in node.op(*tensors, *options)[: node.outputs]]
        plain = [t if t is None else t.detach() for t in tensors]
        # It has no derivative: what needs one refuses, see below.
        torch.library.opcheck(node.backward_op, (*plain, *options, [], output_grads, needed), test_utils=utilities)
