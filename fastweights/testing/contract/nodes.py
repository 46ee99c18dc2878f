"""Every node that ops leave in a traced graph is what torch.library expects of an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...ops.framework.in_torch import Arguments, InPyTorch
from ..cases import OpCase
from .forms import last_form_only


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
