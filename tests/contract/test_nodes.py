"""What the nodes of the ops refuse."""

from __future__ import annotations

import pytest
import torch

from fastweights import ops
from fastweights.ops.framework.spec import spec_of
from fastweights.testing import CASES


def test_no_second_derivative_of_a_node() -> None:
    inputs = CASES["delta_rule-none"].draw(batch=1, time=3, heads=1).map(lambda x: x.requires_grad_())
    o, *_ = spec_of(ops.delta_rule).backends["torch"].node.op(*inputs.tokens.values(), None, None, None, None, 1.0)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(o.sum(), inputs.tokens["k"], create_graph=True)
