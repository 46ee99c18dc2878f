"""Queries, keys and values by one product and one op against three of each, with the kernels."""

from __future__ import annotations

import pytest
import torch

from fastweights.layers import projections, shared_input
from fastweights.layers.heads import HeadSizes
from fastweights.layers.projections import QKVProjection
from fastweights.ops.short_convolution.joint import convolve_joint
from tests.kernels.cases import DEVICE


def gradients(module: QKVProjection, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[torch.Tensor]:
    *found, states = module(x, None, cu_seqlens)
    assert not states
    torch.manual_seed(1)
    towards = [torch.randn_like(y) for y in found]
    return [*found, *torch.autograd.grad(found, [x, *module.parameters()], towards)]


@pytest.mark.kernels
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation, normalize", [("silu", True), ("none", False)])
def test_joint_projections_are_those_of_three_modules(monkeypatch, activation, normalize, packed):
    torch.manual_seed(0)
    heads = HeadSizes(key_heads=2, value_heads=4, key=16, value=32)
    module = QKVProjection(24, heads, 4, activation, normalize, "triton").to(DEVICE)
    x = torch.randn(1 if packed else 2, 9, 24, device=DEVICE, requires_grad=True)
    cu_seqlens = torch.tensor([0, 3, 3, 9], device=DEVICE) if packed else None
    apart = gradients(module, x, cu_seqlens)
    taken = []
    monkeypatch.setattr(shared_input, "trains_on_gpu", lambda x: True)
    monkeypatch.setattr(
        projections, "convolve_joint", lambda *given, **how: taken.append(1) or convolve_joint(*given, **how)
    )
    for got, wanted in zip(gradients(module, x, cu_seqlens), apart, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert taken
