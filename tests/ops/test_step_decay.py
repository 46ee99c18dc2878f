"""Step sizes and log decays of Mamba-2: the kernel (on a GPU or in Triton's interpreter) against PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fastweights.layers import decay
from fastweights.ops.step_decay import gain_decay, softplus_above, step_decay, takes_step_decay
from tests.kernels.cases import DEVICE

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("limits", [(0.0, None), (0.4, 0.9)], ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 6), (1, 50, 4)], ids=str)
def test_values(shape, limits):
    """Steps may be a slice of a joint projection; large and small ones keep their digits, and a NaN stays where it is."""
    torch.manual_seed(0)
    joint = 8 * torch.randn(*shape[:2], 11 + shape[2], device=DEVICE)
    step, bias, A_log = joint[:, :, 11:], torch.randn(shape[2], device=DEVICE), torch.randn(shape[2], device=DEVICE)
    step[0, 0, :3] = torch.tensor([-30.0, 40.0, math.nan])
    assert takes_step_decay(step, bias, A_log, backend="triton")
    dt, g = step_decay(step, bias, A_log, *limits)
    wanted = F.softplus(step.double() + bias.double(), threshold=80).clamp(*limits)
    torch.testing.assert_close(dt.double(), wanted, rtol=1e-4, atol=0, equal_nan=True)
    torch.testing.assert_close(g.double(), -A_log.double().exp() * wanted, rtol=1e-4, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gains_beside_the_decays(dtype):
    """Both are slices of a joint projection; the decays are those of the steps alone."""
    joint = torch.randn(2, 5, 20, device=DEVICE).to(dtype)
    gain, step, bias, A_log = (
        joint[:, :, 1:7],
        joint[:, :, 7:13],
        joint[0, 0, :6].clone(),
        torch.randn(6, device=DEVICE),
    )
    beta, g = gain_decay(gain, step, bias, A_log, 2.0)
    torch.testing.assert_close(beta, 2 * gain.float().sigmoid(), rtol=1e-6, atol=1e-7)
    assert torch.equal(g, step_decay(step, bias, A_log)[1])


def test_the_layer_takes_it(monkeypatch):
    """Its numbers are those of the layer in PyTorch, in the dtypes of a model in bfloat16."""
    layer = decay.StepDecay(5, smallest=0.01, largest=None, long_memory=None).to(DEVICE, torch.bfloat16)
    step = torch.randn(2, 3, 5, device=DEVICE, dtype=torch.bfloat16)
    wanted, called = layer(step), []  # gradients are on
    monkeypatch.setattr(decay, "takes_step_decay", lambda *given: takes_step_decay(*given, backend="triton"))
    monkeypatch.setattr(decay, "step_decay", lambda *given: called.append(1) or step_decay(*given))
    with torch.no_grad():
        got = layer(step)
    assert called
    torch.testing.assert_close(got, tuple(x.detach() for x in wanted), rtol=1e-5, atol=1e-7)


def test_what_the_kernel_serves():
    step, bias = torch.zeros(1, 1, 4, device=DEVICE), torch.zeros(4, device=DEVICE)
    assert not takes_step_decay(step, bias.clone().requires_grad_(), bias, backend="triton")
    assert not takes_step_decay(step, bias.double(), bias, backend="triton")
    assert not takes_step_decay(step, bias, bias, backend="torch")


def test_softplus_above() -> None:
    x = 30 * torch.randn(3, 500, device=DEVICE)
    x[0, 0] = math.nan
    wanted = 0.25 + F.softplus(x.double())
    got = softplus_above(x, 0.25, backend="triton")
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert softplus_above(x.half(), 0.25, backend="triton").dtype == torch.float32
    with_gradient = softplus_above(x.requires_grad_(), 0.25, backend="triton")
    torch.testing.assert_close(with_gradient, got, rtol=1e-6, atol=0, equal_nan=True)
    assert with_gradient.requires_grad
