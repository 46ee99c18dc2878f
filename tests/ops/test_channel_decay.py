"""Log decays per channel by the kernels, on a GPU or in Triton's interpreter, against the formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastweights.ops.channel_decay import channel_decay
from tests.kernels.cases import DEVICE


@pytest.mark.kernels
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("shape", [(2, 7, 48), (1, 40, 17), (0, 3, 16)], ids=str)
def test_values_and_gradients(shape, traced):
    torch.manual_seed(0)
    given = [torch.randn(size, device=DEVICE) * 4 for size in (shape, shape[-1:], shape[-1:])]
    leaves = [x.requires_grad_() for x in (*given[:2], given[2].abs())]
    call = torch.compile(channel_decay, fullgraph=True, backend="aot_eager") if traced else channel_decay
    dg = torch.randn(shape, device=DEVICE)
    got, wanted = call(*leaves), -leaves[2] * F.softplus(leaves[0] + leaves[1])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    for x, exact in zip(torch.autograd.grad(got, leaves, dg), torch.autograd.grad(wanted, leaves, dg), strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-4, atol=1e-5)
