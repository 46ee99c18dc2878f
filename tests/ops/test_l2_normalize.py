"""Vectors of length 1: the kernel (on a GPU or in Triton's interpreter) against PyTorch."""

from __future__ import annotations

import pytest
import torch

from fastweights.ops.l2_normalize import l2_normalize
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("shape", [(2, 3, 48), (5, 1), (2, 300), (0, 4)], ids=str)
def test_values(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE)
    x[:1] *= 1e-4  # as small as eps
    torch.testing.assert_close(l2_normalize(x, backend="triton"), l2_normalize(x, backend="torch"))


def test_any_layout():
    joint = torch.randn(6, 40, device=DEVICE)
    for x in (joint.mT, joint[:, 3:20], joint[0], joint.view(2, 3, 40)[:, 1]):
        torch.testing.assert_close(l2_normalize(x, 0.5, backend="triton"), l2_normalize(x, 0.5, backend="torch"))


def test_gradients_and_wide_vectors():
    """Gradients come from PyTorch."""
    x = torch.randn(2, 8, device=DEVICE, requires_grad=True)
    assert l2_normalize(x, backend="triton").requires_grad
    with pytest.raises(ValueError, match="4096"):
        l2_normalize(torch.zeros(1, 5000, device=DEVICE), backend="triton")
