"""Queries, keys and values convolved in one launch (on a GPU or in Triton's interpreter), against the ops for each step."""

from __future__ import annotations

import pytest
import torch

from fastweights.ops.short_convolution.heads import convolve_heads, convolve_heads_in_torch, takes_heads
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("lengths", [None, [5, 1, 0, 14]], ids=["rows", "packed"])
@pytest.mark.parametrize(("keys", "width", "values"), [(32, 16, 64), (24, 12, 20), (16, 16, 8)], ids=str)
def test_the_numbers_of_each_step(keys, width, values, lengths):
    torch.manual_seed(0)
    shape = (3, 20) if lengths is None else (1, 20)
    x = torch.randn(*shape, 7 + 2 * keys + values, device=DEVICE)[..., 7:]  # a slice of a joint projection
    channels, count = 2 * keys + values, shape[0] if lengths is None else len(lengths)
    weight, window = torch.randn(channels, 4, device=DEVICE), torch.randn(count, 3, channels, device=DEVICE)
    edges = None if lengths is None else torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    made = convolve_heads(x, weight, keys, width, window, edges, "triton")
    wanted = convolve_heads_in_torch(x, weight, keys, width, window, edges, "torch")
    for one, exact in zip(made, wanted, strict=True):
        assert one.is_contiguous() and one.dtype == exact.dtype
        torch.testing.assert_close(one, exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(made[3], wanted[3])


def test_what_the_kernel_serves():
    x, weight, window = (torch.zeros(shape, device=DEVICE) for shape in ((1, 5, 12), (12, 4), (1, 3, 12)))
    assert takes_heads("triton", x, weight, window) and not takes_heads("torch", x, weight, window)
    assert not takes_heads("triton", x, weight.new_zeros(12, 9), window)
    assert not takes_heads("triton", x, weight, window.half())
    assert not takes_heads("triton", x.requires_grad_(), weight, window)
