"""Positive keys and directions of a penalty: the kernel (on a GPU or in Triton's interpreter) against the layer in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastweights.layers import linear_attention, vla
from fastweights.ops.positive_keys import positive_keys, takes_positive_keys
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("directions", [True, False])
@pytest.mark.parametrize("width", [20, 32])
def test_values(directions: bool, width: int) -> None:
    torch.manual_seed(0)
    q, k = (3 * torch.randn(2, 3, 2, width, device=DEVICE) for _ in range(2))
    k[0, 0, 0] = 0
    penalty = vla.PenaltyDirection(2, width).to(DEVICE) if directions else None
    w = None if penalty is None else penalty.weight.detach()
    assert takes_positive_keys(q, k, w, "triton")
    new_q, new_k, u = positive_keys(q, k, w)
    torch.testing.assert_close((new_q, new_k), (F.elu(q) + 1, F.elu(k) + 1), rtol=1e-5, atol=1e-6)
    if penalty is None:
        assert u is None
    else:
        torch.testing.assert_close(u, penalty(k).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vla", "vla-linear"])
def test_the_layers_take_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, kind = {
        "vla": (vla, vla.VariationalLinearAttention), "vla-linear": (linear_attention, linear_attention.LinearAttention)
    }[name]  # fmt: skip
    options = {} if name == "vla" else {**vla.BARE, "feature_map": "elu", "normalizer": True}
    layer = kind(hidden_size=24, num_heads=2, backend="torch", **options).to(DEVICE)
    x, called = torch.randn(2, 3, 24, device=DEVICE), []
    wanted = layer(x)  # gradients are on

    def takes(*given: Any, **named: Any) -> bool:
        return takes_positive_keys(*given[:3], backend="triton")

    monkeypatch.setattr(module, "takes_positive_keys", takes)
    monkeypatch.setattr(module, "positive_keys", lambda *given: called.append(1) or positive_keys(*given))
    with torch.no_grad():
        got = layer(x)
    assert called
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_what_the_kernel_serves() -> None:
    k = torch.zeros(1, 1, 2, 8, device=DEVICE)
    assert takes_positive_keys(k, k, backend="triton")
    assert not takes_positive_keys(k, k.clone().requires_grad_(), backend="triton")
    assert not takes_positive_keys(k, k, torch.zeros(2, 8, 8, device=DEVICE).double(), "triton")
    assert not takes_positive_keys(k, k.expand(65, 1, 2, 8), backend="triton")
    assert not takes_positive_keys(k, k, backend="torch")
