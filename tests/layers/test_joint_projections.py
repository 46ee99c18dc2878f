"""Queries, keys and values by one product and one op against three of each, with the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastweights.layers import build_mixer, memory_layer, projections, shared_input
from fastweights.layers.heads import HeadSizes
from fastweights.layers.projections import QKVProjection
from fastweights.ops.short_convolution.joint import convolve_joint
from tests.kernels.cases import DEVICE


def gradients(module: nn.Module, x: torch.Tensor, *given: object) -> list[torch.Tensor]:
    made = module(x, *given)
    found = [made] if isinstance(made, torch.Tensor) else made[:3]
    torch.manual_seed(1)
    towards = [torch.randn_like(y) for y in found]
    return [*found, *torch.autograd.grad(found, [x, *module.parameters()], towards)]


def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trainings take the way of a GPU; returns the columns of the joint products from now on."""
    taken: list[int] = []

    def note(joint: torch.Tensor, *given: object, **options: object) -> object:
        taken.append(joint.shape[-1])
        return convolve_joint(joint, *given, **options)

    monkeypatch.setattr(projections, "convolve_joint", note)
    for module in (shared_input, memory_layer):
        monkeypatch.setattr(module, "trains_on_gpu", lambda x: True)
    return taken


@pytest.mark.kernels
@pytest.mark.parametrize(
    "activation, normalize, packed",
    [
        ("silu", True, False),
        pytest.param("none", False, True, marks=pytest.mark.slow),
        pytest.param("silu", True, True, marks=pytest.mark.slow),
        pytest.param("none", False, False, marks=pytest.mark.slow),
    ],
)
def test_joint_projections_are_those_of_three_modules(monkeypatch, activation, normalize, packed):
    torch.manual_seed(0)
    heads = HeadSizes(key_heads=2, value_heads=4, key=16, value=32)
    module = QKVProjection(24, heads, 4, activation, normalize, "triton").to(DEVICE)
    x = torch.randn(1 if packed else 2, 6, 24, device=DEVICE, requires_grad=True)
    cu_seqlens = torch.tensor([0, 1, 1, 6], device=DEVICE) if packed else None
    apart = gradients(module, x, None, cu_seqlens)
    taken = as_on_gpu(monkeypatch)
    for got, wanted in zip(gradients(module, x, None, cu_seqlens), apart, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert taken == [192]


def test_joint_projections_without_convolutions(monkeypatch):
    """Where a compiler writes the gradients side by side."""
    torch.manual_seed(0)
    heads = HeadSizes(key_heads=2, value_heads=4, key=16, value=32)
    module = QKVProjection(24, heads, None, "silu", True)
    x = torch.randn(2, 9, 24, requires_grad=True)
    apart = gradients(module, x, None, None)
    as_on_gpu(monkeypatch)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(projections, "project_together", None)  # three products
    for got, wanted in zip(gradients(module, x, None, None), apart, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(
    "name, heads, columns, options",
    [
        ("gdn", 4, 256, {}),
        ("gdn", 2, 128, {}),
        ("gdn", 4, 256, {"output_gate": "sigmoid", "gate_low_rank": True}),
        ("rls", 4, 256, {}),
        ("gka", 4, 256, {"iterations": 2}),
        ("palimpsa-d", 4, 256, {}),
        ("pmamba2-key", 4, 256, {}),
        ("gated-deltaproduct", 2, 192, {}),
    ],
)
def test_gates_are_columns_of_the_joint_product(monkeypatch, name, heads, columns, options):
    """Rows are filled up to a multiple of 64 columns."""
    torch.manual_seed(0)
    layer = build_mixer(name, hidden_size=24, num_heads=heads, head_dim=16, backend="triton", **options).to(DEVICE)
    x = torch.randn(1, 6, 24, device=DEVICE, requires_grad=True)
    apart = gradients(layer, x)
    taken = as_on_gpu(monkeypatch)
    for got, wanted in zip(gradients(layer, x), apart, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert taken == [columns]
