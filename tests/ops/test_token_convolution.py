"""Short convolutions over one more token: the kernel (on a GPU or in Triton's interpreter) against that of sequences."""

from __future__ import annotations

import pytest
import torch

from fastweights.ops.framework.few_tokens import overwriting_states
from fastweights.ops.short_convolution import short_convolution
from fastweights.ops.short_convolution.token import TokenConvolution, convolve_token, takes_token
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


def draw(channels: int, head: int | None, width: int, bias: bool = False) -> TokenConvolution:
    numbers = torch.randn(3, channels, width + 2, device=DEVICE)
    x, window = numbers[:, :, 0][:, None].contiguous(), numbers[:, :, 2:-1].mT.contiguous()
    weight = torch.randn(channels, width, device=DEVICE)
    return TokenConvolution(x, weight, weight[:, 0].clone() if bias else None, window, head)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("sizes", [[(40, 20), (60, 20), (48, None)], [(200, None)], [(20, 20), (130, None)]], ids=str)
def test_parts(sizes, silu):
    torch.manual_seed(0)
    parts = [draw(channels, head, 4, bias=head is None) for channels, head in sizes]
    assert takes_token(parts, backend="triton")
    held = [one.window.clone() for one in parts]
    made, windows = convolve_token(parts, silu)
    for one, before, y, window in zip(parts, held, made, windows, strict=True):
        wanted, kept = short_convolution(
            one.x, one.weight, one.bias, activation="silu" if silu else None, normalize=one.head, initial_state=before,
            output_final_state=True, backend="torch",
        )  # fmt: skip
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(window, kept) and torch.equal(one.window, before)


def test_windows_are_written_where_they_lie_where_that_is_allowed():
    parts = [draw(24, 8, 3), draw(16, None, 3)]
    _, wanted = convolve_token(parts, True)
    with overwriting_states():
        _, windows = convolve_token(parts, True)
    for one, window, new in zip(parts, windows, wanted, strict=True):
        assert window is one.window and torch.equal(window, new)


def test_what_the_kernel_serves():
    one = draw(24, 8, 3)
    assert not takes_token([one, draw(24, 8, 4)], backend="triton")
    assert not takes_token([draw(24, 8, 9)], backend="triton")
    assert not takes_token([one._replace(x=one.x.expand(3, 2, 24))], backend="triton")
    assert not takes_token([one._replace(x=one.x.requires_grad_())], backend="triton")
    assert not takes_token([one], backend="torch")
