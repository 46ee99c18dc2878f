"""Queries, keys and values convolved in one launch (on a GPU or in Triton's interpreter), against the ops for each step."""

from __future__ import annotations

import pytest
import torch

from fastweights.ops.short_convolution.heads import convolve_heads, convolve_heads_in_torch, takes_heads
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


ROWS, PACKED = None, [5, 1, 0, 14]


@pytest.mark.parametrize(
    ("keys", "width", "values", "lengths"),
    [
        pytest.param(24, 12, 20, PACKED, id="24-12-20-packed"),
        pytest.param(16, 16, 8, ROWS, id="16-16-8-rows", marks=pytest.mark.slow),
        pytest.param(24, 12, 20, ROWS, id="24-12-20-rows", marks=pytest.mark.slow),
        pytest.param(16, 16, 8, PACKED, id="16-16-8-packed", marks=pytest.mark.slow),
        pytest.param(32, 16, 64, ROWS, id="32-16-64-rows", marks=pytest.mark.slow),
        pytest.param(32, 16, 64, PACKED, id="32-16-64-packed", marks=pytest.mark.slow),
    ],
)
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


def test_heads_are_rounded_before_they_get_their_length():
    torch.manual_seed(0)
    x, weight, window = (torch.randn(shape, device=DEVICE).half() for shape in ((1, 24, 40), (40, 4), (1, 3, 40)))
    made = convolve_heads(x, weight, 16, 16, window, None, "triton")
    wanted = convolve_heads_in_torch(x, weight, 16, 16, window, None, "triton")
    for one, exact in zip(made, wanted, strict=True):
        assert (one != exact).float().mean() < 0.02  # the sum of squares may be taken in another order


def test_what_the_kernel_serves():
    x, weight, window = (torch.zeros(shape, device=DEVICE) for shape in ((1, 5, 12), (12, 4), (1, 3, 12)))
    assert takes_heads("triton", x, weight, window) and not takes_heads("torch", x, weight, window)
    assert not takes_heads("triton", x, weight.new_zeros(12, 9), window)
    assert not takes_heads("triton", x, weight, window.half())
    assert not takes_heads("triton", x.requires_grad_(), weight, window)
