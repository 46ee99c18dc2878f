"""LayerNorm of a few rows: the kernel (on a GPU or in Triton's interpreter) against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastweights.kernels.pointwise import layer_norm as kernel
from fastweights.ops.layer_norm import layer_norm
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("shape", [(1, 1, 300), (3, 1, 64), (5, 1024)], ids=str)
def test_values(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """A row far from 0 keeps its digits, and a row may be a slice of a longer one."""
    torch.manual_seed(0)
    joint = torch.randn(*shape[:-1], shape[-1] + 8, device=DEVICE)
    x, weight, bias = joint[..., 8:], torch.randn(shape[-1], device=DEVICE), torch.randn(shape[-1], device=DEVICE)
    x.flatten(0, -2)[0] += 100
    called, original = [], kernel.layer_norm
    monkeypatch.setattr(kernel, "layer_norm", lambda *given: called.append(1) or original(*given))
    got = layer_norm(x, weight, bias, 1e-5, backend="triton")
    assert called
    wanted = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=5e-5)
    for given in (x.requires_grad_(), torch.randn(65, shape[-1], device=DEVICE)):
        layer_norm(given, weight, bias, 1e-5, backend="triton")
    assert len(called) == 1
