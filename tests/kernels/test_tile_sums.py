"""Sums over tiles by one launch."""

from __future__ import annotations

import pytest
import torch

from fastweights.kernels.pointwise.tile_sums import sum_tiles
from tests.kernels.cases import DEVICE


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(70, 128), (1030, 3, 5), (1, 9000), (3, 1)])
def test_sum_tiles(shape):
    """Fewer and more tiles than a step of a program takes, columns of one program and of many."""
    torch.manual_seed(0)
    sums = torch.randn(shape, device=DEVICE)
    torch.testing.assert_close(sum_tiles(sums, torch.float32), sums.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert sum_tiles(sums, torch.bfloat16).dtype == torch.bfloat16
